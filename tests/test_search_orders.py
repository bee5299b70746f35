"""The optimiser's parts: bounds that no order beats, orders that hold what they may, both forms of each kernel."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

import stageloom as sl
from stageloom.errors import InputError
from stageloom.placement import Placement
from stageloom.schedules import records
from stageloom.search import exact
from stageloom.search.bounds import lower_bound, smallest_limits
from stageloom.search.dispatch import dispatch, scheduled
from stageloom.search.local import anneal, annealed
from stageloom.search.order import evaluate, replay, starts, value_of
from stageloom.search.problem import Ints, Problem, from_schedule, pose, pose_again, to_schedule
from stageloom.search.rules import base_rule, grid
from stageloom.search.unroll import unrolled

UNEVEN = sl.Costs(F=[1.3, 1, 0.8, 2], B=[1, 1.2, 1, 1.7], W=[0.5, 1, 0.9, 1.1], latency=0.2, overhead=0.05, w_share=0.4)
CASES = [
    (sl.line(4), 9, 4.0),
    (sl.line(4), 9, 2.5),
    (sl.zigzag(4, 2), 7, 2.0),
    (sl.loop(4, 2), 8, 4.5),
    (sl.two_way(4), 8, 5.0),
    (sl.line(3), 5, None),
]


def posed(placement: Placement, microbatches: int, limit: float | None, fused: tuple[int, ...] = ()) -> Problem:
    costs = UNEVEN if placement.ranks == 4 else sl.Costs(F=1, B=1.5, W=0.5)
    return pose(placement, microbatches, costs, limit=limit, fused=fused)


@pytest.mark.parametrize(("placement", "microbatches", "limit"), CASES)
def test_list_scheduled_orders_are_sound_and_within_the_limit(
    placement: Placement, microbatches: int, limit: float | None
) -> None:
    problem = posed(placement, microbatches, limit)
    ran = 0
    for rule in itertools.islice(grid(problem), 60):
        out = scheduled(problem, rule)
        if out is None:
            continue
        ran += 1
        order, spans = out
        schedule = to_schedule(problem, order, "listed")
        assert sl.problems(schedule) == []
        metrics = sl.measure(sl.simulate(schedule, problem.costs))
        assert limit is None or max(metrics.peak_activations) <= limit + 1e-9
        value = evaluate(problem, order)
        assert value is not None
        # The simulator starts each op as early as the order allows, the list scheduler may have waited.
        assert value.makespan == pytest.approx(metrics.makespan)
        assert value.cost == pytest.approx(metrics.cost)
        assert value.makespan <= value_of(spans).makespan + 1e-9
        for objective in ("makespan", "cost"):
            assert lower_bound(problem, objective) <= value.of(objective) + 1e-9
    assert ran >= 30


@pytest.mark.parametrize(("placement", "microbatches", "limit"), CASES)
def test_both_forms_of_every_kernel_agree(placement: Placement, microbatches: int, limit: float | None) -> None:
    problem = posed(placement, microbatches, limit, fused=(1,))
    rule = base_rule(problem)
    members, first, last_of = problem.members
    tables = (problem.time, problem.step, problem.lag)
    results: list[list[np.ndarray]] = []
    for form in ("plain", "compiled"):
        order, spans, again = (
            np.empty(problem.ops, dtype=np.int32),
            np.zeros((2, problem.ranks)),
            np.zeros((2, problem.ranks)),
        )
        assert getattr(dispatch, form)(
            problem.stages, problem.count, problem.rank, members, first, last_of, *tables, problem.fused, problem.limit,
            problem.offsets, rule.due(problem), rule.ahead, rule.hold, rule.wait, rule.fill, order, spans,
        )  # fmt: skip
        assert (
            getattr(replay, form)(
                problem.stages, problem.count, problem.rank, *tables, problem.limit, problem.offsets, order, again
            )
            == 0
        )
        best = order.copy()
        found = getattr(anneal, form)(
            problem.stages, problem.count, problem.rank, *tables, problem.limit, problem.offsets, order.copy(), best,
            False, 0.0, 300, 1.0, 0.1, 0.02, 7,
        )  # fmt: skip
        results.append([order, spans, again, best, np.array([found])])
    for plain, compiled in zip(*results, strict=True):
        assert np.array_equal(plain, compiled)


def all_orders(problem: Problem) -> Iterator[Ints]:
    """Every order of a tiny line: for each rank all merges of its F's, B's and W's that keep F before B before W."""
    count = problem.microbatches

    def merges(done: tuple[int, int, int]) -> Iterator[tuple[int, ...]]:
        if done == (count, count, count):
            yield ()
            return
        for kind in range(3):
            if done[kind] < (count if kind == 0 else done[kind - 1]):
                after = tuple(n + (k == kind) for k, n in enumerate(done))
                for rest in merges(after):  # type: ignore[arg-type]
                    yield (kind, *rest)

    words = list(merges((0, 0, 0)))
    for choice in itertools.product(words, repeat=problem.ranks):
        yield np.array([k * problem.places + r for r, word in enumerate(choice) for k in word], dtype=np.int32)


