"""The optimiser with overlapped pairs: beside DualPipe, against all orders of tiny cases, and with pairs refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import stageloom as sl
from command import stageloom
from stageloom.op import Kind
from stageloom.placement import Placement
from stageloom.search.optimize import search
from stageloom.search.pair_bounds import paired_bound
from stageloom.search.pair_dispatch import changed, dispatch_pairs, grid, scheduled
from stageloom.search.pair_moves import anneal_pairs
from stageloom.search.pairing import Items, evaluate, from_order, from_paired, replay, tables_of, to_paired
from stageloom.search.pairs import annealed, search_pairs
from stageloom.search.problem import Problem, pose
from stageloom.search.standing import standings

UNEVEN = sl.Costs(F=1.1, B=0.9, W=0.7, BW=1.5, overlap_fraction=0.7, latency=0.05, overhead=0.02, w_share=0.4)


def beside(name: str, ranks: int, microbatches: int, costs: sl.Costs, share: float) -> tuple[Problem, float]:
    """The problem of a published schedule at this share of its own memory, and what it takes itself."""
    schedule = sl.build(name, ranks, microbatches)
    metrics = sl.measure(sl.simulate(schedule, costs))
    limit = share * max(metrics.peak_activations)
    return pose(schedule.placement, microbatches, costs, limit=limit, path_of=schedule.path_of), metrics.makespan


@pytest.mark.parametrize("share", [1.0, 0.75])
@pytest.mark.parametrize("fraction", [1.0, 0.8, 0.67])
@pytest.mark.parametrize(("name", "ranks"), [("dualpipe", 8), ("dualpipev", 4)])
def test_beside_dualpipe_at_its_memory_and_at_less(name: str, ranks: int, fraction: float, share: float) -> None:
    costs = sl.Costs(overlap_fraction=fraction)
    problem, published = beside(name, ranks, 20 if ranks == 8 else 10, costs, share)
    found = search_pairs(problem, seconds=0.6, seed=1)
    schedule = found.schedule("mine")
    assert sl.problems(schedule) == []
    metrics = sl.measure(sl.simulate(schedule, costs))
    assert metrics.makespan == pytest.approx(found.best)
    assert max(metrics.peak_activations) <= problem.limit[0] / problem.unit + 1e-9
    assert found.bound <= found.best
    assert found.best <= search(problem, seconds=0.15, seed=1).best + 1e-9
    rows, _ = standings(problem, "makespan")
    assert all(found.best <= row.makespan + 1e-9 for row in rows if row.fits and row.same_placement)
    if share == 1:
        assert found.best < published
        assert found.gap < 0.025
    assert schedule.pair.any() == (fraction < 1)


def words(problem: Problem, places: list[int]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Every list of items of a rank that keeps its own order: (front, rear) as in `pairing`."""

    def more(left: tuple[tuple[int, int, int], ...]) -> Iterator[tuple[tuple[int, int], ...]]:
        if all(each == (0, 0, 0) for each in left):
            yield ()
            return
        # of every place: forwards to come, backwards to come, W's owed
        for at, (f, b, w) in enumerate(left):
            steps = [((places[at], -1), (f - 1, b, w))] if f else []
            if b > f:
                steps.append(((-1, Kind.BW * problem.places + places[at]), (f, b - 1, w)))
                if not problem.fused[places[at]]:
                    steps.append(((-1, Kind.B * problem.places + places[at]), (f, b - 1, w + 1)))
            if w:
                steps.append(((-1, Kind.W * problem.places + places[at]), (f, b, w - 1)))
            for item, after in steps:
                for rest in more((*left[:at], after, *left[at + 1 :])):
                    yield (item, *rest)
        for one, other in itertools.product(range(len(left)), repeat=2):
            if left[one][0] and left[other][1] > left[other][0]:
                after = list(left)
                after[one] = after[one][0] - 1, after[one][1], after[one][2]
                after[other] = after[other][0], after[other][1] - 1, after[other][2]
                for rest in more(tuple(after)):
                    yield ((places[one], Kind.BW * problem.places + places[other]), *rest)

    yield from more(tuple((int(problem.count[place]),) * 2 + (0,) for place in places))


def all_orders(problem: Problem) -> Iterator[Items]:
    of_ranks = [list(words(problem, problem.places_of(rank))) for rank in range(problem.ranks)]
    for choice in itertools.product(*of_ranks):
        items = np.full((2, problem.ops), -1, dtype=np.int32)
        for rank, word in enumerate(choice):
            low = int(problem.offsets[rank])
            items[:, low : low + len(word)] = np.array(word).T
        yield Items(items[0], items[1], np.array([len(word) for word in choice]))


@cache
def everything(placement: Placement, microbatches: int) -> list[Items]:
    return list(all_orders(pose(placement, microbatches, sl.Costs())))


