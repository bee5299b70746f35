"""Bounds by deadlines: never above an optimum, never against an order that exists, and tight where memory is little."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import stageloom as sl
from stageloom.placement import Placement
from stageloom.search import exact
from stageloom.search.asked import DEPTHS, Deadlines
from stageloom.search.bounds import lower_bound, smallest_limits
from stageloom.search.deadline import Table, refuted, shrink, tabled
from stageloom.search.dispatch import scheduled
from stageloom.search.local import annealed
from stageloom.search.narrow import narrow
from stageloom.search.optimize import warm_up
from stageloom.search.order import evaluate, starts
from stageloom.search.problem import Ints, Problem, pose
from stageloom.search.rules import grid
from stageloom.search.sides import take_sides

PAPER = sl.Costs(F=18.522, B=18.086, W=9.337, latency=0.601, w_share=32 * 2304 / (34 * 2304 + 5 * 24 * 1024))


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    warm_up()


def drawn(seed: int, most_ops: int) -> tuple[Problem, Ints]:
    """A random problem (placement, times, latency, memory a rank, fused stages) of at most this many ops, for which
    the list scheduler finds an order; and the best of its orders."""
    random = np.random.default_rng(seed)
    while True:
        ranks, microbatches = int(random.integers(2, 5)), int(random.integers(2, 9))
        kind = int(random.integers(0, 6))
        placement: Placement = sl.line(ranks)
        if kind == 3:
            placement = sl.zigzag(ranks, 2)
        elif kind == 4:
            placement = sl.loop(ranks, 2)
        elif kind == 5 and ranks % 2 == 0:
            placement = sl.two_way(ranks)
        stages = placement.stages
        times = {key: (random.integers(1, 21, stages) / 10).tolist() for key in "FBW"}
        if random.random() < 0.3:
            times = {key: float(random.integers(1, 4)) for key in "FBW"}
        costs = sl.Costs(**times, latency=float(random.choice([0, 0.1, 0.5, 1.5])), w_share=float(random.random()))
        fused = tuple(np.flatnonzero(random.random(stages) < 0.15).tolist())
        free = pose(placement, microbatches, costs, limit=1000.0, fused=fused)
        if free.ops > most_ops:
            continue
        need = smallest_limits(free) / free.unit
        more = random.integers(0, 9, ranks) / 4 if random.random() < 0.5 else float(random.integers(0, 9)) / 4
        problem = pose(placement, microbatches, costs, limit=(need + more).tolist(), fused=fused)
        order = found(problem)
        if order is not None:
            return problem, order


def found(problem: Problem, rules: int = 40) -> Ints | None:
    """The best order of the list scheduler."""
    best: tuple[float, Ints] | None = None
    for rule in itertools.islice(grid(problem), rules):
        out = scheduled(problem, rule)
        value = None if out is None else evaluate(problem, out[0])
        if out is not None and value is not None and (best is None or value.makespan < best[0]):
            best = value.makespan, out[0].copy()
    return None if best is None else best[1]


@pytest.mark.parametrize("seed", range(40))
def test_no_optimum_is_refuted(seed: int) -> None:
    problem, order = drawn(seed, 40)
    solved = exact.solve_all(problem, order, "makespan", bound=0.0, effort=3, wall=20, seed=0)
    best = evaluate(problem, order if solved.order is None else solved.order)
    assert best is not None
    table = tabled(problem)
    assert not refuted(table, best.makespan * (1 + 1e-9))
    known = Deadlines(table, lower_bound(problem, "makespan"))
    bounds = [known.below(best.makespan * 1.1, depth, budget=0.3) for depth in range(DEPTHS)]
    assert bounds == sorted(bounds)
    assert bounds[-1] <= best.makespan * (1 + 1e-9)


def rows_by_class(problem: Problem, table: Table, order: Ints) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of an order's ops, in the table's numbering."""
    begins, ends = starts(problem, order)
    begin, end = np.zeros(len(table.head)), np.zeros(len(table.head))
    for cls in range(len(table.size)):
        rows = np.flatnonzero(order == cls)
        begin[table.base[cls] : table.base[cls] + len(rows)] = begins[rows]
        end[table.base[cls] : table.base[cls] + len(rows)] = ends[rows]
    return begin, end


