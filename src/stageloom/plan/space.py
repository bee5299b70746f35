"""What the search chooses from: every way to cut a job over a cluster, and why there is none where there is none."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from stageloom.errors import InputError
from stageloom.plan.cluster import Cluster
from stageloom.plan.model import Model
from stageloom.plan.training import RECOMPUTES, Recompute, Training

Words = Recompute | tuple[Recompute, ...]
Reason = Literal["depth", "batch", "sizes", "memory", "one GPU", "schedule"]

MICROBATCHES: Final = (1, 2, 4, 8, 16)
"""Sequences of a micro-batch that are tried where the job does not say."""

MOST_CHUNKS: Final = 12
FEW_CHUNKS: Final = 4
"""Chunks a rank are tried up to `FEW_CHUNKS`, and up to `MOST_CHUNKS` where they come out even."""


class Refusal(InputError):
    """There is no plan to give. `reason` is the kind, the text says why and what would be right."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason: Reason = reason


@dataclass(frozen=True, slots=True)
class Space:
    """What may be chosen; None leaves a dimension free.

    tensor, pipeline, data, expert, chunks, microbatch: sizes as in `Layout`. recompute: words, or one tuple a layer, of
    which one is chosen. schedules: names. asynchronous: schedules with stale weights too. optimised: seconds of effort
    for orders searched for the best layouts (`stageloom.search`), 0 for none.
    """

    tensor: int | None = None
    pipeline: int | None = None
    data: int | None = None
    expert: int | None = None
    chunks: int | None = None
    microbatch: int | None = None
    recompute: tuple[Words, ...] = RECOMPUTES
    schedules: tuple[str, ...] | None = None
    asynchronous: bool = False
    optimised: float = 0.0

    def __post_init__(self) -> None:
        for key in ("tensor", "pipeline", "data", "expert", "chunks", "microbatch"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise InputError(f"{key} = {value}; a whole number of at least 1 is needed")
        if not self.recompute:
            raise InputError("recompute: nothing to choose from; at least one of none, selective, full is needed")


@dataclass(frozen=True, slots=True)
class Cut:
    """A layout before its chunks and its layers: what a schedule does not change."""

    tensor: int
    pipeline: int
    data: int
    expert: int
    microbatch: int
    recompute: Words

    @property
    def group(self) -> tuple[int, int]:
        return self.tensor, self.pipeline


def divisors(number: int) -> list[int]:
    """All of them, smallest first."""
    low = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return low + [number // each for each in reversed(low) if each * each != number]


def cuts(model: Model, cluster: Cluster, training: Training, space: Space) -> list[Cut]:
    """Every cut that uses all GPUs and divides heads, experts and batch. Raises Refusal where there is none."""
    _check(model, cluster, training, space)
    found = [
        Cut(tensor, pipeline, data, expert, microbatch, recompute)
        for tensor, pipeline, data in _grids(model, cluster, space)
        for microbatch in _microbatches(training, space, data)
        for expert in _experts(model, space, tensor * data)
        for recompute in space.recompute
    ]
    if not found:
        raise _nothing(model, cluster, training, space)
    return found


def chunk_counts(layers: int, pipeline: int, space: Space) -> tuple[int, ...]:
    """Chunks a rank to try at this depth, for schedules that take them."""
    most = layers // pipeline
    if space.chunks is not None:
        return (space.chunks,) if space.chunks <= most else ()
    few = range(2, min(most, FEW_CHUNKS) + 1)
    even = [each for each in divisors(most) if FEW_CHUNKS < each <= MOST_CHUNKS and layers % pipeline == 0]
    return (*few, *even)


def _grids(model: Model, cluster: Cluster, space: Space) -> Iterator[tuple[int, int, int]]:
    for tensor in _chosen(space.tensor, _tensor_sizes(model)):
        if cluster.gpus % tensor or _straddled(cluster, tensor) is not None:
            continue
        for pipeline in _chosen(space.pipeline, divisors(cluster.gpus // tensor)):
            if pipeline > len(model.layers) or (cluster.gpus // tensor) % pipeline:
                continue
            data = cluster.gpus // tensor // pipeline
            if space.data in (None, data):
                yield tensor, pipeline, data


def _straddled(cluster: Cluster, tensor: int) -> int | None:
    """The size of nodes that cut some tensor-parallel groups in two, though others lie in a node and all are taken to;
    None where there are none. Groups larger than a node are taken to lie across nodes."""
    if cluster.nodes == 1 or tensor > cluster.gpus_per_node:
        return None
    return next((group.gpus_per_node for group in cluster.groups if group.gpus_per_node % tensor), None)


def _tensor_sizes(model: Model) -> list[int]:
    return divisors(math.gcd(*(layer.attention.heads for layer in model.layers)))


def _expert_sizes(model: Model) -> list[int]:
    return divisors(math.gcd(*(layer.experts.count for layer in model.layers if layer.experts is not None)) or 1)


def _microbatches(training: Training, space: Space, data: int) -> Iterator[int]:
    fixed = space.microbatch or training.microbatch
    for size in (fixed,) if fixed else MICROBATCHES:
        if training.global_batch % (data * size) == 0:
            yield size


def _experts(model: Model, space: Space, members: int) -> Iterator[int]:
    """`members` hold the same layers."""
    for expert in _chosen(space.expert, _expert_sizes(model)):
        if members % expert == 0:
            yield expert


def _chosen(fixed: int | None, free: Iterable[int]) -> Iterable[int]:
    return (fixed,) if fixed is not None else free


def _check(model: Model, cluster: Cluster, training: Training, space: Space) -> None:
    """What is asked for, one dimension after another. Raises Refusal."""
    layers, gpus = len(model.layers), cluster.gpus
    if space.pipeline is not None and space.pipeline > layers:
        raise Refusal(
            "depth",
            f"pipeline = {space.pipeline}; {model.name} has {layers} layers, so at most {layers} stages can hold one",
        )
    if space.chunks is not None and space.chunks * (space.pipeline or 1) > layers:
        raise Refusal(
            "depth",
            f"pipeline {space.pipeline or 1} x chunks {space.chunks} is {space.chunks * (space.pipeline or 1)} stages; "
            f"{model.name} has {layers} layers, so at most {layers // (space.pipeline or 1)} chunks are possible",
        )
    for key, value, right in (
        ("tensor", space.tensor, _tensor_sizes(model)),
        ("expert", space.expert, _expert_sizes(model)),
    ):
        if value is not None and value not in right:
            what = "attention heads" if key == "tensor" else "experts"
            raise Refusal(
                "sizes", f"{key} = {value}; it has to divide the {what} of {model.name}: {', '.join(map(str, right))}"
            )
    node = None if space.tensor is None else _straddled(cluster, space.tensor)
    if node is not None:
        raise Refusal(
            "sizes",
            f"tensor = {space.tensor}; nodes of {node} GPUs would cut some groups of as many in two: a divisor of "
            f"{node} is needed, or more than a node has",
        )
    product = math.prod(each for each in (space.tensor, space.pipeline, space.data) if each is not None)
    if gpus % product or (None not in (space.tensor, space.pipeline, space.data) and gpus != product):
        given = " x ".join(
            f"{key} {value}"
            for key, value in (("tensor", space.tensor), ("pipeline", space.pipeline), ("data", space.data))
            if value is not None
        )
        raise Refusal("sizes", f"{given} = {product:,} GPUs; {cluster.name} has {gpus:,}, which have to be used evenly")


def _nothing(model: Model, cluster: Cluster, training: Training, space: Space) -> Refusal:
    """Why no cut is left: the batch, or sizes that do not go together."""
    grids = list(_grids(model, cluster, space))
    size = space.microbatch or training.microbatch or 1
    batch = training.global_batch
    steps = sorted({data * size for _, _, data in grids})
    if steps and all(batch % step for step in steps):
        near = {max(step, near) for step in steps for near in (batch // step * step, -(-batch // step) * step)}
        first = sorted(near, key=lambda each: (abs(each - batch), each))[0]
        pipelines = ", ".join(f"{step // size:,}" for step in steps[:4]) + (" ..." if len(steps) > 4 else "")
        return Refusal(
            "batch",
            f"global_batch = {batch:,} sequences; {cluster.gpus:,} GPUs make {pipelines} pipelines side by side, each "
            f"of which takes micro-batches of {size}, and none of these divides it; nearest: {first:,}",
        )
    if not grids:
        sizes = f"{len(model.layers)} layers and the attention heads of {model.name}"
        return Refusal(
            "sizes",
            f"{cluster.gpus:,} GPUs cannot be cut into tensor x pipeline x data that go with {sizes}; "
            "leave more of tensor, pipeline and data free",
        )
    members = sorted({tensor * data for tensor, _, data in grids})
    return Refusal(
        "sizes",
        f"expert = {space.expert}; it has to divide tensor x data, which is {', '.join(map(str, members[:8]))} here",
    )
