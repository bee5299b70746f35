"""One step of training, predicted: the schedule simulated on the model's costs, and what stands beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np

from stageloom.costs import Costs, costs_from
from stageloom.errors import InputError
from stageloom.plan.cluster import Cluster
from stageloom.plan.constants import Constants, fitted
from stageloom.plan.cost import costs_of, counts, setting, stage_times
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

    measured: costs of a profile; what they say (in their unit) replaces what the model says, key by key. Raises
    InputError where layout, schedule or batch do not go together, ConstraintError where the schedule cannot be built
    at these sizes.
    """
    check(model, cluster, training, layout)
    s = setting(model, cluster, training, layout, fitted() if constants is None else constants, software)
    times = stage_times(model, layout, s, training.communication_share)

    def costs(paths: int) -> tuple[Costs, list[StageBytes]]:
        held = stage_bytes(model, training, layout, s, paths)
        modelled = costs_of(times, held, s, layout)
        return (modelled if measured is None else replaced(modelled, measured)), held

    order = schedule if isinstance(schedule, Schedule) else build(schedule, layout, training, lambda: costs(1)[0])
    if (order.ranks, order.stages) != (layout.pipeline, layout.stages):
        raise InputError(
            f"{order.name} has {order.stages} stages on {order.ranks} ranks; the layout has {layout.stages} on "
            f"{layout.pipeline} (pipeline {layout.pipeline} x chunks {layout.chunks})"
        )
    known, held = costs(len(order.placement.paths))
    timeline = simulate(order, known)
    around = beside(model, training, layout, s, held, timeline)
    seconds = around.seconds
    flops = model_flops(model, training)
    parts, bubble = _parts(timeline, around, [one.work.total - one.exposed.total for one in times])
    gpu = cluster.gpu
    at_most = layout.gpus * gpu.peak[gpu.mfu_type(training.dtype)]
    if measured is not None and flops > seconds * at_most:
        raise InputError(
            f"{measured.place}: with these times a step takes {seconds:.3g} s, and all {layout.gpus:,} GPUs need "
            f"{flops / at_most:.3g} s for its products at their peak; times of this model and layout are needed, in "
            f"the unit that the file states ({measured.unit})"
        )
    return Prediction(
        schedule=order.name,
        seconds=seconds,
        tokens_per_second=training.step_tokens / seconds,
        flops=flops,
        mfu=flops / seconds / at_most,
        bubble=bubble,
        exposed=parts["collectives"] + parts["gradients"] + parts["tied embedding"],
        parts=parts,
        memory=memory(model, layout, s, held, timeline),
        costs=known,
        beside=around,
        timeline=timeline,
    )


TIMES: Final = ("F", "B", "W", "BW", "overlap_time", "latency", "overhead")


def replaced(modelled: Costs, measured: Costs) -> Costs:
    """The model's costs with every key that `measured` sets in its place, in seconds. Raises InputError where the
    measured times have no unit."""
    if measured.seconds is None:
        raise InputError(
            "measured costs: unit is missing; s, ms or us is needed to set them beside the model's seconds"
        )
    given = measured.model_fields_set - {"unit"}
    # Where parts were measured, their F, B, W and pair are there as well, computed from them.
    changed = {key: getattr(measured, key) for key in given if key != "anatomy"}
    scale = measured.seconds
    for key in given & set(TIMES):
        changed[key] = _scaled(changed[key], scale)
    if "links" in given:
        changed["links"] = tuple(
            link.model_copy(update={"latency": None if link.latency is None else link.latency * scale})
            for link in measured.links
        )
    kept = {key: getattr(modelled, key) for key in modelled.model_fields_set - given}
    if given & {"B", "W"} and "BW" not in given:
        kept.pop("BW", None)
    if "overlap_time" in given:
        kept.pop("overlap_fraction", None)
    return costs_from(changed, measured.place, **kept)


def _scaled(value: float | list[float] | None, scale: float) -> float | list[float] | None:
    if value is None:
        return None
    return [one * scale for one in value] if isinstance(value, list) else value * scale


@lru_cache(maxsize=512)
def _fixed(name: str, ranks: int, microbatches: int, options: tuple[tuple[str, Any], ...]) -> Schedule:
    return find(name)(ranks, microbatches, **dict(options))


def build(name: str, layout: Layout, training: Training, costs: Callable[[], Costs]) -> Schedule:
    """The schedule of this name for a layout; one that is searched for is searched for these costs."""
    record, microbatches = find(name), layout.microbatches(training)
    options = {"chunks": layout.chunks} if any(option.name == "chunks" for option in record.options) else {}
    if record.searched:
        return found_order(name, layout.pipeline, microbatches, costs(), **options)
    return _fixed(record.name, layout.pipeline, microbatches, tuple(options.items()))


def found_order(name: str, ranks: int, microbatches: int, costs: Costs, **options: Any) -> Schedule:
    """What a published search, by its name, finds for a plan's costs."""
    return find(name)(ranks, microbatches, costs=_even(costs), **options)


def _even(costs: Costs) -> Costs:
    """As the authors of the published searches give costs to them: the median stage's time for all stages, and a limit
    that counts micro-batches, whatever a stage keeps of one; what B makes for W beyond that is not known to them
    (sail-sg/zero-bubble-pipeline-parallelism, first release, `get_zero_bubble_forward_backward_func`)."""

    def median(key: str) -> float:
        values = sorted(np.ravel(getattr(costs, key)).tolist())
        return values[len(values) // 2]

    medians = {key: median(key) for key in ("F", "B", "W", "activation_bytes")}
    return costs.model_copy(update=medians | {"BW": None, "w_share": min(1.0, costs.w_share)})


def model_flops(model: Model, training: Training) -> float:
    """Floating-point operations that a step needs: three products (forward, two gradients) with every parameter that
    a token uses but the embedding's, and with attention's whole square."""
    parameters = 0.0
    for (layer, _), count in counts((layer, "none") for layer in model.layers):
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
    rank = around.last
    products = np.zeros(schedule.ranks)
    each = schedule.microbatches / len(schedule.placement.paths)
    for path in schedule.placement.table:
        np.add.at(products, path, np.asarray(compute) * each)
    working = min(float(products[rank]), float(busy[rank]))
    return {
        "compute": working,
        "collectives": float(busy[rank]) - working,
        "idle": max(0.0, float(around.spans[rank] - around.exposed[rank] - busy[rank])),  # not -1e-16
        "gradients": float(around.exposed[rank]),
        "tied embedding": around.tied,
        "optimizer": around.optimizer,
        "step": around.step,
    }, max(0.0, cost - float(busy.mean())) / cost if cost else 0.0