EQUAL = sl.Costs(overlap_fraction=0.67)
STRANGE = sl.Costs(F=[1, 2], B=[2, 1], W=[0.5, 0.2], overlap_fraction=0.3, w_share=1.2, stragglers={1: 1.3})
"""A pair takes less than its backward alone, and B allocates."""


@pytest.mark.parametrize(
    ("placement", "microbatches", "costs", "limits"),
    [
        (sl.line(2), 2, EQUAL, (None, 1.0)),
        (sl.line(2), 2, UNEVEN, (None, 1.0)),
        (sl.line(2), 2, STRANGE, (None, 1.5, 1.2)),
        (sl.line(2), 3, EQUAL, (2.0,)),
        (sl.line(3), 2, UNEVEN, (None, 1.4)),
        (sl.two_way(2), 2, EQUAL, (None, 2.0)),
        (sl.two_way(2), 2, STRANGE, (None, 2.2)),
        (sl.zigzag(2, 2), 1, UNEVEN, (None,)),
        (sl.line(1), 4, EQUAL, (None, 2.0, 1.5)),
    ],
)
def test_bound_and_search_against_all_orders(
    placement: Placement, microbatches: int, costs: sl.Costs, limits: tuple[float | None, ...]
) -> None:
    search(pose(sl.line(2), 2, sl.Costs(), limit=2), seconds=0.01)  # compiles the kernels
    for limit in limits:
        problem = pose(placement, microbatches, costs, limit=limit)
        tables = tables_of(problem)
        values = [v for items in everything(placement, microbatches) if (v := evaluate(tables, items)) is not None]
        for objective in ("makespan", "cost"):
            best = min(value.of(objective) for value in values)
            assert paired_bound(tables, objective) <= best + 1e-9
            found = search_pairs(problem, objective=objective, seconds=0.1)
            assert found.bound <= best + 1e-9
            assert found.best >= best - 1e-9
            if objective == "makespan":
                assert found.best == pytest.approx(best)


def test_the_bound_holds_for_every_order_that_the_rules_make() -> None:
    rng = np.random.default_rng(3)
    for name, ranks, microbatches in (("dualpipe", 4, 8), ("dualpipev", 3, 7)):
        for share in (1.0, 0.6):
            problem, _ = beside(name, ranks, microbatches, UNEVEN, share)
            tables = tables_of(problem)
            bounds = {objective: paired_bound(tables, objective) for objective in ("makespan", "cost")}
            for rule in itertools.islice(grid(tables), 0, None, 5):
                items = scheduled(tables, changed(rule, rng))
                assert items is not None
                value = evaluate(tables, items)
                assert value is not None
                assert all(bounds[objective] <= value.of(objective) + 1e-9 for objective in bounds)
                schedule = to_paired(problem, items, "mine")
                assert sl.problems(schedule) == []
                metrics = sl.measure(sl.simulate(schedule, UNEVEN))
                assert (metrics.makespan, metrics.cost) == pytest.approx((value.makespan, value.cost))
                assert max(metrics.peak_activations) <= problem.limit[0] / problem.unit + 1e-9


@pytest.mark.parametrize(("name", "ranks", "microbatches"), [("dualpipe", 4, 10), ("dualpipev", 3, 8), ("1f1b", 3, 5)])
def test_items_say_a_schedule_and_take_what_the_simulator_says(name: str, ranks: int, microbatches: int) -> None:
    costs = UNEVEN.model_copy(update={"stragglers": {1: 1.25}})
    schedule = sl.build(name, ranks, microbatches)
    metrics = sl.measure(sl.simulate(schedule, costs))
    peaks = metrics.peak_activations
    problem = pose(schedule.placement, microbatches, costs, limit=peaks, path_of=schedule.path_of)
    items = from_paired(problem, schedule)
    assert items is not None
    assert to_paired(problem, items, name) == schedule
    value = evaluate(tables_of(problem), items)
    assert value is not None
    assert (value.makespan, value.cost) == pytest.approx((metrics.makespan, metrics.cost))
    for rank in range(ranks):  # what a rank holds at its fullest is counted as the metrics count it
        less = [peak - 0.01 * (each == rank) for each, peak in enumerate(peaks)]
        tighter = pose(schedule.placement, microbatches, costs, limit=less, path_of=schedule.path_of)
        assert evaluate(tables_of(tighter), items) is None


def test_what_is_no_forward_with_a_full_backward_is_not_taken() -> None:
    text = "stageloom schedule 1\nname: x\nranks: 1\nmicrobatches: 2\npath: 0\nrank 0: F0 F1&B0 W0 BW1\n"
    schedule = sl.loads(text)
    problem = pose(schedule.placement, 2, sl.Costs(overlap_fraction=0.8))
    assert from_paired(problem, schedule) is None
    full = sl.loads(text.replace("F1&B0 W0", "BW0&F1"))
    assert from_paired(problem, full) is not None
    assert from_paired(pose(sl.line(1), 2, sl.Costs(), fused=[0]), sl.loads(text.replace("F1&B0", "F1 B0"))) is None


