"""The optimiser as a whole: what it finds, proves, refuses and repeats; its command."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

import stageloom as sl
from command import stageloom
from stageloom.errors import InputError
from stageloom.placement import Placement
from stageloom.search.optimize import search
from stageloom.search.pareto import curve
from stageloom.search.partition import balanced, by_stage, layers_of, partition
from stageloom.search.problem import pose, to_schedule
from stageloom.search.settled import checked
from stageloom.search.standing import standings

PAPER = sl.Costs(F=18.522, B=18.086, W=9.337, latency=0.601, w_share=32 * 2304 / (34 * 2304 + 5 * 24 * 1024))
TIMES = ["--f", "18.522", "--b", "18.086", "--w", "9.337", "--latency", "0.601"]


@pytest.mark.parametrize(
    ("placement", "microbatches", "limit", "objective", "optimum"),
    [
        (sl.line(4), 8, 4.0, "makespan", 456.585),
        (sl.line(8), 24, 8.0, "makespan", 1310.405),
        (sl.line(8), 24, 12.0, "makespan", 1236.541),
        (sl.line(8), 8, 8.0, "makespan", 566.871),
        (sl.line(8), 24, 12.0, "cost", 1163.608),
        (sl.loop(8, 2), 16, 11.5, "makespan", 804.154),
        (sl.line(8), 24, 6.4, "makespan", 1501.120),
    ],
)
def test_proves_what_is_optimal(
    placement: Placement, microbatches: int, limit: float, objective: str, optimum: float
) -> None:
    problem = pose(placement, microbatches, PAPER, limit=limit)
    found = search(problem, objective=objective, seconds=20)
    assert found.gap == 0
    assert found.best == pytest.approx(optimum, abs=1e-3)
    schedule, metrics = checked(found)
    assert (metrics.cost if objective == "cost" else metrics.makespan) == pytest.approx(optimum, abs=1e-3)
    assert max(metrics.peak_activations) <= limit + 1e-9
    assert sl.problems(schedule) == []


@pytest.mark.parametrize(
    ("placement", "microbatches", "limit", "at_most"),
    [
        (sl.line(8), 24, 6.0, 1531.9),  # below 1F1B's memory, where the published greedy takes 2891.859
        (sl.zigzag(4, 2), 8, 2.0, 550.0),  # V-Min's memory, where V-Min takes 562.140
        (sl.zigzag(8, 2), 24, 5.0, 1328.7),  # V-Half's memory, where V-Half takes 1328.772
        (sl.two_way(4), 8, 4.0, 520.0),
    ],
)
def test_beats_what_is_published(placement: Placement, microbatches: int, limit: float, at_most: float) -> None:
    problem = pose(placement, microbatches, PAPER, limit=limit)
    found = search(problem, seconds=1, seed=3)
    assert found.best <= at_most
    rows, _ = standings(problem, "makespan")
    assert all(found.best <= row.makespan * (1 + 1e-9) for row in rows if row.fits and row.same_placement)
    _, metrics = checked(found)
    assert metrics.makespan == pytest.approx(found.best)
    assert max(metrics.peak_activations) <= limit + 1e-9


def test_the_same_seed_gives_the_same_order() -> None:
    problem = pose(sl.zigzag(3, 2), 7, PAPER, limit=2.0)
    one, again, other = (search(problem, seconds=0.4, seed=seed) for seed in (5, 5, 6))
    assert np.array_equal(one.order, again.order)
    assert (one.value, one.bound) == (again.value, again.bound)
    assert not one.cut_short
    assert abs(other.best - one.best) < 0.1 * one.best


def test_a_limit_a_rank_and_fused_stages_and_stragglers() -> None:
    costs = PAPER.model_copy(update={"stragglers": {2: 1.3}})
    problem = pose(sl.line(4), 12, costs, limit=[4, 3, 2.5, 1], fused=[0, 3])
    schedule, metrics = checked(search(problem, seconds=0.5))
    assert all(peak <= limit + 1e-9 for peak, limit in zip(metrics.peak_activations, (4, 3, 2.5, 1), strict=True))
    kinds = {(op.stage, op.kind.name) for rank in range(4) for op in schedule.ops(rank)}
    assert kinds == {(s, k) for s in (1, 2) for k in "FBW"} | {(s, k) for s in (0, 3) for k in ("F", "BW")}


def test_a_long_step_is_its_steady_state_repeated() -> None:
    problem = pose(sl.line(16), 1024, PAPER, limit=16)
    found = search(problem, seconds=2)
    assert found.source.endswith("unrolled")
    assert found.gap == 0
    _, metrics = checked(found)
    assert metrics.makespan == pytest.approx(found.best)
    assert max(metrics.peak_activations) <= 16 + 1e-9


def test_an_infeasible_limit_is_refused_with_the_smallest_that_is_not() -> None:
    with pytest.raises(InputError, match=r"smallest feasible limit is 1u there, and 1u on all ranks"):
        search(pose(sl.zigzag(4, 2), 8, PAPER, limit=0.9))
    assert search(pose(sl.zigzag(4, 2), 8, PAPER, limit=1.0), seconds=0.2).best > 0


@pytest.mark.parametrize(
    ("more", "words"), [({"seconds": 0.0}, "seconds"), ({"seed": -1}, "seed"), ({"objective": "speed"}, "objective")]
)
def test_wrong_arguments_are_refused(more: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        search(pose(sl.line(2), 2, sl.Costs()), **more)  # type: ignore[arg-type]


def test_the_curve_falls_and_lies_on_or_below_published_points() -> None:
    def problem_at(memory: float):
        return pose(sl.line(4), 8, PAPER, limit=memory * 4)

    points = curve(problem_at, [0.2, 0.5, 0.75, 1.0, 1.5, 2.0], objective="makespan", seconds=0.3, seed=0)
    assert [point.memory for point in points] == [0.5, 0.75, 1.0, 1.5, 2.0]
    assert all(one.value >= two.value - 1e-9 for one, two in itertools.pairwise(points))
    for point in points:
        rows, _ = standings(problem_at(point.memory), "makespan")
        assert all(point.value <= r.makespan + 1e-9 for r in rows if r.fits and r.same_placement)


def test_balanced_partition_is_the_best_of_all() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        work, stages = rng.uniform(0, 3, int(rng.integers(1, 8))), int(rng.integers(1, 5))
        counts = balanced(work, stages)
        assert sum(counts) == len(work)
        assert len(counts) == stages
        sums = _sums(work, counts)
        every = [
            max(_sums(work, np.diff([0, *sorted(cut), len(work)]).tolist()))
            for cut in np.ndindex(*[len(work) + 1] * (stages - 1))
        ]
        assert max(sums) == pytest.approx(min(every))


def _sums(work: np.ndarray, counts: object) -> list[float]:
    edges = np.concatenate(([0], np.cumsum(counts)))  # type: ignore[arg-type]
    return [float(work[low:high].sum()) for low, high in itertools.pairwise(edges)]


def test_partition_moves_layers_until_a_step_is_shorter() -> None:
    costs = sl.Costs(F=[1.0] * 8 + [2.5], B=[1.0] * 8 + [2.5], W=[1.0] * 8 + [2.5], latency=0.1)
    assert layers_of(costs) == 9

    def judge(each: sl.Costs) -> float:
        return search(pose(sl.line(4), 8, each, limit=4), seconds=0.02).best

    found = partition(costs, 4, 4, judge)
    assert sum(found.counts) == 9
    assert found.value <= judge(by_stage(costs, balanced([3.0] * 8 + [7.5], 4), 4)) + 1e-9
    assert found.costs.stage_times(4, 4)[0].sum() == pytest.approx(10.5)
    with pytest.raises(InputError, match="no list"):
        layers_of(sl.Costs())
    with pytest.raises(InputError, match="differ in length"):
        layers_of(sl.Costs(F=[1, 2], B=[1, 2, 3]))


def test_empty_stages_can_be_run() -> None:
    costs = by_stage(sl.Costs(F=[1, 1], B=[1, 1], W=[1, 1]), (0, 1, 1, 0), 4)
    found = search(pose(sl.line(4), 6, costs, limit=4), seconds=0.3)
    schedule, metrics = checked(found)
    assert sl.problems(schedule) == []
    assert metrics.makespan == pytest.approx(found.best)


def test_command_writes_what_it_found_and_compares(tmp_path: Path) -> None:
    out = tmp_path / "best.loom"
    shown = stageloom("optimize", "-p", "8", "-m", "24", *TIMES, "--memory", "1.5", "--compare", "-o", str(out))
    assert shown.status == 0, shown.err
    assert "proven optimal" in shown.out
    assert "zb-2p !" in shown.out
    found = json.loads(stageloom("simulate", str(out), *TIMES, "--json").out)
    assert found["makespan"] == pytest.approx(1236.54, abs=0.1)
    assert max(found["peak_activations"]) <= 12
    assert stageloom("validate", str(out)).status == 0


def test_command_as_json_with_the_cost_objective() -> None:
    shown = stageloom("optimize", "-p", "4", "-m", "8", "--memory", "6u", "--objective", "cost", "--json", "--compare")
    data = json.loads(shown.out)
    assert data["objective"] == "cost"
    assert data["gap"] == 0
    assert data["value"] == data["metrics"]["cost"] == 25
    assert data["memory_limit"] == [6.0] * 4
    assert {row["name"] for row in data["published"]} >= {"1f1b", "zb-1p", "v-half"}


def test_command_draws_the_curve(tmp_path: Path) -> None:
    out = tmp_path / "curve.svg"
    shown = stageloom("optimize", "-p", "3", "-m", "6", "--pareto", "--seconds", "2", "-o", str(out))
    assert shown.status == 0, shown.err
    assert "* best found" in shown.out
    assert "zb-1p" in shown.out
    assert "<polyline" in out.read_text()


def test_command_splits_layers_over_stages(tmp_path: Path) -> None:
    costs = tmp_path / "layers.yaml"
    costs.write_text("F: [1, 1, 1, 1, 1, 3]\nB: [1, 1, 1, 1, 1, 3]\nW: [1, 1, 1, 1, 1, 3]\n")
    shown = stageloom("optimize", "-p", "3", "-m", "6", "--costs", str(costs), "--partition", "--seconds", "1")
    assert shown.status == 0, shown.err
    assert "layers     3 2 1, by stage" in shown.out or "layers     2 3 1, by stage" in shown.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--memory", "0.1"], "the smallest feasible limit is 1u there"),
        (["--memory", "lots"], "as 1.3 (times 1F1B's)"),
        (["--memory", "1,2"], "2 limits for 4 ranks"),
        (["--memory", "4GB"], "activation_bytes"),
        (["--memory", "1,4GB,1,1"], "cannot stand in one list"),
        (["--memory=-1"], "all above 0"),
        (["--fused", "x"], "stages are needed"),
        (["--fused", "9"], "the placement has stages 0 to 3"),
        (["--seconds", "0"], "above 0"),
        (["--seed", "-1"], "at least 0"),
        (["-o", "best.txt"], "ends in .loom"),
        (["-o", "no-such-folder/best.loom", "--seconds", "0.1"], "no folder"),
        (["--pareto", "-o", "curve.loom"], "ends in .svg"),
        (["--chunks", "3"], "for --placement loop"),
        (["--partition"], "no list"),
    ],
)
def test_command_refuses(arguments: list[str], words: str) -> None:
    shown = stageloom("optimize", "-p", "4", "-m", "8", *arguments)
    assert shown.status == 2
    assert words in shown.err
    assert shown.out == ""


def test_odd_two_way_placement_is_refused() -> None:
    shown = stageloom("optimize", "-p", "3", "-m", "8", "--placement", "two-way")
    assert shown.status == 2
    assert "even number of ranks" in shown.err


def test_names_of_found_schedules() -> None:
    found = search(pose(sl.line(2), 4, sl.Costs(), limit=2), seconds=0.1)
    assert sl.loads(sl.dumps(to_schedule(found.problem, found.order, "mine"))).name == "mine"
