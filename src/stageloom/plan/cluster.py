"""What a model is trained on: groups of equal nodes, their GPUs, and the links inside and between nodes.

Every figure is the hardware's nominal one (a datasheet's peak without sparsity, a link's rate in one direction); what
is reached of it is the cost model's to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from stageloom.errors import InputError

DTYPES: Final = ("bf16", "fp16", "fp8", "fp32")


@dataclass(frozen=True, slots=True)
class Gpu:
    """memory: bytes; peak: flop/s of dense matrix products by input type; bandwidth: of its memory, bytes/s.

    A type that is not in `peak` is one that the GPU has no fast products for.
    """

    name: str
    memory: float
    peak: Mapping[str, float] = field(hash=False)
    bandwidth: float

    def mfu_type(self, dtype: str) -> str:
        """The type whose peak MFU is a share of: for fp8 that of bf16, where there is one, as is customary."""
        return "bf16" if dtype == "fp8" and "bf16" in self.peak else dtype


@dataclass(frozen=True, slots=True)
class Link:
    """bandwidth: bytes/s in one direction for one GPU; latency: seconds of a short message."""

    bandwidth: float
    latency: float


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """`nodes` equal nodes. inside: between the GPUs of a node; between: the network, as one GPU's share of it."""

    nodes: int
    gpus_per_node: int
    gpu: Gpu
    inside: Link
    between: Link

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True)
class Cluster:
    """One or more groups of equal nodes. GPUs are numbered node by node, group by group.

    oversubscription: how many times more bandwidth the nodes have than the network between them carries when all send
    far (1: none missing). A synchronous step waits for the slowest GPU, so `gpu`, `inside`, `between` and
    `gpus_per_node` of a mixed cluster are the worst of its groups in each respect; `group(n)` is the truth about one
    GPU.
    """

    name: str
    groups: tuple[NodeGroup, ...]
    oversubscription: float = 1.0
    source: str = ""

    def __post_init__(self) -> None:
        if not self.groups:
            raise InputError("a cluster has at least one group of nodes")

    @property
    def gpus(self) -> int:
        """GPUs in all groups."""
        return sum(group.gpus for group in self.groups)

    @property
    def nodes(self) -> int:
        return sum(group.nodes for group in self.groups)

    @property
    def mixed(self) -> bool:
        return len(set(self.groups)) > 1

    @property
    def gpus_per_node(self) -> int:
        return min(group.gpus_per_node for group in self.groups)

    @property
    def gpu(self) -> Gpu:
        gpus = list(dict.fromkeys(group.gpu for group in self.groups))
        if len(gpus) == 1:
            return gpus[0]
        shared = [dtype for dtype in DTYPES if all(dtype in gpu.peak for gpu in gpus)]
        return Gpu(
            name="+".join(gpu.name for gpu in gpus),
            memory=min(gpu.memory for gpu in gpus),
            peak={dtype: min(gpu.peak[dtype] for gpu in gpus) for dtype in shared},
            bandwidth=min(gpu.bandwidth for gpu in gpus),
        )

    @property
    def inside(self) -> Link:
        return _worst([group.inside for group in self.groups])

    @property
    def between(self) -> Link:
        """The network as one GPU's share of it, not yet divided by `oversubscription`."""
        return _worst([group.between for group in self.groups])

    def group(self, gpu: int) -> NodeGroup:
        """The group that GPU number `gpu` stands in. Raises InputError where there is no such GPU."""
        left = gpu
        for group in self.groups:
            if 0 <= left < group.gpus:
                return group
            left -= group.gpus
        raise InputError(f"GPU {gpu} of {self.name}: it has GPUs 0 to {self.gpus - 1}")


def _worst(links: list[Link]) -> Link:
    return Link(min(link.bandwidth for link in links), max(link.latency for link in links))


def cluster(
    name: str, gpus: int, gpus_per_node: int, gpu: Gpu, inside: Link, between: Link, oversubscription: float = 1.0
) -> Cluster:
    """A cluster of equal nodes; fewer GPUs than a node has are a part of one node.

    Raises InputError where the GPUs do not fill whole nodes.
    """
    if gpus < 1 or gpus_per_node < 1:
        raise InputError(f"{gpus} GPUs in nodes of {gpus_per_node}; at least 1 of each is needed")
    size = min(gpus, gpus_per_node)
    if gpus % size:
        below = gpus // size * size
        raise InputError(f"{gpus} GPUs do not fill nodes of {size}; nearest: {below} or {below + size}")
    return Cluster(name, (NodeGroup(gpus // size, size, gpu, inside, between),), oversubscription)
