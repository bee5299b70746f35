"""The steps of a search, in rising cost: each starts from the best so far and offers what it finds."""

from __future__ import annotations

import time as clock
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Self, TypeVar

import numpy as np

from stageloom.errors import MissingExtra, StageloomError
from stageloom.op import Kind
from stageloom.schedules import records
from stageloom.search import exact
from stageloom.search.asked import Deadlines
from stageloom.search.deadline import tabled
from stageloom.search.dispatch import Rule, scheduled
from stageloom.search.local import annealed
from stageloom.search.order import Value, evaluate, value_of
from stageloom.search.problem import Floats, Ints, Problem, from_schedule
from stageloom.search.rules import base_rule, changed, grid
from stageloom.search.serial import serial
from stageloom.search.zero_bubble import classes, orders

SPEED: Final = 15_000_000
"""Ops that the list scheduler, or the longest path, of a nominal core handles in a second."""
MOVE: Final = 0.4
"""Work of a move of the annealing, in schedules of the list scheduler."""
GRACE: Final = 20.0
PATIENCE: Final = 4.0
"""Wall-clock time, as a multiple of the nominal seconds (and GRACE more), after which a search is cut short."""
CLOSE: Final = 1e-9
BOUNDING: Final = (0.1, 0.1, 0.2)
"""Parts of the seconds that deadlines may take at each depth, each time."""
SEEDS: Final = 2_000_000_000
SMALL: Final = 110
"""Ops up to which CP-SAT is given the whole problem."""

Entry = TypeVar("Entry", bound=tuple[Any, ...])


@dataclass(frozen=True)
class Progress:
    """Where a search stands: what it is doing, the best value, the bound, nominal seconds spent."""

    step: str
    best: float
    bound: float
    seconds: float

    @property
    def gap(self) -> float:
        return gap(self.best, self.bound)


def gap(best: float, bound: float) -> float:
    """(found - bound) / bound, 0 where they are equal but for rounding."""
    if bound <= 0:
        return 0.0
    part = (best - bound) / bound
    return 0.0 if part <= CLOSE else part


@dataclass
class Search:
    """The state of a search. `effort`: nominal seconds of work done; `rules`: the best of the list scheduler;
    `guided`: the best of it by windows, with the priorities of their ops; `simple`: the bound before any deadline."""

    problem: Problem
    objective: str
    seconds: float
    random: np.random.Generator
    bound: float
    progress: Callable[[Progress], None]
    order: Ints | None = None
    value: Value | None = None
    source: str = ""
    rules: list[tuple[float, Rule]] = field(default_factory=list[tuple[float, Rule]])
    spent: dict[str, float] = field(default_factory=dict[str, float])
    effort: float = 0.0
    began: float = field(default_factory=clock.perf_counter)
    step: str = ""
    cut: bool = False
    known: Deadlines | None = None
    simple: float = 0.0
    guided: list[tuple[float, Rule, Floats]] = field(default_factory=list[tuple[float, Rule, Floats]])

    @property
    def best(self) -> float:
        return np.inf if self.value is None else self.value.of(self.objective)

    @property
    def closed(self) -> bool:
        return self.best <= self.bound * (1 + CLOSE)

    @property
    def tight(self) -> bool:
        """Do windows see more of this problem than the simple bounds do?"""
        return self.known is not None and self.known.low > self.simple * (1 + CLOSE)

    @property
    def late(self) -> bool:
        return clock.perf_counter() - self.began > PATIENCE * self.seconds + GRACE

    @property
    def over(self) -> bool:
        return self.closed or self.effort >= self.seconds or self.late

    def offer(self, order: Ints, value: Value, source: str) -> bool:
        """Keep the order where it is better than the best."""
        if value.of(self.objective) >= self.best * (1 - CLOSE):
            return False
        self.order, self.value, self.source = order.copy(), value, source
        self.tell()
        return True

    def tell(self) -> None:
        self.progress(Progress(self.step, self.best, self.bound, self.effort))

    def take(self, name: str, step: Callable[[Self], None]) -> None:
        """Take a step, and count its wall-clock time."""
        self.step = name
        began = clock.perf_counter()
        step(self)
        self.spent[name] = self.spent.get(name, 0.0) + clock.perf_counter() - began

    def pay(self, evaluations: float) -> None:
        """Count work: this many orders scheduled or timed."""
        self.effort += evaluations * self.problem.ops / SPEED


def published(run: Search) -> None:
    """Every published order of this placement that fits, and the zero-bubble greedy's eight."""
    problem = run.problem
    for record in records():
        chunked = any(option.name == "chunks" for option in record.options)
        if chunked and problem.placement.chunks == 1:
            continue
        options = {"chunks": problem.placement.chunks} if chunked else {}
        with suppress(StageloomError):
            schedule = record(problem.ranks, problem.microbatches, costs=problem.costs, **options)
            order = from_schedule(problem, schedule)
            value = None if order is None else evaluate(problem, order)
            if order is not None and value is not None:
                split = bool((schedule.kind == Kind.BW).any()) and not problem.fused.all()
                run.offer(order, value, f"{record.name}, split" if split else record.name)
        run.pay(4)
    if problem.stages == problem.ranks and len(problem.placement.paths) == 1 and not problem.fused.any():
        for _, kinds in orders(problem):
            order = classes(problem, kinds)
            value = evaluate(problem, order)
            if value is not None:
                run.offer(order, value, "a variant of zb-greedy")


