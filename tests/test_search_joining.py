"""Backwards that are shorter, or hold less, in one op: bounds hold for every published order, none beats the result."""

from __future__ import annotations

import numpy as np
import pytest

import stageloom as sl
from stageloom.placement import Placement
from stageloom.search.bounds import lower_bound, smallest_limits
from stageloom.search.joining import ends_split, fused_where, items_of, neighbours_joined, pays, relaxed
from stageloom.search.optimize import search
from stageloom.search.pairing import evaluate, tables_of, to_paired
from stageloom.search.pareto import curve
from stageloom.search.problem import pose
from stageloom.search.settled import checked
from stageloom.search.standing import standings

PLACES = (sl.line(3), sl.line(4), sl.zigzag(3, 2), sl.loop(2, 2), sl.two_way(4))


def drawn(seed: int) -> tuple[Placement, int, sl.Costs, float]:
    """(placement, micro-batches, costs, limit) in which joining B and W pays in one way or another."""
    random = np.random.default_rng(seed)
    place = PLACES[int(random.integers(len(PLACES)))]
    stages, even = place.stages, bool(random.integers(2))

    def times(low: float, high: float) -> list[float]:
        return random.uniform(low, high, stages).round(2).tolist() if not even else [float(random.uniform(low, high))]

    costs: dict[str, object] = {"F": times(0.5, 1.5), "B": times(0.5, 1.5), "W": times(0.2, 1.2)}
    costs |= {"latency": float(random.choice((0, 0.1))), "w_share": float(random.choice((0.3, 1.0, 1.5, 2.2)))}
    if random.integers(3):
        costs["BW"] = times(0.5, 2.2)  # also below B alone, and above B + W
    if random.integers(2) or "BW" not in costs:
        costs["overhead"] = float(random.uniform(0.02, 0.4))
    limit = place.ranks * float(random.choice((0.5, 0.75, 1, 1.5)))
    return place, int(random.integers(2, 5)) * place.ranks, sl.Costs(**costs), limit


@pytest.mark.parametrize(("seed", "objective"), [(seed, ("makespan", "cost")[seed % 3 > 1]) for seed in range(20)])
def test_the_bound_holds_for_every_published_order_and_the_result_is_not_worse(seed: int, objective: str) -> None:
    place, microbatches, costs, limit = drawn(seed)
    free = relaxed(pose(place, microbatches, costs))
    limit = max(limit, float(smallest_limits(free).max() / free.unit))
    problem = pose(place, microbatches, costs, limit=limit)
    rows, _ = standings(problem, objective)
    ours = [row for row in rows if row.fits and row.same_placement]
    bound = lower_bound(relaxed(problem), objective)
    assert all(bound <= row.of(objective) * (1 + 1e-9) for row in ours)
    found = search(problem, objective=objective, seconds=0.1, seed=seed)
    assert found.bound <= found.best * (1 + 1e-9)
    assert all(found.best <= row.of(objective) * (1 + 1e-9) for row in ours), (found.best, found.source, ours)
    _, metrics = checked(found)
    assert found.best == pytest.approx(metrics.cost if objective == "cost" else metrics.makespan)
    assert max(metrics.peak_activations) <= limit * (1 + 1e-9)


def test_a_cheap_joined_backward_is_joined_where_nobody_waits_and_split_where_somebody_does() -> None:
    costs = sl.Costs(BW=1.2)
    found = search(pose(sl.line(4), 8, costs, limit=4), seconds=1)
    # 1F1B takes 24.2; the best with every B and W apart 27; 23 is certain: 8 F, 8 BW, the way in and the way out.
    assert found.bound == pytest.approx(23)
    assert found.best <= 23.6 + 1e-9
    text = sl.dumps(found.schedule("mine"))
    assert "BW3" in text
    assert " B7 " in text


def test_relaxed_times_are_no_more_than_either_way() -> None:
    costs = sl.Costs(F=1, B=[1, 1, 2], W=1, BW=[1.5, 2.5, 1.75], overhead=0.25, w_share=1.5)
    problem = pose(sl.line(3), 3, costs)
    loose = relaxed(problem)
    assert pays(problem).all()
    np.testing.assert_allclose(loose.time[1], [1.25, 1.25, 2.0])
    np.testing.assert_allclose(loose.time[2], [0.5, 1.25, 0.0])
    assert (loose.step[0] + loose.step[1] + loose.step[2] == 0).all()
    assert (loose.step[1] == 0).all()
    assert relaxed(loose) is loose
    assert not pays(fused_where(problem, pays(problem))).any()


def test_where_joining_does_not_pay_nothing_changes() -> None:
    for costs in (sl.Costs(), sl.Costs(BW=2), sl.Costs(BW=3), sl.Costs(w_share=1)):
        problem = pose(sl.line(4), 8, costs, limit=4)
        assert relaxed(problem) is problem
        assert search(problem, seconds=0.05).paired is None
    assert relaxed(pose(sl.line(4), 8, sl.Costs(BW=1.2), fused=range(4))).fused.all()


def test_neighbours_join_and_ends_split() -> None:
    problem = pose(sl.line(2), 3, sl.Costs(BW=1.2))
    rank = np.repeat([0, 1], 9).astype(np.int32)
    code = np.array([0, 0, 2, 4, 0, 2, 2, 4, 4, 1, 3, 5, 1, 3, 1, 5, 3, 5], dtype=np.int32)
    joined = neighbours_joined(problem, rank, code, pays(problem))
    assert joined[1].tolist() == [0, 0, 6, 0, 2, 6, 4, 1, 7, 1, 3, 1, 5, 7]
    split = ends_split(problem, *joined, 1)
    assert split[1].tolist() == [0, 0, 6, 0, 2, 6, 4, 1, 7, 1, 3, 1, 5, 3, 5]
    items = items_of(problem, *joined)
    value = evaluate(tables_of(problem), items)
    schedule = to_paired(problem, items, "joined")
    assert sl.problems(schedule) == []
    assert value is not None
    assert value.makespan == pytest.approx(sl.measure(sl.simulate(schedule, problem.costs)).makespan)


def test_less_memory_is_feasible_where_a_joined_backward_holds_less() -> None:
    problem = pose(sl.line(3), 6, sl.Costs(w_share=2), limit=1)  # B alone would hold two
    found = search(problem, seconds=0.05)
    assert max(checked(found)[1].peak_activations) == 1
    points = curve(lambda memory: pose(sl.line(3), 6, sl.Costs(w_share=2), limit=3 * memory), [0.34, 0.7, 1.0, 1.5],
                   objective="makespan", seconds=0.05, seed=0)  # fmt: skip
    values = [point.value for point in points]
    assert values == sorted(values, reverse=True)


def test_a_long_step_with_joined_backwards() -> None:
    found = search(pose(sl.line(16), 800, sl.Costs(BW=1.2), limit=16), seconds=0.5)
    assert found.gap < 0.01
    assert sl.measure(sl.simulate(found.schedule("long"), sl.Costs(BW=1.2))).makespan == pytest.approx(found.best)
