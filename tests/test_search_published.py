"""The published searches: the orders their authors' programs find, for the costs they are given."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pytest

import stageloom as sl
from command import stageloom
from stageloom.search import building_block as bb
from stageloom.search.problem import from_schedule, pose, to_schedule
from stageloom.search.zero_bubble import greedy, orders

# The zero-bubble paper's profiled times at 8 ranks (ms), and its activations: F 34h + 5as, of which W frees 32h.
PAPER = sl.Costs(F=18.522, B=18.086, W=9.337, latency=0.601, w_share=32 * 2304 / (34 * 2304 + 5 * 24 * 1024))


@pytest.mark.parametrize(
    ("ranks", "microbatches", "memory", "makespan", "cost"),
    [
        (4, 8, "1", 456.585, 456.585),
        (8, 24, "1", 1310.405, 1310.405),
        (8, 24, "1.5", 1244.070, 1188.126),
        (8, 24, "3/4", 2891.859, 2891.859),
        (8, 24, "2", 1236.567, 1152.599),
    ],
)
def test_greedy_gives_what_the_authors_program_gives(
    ranks: int, microbatches: int, memory: str, makespan: float, cost: float
) -> None:
    schedule = sl.build("zb-greedy", ranks, microbatches, costs=PAPER, memory=memory)
    metrics = sl.measure(sl.simulate(schedule, PAPER))
    assert sl.problems(schedule) == []
    assert (metrics.makespan, metrics.cost) == (pytest.approx(makespan), pytest.approx(cost))
    assert max(metrics.peak_activations) <= float(Fraction(memory)) * ranks


def test_v_blocks_on_profiled_times() -> None:
    for name, ranks, microbatches, makespan in (("v-min", 4, 8, 562.140), ("v-min", 8, 24, 1658.824)):
        found = sl.measure(sl.simulate(sl.build(name, ranks, microbatches), PAPER)).makespan
        assert found == pytest.approx(makespan, abs=1e-3)


def test_searches_look_at_the_costs_and_other_schedules_do_not() -> None:
    slow_w = sl.Costs(F=1, B=1, W=3)
    assert sl.build("zb-2p", 4, 12, costs=slow_w) != sl.build("zb-2p", 4, 12)
    assert sl.build("zb-h2", 4, 12, costs=slow_w) == sl.build("zb-h2", 4, 12)
    row = next(row for row in sl.compare(4, 12, slow_w).rows if row.label == "zb-2p")
    assert row.timeline.schedule == sl.build("zb-2p", 4, 12, costs=slow_w)


def test_stages_of_different_cost_within_the_limit() -> None:
    costs = sl.Costs(F=[1.2, 1, 1, 2], B=[1, 1, 1.3, 2], W=[1, 1, 1, 1.5], latency=0.2)
    one, two = (sl.measure(sl.simulate(sl.build(f"zb-{k}p", 4, 16, costs=costs), costs)) for k in (1, 2))
    assert max(one.peak_activations) <= 4
    assert max(two.peak_activations) <= 8
    assert one.cost == two.cost == pytest.approx(16 * 5.5)  # the busiest rank never waits


@pytest.mark.parametrize("limit", [1, 1.5, 4, 7.7])
def test_both_forms_of_the_greedy_agree(limit: float) -> None:
    problem = pose(sl.line(4), 11, sl.Costs(F=2, B=1.5, W=0.7, latency=0.3, w_share=0.36), limit=limit)
    found = orders(problem)
    assert len(found) == 8
    for choice, (cost, order) in enumerate(found):
        flags = [not choice & bit for bit in (4, 2, 1)]
        again = np.zeros_like(order)
        run_ = greedy.compiled
        assert run_(11, problem.time, problem.step, problem.lag, problem.limit, *flags, again) == cost
        assert (again == order).all()


@pytest.mark.parametrize("block", [bb.v_min, bb.v_half, bb.v_zb])
def test_no_two_passes_of_a_block_meet(block: bb.Block) -> None:
    for ranks in range(1, 40):
        for row in block(ranks):
            assert len(set(row % bb.PERIOD)) == 4, ranks


def test_an_order_and_its_schedule_say_the_same() -> None:
    for name in ("zb-h1", "zb-v", "1f1b", "interleaved-1f1b", "chimera"):
        schedule = sl.build(name, 4, 8)
        problem = pose(schedule.placement, 8, sl.Costs(), path_of=schedule.path_of)
        order = from_schedule(problem, schedule)
        assert order is not None
        back = to_schedule(problem, order, "again")
        assert sl.problems(back) == []
        assert len(back) == 3 * 8 * schedule.stages
        split, whole = sl.simulate(back).end.max(), sl.simulate(schedule).end.max()
        # A BW that is split sends its message on before its W.
        assert split < whole if name in ("1f1b", "interleaved-1f1b", "chimera") else split <= whole
    fused = pose(sl.line(4), 8, sl.Costs(), fused=range(4))
    order = from_schedule(fused, sl.build("zb-h1", 4, 8))
    assert order is not None
    assert len(to_schedule(fused, order, "fused")) == 2 * 4 * 8
    assert from_schedule(fused, sl.build("zb-v", 4, 8)) is None


def test_command_line_takes_them_by_name_with_costs() -> None:
    flags = ["-p", "8", "-m", "24", "--f", "18.522", "--b", "18.086", "--w", "9.337", "--latency", "0.601", "--json"]
    found = json.loads(stageloom("simulate", "zb-2p", *flags).out)
    assert found["bubble_rate"] == pytest.approx(0.0433, abs=5e-5)
    found = json.loads(stageloom("simulate", "zb-greedy", "-O", "memory=1", *flags).out)
    assert found["bubble_rate"] == pytest.approx(0.1585, abs=5e-5)


@pytest.mark.parametrize(
    ("option", "words"),
    [("memory=0.1", "at least 1/4 is needed"), ("memory=x", "a number above 0 is needed"), ("memory=0", "above 0")],
)
def test_a_limit_that_cannot_be_is_refused(option: str, words: str) -> None:
    found = stageloom("simulate", "zb-greedy", "-p", "4", "-m", "8", "-O", option)
    assert found.status == 2
    assert words in found.err
    assert "Traceback" not in found.err
