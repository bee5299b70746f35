"""Where every published schedule stands beside a found order: the same costs, the same memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stageloom.errors import StageloomError
from stageloom.metrics import measure
from stageloom.schedules import Record, records
from stageloom.search.problem import Problem
from stageloom.simulate import simulate

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Standing:
    """A published schedule: its makespan and cost, the fullest rank's activations (in what the limit is given in), and
    whether every rank stays within its limit. `same_placement`: its stages stand where the found order's do."""

    name: str
    makespan: float
    cost: float
    peak: float
    fits: bool
    same_placement: bool

    def of(self, objective: str) -> float:
        return self.cost if objective == "cost" else self.makespan


def standings(
    problem: Problem, objective: str, progress: Callable[[str], None] | None = None
) -> tuple[list[Standing], list[str]]:
    """Every synchronous schedule of whole micro-batches at the problem's sizes: those that fit first, best first; and
    the names of those that these sizes do not allow. ZB-greedy is given the limit itself."""
    rows: list[Standing] = []
    refused: list[str] = []
    for record in records():
        if not record.synchronous:
            continue
        if progress is not None:
            progress(record.name)
        for options in _variants(record, problem):
            try:
                schedule = record(problem.ranks, problem.microbatches, costs=problem.costs, **options)
                if schedule.slices > 1:
                    continue
                metrics = measure(simulate(schedule, problem.costs))
            except StageloomError:
                refused.append(record.name)
                continue
            in_bytes = problem.unit_name == "bytes"
            peaks = np.array(metrics.peak_activation_bytes or [0.0] if in_bytes else metrics.peak_activations)
            fits = bool((peaks <= problem.limit / problem.unit * (1 + TOLERANCE)).all())
            words = [str(value) if isinstance(value, str) else f"{key}={value}" for key, value in options.items()]
            rows.append(
                Standing(
                    " ".join([record.name, *words]),
                    metrics.makespan,
                    metrics.cost,
                    float(peaks.max()),
                    fits,
                    schedule.placement == problem.placement,
                )
            )
    return sorted(rows, key=lambda row: (not row.fits, row.of(objective), row.peak, row.name)), refused


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
