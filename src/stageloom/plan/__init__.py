"""From a model, a cluster and a training job to a plan.

What is asked stands in three values, each from a preset's name, a file, or Python:

    model     what is trained: layers, widths, experts     `load_model("llama3-8b")`, `load_model("config.json")`
    cluster   what it is trained on: GPUs, nodes, links    `load_cluster("h800x2048")`
    training  how: sequence, batch, precision, sharding    `load_training("training.yaml")`, `Training(4096, 15360)`
"""

from stageloom.plan.cluster import Cluster, Gpu, Link, NodeGroup
from stageloom.plan.load_cluster import load_cluster
from stageloom.plan.load_model import load_model
from stageloom.plan.load_training import agree, load_training
from stageloom.plan.model import Model, gpt
from stageloom.plan.training import Training

__all__ = [
    "Cluster",
    "Gpu",
    "Link",
    "Model",
    "NodeGroup",
    "Training",
    "agree",
    "gpt",
    "load_cluster",
    "load_model",
    "load_training",
]