def try_rules(run: Search) -> None:
    """The list scheduler over the grid; the best rules are kept for climbing."""
    for number, rule in enumerate(grid(run.problem)):
        _try(run, rule)
        if run.closed or (run.order is not None and number > 200 and run.effort > 0.3 * run.seconds) or run.late:
            break
    if not run.rules:
        run.rules.append((np.inf, base_rule(run.problem)))
    if run.order is None:
        order = serial(run.problem)
        value = evaluate(run.problem, order)
        if value is not None:
            run.offer(order, value, "one by one")


def keep_best(kept: list[Entry], most: int, *more: Entry) -> None:
    """Of what is kept, each with what it takes in front, and of more: the best `most`, best first."""
    kept.extend(more)
    kept.sort(key=lambda each: each[0])
    del kept[most:]


def _try(run: Search, rule: Rule, keep: int = 6) -> float:
    run.pay(1.6)
    out = scheduled(run.problem, rule)
    if out is None:
        return np.inf
    value = value_of(out[1])
    run.offer(out[0], value, run.step)
    found = value.of(run.objective)
    if len(run.rules) < keep or found < run.rules[-1][0] - 1e-9:
        keep_best(run.rules, keep, (found, rule))
    return found


def deadlines(run: Search, depth: int = 0) -> None:
    """Raise the bound by refuting deadlines; where the best is refuted but for a hair, it is optimal."""
    if run.objective != "makespan":
        return
    budget = BOUNDING[depth] * run.seconds
    if run.known is None:
        table = tabled(run.problem)
        if 20 * table.sweep > budget:
            return  # not one deadline could be judged
        run.known, run.simple = Deadlines(table, run.bound), run.bound
    if depth and not run.tight:
        return  # probing seldom catches up
    before = run.known.effort
    bound = run.known.below(run.best, depth, budget)
    run.effort += run.known.effort - before
    if bound > run.bound:
        run.bound = bound
        run.tell()


def climb(run: Search) -> None:
    """Hill climbing on the rules from the best and from another of the best."""
    share = 0.08 if run.tight else 0.12  # `guided` does better there
    for start in (0, int(run.random.integers(0, len(run.rules)))):
        value, rule = run.rules[start]
        budget = run.effort + max(share * run.seconds, 0.02)
        failures = 0
        while run.effort < budget and not run.over:
            other = changed(rule, run.problem, run.random)
            found = _try(run, other)
            failures += 1
            if found <= value + 1e-9:
                failures = 0 if found < value - 1e-9 else failures
                value, rule = found, other
            if failures > 1500:
                break


OF_AN_OP: Final = 0.15
"""Of an op's mean time, the temperature at which short steps are annealed."""


def anneal(run: Search) -> None:
    """Annealing on the order: from the best, and from what the best rules give, hot and cool."""
    assert run.order is not None
    portion = 0.1 * run.seconds
    heats = [(0.0005, False), (0.001, True), (0.0015, False)]
    short = OF_AN_OP * run.problem.ranks / run.problem.ops
    if short > 1.25 * heats[-1][0]:  # in a short step an op is a large part of the makespan
        heats.append((short, False))
    for hot, from_rules in heats:
        if run.over:
            return
        order = run.order
        if from_rules:
            out = scheduled(run.problem, run.rules[int(run.random.integers(0, len(run.rules)))][1])
            order = order if out is None else out[0]
        moves = int(max(2_000, min(2_000_000, portion * SPEED / (MOVE * run.problem.ops))))
        seed = int(run.random.integers(0, SEEDS))
        goal = run.bound * (1 + CLOSE)
        found, value = annealed(
            run.problem, order, objective=run.objective, goal=goal, moves=moves, seed=seed, hot=hot, cold=0.1 * hot
        )
        run.pay(MOVE * moves)
        run.offer(found, value, "annealing")


def solve(run: Search) -> None:
    """CP-SAT on the whole problem, where it is small."""
    if run.problem.ops > SMALL or run.order is None:
        return
    effort = min(20.0, 0.1 * run.seconds)
    with suppress(MissingExtra):
        solved = exact.solve_all(
            run.problem, run.order, run.objective, bound=run.bound, effort=effort, wall=PATIENCE * run.seconds,
            seed=int(run.random.integers(0, SEEDS)),
        )  # fmt: skip
        run.cut = solved.cut_short
        value = None if solved.order is None else evaluate(run.problem, solved.order)
        if solved.order is not None and value is not None:
            run.offer(solved.order, value, "exact")
        if solved.bound is not None and solved.bound > run.bound:
            run.bound = min(solved.bound, run.best)
        run.effort += 2 * effort


WINDOW: Final = 90
"""Ops that are free in a window, about."""


def windows(run: Search) -> None:
    """CP-SAT on windows of time, at random places and of several sizes."""
    assert run.order is not None
    assert run.value is not None
    if run.objective != "makespan":
        return
    try:
        exact.load()
    except MissingExtra:
        run.effort += 0.02 * run.seconds
        return
    order, value = run.order, run.value
    budget = run.effort + max(0.1 * run.seconds, 0.5)
    while run.effort < budget and not run.over:
        ops = WINDOW * float(run.random.choice((0.5, 1.0)))
        width = min(1.0, ops / run.problem.ops) * value.makespan
        begin = float(run.random.uniform(-0.3 * width, value.makespan - 0.5 * width))
        seed = int(run.random.integers(0, SEEDS))
        run.effort += 0.5
        found = exact.solve_window(run.problem, order, begin=begin, end=begin + width, effort=0.05, seed=seed)
        after = None if found is None else evaluate(run.problem, found)
        if found is None or after is None or after.makespan > value.makespan * (1 + CLOSE):
            continue
        order, value = found, after
        run.offer(order, value, "CP-SAT")
        run.tell()
