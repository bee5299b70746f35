"""What `optimize` prints."""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.text import Text

from stageloom.cli.columns import Column, print_columns
from stageloom.cli.words import count, many, size, time
from stageloom.metrics import Metrics
from stageloom.search.optimize import Outcome
from stageloom.search.problem import UNLIMITED, Problem
from stageloom.search.standing import Standing, best_that_fits, on_same_placement, peaks_of

SHOWN_RANKS: Final = 16
"""Ranks up to which each one's memory is shown, where their limits differ."""
MEANING: Final = {
    "makespan": "first start to last end of the step",
    "cost": "the longest rank's own first start to own last end: a step's time only where consecutive steps overlap, "
    "so that the optimiser step is no barrier",
}


def overlapped(outcome: Outcome) -> int:
    """How many forwards are overlapped with a backward."""
    items = outcome.paired
    return 0 if items is None else int(((items.front >= 0) & (items.rear >= 0)).sum())


def _held(problem: Problem, value: float) -> str:
    return size(value) if problem.unit_name == "bytes" else count(value)


def _memory(problem: Problem, metrics: Metrics) -> str:
    """What the ranks hold, of what they may."""
    peaks, limits = peaks_of(problem, metrics), problem.limit / problem.unit
    unit = "" if problem.unit_name == "bytes" else f" {problem.unit_name}"
    if (problem.limit >= UNLIMITED).all():
        return f"fullest rank {_held(problem, float(peaks.max()))}{unit}; no limit"
    if limits.min() == limits.max():
        return f"fullest rank {_held(problem, float(peaks.max()))} of {_held(problem, float(limits[0]))}{unit}"
    words = [
        _held(problem, float(peak)) + (f" of {_held(problem, float(each))}" if parts < UNLIMITED else "")
        for peak, each, parts in zip(peaks, limits, problem.limit, strict=True)
    ]
    if len(words) <= SHOWN_RANKS:
        return f"{', '.join(words)}{unit}, by rank"
    nearest = int(np.argmax(peaks / limits))
    return f"nearest to its limit is rank {nearest}: {words[nearest]}{unit}"


def print_outcome(
    outcome: Outcome,
    metrics: Metrics,
    rows: list[Standing],
    counts: tuple[int, ...] | None,
    *,
    compare: bool,
    out: Console,
) -> None:
    problem, objective = outcome.problem, outcome.objective
    unit = f" {problem.costs.unit}" if problem.costs.unit else ""
    sizes = (
        f"{many(problem.ranks, 'rank')}, {many(problem.microbatches, 'micro-batch')}, {many(problem.stages, 'stage')}"
    )
    out.print(Text("optimized", style="bold").append(f": {sizes}", style="not bold"))
    value = metrics.cost if objective == "cost" else metrics.makespan
    proof = "proven optimal" if outcome.gap == 0 else f"at most {100 * outcome.gap:.2f} % above the optimum"
    out.print(f"{objective:<10} {time(value)}{unit}, {proof} (bound {time(outcome.bound)}); found by {outcome.source}")
    out.print(f"           {objective}: {MEANING[objective]}", style="dim")
    if problem.costs.occupancy or problem.costs.blocking:
        out.print("           simulated with busy links and blocking senders, which the bound leaves out", style="dim")
    out.print(f"memory     {_memory(problem, metrics)}")
    if overlapped(outcome):
        out.print(f"pairs      {overlapped(outcome)} of {int(problem.count.sum())} forwards run beside a full backward")
    if counts is not None:
        out.print(f"layers     {' '.join(map(str, counts))}, by stage")
    _print_published(problem, objective, value, unit, rows, out)
    spent = ", ".join(f"{step} {seconds:.1f} s" for step, seconds in outcome.spent.items() if seconds >= 0.05)
    out.print(f"time       {spent or 'less than 0.1 s'}", style="dim")
    if outcome.gap and find_spec("ortools") is None:
        out.print("Without the exact solver (pip install 'stageloom[search]').", style="dim")
    if outcome.cut_short:
        out.print("The machine was too slow for this effort: a faster one may find another order.", style="yellow")
    if compare:
        out.print()
        _print_rows(problem, objective, value, rows, out)


def _print_published(
    problem: Problem, objective: str, value: float, unit: str, rows: list[Standing], out: Console
) -> None:
    """The best published schedules, and how much longer they take than what was found."""
    copies = len(problem.placement.paths)
    for words, row in (("same placement", on_same_placement(rows)), ("any placement", best_that_fits(rows))):
        if row is None:
            continue
        more = _more(row, objective, value)
        than = "the same" if more == 0 else f"{abs(more):.2f} % {'longer' if more > 0 else 'shorter'} than this"
        twice = ", with two copies of the parameters" if row.copies > copies else ""
        sliced = f", with micro-batches cut in {row.slices} slices" if row.slices > 1 else ""
        shown = f"{row.name}, {time(row.of(objective))}{unit}: {than}{twice}{sliced}"
        out.print(f"published  best that fits, {words}: {shown}")
    if problem.fused.any():
        out.print("           published with B and W joined where they are here", style="dim")


def _more(row: Standing, objective: str, value: float) -> float:
    """How much longer a published schedule takes, in per cent of what was found; 0 where they are equal."""
    more = 100 * (row.of(objective) / value - 1) if value else 0.0
    return more if abs(more) >= 0.005 else 0.0


def _print_rows(problem: Problem, objective: str, value: float, rows: list[Standing], out: Console) -> None:
    def to_ours(row: Standing) -> str:
        return f"{_more(row, objective, value):+.2f} %" if value else "-"

    columns = [
        Column("published", [Text(row.name + ("" if row.fits else " !")) for row in rows], left=True),
        Column("makespan", [time(row.makespan) for row in rows]),
        Column("cost", [time(row.cost) for row in rows]),
        Column(f"{objective}\nto ours", [to_ours(row) for row in rows]),
        Column("fullest\nrank", [_held(problem, row.peak) for row in rows]),
    ]
    print_columns(columns, out)
    if not all(row.fits for row in rows):
        out.print("! holds more than the limit.", style="dim")
    for row in rows:
        if row.slices > 1:
            out.print(f"{row.name} cuts micro-batches in {row.slices} slices, which take their shares.", style="dim")


def outcome_json(
    outcome: Outcome,
    metrics: Metrics,
    shown: list[Standing] | None,
    rows: list[Standing],
    counts: tuple[int, ...] | None,
) -> dict[str, Any]:
    best = next((row for row in rows if row.fits), None)
    data: dict[str, Any] = {
        "objective": outcome.objective,
        "value": metrics.cost if outcome.objective == "cost" else metrics.makespan,
        "bound": outcome.bound,
        "gap": outcome.gap,
        "optimal": outcome.gap == 0,
        "source": outcome.source,
        "cut_short": outcome.cut_short,
        "memory_unit": outcome.problem.unit_name,
        "memory_limit": [
            None if limit >= UNLIMITED else round(float(limit / outcome.problem.unit), 9)
            for limit in outcome.problem.limit
        ],
        "best_published": None if best is None else asdict(best),
        "pairs": overlapped(outcome),
        "seconds": outcome.spent,
        "metrics": asdict(metrics),
    }
    if counts is not None:
        data["layers"] = list(counts)
    if shown is not None:
        data["published"] = [asdict(row) for row in shown]
    return data
