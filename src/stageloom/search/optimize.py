"""The optimiser: from what is published to better orders, each step from the best so far, until a bound is met.

Steps, in rising cost: published orders that fit; the list scheduler over a grid of rules; hill climbing on the rules;
annealing on the order; CP-SAT, all ops of a small problem or windows of a large one. The effort of each is counted in
work done, not in time, so that the same seed and `seconds` give the same order on any machine; `seconds` are those of a
nominal core. Only a machine several times slower is cut short, which the result then says.
"""

from __future__ import annotations

import time as clock
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Final

import numpy as np

from stageloom.costs import Costs
from stageloom.errors import InputError
from stageloom.placement import line
from stageloom.schedule import Schedule
from stageloom.search import local
from stageloom.search.asked import DEPTHS
from stageloom.search.bounds import lower_bound
from stageloom.search.deadline import refuted, tabled
from stageloom.search.dispatch import Rule, scheduled
from stageloom.search.guided import first, later
from stageloom.search.joining import pays, search_joined
from stageloom.search.limits import check_limits
from stageloom.search.order import Value, evaluate, starts
from stageloom.search.pairing import Items, to_paired
from stageloom.search.problem import Ints, Problem, pose, pose_again, to_schedule
from stageloom.search.rules import base_rule
from stageloom.search.steps import (
    CLOSE,
    Progress,
    Search,
    anneal,
    climb,
    deadlines,
    gap,
    published,
    solve,
    try_rules,
    windows,
)
from stageloom.search.unroll import unrolled
from stageloom.search.zero_bubble import orders

OBJECTIVES: Final = ("makespan", "cost")
LARGE: Final = 30_000
"""Ops above which a step of fewer micro-batches is searched, and its steady state repeated."""


@dataclass(frozen=True)
class Outcome:
    """The best order found. `source`: the step that found it; `spent`: wall-clock seconds by step; `cut_short`: the
    machine was too slow for the effort asked for, so that a faster one would give another order; `rules`: the
    best of the list scheduler; `paired`: the order with overlapped pairs, where one was searched for and is the better
    one (`order` is then the best without)."""

    problem: Problem
    order: Ints
    objective: str
    value: Value
    bound: float
    source: str
    spent: dict[str, float]
    cut_short: bool
    rules: tuple[Rule, ...] = ()
    paired: Items | None = None

    def schedule(self, name: str) -> Schedule:
        """The order as a schedule."""
        if self.paired is not None:
            return to_paired(self.problem, self.paired, name)
        return to_schedule(self.problem, self.order, name)

    @property
    def best(self) -> float:
        return self.value.of(self.objective)

    @property
    def gap(self) -> float:
        return gap(self.best, self.bound)


def search(
    problem: Problem,
    *,
    objective: str = "makespan",
    seconds: float = 30.0,
    seed: int = 0,
    start: Sequence[Ints] = (),
    start_pairs: Sequence[Items] = (),
    progress: Callable[[Progress], None] | None = None,
) -> Outcome:
    """The best order that this effort finds, from `start` (and `start_pairs`, `Outcome.paired`) too where given.

    Raises InputError for an infeasible limit or a wrong argument.
    """
    if objective not in OBJECTIVES:
        raise InputError(f"objective {objective!r}; expected makespan or cost")
    if not 0 < seconds <= 1e6:
        raise InputError(f"seconds = {seconds:g}; a number above 0, up to 1,000,000, is needed")
    if seed < 0:
        raise InputError(f"seed = {seed}; a whole number of at least 0 is needed")
    check_limits(problem)
    warm_up()
    if pays(problem).any():
        return search_joined(
            problem, _apart, objective=objective, seconds=seconds, seed=seed, start=start, start_pairs=start_pairs,
            progress=progress,
        )  # fmt: skip
    return _apart(problem, objective, seconds, seed, start, progress)


