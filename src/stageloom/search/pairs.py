"""The optimiser with overlapped pairs: after the search without, orders whose forwards run beside full backwards.

It starts from every published schedule with pairs that fits, from the best order without pairs, and from a list
scheduler that pairs what is ready; then annealing. As in `optimize`, effort is counted in work done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Final

import numpy as np

from stageloom.costs import Costs
from stageloom.errors import StageloomError
from stageloom.placement import line
from stageloom.schedule import Schedule
from stageloom.schedules import records
from stageloom.search.local import GUIDE
from stageloom.search.optimize import Outcome, search
from stageloom.search.order import Value
from stageloom.search.pair_bounds import paired_bound
from stageloom.search.pair_dispatch import PairRule, changed, grid, scheduled
from stageloom.search.pair_moves import anneal_pairs
from stageloom.search.pairing import Items, Tables, evaluate, from_order, from_paired, tables_of
from stageloom.search.problem import Ints, Problem, from_schedule, pose
from stageloom.search.steps import CLOSE, SEEDS, SPEED, Progress, Search, keep_best

ALONE: Final = 0.25
"""The part of the effort that goes into the search without pairs."""
MOVE: Final = 0.07
"""Work of a move of the annealing (most are seen to break the rank's own order), in longest paths."""
DISPATCH: Final = 3.5
"""The same of a run of the list scheduler."""
LEAST: Final = 1e-4
"""Seconds that a run of the list scheduler takes at least, however small the problem."""
STARTS: Final = 6
"""Orders, and rules, that are kept to go on from."""


@dataclass
class PairSearch(Search):
    """The state of a search with pairs. `starts`: orders to anneal from, `found`: rules to climb from, with what they
    take."""

    tables: Tables | None = None
    items: Items | None = None
    starts: list[tuple[float, Items]] = field(default_factory=list[tuple[float, Items]])
    found: list[tuple[float, PairRule]] = field(default_factory=list[tuple[float, PairRule]])

    def try_items(self, items: Items | None, source: str) -> float:
        """Keep an order where it is better than the best; what it takes, inf where it cannot run."""
        assert self.tables is not None
        value = None if items is None else evaluate(self.tables, items)
        if items is None or value is None:
            return np.inf
        if value.of(self.objective) < self.best * (1 - CLOSE):
            self.items, self.value, self.source = items, value, source
            self.tell()
        return value.of(self.objective)

    def keep_start(self, value: float, items: Items) -> None:
        keep_best(self.starts, STARTS, (value, items))


def search_pairs(
    problem: Problem,
    *,
    objective: str = "makespan",
    seconds: float = 30.0,
    seed: int = 0,
    start: Sequence[Ints] = (),
    start_pairs: Sequence[Items] = (),
    progress: Callable[[Progress], None] | None = None,
) -> Outcome:
    """The best order that this effort finds, with or without pairs. Raises as `search` does."""
    published = list(_published(problem))
    apart = [from_schedule(problem, replace(each, pair=np.zeros_like(each.pair))) for each in published]
    plain = search(
        problem, objective=objective, seconds=ALONE * seconds, seed=seed,
        start=[*start, *(order for order in apart if order is not None)], progress=progress,
    )  # fmt: skip
    warm_up()
    tables = tables_of(problem)
    random = np.random.default_rng([seed, 1])
    run = PairSearch(
        problem, objective, seconds, random, paired_bound(tables, objective), progress or (lambda _: None),
        value=plain.value, source=plain.source, effort=ALONE * seconds, tables=tables, items=plain.paired,
    )  # fmt: skip
    more = start_pairs if plain.paired is None else [*start_pairs, plain.paired]
    for name, step in _steps(plain.order, published, more):
        if run.over:
            break
        run.take(name, step)
    return replace(
        plain, value=run.value or plain.value, bound=min(run.bound, run.best), source=run.source, paired=run.items,
        spent=plain.spent | run.spent, cut_short=(plain.cut_short or run.late) and not run.closed,
    )  # fmt: skip


def _steps(
    order: Ints, published: list[Schedule], more: Sequence[Items]
) -> Iterator[tuple[str, Callable[[PairSearch], None]]]:
    yield "published pairs", lambda run: _from_others(run, order, published, more)
    yield "pair rules", _try_rules
    yield "pair climbing", _climb
    while True:
        yield "pair annealing", _anneal
        yield "pair climbing", _climb


def _published(problem: Problem) -> Iterator[Schedule]:
    """Every published schedule with pairs at these sizes, on this placement."""
    for record in records():
        with suppress(StageloomError):
            schedule = record(problem.ranks, problem.microbatches, costs=problem.costs)
            if schedule.pair.any() and schedule.placement == problem.placement:
                yield schedule


def _from_others(run: PairSearch, order: Ints, published: list[Schedule], more: Sequence[Items]) -> None:
    for schedule in published:
        items = from_paired(run.problem, schedule)
        value = run.try_items(items, schedule.name)
        if items is not None and np.isfinite(value):
            run.keep_start(value, items)
    for items in more:
        value = run.try_items(items, "start")
        if np.isfinite(value):
            run.keep_start(value, items)
    for pairs in (True, False) if len(order) else ():
        items = from_order(run.problem, order, pairs)
        value = run.try_items(items, "neighbours paired") if pairs else run.best
        if np.isfinite(value):
            run.keep_start(value, items)
    run.pay(20)


def _try(run: PairSearch, rule: PairRule) -> float:
    assert run.tables is not None
    items = scheduled(run.tables, rule)
    value = run.try_items(items, run.step)
    run.effort += max(DISPATCH * run.problem.ops / SPEED, LEAST)
    if items is not None and value < min((each[0] for each in run.found), default=np.inf) - CLOSE * value:
        run.keep_start(value, items)
    return value


def _try_rules(run: PairSearch) -> None:
    assert run.tables is not None
    for rule in grid(run.tables):
        run.found.append((_try(run, rule), rule))
        if run.over:
            break
    keep_best(run.found, STARTS)


def _climb(run: PairSearch) -> None:
    """Hill climbing on a rule; what it comes to takes the place of the rule that it started from."""
    if not run.found:
        return
    at = int(run.random.integers(0, len(run.found)))
    value, rule = run.found[at]
    budget = run.effort + 0.06 * run.seconds
    while run.effort < budget and not run.over:
        other = changed(rule, run.random)
        found = _try(run, other)
        if found <= value * (1 + CLOSE):
            value, rule = found, other
    run.found[at] = value, rule
    run.found.sort(key=lambda each: each[0])


def _anneal(run: PairSearch) -> None:
    """Annealing from the best, and from other starts; what one comes to takes the place of the start."""
    assert run.tables is not None
    for hot, from_best in ((0.0003, True), (0.001, False), (0.0003, False), (0.002, True)):
        if run.over or not run.starts:
            return
        at = int(run.random.integers(0, len(run.starts)))
        items = run.items if from_best and run.items is not None else run.starts[at][1]
        moves = int(np.clip(0.06 * run.seconds * SPEED / (MOVE * run.problem.ops), 2_000, 2_000_000))
        seed = int(run.random.integers(0, SEEDS))
        goal = run.bound * (1 + CLOSE)
        out = annealed(run.tables, items, run.objective, goal=goal, moves=moves, seed=seed, hot=hot, cold=0.1 * hot)
        run.pay(MOVE * moves)
        if out is not None:
            run.try_items(out[0], run.step)
            run.starts[at] = out[1].of(run.objective), out[0]


def annealed(
    tables: Tables, items: Items, objective: str, *, goal: float, moves: int, seed: int, hot: float, cold: float
) -> tuple[Items, Value] | None:
    """The best order found from this one, and what it takes; None where this one cannot run. `hot` and `cold` are
    parts of its value."""
    problem = tables.problem
    before = evaluate(tables, items)
    if before is None:
        return None
    scale = before.of(objective)
    best = Items(items.front.copy(), items.rear.copy(), items.size.copy())
    anneal_pairs.pick(problem.ops * moves)(
        problem.stages, int(problem.count.max()), tables.time, tables.paired, tables.step, problem.lag, problem.fused,
        problem.limit, problem.offsets, items.front.copy(), items.rear.copy(), items.size.copy(), best.front, best.rear,
        best.size, objective == "cost", goal, moves, hot * scale, cold * scale, GUIDE, seed,
    )  # fmt: skip
    after = evaluate(tables, best)
    assert after is not None
    return best, after


@cache
def warm_up() -> None:
    """Compile the kernels, or load what was compiled, so that this does not count as searching."""
    tables = tables_of(pose(line(2), 2, Costs(), limit=2))
    items = next(found for rule in grid(tables) if (found := scheduled(tables, rule)) is not None)
    annealed(tables, items, "makespan", goal=0.0, moves=1, seed=0, hot=0.1, cold=0.1)
