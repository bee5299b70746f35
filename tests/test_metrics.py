"""The numbers of a timeline, on cases small enough to check by hand."""

from __future__ import annotations

import pytest

import stageloom as sl
from stageloom import Costs
from stageloom.metrics import CAUSES


def measured(name: str, ranks: int, microbatches: int, **costs: object) -> sl.Metrics:
    return sl.measure(sl.simulate(sl.build(name, ranks, microbatches), Costs(**costs)))  # type: ignore[arg-type]


def test_1f1b_on_two_ranks_by_hand() -> None:
    """rank 0: F0 F1 .. BW0 F2 BW1 . BW2 ; rank 1: . F0 BW0 F1 BW1 F2 BW2 (F 1, BW 2)."""
    metrics = measured("1f1b", 2, 3)
    assert metrics.makespan == 12
    assert metrics.cost == 12
    assert metrics.work == 9
    assert metrics.bubble_time == 3
    assert metrics.bubble_rate == 0.25
    assert metrics.utilization_per_rank == [0.75, 0.75]
    assert metrics.peak_activations == [2, 1]
    assert metrics.first_full_time == 1
    assert metrics.messages == 6


def test_cost_and_makespan_differ_where_ranks_start_late_and_end_late() -> None:
    metrics = measured("zb-h2", 4, 16)
    assert metrics.cost == 48
    assert metrics.makespan == 51
    assert metrics.bubble_rate == 0


def test_what_sums_of_numbers_leave_is_no_loss() -> None:
    """These were 8.9e-16 and the like."""
    for name in ("1f1b", "zb-h1", "zb-v"):
        metrics = measured(name, 4, 7, F=0.1, B=0.2, W=0.7, latency=0.03)
        assert metrics.imbalance_loss == 0
        assert metrics.schedule_loss == pytest.approx(metrics.bubble_time)


def test_steady_phase_of_1f1b_has_no_bubble_and_the_fill_has() -> None:
    metrics = measured("1f1b", 8, 64)
    assert metrics.steady_utilization == pytest.approx(1.0)
    assert metrics.utilization < 0.95


def test_no_steady_phase_with_fewer_microbatches_than_ranks() -> None:
    assert measured("1f1b", 8, 2).steady_utilization is None


def test_bubble_share_falls_with_microbatches_and_grows_with_ranks_but_dualpipes_time_is_constant() -> None:
    rates = [measured("1f1b", 8, m).bubble_rate for m in (16, 32, 64)]
    assert rates == sorted(rates, reverse=True)
    rates = [measured("1f1b", p, 32).bubble_rate for p in (2, 4, 8, 16)]
    assert rates == sorted(rates)
    assert len({measured("dualpipe", 8, m).bubble_time for m in (16, 20, 40, 100)}) == 1


def test_causes_of_idle_time() -> None:
    """1F1B's first bubble is the price of its memory: a forward was there, but would have been one too many."""
    idle = measured("1f1b", 4, 8).idle_by_cause
    assert set(idle) == set(CAUSES)
    assert idle["warm-up"] == 0 + 1 + 2 + 3
    assert idle["memory"] > 0
    assert idle["message"] == idle["neighbour"] == 0
    # with room for everything (GPipe) no forward is ever held back
    assert measured("gpipe", 4, 8).idle_by_cause["memory"] == 0
    # one slow rank makes its neighbours wait; a slow link shows as messages under way
    assert measured("gpipe", 4, 8, stragglers={1: 3.0}).idle_by_cause["neighbour"] > 0
    assert measured("zb-v", 4, 16, latency=0.5).idle_by_cause["message"] > 0


def test_memory_curve_steps_by_hand() -> None:
    curve = sl.memory_curve(sl.simulate(sl.build("zb-h1", 1, 1), Costs(w_share=0.25)))
    assert curve.time.tolist() == [0, 3]
    assert curve.units.tolist() == [1, 0]
    split = sl.loads("stageloom schedule 1\nname: s\nranks: 1\nmicrobatches: 1\npath: 0\nrank 0: F0 B0 W0\n")
    curve = sl.memory_curve(sl.simulate(split, Costs(w_share=0.25, activation_bytes=8)))
    assert curve.time.tolist() == [0, 2, 3]
    assert curve.units.tolist() == [1, 0.25, 0]
    assert curve.bytes.tolist() == [8, 2, 0]


def test_a_pair_holds_both_microbatches_whichever_is_written_first() -> None:
    head = "stageloom schedule 1\nname: s\nranks: 1\nmicrobatches: 2\npath: 0\nrank 0: "
    for pair in ("F1&BW0", "BW0&F1"):
        metrics = sl.measure(sl.simulate(sl.loads(head + f"F0 {pair} BW1\n")))
        assert metrics.peak_activations == [2]


def test_critical_path_names_ops_and_messages() -> None:
    steps = sl.critical_path(sl.simulate(sl.build("1f1b", 2, 1), Costs(latency=0.5)))
    assert [(step.what, step.text) for step in steps] == [
        ("op", "F0@0"),
        ("message", "F0@0 from rank 0 to rank 1"),
        ("op", "F0@1"),
        ("op", "BW0@1"),
        ("message", "BW0@1 from rank 1 to rank 0"),
        ("op", "BW0@0"),
    ]


def test_gpu_hours_per_million_tokens() -> None:
    # 4 ranks, 21 s for 4 micro-batches of 1000 tokens: 84 GPU-seconds for 4,000 tokens
    metrics = measured("1f1b", 4, 4, unit="s", tokens=1000)
    assert metrics.gpu_hours_per_million_tokens == pytest.approx(84 / 3600 / 4000 * 1e6)
    in_ms = measured("1f1b", 4, 4, unit="ms", tokens=1000)
    assert in_ms.gpu_hours_per_million_tokens == pytest.approx(84 / 3600 / 4000 * 1e3)
    assert measured("1f1b", 4, 4).gpu_hours_per_million_tokens is None


def test_zero_cost_ops_work() -> None:
    metrics = measured("zb-h1", 4, 8, W=0)
    assert metrics.bubble_time == pytest.approx(3 * 2)
    assert measured("1f1b", 4, 8, F=0).makespan == pytest.approx(8 * 2 + 3 * 2)


def test_a_rank_without_a_stage_is_idle_throughout() -> None:
    text = "stageloom schedule 1\nname: s\nranks: 3\nmicrobatches: 1\npath: 0 2\nrank 0: F0 BW0\nrank 2: F0 BW0\n"
    metrics = sl.measure(sl.simulate(sl.loads(text)))
    assert metrics.utilization_per_rank[1] == 0
    assert metrics.peak_activations[1] == 0
    assert metrics.first_full_time is None


def test_comparison_is_sorted_and_says_why_others_do_not_apply() -> None:
    comparison = sl.compare(4, 6, Costs(latency=0.1))
    makespans = [row.metrics.makespan for row in comparison.rows]
    assert makespans == sorted(makespans)
    assert {refused.name for refused in comparison.refused} == {"dualpipe", "dualpipev"}
    assert next(row for row in comparison.rows if row.label == "1f1b").makespan_difference == 0