def _apart(
    problem: Problem,
    objective: str,
    seconds: float,
    seed: int,
    start: Sequence[Ints],
    progress: Callable[[Progress], None] | None,
) -> Outcome:
    """The search of a problem in which no B and W are joined but those that are fused."""
    short = _short_step(problem)
    if short is not None:
        outcome = _by_unrolling(problem, short, objective, seconds, seed, progress)
        if outcome is not None:
            return outcome
    run = Search(
        problem, objective, seconds, np.random.default_rng(seed), lower_bound(problem, objective),
        progress or (lambda _: None),
    )  # fmt: skip
    for order in start:
        value = evaluate(problem, order) if len(order) == problem.ops else None
        if value is not None:
            run.offer(order, value, "start")
    for name, step in _steps():
        if run.closed or (run.order is not None and run.over):
            break
        run.take(name, step)
    assert run.order is not None  # one micro-batch after another fits every limit that is feasible
    assert run.value is not None
    return Outcome(
        problem, run.order, objective, run.value, min(run.bound, run.best), run.source, run.spent,
        cut_short=(run.late or run.cut) and not run.closed, rules=tuple(rule for _, rule in run.rules),
    )  # fmt: skip


@cache
def warm_up() -> None:
    """Compile the kernels, or load what was compiled, so that this does not count as searching."""
    tiny = pose(line(2), 2, Costs(), limit=2)
    assert local.anneal.compiled is not None  # from here on every kernel is used in its compiled form
    out = scheduled(tiny, base_rule(tiny))
    assert out is not None
    starts(tiny, out[0])
    orders(tiny)
    refuted(tabled(tiny), 1.0)
    local.annealed(tiny, out[0], objective="makespan", goal=0.0, moves=1, seed=0, hot=0.1, cold=0.1)


def _steps() -> Iterator[tuple[str, Callable[[Search], None]]]:
    yield "published", published
    yield "rules", try_rules
    yield "deadlines", deadlines
    yield "windows", first
    yield "climbing", climb
    yield "annealing", anneal
    yield "exact", solve
    while True:
        for depth in range(DEPTHS):
            yield "deadlines", partial(deadlines, depth=depth)
        yield "windows", first
        yield "CP-SAT", windows
        yield "annealing", anneal
        yield "climbing", climb
        yield "windows", later


def _short_step(problem: Problem) -> Problem | None:
    """A step of fewer micro-batches whose steady state can be repeated; None where all can be searched."""
    few = max(4 * problem.ranks, 24)
    fit = int((problem.limit[problem.rank] // np.maximum(problem.step[0], 1)).min())
    if problem.stages == problem.ranks and 0 < fit < problem.ranks:
        few += (problem.microbatches - few) % fit  # little memory makes groups of as many as fit
    if len(problem.placement.paths) > 1 or problem.microbatches < 2 * few or problem.ops <= LARGE:
        return None
    return pose_again(problem, few)


def _by_unrolling(
    problem: Problem,
    short: Problem,
    objective: str,
    seconds: float,
    seed: int,
    progress: Callable[[Progress], None] | None,
) -> Outcome | None:
    found = _apart(short, objective, seconds, seed, (), progress)
    began = clock.perf_counter()
    tried = [(found.source, found.order)]
    tried += [("rules", out[0]) for rule in found.rules if (out := scheduled(short, rule)) is not None]
    best: tuple[str, Ints, Value] | None = None
    for source, order in tried:
        larger = unrolled(short, order, problem, objective)
        value = None if larger is None else evaluate(problem, larger)
        if larger is None or value is None:
            continue
        if best is None or value.of(objective) < best[2].of(objective) * (1 - CLOSE):
            best = f"{source}, unrolled", larger, value
    if best is None:
        return None
    bound = lower_bound(problem, objective)
    spent = found.spent | {"unrolling": clock.perf_counter() - began}
    return Outcome(
        problem, best[1], objective, best[2], min(bound, best[2].of(objective)), best[0], spent, found.cut_short
    )
