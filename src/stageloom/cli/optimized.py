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
from stageloom.errors import ScheduleError
from stageloom.metrics import Metrics, measure
from stageloom.schedule import Schedule
from stageloom.search.optimize import Outcome
from stageloom.search.problem import Problem
from stageloom.search.standing import Standing
from stageloom.simulate import simulate
from stageloom.validate import problems

MEANING: Final = {
    "makespan": "first start to last end of the step",
    "cost": "the longest rank's own first start to own last end: a step's time only where consecutive steps overlap, "
    "so that the optimiser step is no barrier",
}


def checked(outcome: Outcome, name: str = "optimized") -> tuple[Schedule, Metrics]:
    """The found order as a schedule, validated, and its metrics by the simulator. Raises ScheduleError where they do
    not agree with what the search says, which would be a fault of the search."""
    schedule = outcome.schedule(name)
    found = problems(schedule)
    if found:
        raise ScheduleError(f"{name}: the search made an order that cannot run: {found[0]}", [str(p) for p in found])
    return schedule, measure(simulate(schedule, outcome.problem.costs))


def overlapped(outcome: Outcome) -> int:
    """How many forwards are overlapped with a backward."""
    items = outcome.paired
    return 0 if items is None else int(((items.front >= 0) & (items.rear >= 0)).sum())


def _peak(problem: Problem, metrics: Metrics) -> float:
    in_bytes = problem.unit_name == "bytes"
    return max(metrics.peak_activation_bytes or [0.0] if in_bytes else metrics.peak_activations)


def _held(problem: Problem, value: float) -> str:
    return size(value) if problem.unit_name == "bytes" else count(value)


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
    limit = problem.limit / problem.unit
    allowed = _held(problem, float(limit.min())) if limit.min() == limit.max() else "by rank"
    out.print(f"memory     fullest rank {_held(problem, _peak(problem, metrics))} of {allowed} {problem.unit_name}")
    if outcome.paired is not None:
        out.print(f"pairs      {overlapped(outcome)} of {int(problem.count.sum())} forwards run beside a full backward")
    if counts is not None:
        out.print(f"layers     {' '.join(map(str, counts))}, by stage")
    for words, row in (
        ("same placement", next((row for row in rows if row.fits and row.same_placement), None)),
        ("any placement", next((row for row in rows if row.fits), None)),
    ):
        if row is not None:
            win = 1 - value / row.of(objective) if row.of(objective) else 0.0
            out.print(f"published  best that fits, {words}: {row.name}, {time(row.of(objective))}{unit}; this is "
                      f"{100 * abs(win):.2f} % {'shorter' if win >= 0 else 'longer'}")  # fmt: skip
    spent = ", ".join(f"{step} {seconds:.1f} s" for step, seconds in outcome.spent.items() if seconds >= 0.05)
    out.print(f"time       {spent or 'less than 0.1 s'}", style="dim")
    if outcome.gap and find_spec("ortools") is None:
        out.print("Without the exact solver (pip install 'stageloom[search]').", style="dim")
    if outcome.cut_short:
        out.print("The machine was too slow for this effort: a faster one may find another order.", style="yellow")
    if compare:
        out.print()
        _print_rows(problem, objective, value, rows, out)


def _print_rows(problem: Problem, objective: str, value: float, rows: list[Standing], out: Console) -> None:
    def to_ours(row: Standing) -> str:
        return f"{100 * (row.of(objective) / value - 1):+.1f} %" if value else "-"

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
        "memory_limit": np.round(outcome.problem.limit / outcome.problem.unit, 9).tolist(),
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
