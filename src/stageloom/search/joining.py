"""Orders in which a B and its W may be one op, a BW: where that takes less time than the two, or holds less.

Three searches without the choice, and one with it: every such stage fused; every one split; the *relaxed* problem,
which every order is an order of and whose bound therefore holds for all; then annealing over orders in which each
backward is split or joined, from the best of these and from every published order with its BWs.
"""

from __future__ import annotations

import time as clock
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from stageloom.costs import Costs
from stageloom.op import Kind
from stageloom.placement import line
from stageloom.search.bounds import lower_bound, smallest_limits
from stageloom.search.local import GUIDE
from stageloom.search.order import Value
from stageloom.search.pair_moves import anneal_pairs
from stageloom.search.pairing import NONE, Items, Tables, evaluate, from_paired, tables_of
from stageloom.search.problem import Floats, Ints, Problem, pose
from stageloom.search.standing import built
from stageloom.search.steps import CLOSE, GRACE, PATIENCE, SEEDS, SPEED, Progress

if TYPE_CHECKING:
    from stageloom.search.optimize import Outcome

SHARES: Final = {"fused": 0.25, "relaxed": 0.3, "split": 0.15}
"""The parts of the effort that go into the searches without the choice; the rest is annealing."""
MOVE: Final = 0.15
"""Work of a move of the annealing, in longest paths."""
HEATS: Final = (0.0005, 0.001, 0.002)
FEW: Final = 200
"""Moves below which annealing is not worth its beginning."""


class Plain(Protocol):
    """`optimize`'s search of a problem in which no B and W are joined."""

    def __call__(
        self,
        problem: Problem,
        objective: str,
        seconds: float,
        seed: int,
        start: Sequence[Ints],
        progress: Callable[[Progress], None] | None,
    ) -> Outcome: ...


def whole_time(problem: Problem) -> Floats:
    """Time of a BW at every place, with its overhead."""
    costs, paths = problem.costs, len(problem.placement.paths)
    times = np.tile(costs.stage_times(problem.stages, problem.ranks)[Kind.BW], paths)
    return (times + costs.overhead) * costs.rank_factors(problem.ranks)[problem.rank]


def pays(problem: Problem) -> NDArray[np.bool_]:
    """The places at which a BW is shorter than its B and W one after the other, or holds less than the B does."""
    apart = problem.time[Kind.B] + problem.time[Kind.W]
    shorter = whole_time(problem) < apart * (1 - CLOSE)
    leaner = -problem.step[Kind.W] > problem.step[Kind.F]
    return ~problem.fused & (shorter | leaner) & (problem.count > 0)


def relaxed(problem: Problem) -> Problem:
    """The problem at times and memory that are no more than those of any order, split or joined; itself where joining
    pays nowhere.

    B' = min(B, BW), W' = min(W, BW - B'), overheads included, and W frees at most what F took. Put B' for every B, W'
    for every W, and B' with W' right behind it for every BW. No op ends later than it did: B' + W' is no more than BW,
    and the message of a B' leaves no later than that of its BW. No rank holds more: the B' of a BW frees a part sooner
    than the BW, its W' the rest no later. So what no order of this problem beats, no order of the other does.
    """
    where = pays(problem)
    if not where.any():
        return problem
    whole = whole_time(problem)
    time, step = problem.time.copy(), problem.step.copy()
    time[Kind.B] = np.where(where, np.minimum(time[Kind.B], whole), time[Kind.B])
    time[Kind.W] = np.where(where, np.minimum(time[Kind.W], whole - time[Kind.B]), time[Kind.W])
    step[Kind.W] = np.where(where, np.maximum(step[Kind.W], -step[Kind.F]), step[Kind.W])
    step[Kind.B] = -step[Kind.F] - step[Kind.W]
    return replace(problem, time=time, step=step)


def fused_where(problem: Problem, where: NDArray[np.bool_]) -> Problem:
    """The problem with every backward at these places a BW."""
    time, step = problem.time.copy(), problem.step.copy()
    time[Kind.B, where], time[Kind.W, where] = whole_time(problem)[where], 0.0
    step[Kind.B, where], step[Kind.W, where] = -step[Kind.F, where], 0
    return replace(problem, time=time, step=step, fused=problem.fused | where)


# ------------------------------------------------------------------ orders with a choice


