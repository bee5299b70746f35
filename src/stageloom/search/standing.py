"""Where every published schedule stands beside a found order: the same costs, the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stageloom.errors import StageloomError
from stageloom.metrics import Metrics, measure
from stageloom.op import Kind
from stageloom.schedule import Schedule
from stageloom.schedules import Record, records
from stageloom.search.problem import Problem
from stageloom.simulate import simulate

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Standing:
    """A published schedule: its makespan and cost, the fullest rank's activations (in what the limit is given in), and
    whether every rank stays within its limit. `same_placement`: its stages stand where the found order's do, and it has
    whole micro-batches. `copies`: how many of the parameters it holds. `slices`: in how many it cuts a micro-batch."""

    name: str
    makespan: float
    cost: float
    peak: float
    fits: bool
    same_placement: bool
    copies: int = 1
    slices: int = 1

    def of(self, objective: str) -> float:
        return self.cost if objective == "cost" else self.makespan


def built(problem: Problem) -> Iterator[tuple[str, Schedule]]:
    """(name with options, schedule) of every synchronous schedule of whole micro-batches that these sizes allow."""
    for record in records():
        for name, schedule in _of_record(record, problem):
            if schedule is not None and schedule.slices == 1:
                yield name, schedule


def _of_record(record: Record, problem: Problem) -> Iterator[tuple[str, Schedule | None]]:
    """The same of one record; None for what its sizes do not allow."""
    if not record.synchronous:
        return
    for options in _variants(record, problem):
        words = [str(value) if isinstance(value, str) else f"{key}={value}" for key, value in options.items()]
        name = " ".join([record.name, *words])
        try:
            schedule = record(problem.ranks, problem.microbatches, costs=problem.costs, **options)
        except StageloomError:
            yield name, None
            continue
        yield name, _joined_at(schedule, problem) if problem.fused.any() else schedule


def _joined_at(schedule: Schedule, problem: Problem) -> Schedule:
    """The schedule with every B a BW at the stages that are fused, and their W's gone.

    No rank's forwards and backwards change places, so that it still runs.
    """
    fused = problem.fused[: problem.stages]
    if schedule.stages != problem.stages:
        fused = np.full(schedule.stages, fused.all())  # stages are named, and this schedule has others
    here = fused[schedule.stage]
    gone = here & (schedule.kind == Kind.W)
    pair = schedule.pair.copy()
    pair[np.flatnonzero(gone)] = False
    pair[np.flatnonzero(gone[1:])] = False
    keep = ~gone
    return replace(
        schedule,
        offsets=np.concatenate(([0], np.cumsum(keep)))[schedule.offsets],
        kind=np.where(here & (schedule.kind == Kind.B), Kind.BW, schedule.kind).astype(np.int8)[keep],
        stage=schedule.stage[keep],
        microbatch=schedule.microbatch[keep],
        slice=schedule.slice[keep],
        pair=pair[keep],
    )


def standings(
    problem: Problem, objective: str, progress: Callable[[str], None] | None = None
) -> tuple[list[Standing], list[str]]:
    """Every synchronous schedule at the problem's sizes: those that fit first, best first; and the names of those that
    these sizes do not allow. ZB-greedy is given the limit itself. Where stages are fused, so are theirs; of a schedule
    with other stages all, or none."""
    rows: list[Standing] = []
    refused: list[str] = []
    for record in records():
        if progress is not None and record.synchronous:
            progress(record.name)
        for name, schedule in _of_record(record, problem):
            if schedule is None:
                refused.append(record.name)
                continue
            metrics = measure(simulate(schedule, problem.costs))
            rows.append(
                Standing(
                    name,
                    metrics.makespan,
                    metrics.cost,
                    float(peaks_of(problem, metrics).max()),
                    fits(problem, metrics),
                    schedule.placement == problem.placement and schedule.slices == 1,
                    len(schedule.placement.paths),
                    schedule.slices,
                )
            )
    return sorted(rows, key=lambda row: (not row.fits, row.of(objective), row.peak, row.name)), refused


def peaks_of(problem: Problem, metrics: Metrics) -> NDArray[np.float64]:
    """What every rank holds at most, in what the limit is given in."""
    in_bytes = problem.unit_name == "bytes"
    return np.array(metrics.peak_activation_bytes or [0.0] if in_bytes else metrics.peak_activations)


def fits(problem: Problem, metrics: Metrics) -> bool:
    return bool((peaks_of(problem, metrics) <= problem.limit / problem.unit * (1 + TOLERANCE)).all())


def _variants(record: Record, problem: Problem) -> list[dict[str, object]]:
    names = {option.name for option in record.options}
    if "memory" in names:
        if problem.unit_name == "bytes":
            return []
        share = float(problem.limit.min() / problem.unit) / problem.ranks
        return [{"memory": f"{min(share, 1000.0):.9g}"}]
    more = {"chunks": problem.placement.chunks} if "chunks" in names and problem.placement.chunks > 1 else {}
    return [{**more, **variant} for variant in record.variants]


def best_that_fits(rows: list[Standing]) -> Standing | None:
    """The best published schedule within the limits, of any placement."""
    return next((row for row in rows if row.fits), None)


def on_same_placement(rows: list[Standing]) -> Standing | None:
    return next((row for row in rows if row.fits and row.same_placement), None)
