"""One step of training, predicted: the schedule simulated on the model's costs, and what stands beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from stageloom.costs import Costs
from stageloom.errors import InputError
from stageloom.plan.cluster import Cluster
from stageloom.plan.constants import Constants, fitted
from stageloom.plan.cost import costs_of, setting, stage_times
from stageloom.plan.cost_step import Beside, beside
from stageloom.plan.layout import Layout, check
from stageloom.plan.memory import RankMemory, memory
from stageloom.plan.memory_stage import StageBytes, stage_bytes
from stageloom.plan.model import Model, layer_parameters
from stageloom.plan.software import MODERN, Software
from stageloom.plan.training import Training
from stageloom.schedule import Schedule
from stageloom.schedules import find
from stageloom.simulate import Timeline, simulate


@dataclass(frozen=True)
class Prediction:
    """One step. Seconds, bytes, flops.

    seconds: of the step, from its start to updated parameters. tokens_per_second: of all GPUs. flops: that the model
    needs (recomputation not counted, attention's square whole, as in arXiv 2205.05198, appendix A). mfu: these over
    what all GPUs could do. bubble: of the pipeline alone, as `Metrics.bubble_rate`. exposed: communication that the
    busiest rank waits for in the whole step. parts: seconds of the busiest rank by what they go to; they sum to
    `seconds`. memory: per rank of the pipeline.
    """

    schedule: str
    seconds: float
    tokens_per_second: float
    flops: float
    mfu: float
    bubble: float
    exposed: float
    parts: dict[str, float]
    memory: tuple[RankMemory, ...]
    costs: Costs
    beside: Beside
    timeline: Timeline

    @property
    def peak_memory(self) -> float:
        """Bytes of the fullest rank, with what no allocator sees."""
        return max(rank.total for rank in self.memory)


def predict(
    model: Model,
    cluster: Cluster,
    training: Training,
    layout: Layout,
    schedule: str | Schedule,
    constants: Constants | None = None,
    software: Software = MODERN,
    *,
    measured: Costs | None = None,
) -> Prediction:
    """One step of `model` laid out as `layout`, with the schedule of this name, or this one.

    measured: costs of a profile, which replace those of the model. Raises InputError where layout, schedule or batch
    do not go together, ConstraintError where the schedule cannot be built at these sizes.
    """
    check(model, cluster, training, layout)
    s = setting(model, cluster, training, layout, fitted() if constants is None else constants, software)
    times = stage_times(model, layout, s, training.communication_share)

    def costs(paths: int) -> tuple[Costs, list[StageBytes]]:
        held = stage_bytes(model, training, layout, s, paths)
        return (costs_of(times, held, s, layout) if measured is None else measured), held

    order = schedule if isinstance(schedule, Schedule) else build(schedule, layout, training, lambda: costs(1)[0])
    if (order.ranks, order.stages) != (layout.pipeline, layout.stages):
        raise InputError(
            f"{order.name} has {order.stages} stages on {order.ranks} ranks; the layout has {layout.stages} on "
            f"{layout.pipeline} (pipeline {layout.pipeline} x chunks {layout.chunks})"
        )
    known, held = costs(len(order.placement.paths))
    timeline = simulate(order, known)
    around = beside(model, training, layout, s, held, timeline)
    seconds = around.finish + around.after
    flops = model_flops(model, training)
    parts, bubble = _parts(timeline, around, [one.work.total - one.exposed.total for one in times])
    at_most = cluster.gpu.peak["bf16" if training.dtype == "fp8" else training.dtype]
    return Prediction(
        schedule=order.name,
        seconds=seconds,
        tokens_per_second=training.step_tokens / seconds,
        flops=flops,
        mfu=flops / seconds / layout.gpus / at_most,
        bubble=bubble,
        exposed=parts["collectives"] + parts["gradients"] + parts["tied embedding"],
        parts=parts,
        memory=memory(model, layout, s, held, timeline),
        costs=known,
        beside=around,
        timeline=timeline,
    )


@lru_cache(maxsize=512)
def _fixed(name: str, ranks: int, microbatches: int, options: tuple[tuple[str, Any], ...]) -> Schedule:
    return find(name)(ranks, microbatches, **dict(options))


def build(name: str, layout: Layout, training: Training, costs: Callable[[], Costs]) -> Schedule:
    """The schedule of this name for a layout; one that is searched for is searched for these costs."""
    record, microbatches = find(name), layout.microbatches(training)
    options = {"chunks": layout.chunks} if any(option.name == "chunks" for option in record.options) else {}
    if record.searched:
        return record(layout.pipeline, microbatches, costs=costs(), **options)
    return _fixed(record.name, layout.pipeline, microbatches, tuple(options.items()))


def model_flops(model: Model, training: Training) -> float:
    """Floating-point operations that a step needs: three products (forward, two gradients) with every parameter that
    a token uses but the embedding's, and with attention's whole square."""
    parameters = 0.0
    for layer, count in Counter(model.layers).items():
        used = layer_parameters(model, layer)
        parameters += count * (used.active - used.norms)
        a = layer.attention
        pairs = min(a.window or training.sequence, training.sequence)
        parameters += count * a.heads * pairs * (a.head_width + a.value_width)
    parameters += model.vocabulary * model.hidden
    return 6.0 * parameters * training.step_tokens


def _parts(timeline: Timeline, around: Beside, compute: list[float]) -> tuple[dict[str, float], float]:
    """Seconds of the rank that is done last, by what they go to; and the pipeline's bubble rate."""
    schedule = timeline.schedule
    took = timeline.end - timeline.start
    took[np.flatnonzero(schedule.pair) + 1] = 0.0  # a pair takes its time once
    first = schedule.offsets[:-1]
    busy = np.add.reduceat(took, first)
    ends, starts = np.maximum.reduceat(timeline.end, first), np.minimum.reduceat(timeline.start, first)
    cost = float((ends - starts).max())
    rank = int((ends + around.exposed).argmax())
    products = np.zeros(schedule.ranks)
    each = schedule.microbatches / len(schedule.placement.paths)
    for path in schedule.placement.table:
        np.add.at(products, path, np.asarray(compute) * each)
    working = min(float(products[rank]), float(busy[rank]))
    return {
        "compute": working,
        "collectives": float(busy[rank]) - working,
        "idle": float(ends[rank] - busy[rank]) - float(timeline.start.min()),
        "gradients": float(around.exposed[rank]),
        "tied embedding": around.tied,
        "optimizer": around.optimizer,
        "step": around.step,
    }, (cost - float(busy.mean())) / cost if cost else 0.0
