"""The curve of what a step takes against the memory it may hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stageloom.errors import InputError
from stageloom.search.bounds import smallest_limits
from stageloom.search.joining import relaxed
from stageloom.search.optimize import Outcome, search
from stageloom.search.pairs import search_pairs
from stageloom.search.problem import Problem
from stageloom.search.settled import checked, simulated


@dataclass(frozen=True)
class Point:
    """The best at one limit, a multiple of 1F1B's P micro-batches."""

    memory: float
    value: float
    bound: float
    outcome: Outcome


def curve(
    problem_at: Callable[[float], Problem],
    multiples: Sequence[float],
    *,
    objective: str,
    seconds: float,
    seed: int,
    pairs: bool = False,
    progress: Callable[[float], None] | None = None,
) -> list[Point]:
    """The best order at each limit that is feasible, `seconds` for each. An order that fits less memory fits more, so
    the curve never rises: each search starts from the one before. `pairs`: forwards may be overlapped with backwards.
    """
    points: list[Point] = []
    for memory in sorted(multiples):
        problem = problem_at(memory)
        if (smallest_limits(relaxed(problem)) > problem.limit).any():
            continue
        if progress is not None:
            progress(memory)
        before = [point.outcome for point in points[-1:]]
        orders = [each.order for each in before]
        paired = [each.paired for each in before if each.paired is not None]
        found = (search_pairs if pairs else search)(
            problem, objective=objective, seconds=seconds, seed=seed, start=orders, start_pairs=paired
        )
        if problem.costs.occupancy or problem.costs.blocking:
            found = simulated(found, checked(found)[1])
            if points and points[-1].value < found.best:
                found = replace(points[-1].outcome, problem=problem, bound=found.bound)
        points.append(Point(memory, found.best, found.bound, found))
    if not points:
        raise InputError(
            f"pareto: none of the limits {min(multiples):g} to {max(multiples):g} lets one micro-batch pass"
        )
    return points