@pytest.mark.parametrize("seed", range(100, 125))
def test_every_window_holds_every_order_that_keeps_the_deadline(seed: int) -> None:
    problem, order = drawn(seed, 200)
    order, value = annealed(
        problem, order, objective="makespan", goal=0.0, moves=2000, seed=seed, hot=0.002, cold=0.0002
    )
    table = tabled(problem)
    deadline = value.makespan * (1 + 1e-9)
    windows = table.windows(deadline)
    assert shrink(table, windows, deadline)[0]
    begin, end = rows_by_class(problem, table, order)
    assert (windows[0] <= begin + 1e-9).all()
    assert (windows[1] >= end - 1e-9).all()
    for rank, row in enumerate(table.classes):
        for cls in row[row >= 0]:
            for n in range(int(table.size[cls])):
                x = table.base[cls] + n
                for c, other in enumerate(row):
                    if other >= 0 and windows[2][x, c] > 0:
                        assert end[table.base[other] + windows[2][x, c] - 1] <= begin[x] + 1e-9, (rank, cls, n)


@pytest.mark.parametrize(
    ("microbatches", "limit", "optimum"),
    [(6, 2, 532.205), (8, 2, 699.715), (10, 2, 867.225), (8, 3, 532.205), (9, 3, 586.285), (10, 3, 653.770)],
)
def test_little_memory_is_tight(microbatches: int, limit: float, optimum: float) -> None:
    """Where CP-SAT has proven the optimum (up to 90 s a case), windows alone prove it."""
    problem = pose(sl.line(4), microbatches, PAPER, limit=limit)
    known = Deadlines(tabled(problem), lower_bound(problem, "makespan"))
    assert known.low < optimum * (1 - 0.014)
    assert known.below(optimum + 1e-3) == pytest.approx(optimum, rel=4e-4)
    assert refuted(known.table, optimum * (1 - 1e-6))
    assert not refuted(known.table, optimum * (1 + 1e-6))


def test_probing_proves_what_windows_alone_do_not() -> None:
    """At eight tenths of 1F1B's memory windows alone stop 1.5 per cent below the optimum."""
    problem, optimum = pose(sl.line(8), 24, PAPER, limit=6.4), 1501.12
    known = Deadlines(tabled(problem), lower_bound(problem, "makespan"))
    assert known.below(optimum + 1e-3) < 0.987 * optimum
    assert known.below(optimum - 1e-3, depth=1, budget=5.0) == pytest.approx(optimum, rel=1e-6)
    assert not refuted(known.table, optimum + 2e-3)


def test_what_was_not_finished_goes_on_where_it_stopped() -> None:
    problem = pose(sl.line(8), 24, PAPER, limit=4)
    known = Deadlines(tabled(problem), lower_bound(problem, "makespan"))
    known.below(2099.145)
    assert not known.ask(2055.0, depth=1, budget=0.02)
    assert known.open[1].deadline == 2055.0
    learned = known.open[1].found
    assert known.ask(2055.0, depth=1, budget=20.0)
    assert known.low == 2055.0
    assert learned > 0


@pytest.mark.parametrize("seed", range(200, 206))
def test_both_forms_of_the_kernels_agree(seed: int) -> None:
    problem, _ = drawn(seed, 60)
    table = tabled(problem)
    for deadline in np.array([1.0, 1.3]) * lower_bound(problem, "makespan"):
        outcomes: list[tuple[object, ...]] = []
        for form in ("plain", "compiled"):
            windows, work = table.windows(deadline), np.zeros(1, dtype=np.int64)
            stale = np.ones((4, problem.ranks), dtype=np.int64)
            swept = getattr(narrow, form)(
                table.stages, table.size, table.base, table.rank, table.classes, table.local, table.time, table.lag,
                table.early, table.late, table.limit, *windows, stale, work, 3, 1e-9, 1e-9,
            )  # fmt: skip
            moved = getattr(take_sides, form)(
                table.size, table.base, table.classes, table.time, *windows, stale, work, True, 1e-9
            )
            outcomes.append((swept, moved, stale.tobytes(), int(work[0]), *(each.tobytes() for each in windows)))
        assert outcomes[0] == outcomes[1]
