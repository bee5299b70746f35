"""What a layout presumes of ranks and links, in words: the mesh, and the all-to-all of experts."""

from __future__ import annotations

from stageloom.plan.cluster import Cluster
from stageloom.plan.layout import Layout
from stageloom.plan.model import Model
from stageloom.plan.training import Training


def mesh(layout: Layout, cluster: Cluster) -> str:
    """How ranks are numbered, and which dimensions leave a node."""
    node = cluster.gpus_per_node
    sizes = [("tensor", layout.tensor, 1), ("data", layout.data, layout.tensor)]
    sizes.append(("pipeline", layout.pipeline, layout.tensor * layout.data))
    words = [
        f"{name} {size} ({'inside a node' if size * stride <= node else 'across nodes'})" if size > 1 else f"{name} 1"
        for name, size, stride in sizes
    ]
    text = f"{layout.gpus:,} GPUs as {' x '.join(words)}, neighbours first in this order"
    if layout.expert > 1:
        across = -(-layout.expert // node)
        nodes = f"over {across} nodes" if across > 1 else "inside a node"
        text += f"; experts over {layout.expert} neighbours of tensor x data ({nodes})"
    return text


def mixed_nodes(cluster: Cluster, training: Training) -> str | None:
    """What each GPU of a mixed cluster counts as; None where the nodes are equal."""
    if not cluster.mixed:
        return None
    gpu = cluster.gpu
    dtype = gpu.mfu_type(training.dtype)
    return (
        f"they differ, and each GPU counts as the worst of them in every respect, as a step waits for the slowest: "
        f"{gpu.memory / 1e9:.1f} GB, {gpu.peak[dtype] / 1e12:,.0f} TFLOP/s in {dtype} (MFU is of that)"
    )


def all_to_all(model: Model, cluster: Cluster, training: Training, layout: Layout) -> str | None:
    """The dispatch and combine that costs presume; None where there are no experts to reach."""
    experts = next((layer.experts for layer in reversed(model.layers) if layer.experts is not None), None)
    if experts is None or layout.expert < 2:
        return None
    text = (
        f"each token goes to {experts.per_token} of {experts.count} experts, dispatched in "
        f"{8 if training.dtype == 'fp8' else 16} bits and combined in 16"
    )
    if layout.expert > cluster.gpus_per_node:
        text += ", once to each node over the network and from there to its GPUs over the links inside, both at a time"
        text += " (as DeepEP does)"
    if experts.groups > 1:
        text += f"; routing is limited to {experts.groups_per_token} of {experts.groups} groups of experts"
    share = training.communication_share
    text += f"; {100 * share:.0f} % of the multiprocessors send" if share else "; no multiprocessors are set aside"
    return text + "; experts are taken to be chosen evenly"
