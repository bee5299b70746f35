"""The ground of the cost model: what a product, a kernel that moves data, and a collective take on one GPU.

A product takes the longer of its flops at the share of the peak that its size allows, and its bytes at the memory's
bandwidth (the roofline); every kernel adds a constant for starting and draining. Collectives are rings: twice (one
way: once) the bytes over the slowest link that the ring crosses, and a latency for each step.
"""

from __future__ import annotations

from dataclasses import dataclass

from stageloom.errors import InputError
from stageloom.plan.cluster import Cluster
from stageloom.plan.constants import Constants
from stageloom.plan.training import Dtype, Scaling

TILE = 128
DEPTH = 4096  # of a tile's product: together the unit in which a product's size is counted


@dataclass(frozen=True, slots=True)
class Machine:
    """What one GPU of a cluster reaches. peak: of projections, flop/s; core_peak: of attention's products, which stay
    in 16 bits; memory, scores: bytes/s, of kernels that move data and of those on attention's
    scores; width: bytes of a product's inputs; inside, between: bytes/s of the links,
    exchange_*: by all-to-alls;
    *_latency: of a step of a ring; start: of a collective."""

    peak: float
    core_peak: float
    memory: float
    scores: float
    width: float
    kernel: float
    tiles: float
    attention_forward: float
    attention_backward: float
    node: int
    inside: float
    between: float
    exchange_inside: float
    exchange_between: float
    inside_latency: float
    between_latency: float
    start: float


def machine(cluster: Cluster, dtype: Dtype, constants: Constants, scaling: Scaling = "tensor") -> Machine:
    """What the slowest GPU of `cluster` reaches. Raises InputError where it has no products of that type."""
    gpu, inside, between = cluster.gpu, cluster.inside, cluster.between
    if dtype not in gpu.peak:
        raise InputError(f"dtype: {dtype}; {gpu.name} has no matrix products of it, only {', '.join(gpu.peak)}")
    share = constants.product_share
    if dtype == "fp8":
        share = constants.product_share_blocks if scaling == "block" else constants.product_share_fp8
    core = gpu.peak.get("bf16", gpu.peak.get("fp16", gpu.peak[dtype])) if dtype == "fp8" else gpu.peak[dtype]
    network = between.bandwidth / cluster.oversubscription
    return Machine(
        peak=gpu.peak[dtype] * share,
        core_peak=core * constants.product_share,
        memory=gpu.bandwidth * constants.memory_share,
        scores=gpu.bandwidth * constants.score_share,
        width=1.0 if dtype == "fp8" else 2.0,
        kernel=constants.kernel,
        tiles=constants.product_tiles,
        attention_forward=core * constants.attention_forward,
        attention_backward=core * constants.attention_backward,
        node=cluster.gpus_per_node,
        inside=inside.bandwidth * constants.inside_share,
        between=network * constants.network_share,
        exchange_inside=inside.bandwidth * constants.exchange_share,
        exchange_between=network * constants.exchange_share,
        inside_latency=inside.latency,
        between_latency=between.latency,
        start=constants.collective,
    )


class Tally:
    """Seconds that kernels on one GPU take, one after another."""

    __slots__ = ("machine", "seconds")

    def __init__(self, on: Machine) -> None:
        self.machine = on
        self.seconds = 0.0

    def product(
        self, rows: float, columns: float, depth: float, *, batch: float = 1.0, core: bool = False, out: float = 2.0
    ) -> Tally:
        """`batch` products rows x depth by depth x columns; `out` bytes go to and from memory for each result."""
        on = self.machine
        tiles = batch * max(rows / TILE, 1.0) * max(columns / TILE, 1.0) * depth / DEPTH
        peak = (on.core_peak if core else on.peak) / (1.0 + on.tiles / tiles)
        width = 2.0 if core else on.width
        moved = batch * (width * depth * (rows + columns) + out * rows * columns)
        self.seconds += max(2.0 * batch * rows * columns * depth / peak, moved / on.memory) + on.kernel
        return self

    def moved(self, size: float, kernels: int = 1) -> Tally:
        """Kernels that read and write `size` bytes together."""
        if size > 0:
            self.seconds += size / self.machine.memory + kernels * self.machine.kernel
        return self

    def scored(self, size: float, kernels: int = 1) -> Tally:
        """As `moved`, for softmax and dropout of attention's scores."""
        if size > 0:
            self.seconds += size / self.machine.scores + kernels * self.machine.kernel
        return self


def members_on_node(on: Machine, ranks: int, stride: int) -> int:
    """How many of `ranks` ranks, `stride` GPUs apart, stand on one node."""
    return max(1, min(ranks, on.node // stride)) if stride < on.node else 1


def ring(on: Machine, size: float, ranks: int, stride: int = 1) -> float:
    """Seconds of a reduce-scatter, or of an all-gather, of `size` bytes (the whole, not a rank's part) over `ranks`
    ranks that stand `stride` GPUs apart. All groups do so at once: those that leave a node share its network."""
    if ranks < 2:
        return 0.0
    here = members_on_node(on, ranks, stride)
    if here == ranks:
        rate, latency = on.inside, on.inside_latency
    else:
        rate, latency = min(on.inside, here * on.between), on.between_latency
    steps = min(ranks - 1, 2 * on.node)  # long rings become trees
    return (ranks - 1) / ranks * size / rate + on.start / 2 + steps * latency


def all_reduce(on: Machine, size: float, ranks: int, stride: int = 1) -> float:
    """Seconds of an all-reduce: a reduce-scatter and an all-gather."""
    return 2.0 * ring(on, size, ranks, stride)
