"""Memory of a timeline: activations as a step function of time, and what each rank holds at its worst.

F allocates a micro-batch's activations when it starts; B, W and BW free their parts when they end (`rules.ALLOCATES`).
Where W frees more than F allocated (w_share above 1), B allocates the difference when it starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stageloom._kernel import Kernel
from stageloom.metrics.survey import Floats, Survey, survey
from stageloom.op import Kind
from stageloom.rules import ALLOCATES
from stageloom.schedule import Schedule
from stageloom.simulate import Timeline


@dataclass(frozen=True)
class MemoryCurve:
    """Activations held by each rank: rank r owns entries offsets[r] to offsets[r + 1] - 1, one an op.

    From `time[i]` on (to the rank's next entry) the rank holds `units[i]` micro-batches of a whole rank's layers, or
    `bytes[i]`. `row[i]` is the op that changed it.
    """

    offsets: NDArray[np.int64]
    time: Floats
    units: Floats
    bytes: Floats
    row: NDArray[np.int64]


def memory_curve(timeline: Timeline) -> MemoryCurve:
    """The activations of every rank over time."""
    schedule, costs = timeline.schedule, timeline.costs
    allocates = schedule.kind == Kind.F
    if costs.w_share > 1:
        allocates |= schedule.kind == Kind.B
    order = _event_order(schedule, allocates)
    kind = schedule.kind if order is None else schedule.kind[order]
    freed_by_b, freed_by_w = (_running(ALLOCATES[:, part][kind], schedule.offsets) for part in (0, 1))
    scale = schedule.ranks / schedule.stages / schedule.slices
    units = (freed_by_b * (1.0 - costs.w_share) + freed_by_w * costs.w_share) * scale
    time = np.where(allocates, timeline.start, timeline.end)
    if isinstance(costs.activation_bytes, list):
        per_stage = costs.pieces("activation_bytes", schedule.stages, schedule.ranks) / schedule.slices
        part = ALLOCATES @ np.array([1.0 - costs.w_share, costs.w_share])
        stage = schedule.stage if order is None else schedule.stage[order]
        held = _running(part[kind] * per_stage[stage], schedule.offsets)
    else:
        held = units * costs.activation_bytes
    rows = np.arange(len(schedule)) if order is None else order
    return MemoryCurve(schedule.offsets, time if order is None else time[order], units, held, rows)


def _event_order(schedule: Schedule, allocates: NDArray[np.bool_]) -> NDArray[np.int64] | None:
    """Rows in the order in which their memory changes: one half of a pair allocates before the other frees."""
    late = np.flatnonzero(schedule.pair)
    late = late[~allocates[late] & allocates[late + 1]]
    if not len(late):
        return None
    order = np.arange(len(schedule))
    order[late], order[late + 1] = late + 1, late
    return order


def _running(steps: NDArray[np.generic], offsets: NDArray[np.int64]) -> Floats:
    """Running sum of `steps` that starts anew on each rank."""
    total = np.cumsum(steps, dtype=np.int64 if steps.dtype.kind == "i" else np.float64)
    before = np.concatenate((np.zeros(1, dtype=total.dtype), total))[offsets[:-1]]
    return (total - np.repeat(before, np.diff(offsets))).astype(np.float64, copy=False)


@dataclass(frozen=True)
class RankMemory:
    """Bytes a rank holds, one value a rank: weights (every replica and every stashed version), their gradients,
    optimiser state, and activations at their peak; `peak` is the sum."""

    parameters: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats

    @property
    def peak(self) -> Floats:
        return self.parameters + self.gradients + self.optimizer + self.activations


def rank_memory(timeline: Timeline, found: Survey | None = None) -> RankMemory:
    """What each rank holds at its worst, in bytes."""
    schedule, costs = timeline.schedule, timeline.costs

    def held(key: str) -> Floats:
        pieces = costs.pieces(key, schedule.stages, schedule.ranks)
        total = np.zeros(schedule.ranks)
        for path in schedule.placement.table:
            np.add.at(total, path, pieces)
        return total

    return RankMemory(
        held("parameter_bytes") * weight_versions(schedule),
        held("gradient_bytes"),
        held("optimizer_bytes"),
        (survey(timeline) if found is None else found).bytes,
    )


def weight_versions(schedule: Schedule) -> Floats:
    """The most weight versions each rank holds at once: 1 where the schedule is synchronous.

    An asynchronous rank keeps every version from the one of its oldest micro-batch in flight to the newest it has made.
    """
    held = np.ones(schedule.ranks)
    if schedule.version is None or not schedule.update_every:
        return held
    for rank, of_paths in enumerate(schedule.placement.stages_of):
        low, high = int(schedule.offsets[rank]), int(schedule.offsets[rank + 1])
        for stage in {stage for stages in of_paths for stage in stages}:
            most = _versions_held.pick(len(schedule))(
                schedule.kind, schedule.stage, schedule.version, schedule.update_every, low, high, stage
            )
            held[rank] = max(held[rank], float(most))
    return held


@Kernel
def _versions_held(kind: Any, stage: Any, version: Any, every: int, low: int, high: int, where: int) -> int:
    """The most versions of one stage that a rank (rows low to high) holds while it runs forwards."""
    most = 1
    ended = 0
    oldest = low - 1  # the forward whose micro-batch has been in flight longest
    for row in range(low, high):
        if stage[row] != where:
            continue
        if kind[row] >= 2:
            ended += 1
        if kind[row] >= 2 or oldest < low:
            oldest += 1
            while oldest < high - 1 and (kind[oldest] != 0 or stage[oldest] != where):
                oldest += 1
        if kind[row] == 0:
            now = ended // every - version[oldest] + 1
            if now > most:
                most = now
    return most