def test_kernels_are_the_same_plain_and_compiled() -> None:
    problem, _ = beside("dualpipe", 4, 8, UNEVEN, 1.0)
    tables = tables_of(problem)
    rule = next(grid(tables))
    outcomes = []
    for form in ("plain", "compiled"):
        kernels = {kernel: getattr(kernel, form) for kernel in (replay, dispatch_pairs, anneal_pairs)}
        with pytest.MonkeyPatch.context() as patch:
            for kernel, function in kernels.items():
                patch.setattr(kernel, "pick", lambda ops, function=function: function)
            items = scheduled(tables, rule)
            assert items is not None
            out = annealed(tables, items, "makespan", goal=0.0, moves=400, seed=7, hot=0.01, cold=0.001)
            assert out is not None
            outcomes.append((items, *out))
    for one, other in zip(*(each[:2] for each in outcomes), strict=True):
        assert np.array_equal(one.front, other.front)
        assert np.array_equal(one.rear, other.rear)
    assert outcomes[0][2] == outcomes[1][2]
    assert outcomes[0][2].makespan < evaluate(tables, outcomes[0][0]).makespan  # type: ignore[union-attr]


def test_neighbours_of_an_order_become_pairs() -> None:
    problem, _ = beside("dualpipe", 4, 12, sl.Costs(overlap_fraction=0.7), 1.0)
    order = search(problem, seconds=0.1).order
    tables = tables_of(problem)
    alone, paired = (from_order(problem, order, pairs) for pairs in (False, True))
    assert evaluate(tables, alone) == search(problem, seconds=0.1).value
    assert ((paired.front >= 0) & (paired.rear >= 0)).sum() > 0
    assert not ((alone.front >= 0) & (alone.rear >= 0)).any()


def test_the_same_seed_gives_the_same_schedule() -> None:
    problem, _ = beside("dualpipev", 3, 7, UNEVEN, 0.8)
    one, again = (search_pairs(problem, seconds=0.5, seed=5) for _ in range(2))
    assert one.schedule("mine") == again.schedule("mine")
    assert (one.value, one.bound, one.source) == (again.value, again.bound, again.source)


def test_fused_stages_limits_a_rank_and_loops() -> None:
    costs = sl.Costs(overlap_fraction=0.7, latency=0.1, stragglers={2: 1.2})
    problem = pose(sl.loop(3, 2), 8, costs, limit=[3.5, 3, 2.5], fused=[0, 5])
    found = search_pairs(problem, seconds=0.5)
    schedule = found.schedule("mine")
    assert sl.problems(schedule) == []
    metrics = sl.measure(sl.simulate(schedule, costs))
    assert metrics.makespan == pytest.approx(found.best)
    assert all(peak <= limit + 1e-9 for peak, limit in zip(metrics.peak_activations, (3.5, 3, 2.5), strict=True))
    assert schedule.pair.any()
    assert {schedule.op(row).kind for row in np.flatnonzero(np.isin(schedule.stage, (0, 5)))} == {Kind.F, Kind.BW}


TWO_WAY = ["optimize", "-p", "4", "-m", "8", "--placement", "two-way", "--memory", "5u", "--seconds", "1"]


def test_command_pairs_where_costs_say_so_and_not_where_refused(tmp_path: Path) -> None:
    out = tmp_path / "best.loom"
    shown = stageloom(*TWO_WAY, "--overlap", "2", "--compare", "-o", str(out))
    assert shown.status == 0, shown.err
    assert "forwards run beside a full backward" in shown.out
    assert "dualpipe" in shown.out
    assert "&" in out.read_text()
    found = json.loads(stageloom("simulate", str(out), "--overlap", "2", "--json").out)
    dualpipe = json.loads(stageloom("simulate", "dualpipe", "-p", "4", "-m", "8", "--overlap", "2", "--json").out)
    assert found["makespan"] <= dualpipe["makespan"]
    assert max(found["peak_activations"]) <= 5
    for refused in (["--overlap", "2", "--no-pairs"], ["--overlap", "3"], []):
        assert "run beside" not in stageloom(*TWO_WAY, *refused, "-o", str(out)).out
        assert "&" not in out.read_text()
    data = json.loads(stageloom(*TWO_WAY, "--overlap", "2", "--json").out)
    assert data["pairs"] > 0
    assert data["value"] == pytest.approx(found["makespan"])


def test_command_draws_the_curve_with_pairs() -> None:
    arguments = ["optimize", "-p", "2", "-m", "6", "--pareto", "--seconds", "2", "--json"]
    values = {
        more: [point["value"] for point in json.loads(stageloom(*arguments, "--overlap", "2", more).out)]
        for more in ("--pairs", "--no-pairs")
    }
    assert all(one <= two + 1e-9 for one, two in zip(values["--pairs"], values["--no-pairs"], strict=True))
    assert min(values["--pairs"]) < min(values["--no-pairs"])
    assert values["--pairs"] == sorted(values["--pairs"], reverse=True)
