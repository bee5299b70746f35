"""What the second replica of DualPipe costs: a dense model of 70 billion parameters, and a mixture of 671 billion."""

from stageloom.plan import Training, load_cluster, load_model
from stageloom.plan.layout import Layout, spread
from stageloom.plan.replicas import replication

dense = replication(
    load_model("llama3-70b"), load_cluster("h100x64"), Training(4096, 512), Layout(1, 8, 8, layers=spread(80, 8))
)
mixture = replication(
    load_model("deepseek-v3"),
    load_cluster("h800x2048"),
    Training(4096, 15360),
    Layout(1, 16, 128, 64, layers=spread(61, 16)),
)
for name, found in (("70B dense, P = 8", dense), ("671B mixture, P = 16, EP = 64", mixture)):
    held = found.dense + found.routed
    print(
        f"{name}: {held / 1e9:.2f}B parameters a GPU, {found.extra / 1e9:.1f} GB more, {found.share:.0%} of its memory"
    )
