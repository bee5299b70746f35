"""Every published schedule at one size and one set of costs, best first: the main job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np

from stageloom.costs import Costs
from stageloom.errors import ConstraintError, InputError
from stageloom.metrics import Metrics, measure
from stageloom.schedule import Schedule
from stageloom.schedules import Record, find, records
from stageloom.simulate import Timeline, simulate

BASELINE: Final = "1f1b"


@dataclass(frozen=True)
class Row:
    """One schedule of a comparison. Differences are to 1F1B in the same setting; negative is better.

    gpu_hours_difference: GPU-hours per million tokens, None unless unit and tokens are given.
    fits: does the fullest rank hold no more than the memory given? None where no memory is given.
    """

    timeline: Timeline
    metrics: Metrics
    makespan_difference: float
    gpu_hours_difference: float | None
    fits: bool | None

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
    """Rows by makespan, then by cost and the largest peak of activations, those that do not fit the memory last; and
    the schedules that do not apply."""

    ranks: int
    microbatches: int
    costs: Costs
    rows: tuple[Row, ...]
    refused: tuple[Refused, ...]


def compare(
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    *,
    chunks: int | None = None,
    only: Sequence[str | Schedule] = (),
    memory: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Simulate every published schedule at these sizes, or those in `only`.

    `only` holds names, names with options (`hanayo:waves=4`), or schedules of one's own. `chunks` is for those that
    take a number of chunks; `memory` is what a rank can hold, in bytes. Raises InputError for sizes or costs that no
    schedule can be run with, for an unknown name, and for a schedule of other sizes.
    """
    for what, value in (("ranks", ranks), ("microbatches", microbatches)):
        if value < 1:
            raise InputError(f"compare: {what} = {value}; a whole number of at least 1 is needed")
    costs = Costs() if costs is None else costs
    if memory is not None and not any(
        np.any(getattr(costs, key))
        for key in ("activation_bytes", "parameter_bytes", "gradient_bytes", "optimizer_bytes")
    ):
        raise InputError(
            "memory is given, but the costs say nothing in bytes; give activation_bytes, parameter_bytes .."
        )
    baseline = measure(simulate(find(BASELINE)(ranks, microbatches), costs))
    rows: list[Row] = []
    refused: list[Refused] = []
    for name, make in _entries(
        ranks, microbatches, costs, only or [record.name for record in records()], chunks
    ).items():
        if progress is not None:
            progress(name)
        try:
            timeline = simulate(make(), costs)
        except ConstraintError as error:
            refused.append(Refused(error.schedule, error.reason, error.remedy))
            continue
        rows.append(_row(timeline, baseline, memory))
    rows.sort(key=_place)
    return Comparison(ranks, microbatches, costs, tuple(rows), tuple(dict.fromkeys(refused)))


def _entries(
    ranks: int, microbatches: int, costs: Costs, only: Sequence[str | Schedule], chunks: int | None
) -> dict[str, Callable[[], Schedule]]:
    """What to compare: label -> how to make it. A name without options stands for all variants of its schedule."""
    found: dict[str, Callable[[], Schedule]] = {}
    for entry in only:
        if isinstance(entry, Schedule):
            if (entry.ranks, entry.microbatches) != (ranks, microbatches):
                raise InputError(
                    f"compare: {entry.name} has {entry.ranks} ranks and {entry.microbatches} micro-batches, the others "
                    f"{ranks} and {microbatches}; compare at its sizes"
                )
            found[entry.name] = partial(_same, entry)
            continue
        name, colon, words = entry.partition(":")
        record = find(name)
        chunked = {} if chunks is None or not takes_chunks(record) else {"chunks": chunks}
        for variant in [parse_options(words.split(","))] if colon else record.variants:
            label = " ".join([record.name, *(_word(key, value) for key, value in variant.items())])
            found[label] = partial(_build, record, label, ranks, microbatches, costs, chunked | variant)
    return found


def _same(schedule: Schedule) -> Schedule:
    return schedule


def _build(
    record: Record, label: str, ranks: int, microbatches: int, costs: Costs, options: dict[str, Any]
) -> Schedule:
    return replace(record(ranks, microbatches, costs=costs, **options), name=label)


def _word(key: str, value: object) -> str:
    return value if isinstance(value, str) else f"{key}={value}"


def parse_options(words: Sequence[str]) -> dict[str, Any]:
    """Options of a schedule from `NAME=VALUE` texts. Raises InputError naming the text."""
    options: dict[str, Any] = {}
    for text in words:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InputError(f"option {text!r}: expected NAME=VALUE, as slices=4")
        if name in options:
            raise InputError(f"option {text!r}: {name} is given twice")
        digits = value.removeprefix("-")
        options[name] = int(value) if digits.isascii() and digits.isdigit() and len(digits) < 12 else value
    return options


def _row(timeline: Timeline, baseline: Metrics, memory: float | None) -> Row:
    metrics = measure(timeline)
    hours, reference = metrics.gpu_hours_per_million_tokens, baseline.gpu_hours_per_million_tokens
    saved = None if hours is None or reference is None else _difference(hours, reference)
    fits = None if memory is None or metrics.memory_bytes is None else max(metrics.memory_bytes) <= memory
    return Row(timeline, metrics, _difference(metrics.makespan, baseline.makespan), saved, fits)


def _difference(value: float, reference: float) -> float:
    """value - reference, 0 where they differ by rounding alone."""
    return 0.0 if abs(value - reference) <= 1e-9 * abs(reference) else value - reference


def _place(row: Row) -> tuple[bool, float, float, float, str]:
    metrics = row.metrics
    return (
        row.fits is False,
        float(f"{metrics.makespan:.12g}"),
        float(f"{metrics.cost:.12g}"),
        max(metrics.peak_activations),
        row.label,
    )


def takes_chunks(record: Record) -> bool:
    """Does this schedule take a number of chunks a rank?"""
    return any(option.name == "chunks" for option in record.options)
