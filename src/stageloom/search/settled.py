"""The last word is the simulator's: what an order takes with all that the search leaves out.

The search knows no links that are occupied and no senders that stand still. Its bound holds with them too, since they
only ever make an op later; its order may then be worse than a published one, which is kept in its place.
"""

from __future__ import annotations

from dataclasses import replace

from stageloom.errors import ScheduleError
from stageloom.metrics import Metrics, measure
from stageloom.schedule import Schedule
from stageloom.search.optimize import Outcome
from stageloom.search.order import Value
from stageloom.search.standing import Standing, built
from stageloom.search.steps import CLOSE
from stageloom.simulate import simulate
from stageloom.validate import problems


def checked(outcome: Outcome, name: str = "optimized") -> tuple[Schedule, Metrics]:
    """The found order as a schedule, validated, and its metrics by the simulator. Raises ScheduleError where it cannot
    run, which would be a fault of the search."""
    schedule = outcome.schedule(name)
    found = problems(schedule)
    if found:
        raise ScheduleError(f"{name}: the search made an order that cannot run: {found[0]}", [str(p) for p in found])
    return schedule, measure(simulate(schedule, outcome.problem.costs))


def simulated(outcome: Outcome, metrics: Metrics) -> Outcome:
    """The outcome with the simulator's times for the search's, so that gap and value are of one order."""
    return replace(outcome, value=Value(metrics.makespan, metrics.cost))


def settled(outcome: Outcome, rows: list[Standing], *, pairs: bool = False) -> tuple[Outcome, Schedule, Metrics]:
    """The better of the found order and the best published one of the same placement that fits (`rows`, best first, as
    `standings` gives them), by the simulator. `pairs`: it may be one with overlapped pairs."""
    schedule, metrics = checked(outcome)
    outcome = simulated(outcome, metrics)
    problem = outcome.problem
    names = [
        row.name for row in rows
        if row.fits and row.same_placement and row.of(outcome.objective) < outcome.best * (1 - CLOSE)
    ]  # fmt: skip
    better = {name: each for name, each in built(problem) if name in names} if names else {}
    for name in names:
        if pairs or not better[name].pair.any():
            schedule = replace(better[name], name=schedule.name)
            metrics = measure(simulate(schedule, problem.costs))
            return replace(simulated(outcome, metrics), source=name), schedule, metrics
    return outcome, schedule, metrics
