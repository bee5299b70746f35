"""How a model is laid over a cluster: what each dimension of parallelism is, and which layers stand on which stage."""

from __future__ import annotations

from dataclasses import dataclass

from stageloom.errors import InputError
from stageloom.plan.cluster import Cluster
from stageloom.plan.model import Model
from stageloom.plan.training import Recompute, Training


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to lay a model over GPUs. Ranks are numbered as Megatron-LM numbers them: tensor-parallel ranks next to
    each other, then data-parallel ones, then stages.

    tensor: GPUs that share each layer; pipeline: ranks of the pipeline; data: pipelines side by side; expert: GPUs, of
    the tensor x data ones of a rank, that share the routed experts; chunks: stages a rank holds on a path. microbatch:
    sequences. recompute, zero, sequence_parallel: as in `Training`, chosen. layers: how many stand on each stage of a
    path, first stage first: pipeline x chunks numbers (0 is allowed: a stage that only embeds)."""

    tensor: int
    pipeline: int
    data: int
    expert: int = 1
    chunks: int = 1
    microbatch: int = 1
    recompute: Recompute | tuple[Recompute, ...] = "none"
    zero: int = 1
    sequence_parallel: bool = True
    layers: tuple[int, ...] = ()

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def stages(self) -> int:
        """Stages of a path."""
        return self.pipeline * self.chunks

    def microbatches(self, training: Training) -> int:
        """Micro-batches of one pipeline in one step. Raises InputError where the batch cannot be cut so."""
        at_once = self.data * self.microbatch
        if training.global_batch % at_once:
            below = training.global_batch // at_once * at_once
            near = " or ".join(str(n) for n in (below, below + at_once) if n)
            raise InputError(
                f"global_batch = {training.global_batch} sequences; {self.data} pipelines take micro-batches of "
                f"{self.microbatch}, so it has to be a multiple of {at_once}; nearest: {near}"
            )
        return training.global_batch // at_once


def spread(layers: int, stages: int) -> tuple[int, ...]:
    """`layers` on `stages` as evenly as can be; where some get one fewer, it is the last (it has the head), the first
    (it embeds), then those before the last. Raises InputError where there are fewer layers than stages."""
    if not 1 <= stages <= layers:
        raise InputError(f"{layers} layers cannot be spread over {stages} stages; 1 to {layers} stages are possible")
    most, short = -(-layers // stages), -layers % stages
    out = [most] * stages
    for stage in ([stages - 1, 0, *range(stages - 2, 0, -1)])[:short]:
        out[stage] -= 1
    return tuple(out)


def check(model: Model, cluster: Cluster, training: Training, layout: Layout) -> None:
    """Raise InputError, naming the dimension, its value and what would be right, where a layout is impossible."""
    for key in ("tensor", "pipeline", "data", "expert", "chunks", "microbatch"):
        value = getattr(layout, key)
        if value < 1:
            raise InputError(f"{key} = {value}; a whole number of at least 1 is needed")
    if layout.gpus > cluster.gpus:
        raise InputError(
            f"tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data} = {layout.gpus:,} GPUs; "
            f"{cluster.name} has {cluster.gpus:,}"
        )
    if len(layout.layers) != layout.stages:
        raise InputError(
            f"layers: {len(layout.layers)} numbers for {layout.stages} stages "
            f"(pipeline {layout.pipeline} x chunks {layout.chunks}); one a stage is needed"
        )
    if sum(layout.layers) != len(model.layers) or min(layout.layers) < 0:
        raise InputError(
            f"layers: {sum(layout.layers)} on all stages together; {model.name} has {len(model.layers)}, so the "
            "numbers, each at least 0, have to add up to that"
        )
    _check_cuts(model, layout)
    layout.microbatches(training)


def _check_cuts(model: Model, layout: Layout) -> None:
    for layer in {id(layer): layer for layer in model.layers}.values():
        if layer.attention.heads % layout.tensor:
            raise InputError(f"tensor = {layout.tensor}; it has to divide the {layer.attention.heads} attention heads")
        if layer.experts is not None and layer.experts.count % layout.expert:
            raise InputError(f"expert = {layout.expert}; it has to divide the {layer.experts.count} experts")
    if layout.expert > 1 and (layout.tensor * layout.data) % layout.expert:
        raise InputError(
            f"expert = {layout.expert}; it has to divide tensor x data = {layout.tensor * layout.data}, the GPUs "
            "that hold the same stage"
        )
    if layout.expert > 1 and all(layer.experts is None for layer in model.layers):
        raise InputError(f"expert = {layout.expert}; {model.name} has no experts, so only 1 makes sense")
    if isinstance(layout.recompute, tuple) and len(layout.recompute) != len(model.layers):
        raise InputError(f"recompute: {len(layout.recompute)} words for {len(model.layers)} layers; one a layer")