def codes_of(problem: Problem, order: Ints, fused: Problem | None = None) -> tuple[Ints, Ints]:
    """(rank, class) of every row of an order of the problem, or of the problem with more stages fused; BW is kind 3."""
    source = problem if fused is None else fused
    places = problem.places
    code = np.where((order // places == Kind.B) & source.fused[order % places], order + 2 * places, order)
    return np.repeat(np.arange(problem.ranks, dtype=np.int32), np.diff(source.offsets)), code.astype(np.int32)


def items_of(problem: Problem, rank: Ints, code: Ints) -> Items:
    """An order as `pairing` has it."""
    forward = code < problem.places
    size = np.bincount(rank, minlength=problem.ranks).astype(np.int64)
    at = problem.offsets[rank] + np.arange(len(rank)) - np.concatenate(([0], np.cumsum(size)))[rank]
    into = np.full((2, problem.ops), NONE, dtype=np.int32)
    into[0, at], into[1, at] = np.where(forward, code, NONE), np.where(forward, NONE, code)
    return Items(into[0], into[1], size)


def neighbours_joined(problem: Problem, rank: Ints, code: Ints, where: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Every B that has a W of its place right behind it becomes a BW, at the places of `where`."""
    places = problem.places
    kind, place = code // places, code % places
    joins = np.zeros(len(code), dtype=np.bool_)
    joins[:-1] = (kind[:-1] == Kind.B) & (code[1:] == code[:-1] + places) & (rank[1:] == rank[:-1])
    joins &= where[place]
    keep = np.concatenate(([True], ~joins[:-1]))
    return rank[keep], np.where(joins, code + 2 * places, code)[keep].astype(np.int32)


def ends_split(problem: Problem, rank: Ints, code: Ints, many: int) -> tuple[Ints, Ints]:
    """The last `many` BWs of every place that another stage waits for become B's, their W's the end of the rank."""
    places = problem.places
    kind, place = code // places, code % places
    changed, after_rank, after = code.copy(), [rank], [code[:0]]
    for each in range(places):
        if each % problem.stages and not problem.fused[each]:
            rows = np.flatnonzero((kind == Kind.BW) & (place == each))[-many:]
            changed[rows] = places + each
            after_rank.append(rank[rows])
            after.append(np.full(len(rows), 2 * places + each, dtype=np.int32))
    ranks, codes = np.concatenate(after_rank), np.concatenate([changed, *after])
    by_rank = np.argsort(ranks, kind="stable")
    return ranks[by_rank].astype(np.int32), codes[by_rank].astype(np.int32)


@dataclass
class Choice:
    """The state of a search over orders with a choice. `starts`: orders to anneal from; `bound` holds for all."""

    tables: Tables
    objective: str
    bound: float
    progress: Callable[[Progress], None]
    items: Items | None = None
    value: Value | None = None
    source: str = ""
    step: str = ""
    effort: float = 0.0
    starts: list[Items] = field(default_factory=list[Items])

    @property
    def best(self) -> float:
        return np.inf if self.value is None else self.value.of(self.objective)

    @property
    def closed(self) -> bool:
        return self.best <= self.bound * (1 + CLOSE)

    def offer(self, items: Items | None, source: str) -> bool:
        """Keep the order where it runs and is better than the best. Whether it runs within the limits."""
        value = None if items is None else evaluate(self.tables, items)
        if items is None or value is None:
            return False
        if value.of(self.objective) < self.best * (1 - CLOSE):
            self.items, self.value, self.source = items, value, source
            self.progress(Progress(self.step, self.best, self.bound, self.effort))
        return True

    def told(self, real: bool) -> Callable[[Progress], None]:
        """The progress of a search of another problem; `real`: its orders are also this one's."""

        def tell(now: Progress) -> None:
            best = min(self.best, now.best) if real else self.best
            bound = self.bound if real else max(self.bound, now.bound)
            self.progress(Progress(f"{self.step}, {now.step}", best, bound, self.effort + now.seconds))

        return tell


def search_joined(
    problem: Problem,
    plain: Plain,
    *,
    objective: str,
    seconds: float,
    seed: int,
    start: Sequence[Ints],
    start_pairs: Sequence[Items],
    progress: Callable[[Progress], None] | None,
) -> Outcome:
    """The best order that this effort finds, of those that split and those that join each backward."""
    warm_up()
    began = clock.perf_counter()
    where = pays(problem)
    loose, fused = relaxed(problem), fused_where(problem, where)
    tables = replace(tables_of(problem), paired=np.full((2, problem.places), np.inf))  # pairs are another search
    run = Choice(tables, objective, lower_bound(loose, objective), progress or (lambda _: None))
    run.step = "published"
    for name, schedule in built(problem):
        run.offer(from_paired(problem, schedule), name)
    for items in start_pairs:
        run.offer(items, "start")
    if run.items is not None:
        run.starts.append(run.items)
    found: dict[str, Outcome] = {}
    for name, each in (("fused", fused), ("relaxed", loose), ("split", problem)):
        if run.closed or (smallest_limits(each) > each.limit).any():
            continue
        run.step = name
        starts = [order for order in start if len(order) == each.ops]
        out = plain(each, objective, SHARES[name] * seconds, seed, starts, run.told(each is not loose))
        run.effort += SHARES[name] * seconds
        found[name] = out
        if each is loose:
            run.bound = max(run.bound, out.bound)
        rank, code = codes_of(problem, out.order, each)
        _offer_near(run, rank, code, where, f"{out.source}, {'joined' if name == 'fused' else 'split'}")
    spent = {"published": clock.perf_counter() - began - sum(sum(out.spent.values()) for out in found.values())}
    for out in found.values():
        spent = {step: spent.get(step, 0.0) + out.spent.get(step, 0.0) for step in (spent | out.spent)}
    again = clock.perf_counter()
    late = _anneal(run, seconds, np.random.default_rng([seed, 2]), began)
    spent["joining"] = clock.perf_counter() - again
    return _outcome(run, problem, found, spent, late)


def _offer_near(run: Choice, rank: Ints, code: Ints, where: NDArray[np.bool_], source: str) -> None:
    """An order, the same with neighbours joined, and with its last BWs split."""
    problem = run.tables.problem
    plain = items_of(problem, rank, code)
    joined = neighbours_joined(problem, rank, code, where)
    for items in (plain, items_of(problem, *joined)):
        if run.offer(items, source):
            run.starts.append(items)
    for many in sorted({1, 2, 3, *(int(problem.ranks * part) for part in (0.5, 1, 1.5, 2)), problem.microbatches}):
        if 0 < many <= problem.microbatches:
            run.offer(items_of(problem, *ends_split(problem, *joined, many)), f"{source}, ends split")


def _anneal(run: Choice, seconds: float, random: np.random.Generator, began: float) -> bool:
    """Annealing from the best and from other starts, until the effort is spent. Whether the machine was too slow."""
    problem = run.tables.problem
    portion = min(max(0.06 * seconds, 0.02), 1.0)
    moves = int(min(portion * SPEED / (MOVE * problem.ops), 2_000_000))
    run.step = "joining"
    if moves < FEW:
        return False
    for heat, from_best in _rounds():
        if run.closed or run.effort >= seconds or run.items is None:
            return False
        if clock.perf_counter() - began > PATIENCE * seconds + GRACE:
            return True
        items = run.items if from_best or not run.starts else run.starts[int(random.integers(0, len(run.starts)))]
        run.offer(_annealed(run, items, moves, heat, int(random.integers(0, SEEDS))), "joining")
        run.effort += MOVE * moves * problem.ops / SPEED
    return False


def _rounds() -> Iterator[tuple[float, bool]]:
    while True:
        for heat in HEATS:
            yield heat, True
            yield heat, False


def _annealed(run: Choice, items: Items, moves: int, heat: float, seed: int) -> Items:
    tables, problem = run.tables, run.tables.problem
    best: list[Any] = [items.front.copy(), items.rear.copy(), items.size.copy()]
    anneal_pairs.pick(problem.ops * moves)(
        problem.stages, int(problem.count.max()), tables.time, tables.paired, tables.step, problem.lag, problem.fused,
        problem.limit, problem.offsets, items.front.copy(), items.rear.copy(), items.size.copy(), *best,
        run.objective == "cost", run.bound * (1 + CLOSE), moves, heat * run.best, 0.1 * heat * run.best, GUIDE, seed,
    )  # fmt: skip
    return Items(*best)


def _outcome(run: Choice, problem: Problem, found: dict[str, Outcome], spent: dict[str, float], late: bool) -> Outcome:
    from stageloom.search.optimize import Outcome

    split = found.get("split")
    order = np.empty(0, dtype=np.int32) if split is None else split.order
    cut = (late or any(out.cut_short for out in found.values())) and not run.closed
    assert run.value is not None
    assert run.items is not None
    return Outcome(
        problem, order, run.objective, run.value, min(run.bound, run.best), run.source, spent, cut, paired=run.items
    )


@cache
def warm_up() -> None:
    """Compile the kernels, or load what was compiled, so that this does not count as searching."""
    tiny = pose(line(2), 2, Costs(), limit=2)
    run = Choice(replace(tables_of(tiny), paired=np.full((2, 2), np.inf)), "makespan", 0.0, lambda _: None)
    code = np.array([0, 2, 4] * 2 + [1, 3, 5] * 2, dtype=np.int32)
    items = items_of(tiny, *codes_of(tiny, code))
    assert run.offer(items, "")
    assert anneal_pairs.compiled is not None
    _annealed(run, items, 1, 0.1, 0)
