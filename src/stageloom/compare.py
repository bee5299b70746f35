"""Every published schedule at one size and one set of costs, best first: the main job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stageloom.costs import Costs
from stageloom.errors import ConstraintError
from stageloom.metrics import Metrics, measure
from stageloom.schedules import Record, find, records
from stageloom.simulate import Timeline, simulate

BASELINE = "1f1b"


@dataclass(frozen=True)
class Row:
    """One schedule of a comparison. Differences are to 1F1B in the same setting; negative is better.

    gpu_hours_difference: GPU-hours per million tokens, None unless unit and tokens are given.
    """

    record: Record
    timeline: Timeline
    metrics: Metrics
    makespan_difference: float
    gpu_hours_difference: float | None

    @property
    def label(self) -> str:
        """The schedule's name, with the options that make it a variant (`chimera doubling`)."""
        return self.metrics.schedule


@dataclass(frozen=True)
class Refused:
    """A schedule that these sizes do not allow, and why."""

    name: str
    reason: str
    remedy: str


@dataclass(frozen=True)
class Comparison:
    """Rows by makespan, then by cost and the largest peak of activations; and the schedules that do not apply."""

    ranks: int
    microbatches: int
    costs: Costs
    rows: tuple[Row, ...]
    refused: tuple[Refused, ...]


def compare(
    ranks: int,
    microbatches: int,
    costs: Costs,
    *,
    chunks: int | None = None,
    names: Sequence[str] = (),
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Simulate every schedule (or those in `names`) at these sizes. `chunks` is for those that take a number of chunks.

    Raises InputError for sizes or costs that no schedule can be run with, or for an unknown name.
    """
    chosen = tuple(find(name) for name in names) or records()
    baseline = _run(find(BASELINE), ranks, microbatches, costs, {}, {})[1]
    rows: list[Row] = []
    refused: list[Refused] = []
    for record in {record.name: record for record in chosen}.values():
        if progress is not None:
            progress(record.name)
        chunked = {} if chunks is None or not takes_chunks(record) else {"chunks": chunks}
        try:
            for variant in record.variants:
                timeline, metrics = _run(record, ranks, microbatches, costs, chunked, variant)
                rows.append(_row(record, timeline, metrics, baseline))
        except ConstraintError as error:
            refused.append(Refused(record.name, error.reason, error.remedy))
    rows.sort(key=_rank)
    return Comparison(ranks, microbatches, costs, tuple(rows), tuple(refused))


def _row(record: Record, timeline: Timeline, metrics: Metrics, baseline: Metrics) -> Row:
    hours, reference = metrics.gpu_hours_per_million_tokens, baseline.gpu_hours_per_million_tokens
    saved = None if hours is None or reference is None else hours - reference
    return Row(record, timeline, metrics, metrics.makespan - baseline.makespan, saved)


def _rank(row: Row) -> tuple[float, float, float, str]:
    metrics = row.metrics
    return round(metrics.makespan, 9), round(metrics.cost, 9), max(metrics.peak_activations), row.label


def takes_chunks(record: Record) -> bool:
    """Does this schedule take a number of chunks a rank?"""
    return any(option.name == "chunks" for option in record.options)


def _run(
    record: Record, ranks: int, microbatches: int, costs: Costs, options: dict[str, Any], variant: dict[str, Any]
) -> tuple[Timeline, Metrics]:
    words = [str(value) if isinstance(value, str) else f"{name}={value}" for name, value in variant.items()]
    schedule = record(ranks, microbatches, **options, **variant)
    timeline = simulate(replace(schedule, name=" ".join([record.name, *words])), costs)
    return timeline, measure(timeline)
