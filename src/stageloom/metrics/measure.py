"""All the numbers of a timeline in one value, which is also the JSON of `stageloom simulate`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stageloom.metrics.idle import gaps, whole_windows
from stageloom.metrics.memory import rank_memory, weight_versions
from stageloom.metrics.path import critical_path
from stageloom.metrics.survey import TOLERANCE, Survey, busy_between, span, survey
from stageloom.simulate import Timeline

__all__ = ["Metrics", "critical_path", "measure"]


@dataclass(frozen=True)
class Metrics:
    """Numbers of one timeline. Times are in the costs' unit (`unit`, None where none was given).

    schedule, ranks, microbatches, chunks, stages, slices, synchronous: what was run.
    makespan: first start to last end. cost: the papers' measure, max over ranks of last end - first start.
    work: mean over ranks of busy time (an overlapped pair counts once).
    bubble_time = cost - work; bubble_rate = bubble_time / cost (arXiv 2401.10241, table 5).
    schedule_loss = cost - busiest rank's work; imbalance_loss = busiest - mean: bubble_time is their sum.
    utilization: work / makespan; utilization_per_rank likewise; worst_utilization the smallest of them.
    steady_utilization: of the worst rank in the steady phase, which lasts from the moment the last rank has started its
    first backward to the moment the first rank has ended its last forward; None where there is no such phase.
    peak_activations: per rank, in micro-batches of a whole rank's layers. peak_activation_bytes: the same in bytes;
    memory_bytes: per rank, the peak of parameters + gradients + optimiser + activations; None where the costs say
    nothing in bytes.
    parameter_copies: replicas of the weights, times stashed versions (of the rank that holds most).
    first_full_time: first instant at which every rank is busy; full_window the longest such interval; None: never.
    idle_by_cause: idle time of all ranks together, by cause (see `metrics.gaps`).
    messages: messages between ranks; exposed_message_time: idle time spent waiting for one on its way.
    gpu_hours_per_million_tokens: one GPU a rank; None unless unit and tokens are given.
    """

    schedule: str
    ranks: int
    microbatches: int
    chunks: int
    stages: int
    slices: int
    synchronous: bool
    unit: str | None
    makespan: float
    cost: float
    work: float
    bubble_time: float
    bubble_rate: float
    schedule_loss: float
    imbalance_loss: float
    utilization: float
    worst_utilization: float
    steady_utilization: float | None
    utilization_per_rank: list[float]
    peak_activations: list[float]
    peak_activation_bytes: list[float] | None
    memory_bytes: list[float] | None
    parameter_copies: int
    first_full_time: float | None
    full_window: list[float] | None
    idle_by_cause: dict[str, float]
    messages: int
    exposed_message_time: float
    gpu_hours_per_million_tokens: float | None


def measure(timeline: Timeline) -> Metrics:
    """Compute all metrics of a timeline."""
    schedule, costs = timeline.schedule, timeline.costs
    begin, finish = span(timeline)
    makespan = finish - begin
    found = survey(timeline)
    cost = float((found.last - found.first).max())
    work, busiest = float(found.busy.mean()), float(found.busy.max())
    idle = gaps(timeline, found)
    causes = idle.by_cause()
    first_full, window = whole_windows(timeline, idle)
    per_rank_utilization = found.busy / makespan if makespan else np.ones(schedule.ranks)
    versions = weight_versions(schedule)
    memory = rank_memory(timeline, found).peak
    return Metrics(
        schedule=schedule.name,
        ranks=schedule.ranks,
        microbatches=schedule.microbatches,
        chunks=schedule.chunks,
        stages=schedule.stages,
        slices=schedule.slices,
        synchronous=schedule.synchronous,
        unit=costs.unit,
        makespan=makespan,
        cost=cost,
        work=work,
        bubble_time=cost - work,
        bubble_rate=(cost - work) / cost if cost else 0.0,
        schedule_loss=_less(cost, busiest),
        imbalance_loss=_less(busiest, work),
        utilization=work / makespan if makespan else 1.0,
        worst_utilization=float(per_rank_utilization.min()),
        steady_utilization=_steady(timeline, found),
        utilization_per_rank=per_rank_utilization.tolist(),
        peak_activations=np.round(found.units, 9).tolist(),
        peak_activation_bytes=found.bytes.tolist() if found.bytes.any() else None,
        memory_bytes=memory.tolist() if memory.any() else None,
        parameter_copies=len(schedule.placement.paths) * int(versions.max()),
        first_full_time=first_full,
        full_window=None if window is None else [window.start, window.end],
        idle_by_cause=causes,
        messages=int(found.messages.sum()),
        exposed_message_time=causes["message"],
        gpu_hours_per_million_tokens=_gpu_hours(timeline, makespan),
    )


def _less(whole: float, part: float) -> float:
    """whole - part, 0 where that is what sums of floating-point numbers leave."""
    return 0.0 if whole - part <= TOLERANCE * whole else whole - part


def _steady(timeline: Timeline, found: Survey) -> float | None:
    """Utilisation of the worst rank in the steady phase (defined at `Metrics`)."""
    begin, end = float(found.first_backward.max()), float(found.last_forward.min())
    if not end > begin:
        return None
    schedule = timeline.schedule
    inside = np.empty(schedule.ranks)
    busy_between.pick(len(schedule))(schedule.offsets, schedule.pair, timeline.start, timeline.end, begin, end, inside)
    return float(inside.min()) / (end - begin)


def _gpu_hours(timeline: Timeline, makespan: float) -> float | None:
    seconds, tokens = timeline.costs.seconds, timeline.costs.tokens
    if seconds is None or tokens is None:
        return None
    schedule = timeline.schedule
    return makespan * seconds * schedule.ranks / 3600 / (schedule.microbatches * tokens) * 1e6