@pytest.mark.parametrize("limit", [None, 2.0, 1.5, 1.0])
@pytest.mark.parametrize("times", [(1, 1, 1), (1, 2, 0.5), (2, 1, 3)])
def test_bounds_and_exact_search_against_all_orders(limit: float | None, times: tuple[float, float, float]) -> None:
    costs = sl.Costs(F=times[0], B=times[1], W=times[2], latency=0.25, w_share=0.4)
    problem = pose(sl.line(2), 3, costs, limit=limit)
    values = [value for order in all_orders(problem) if (value := evaluate(problem, order)) is not None]
    assert values
    for objective in ("makespan", "cost"):
        best = min(value.of(objective) for value in values)
        bound = lower_bound(problem, objective)
        assert bound <= best + 1e-9
        start = next(o for rule in grid(problem) if (out := scheduled(problem, rule)) is not None for o in [out[0]])
        solved = exact.solve_all(problem, start, objective, bound=bound, effort=20, wall=60, seed=0)
        assert solved.optimal
        assert solved.order is not None
        found = evaluate(problem, solved.order)
        assert found is not None
        if objective == "makespan":
            assert found.makespan == pytest.approx(best)
            assert solved.bound == pytest.approx(best)


def test_no_published_order_beats_the_bound_of_its_own_memory() -> None:
    checked = 0
    for record in records():
        for ranks, microbatches in ((2, 3), (4, 4), (4, 12), (6, 24)):
            if not record.synchronous or record.refusal(ranks, microbatches) is not None:
                continue
            costs = sl.Costs(F=1.2, B=1, W=0.7, latency=0.1, w_share=0.3)
            schedule = record(ranks, microbatches, costs=costs)
            peaks = sl.measure(sl.simulate(schedule, costs)).peak_activations
            problem = pose(schedule.placement, microbatches, costs, limit=peaks, path_of=schedule.path_of)
            order = from_schedule(problem, schedule)
            value = None if order is None else evaluate(problem, order)
            if value is None:
                continue
            checked += 1
            for objective in ("makespan", "cost"):
                assert lower_bound(problem, objective) <= value.of(objective) + 1e-9, record.name
    assert checked > 40


def test_annealing_never_loses_and_repeats_itself() -> None:
    problem = posed(sl.zigzag(4, 2), 7, 3.0)
    out = scheduled(problem, base_rule(problem))
    assert out is not None
    before = evaluate(problem, out[0])
    assert before is not None
    runs = [
        annealed(problem, out[0], objective="makespan", goal=0.0, moves=4000, seed=seed, hot=0.002, cold=0.0002)
        for seed in (1, 1, 2)
    ]
    assert np.array_equal(runs[0][0], runs[1][0])
    for order, value in runs:
        assert value.makespan < before.makespan
        assert evaluate(problem, order) == value


def test_windows_keep_or_improve_an_order() -> None:
    problem = posed(sl.line(4), 9, 3.0)
    out = scheduled(problem, base_rule(problem))
    assert out is not None
    before = evaluate(problem, out[0])
    assert before is not None
    order = exact.solve_window(problem, out[0], begin=5, end=20, effort=1.0, seed=0)
    assert order is not None
    after = evaluate(problem, order)
    assert after is not None
    assert after.makespan <= before.makespan + 1e-9


def test_a_steady_block_is_repeated() -> None:
    costs = sl.Costs(F=1.1, B=1, W=0.8, latency=0.1)
    small = pose(sl.line(4), 16, costs, limit=4)
    order = from_schedule(small, sl.build("zb-h1", 4, 16))
    assert order is not None
    large = pose_again(small, 400)
    more = unrolled(small, order, large, "makespan")
    assert more is not None
    value = evaluate(large, more)
    assert value is not None
    assert value.makespan == pytest.approx(sl.simulate(sl.build("zb-h1", 4, 400), costs).end.max())
    begins, ends = starts(large, more)
    assert ends.max() - begins.min() == pytest.approx(value.makespan)


def test_smallest_limits_let_a_micro_batch_pass_and_less_does_not() -> None:
    for placement in (sl.line(4), sl.zigzag(4, 2), sl.loop(4, 3), sl.two_way(4)):
        problem = pose(placement, 6, UNEVEN if placement.stages % 4 == 0 else sl.Costs())
        need = smallest_limits(problem) / problem.unit
        assert need.max() == pytest.approx(1.0)
        exactly = pose(placement, 6, problem.costs, limit=need.tolist())
        if len(placement.paths) == 1:
            assert any(scheduled(exactly, rule) for rule in itertools.islice(grid(exactly), 100))
        too_little = pose(placement, 6, problem.costs, limit=float(need.max()) - 1e-6)
        assert not any(scheduled(too_little, rule) for rule in itertools.islice(grid(too_little), 20))


@pytest.mark.parametrize(
    ("limit", "words"), [([1.0, 2.0], "2 limits for 4 ranks"), (0.0, "above 0"), (float("nan"), "finite")]
)
def test_wrong_limits_are_refused(limit: float | list[float], words: str) -> None:
    with pytest.raises(InputError, match=words):
        pose(sl.line(4), 8, sl.Costs(), limit=limit)


def test_limits_in_bytes_of_uneven_stages() -> None:
    costs = sl.Costs(activation_bytes=[4e9, 1e9, 1e9, 1e9], w_share=0.5)
    problem = pose(sl.line(4), 8, costs, limit_bytes=8e9)
    out = scheduled(problem, base_rule(problem))
    assert out is not None
    peak = sl.measure(sl.simulate(to_schedule(problem, out[0], "x"), costs)).peak_activation_bytes
    assert peak is not None
    assert 4e9 <= peak[0] <= 8e9
    with pytest.raises(InputError, match="activation_bytes"):
        pose(sl.line(4), 8, sl.Costs(), limit_bytes=8e9)
