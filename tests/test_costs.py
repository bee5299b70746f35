"""What passes cost: numbers, lists, files, links, and what each of them does to the time of a schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stageloom as sl
from stageloom.costs import Costs, costs_from


def makespan(name: str, ranks: int, microbatches: int, **costs: Any) -> float:
    return sl.measure(sl.simulate(sl.build(name, ranks, microbatches), Costs(**costs))).makespan


def test_a_number_is_for_a_whole_rank_however_many_chunks_it_has() -> None:
    for name in ("1f1b", "interleaved-1f1b", "zb-v", "chimera", "dualpipev"):
        metrics = sl.measure(sl.simulate(sl.build(name, 4, 8), Costs(F=2, B=3, W=1)))
        assert metrics.work == pytest.approx(8 * 6)


def test_a_list_is_cut_or_joined_to_the_stages() -> None:
    costs = Costs(F=[2.0, 4.0])
    assert costs.pieces("F", 4, 2).tolist() == [1, 1, 2, 2]
    assert costs.pieces("F", 2, 2).tolist() == [2, 4]
    assert costs.pieces("F", 1, 1).tolist() == [6]


def test_a_list_that_fits_no_stage_count_is_refused() -> None:
    with pytest.raises(sl.InputError, match="F has 3 values and the schedule has 4 stages"):
        makespan("1f1b", 4, 4, F=[1.0, 2.0, 3.0])


def test_bw_takes_b_and_w_unless_told_otherwise() -> None:
    assert makespan("1f1b", 1, 2, F=1, B=2, W=3) == 12
    assert makespan("1f1b", 1, 2, F=1, B=2, W=3, BW=4) == 10


def test_slowest_stage_sets_the_pace() -> None:
    assert makespan("1f1b", 2, 50, F=[1.0, 2.0], B=[1.0, 2.0], W=[0.0, 0.0]) == pytest.approx(50 * 4 + 2)


def test_latency_is_paid_on_every_boundary_of_the_critical_path() -> None:
    # one micro-batch, there and back over 3 boundaries
    assert makespan("1f1b", 4, 1, latency=0.5) == 4 * 3 + 2 * 3 * 0.5


def test_bandwidth_is_bytes_a_second_in_the_unit_of_time() -> None:
    # 1 MB at 1 GB/s is a millisecond
    costs = {"message_bytes": 1e6, "bandwidth": 1e9}
    assert makespan("1f1b", 2, 1, unit="ms", **costs) == pytest.approx(6 + 2)
    assert makespan("1f1b", 2, 1, unit="s", **costs) == pytest.approx(6 + 0.002)


def test_messages_queue_on_a_busy_link_only_with_occupancy() -> None:
    # GPipe's forwards leave every 1, a message takes 3: without queueing many are under way at once
    slow = {"message_bytes": 3.0, "bandwidth": 1.0}
    free, busy = (makespan("gpipe", 2, 4, occupancy=on, **slow) for on in (False, True))
    assert free == (1 + 3 + 4 + 8 + 3 + 2)
    assert busy > free


def test_blocking_sends_hold_the_sender() -> None:
    # naive: one op at a time anyway, so the sender's wait costs nothing; GPipe's forwards are held up
    assert makespan("naive", 2, 2, latency=1, blocking=True) == makespan("naive", 2, 2, latency=1)
    assert makespan("gpipe", 2, 4, latency=1, blocking=True) > makespan("gpipe", 2, 4, latency=1)


def test_one_slow_link() -> None:
    links = [{"from": 1, "to": 2, "latency": 5.0}]
    assert makespan("1f1b", 4, 1, links=links) == 12 + 5


def test_stragglers_and_overhead() -> None:
    assert makespan("1f1b", 1, 2, stragglers={0: 1.5}) == 9
    assert makespan("1f1b", 1, 2, overhead=0.25) == 6 + 4 * 0.25
    metrics = sl.measure(sl.simulate(sl.build("1f1b", 4, 16), Costs(stragglers={2: 2.0})))
    assert metrics.imbalance_loss == pytest.approx(16 * 6 - 16 * 3 * 5 / 4)
    assert np.argmax(metrics.utilization_per_rank) == 2


def test_an_overlapped_pair_takes_the_time_given() -> None:
    plain = makespan("dualpipe", 4, 20)
    assert makespan("dualpipe", 4, 20, overlap_time=3) == plain
    assert makespan("dualpipe", 4, 20, overlap_fraction=1.0) == plain
    assert makespan("dualpipe", 4, 20, overlap_time=2) < plain
    assert makespan("dualpipe", 4, 20, overlap_time=2) == pytest.approx(
        makespan("dualpipe", 4, 20, overlap_fraction=2 / 3)
    )


def test_overlap_changes_nothing_where_nothing_overlaps() -> None:
    assert makespan("zb-v", 4, 8, overlap_time=2) == makespan("zb-v", 4, 8)


def test_times_of_a_chunk_from_its_anatomy() -> None:
    anatomy = {"attention": 1.0, "dispatch": 1.0, "mlp": 1.0, "combine": 1.0, "layers": 4}
    costs = costs_from({"anatomy": anatomy})
    assert (costs.F, costs.B, costs.W) == (16.0, 16.0, 8.0)
    assert costs.anatomy is not None
    assert costs.anatomy.result.hidden == pytest.approx(1.0)
    # all-to-all hides under the other direction's compute: a pair takes 24 where F + B + W is 40
    assert costs.overlap_time == pytest.approx(24)
    dense = costs_from({"anatomy": anatomy | {"dispatch": 0.0, "combine": 0.0}})
    assert dense.overlap_time == pytest.approx(8 + 8 + 8)


def test_moe_all_to_all_makes_dualpipe_the_winner_and_without_it_it_is_not() -> None:
    """The reason for DualPipe, from the numbers: heavy all-to-all hides in its pairs and in no other schedule."""
    heavy = {"anatomy": {"attention": 1.0, "dispatch": 1.5, "mlp": 1.0, "combine": 1.5, "layers": 4}}
    light = {"anatomy": {"attention": 1.0, "dispatch": 0.0, "mlp": 1.0, "combine": 0.0, "layers": 4}}
    best = [sl.compare(8, 32, costs_from(costs)).rows[0].label for costs in (heavy, light)]
    assert best[0] in ("dualpipe", "dualpipev")
    assert best[1] not in ("dualpipe", "dualpipev")


def test_jitter_is_seeded_and_costs_time() -> None:
    schedule = sl.build("1f1b", 4, 16)
    spread = sl.monte_carlo(schedule, Costs(), jitter=0.2, runs=50, seed=3)
    again = sl.monte_carlo(schedule, Costs(), jitter=0.2, runs=50, seed=3)
    other = sl.monte_carlo(schedule, Costs(), jitter=0.2, runs=50, seed=4)
    assert np.array_equal(spread.makespans, again.makespans)
    assert not np.array_equal(spread.makespans, other.makespans)
    assert spread.percentile(5) <= spread.percentile(50) <= spread.percentile(95)
    # waiting on the slower of two jittering neighbours only ever adds
    assert spread.percentile(50) > makespan("1f1b", 4, 16)
    assert sl.monte_carlo(schedule, Costs(), jitter=0, runs=2, seed=0).percentile(50) == makespan("1f1b", 4, 16)


def test_files_in_yaml_and_json(tmp_path: Path) -> None:
    yaml_file, json_file = tmp_path / "costs.yaml", tmp_path / "costs.json"
    yaml_file.write_text(
        "unit: ms\nF: [1, 2]\nB: 1.5\nstragglers: {1: 1.2}\nlinks:\n  - {from: 0, to: 1, latency: 2}\n"
    )
    json_file.write_text(
        '{"unit": "ms", "F": [1, 2], "B": 1.5, "stragglers": {"1": 1.2}, "links": [{"from": 0, "to": 1, "latency": 2}]}'
    )
    assert sl.load_costs(yaml_file) == sl.load_costs(json_file)
    assert sl.load_costs(yaml_file, B=3.0).B == 3.0


def test_memory_in_bytes_by_part() -> None:
    costs = Costs(activation_bytes=10.0, parameter_bytes=100.0, gradient_bytes=50.0, optimizer_bytes=[1, 2, 3, 4])
    memory = sl.rank_memory(sl.simulate(sl.build("1f1b", 4, 8), costs))
    assert memory.activations.tolist() == [40, 30, 20, 10]
    assert memory.parameters.tolist() == [100] * 4
    assert memory.optimizer.tolist() == [1, 2, 3, 4]
    assert memory.peak.tolist() == [191, 182, 173, 164]
    twice = sl.rank_memory(sl.simulate(sl.build("dualpipe", 4, 8), costs))
    assert twice.parameters.tolist() == [200] * 4
    stashed = sl.rank_memory(sl.simulate(sl.build("pipedream", 4, 8), costs))
    assert stashed.parameters.tolist() == [400, 300, 200, 100]
    double = sl.rank_memory(sl.simulate(sl.build("pipedream-2bw", 4, 16), costs))
    assert double.parameters.max() == 200


def test_activations_per_stage_in_bytes() -> None:
    costs = Costs(activation_bytes=[40.0, 30.0, 20.0, 10.0])
    assert sl.rank_memory(sl.simulate(sl.build("1f1b", 4, 8), costs)).activations.tolist() == [160, 90, 40, 10]


def test_w_share_above_one_means_that_b_allocates() -> None:
    peak = [
        sl.measure(sl.simulate(sl.build("zb-h1", 4, 16), Costs(w_share=share))).peak_activations for share in (0.5, 1.5)
    ]
    assert max(peak[1]) > max(peak[0])
    curve = sl.memory_curve(sl.simulate(sl.build("zb-h1", 4, 16), Costs(w_share=1.5)))
    ends = curve.units[curve.offsets[1:] - 1]
    assert ends == pytest.approx([0, 0, 0, 0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"F": -1}, "costs: F: Input should be greater than or equal to 0, got -1"),
        ({"f": 1}, "costs: f: unknown key; known keys: unit, F"),
        ({"unit": "h"}, "costs: unit: Input should be 's', 'ms' or 'us'"),
    ],
)
def test_wrong_costs_in_python_are_named_as_in_a_file(given: dict[str, Any], message: str) -> None:
    with pytest.raises(sl.InputError, match=message):
        Costs(**given)
