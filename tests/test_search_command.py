"""What `optimize` prints and refuses: one value everywhere, limits to be copied, files checked before the search."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import stageloom as sl
from command import stageloom
from stageloom.op import Kind
from stageloom.placement import Placement
from stageloom.search.limits import amount
from stageloom.search.pareto import curve
from stageloom.search.problem import UNLIMITED, pose
from stageloom.search.standing import built, standings

BUSY = "occupancy: true\nblocking: true\nbandwidth: 1\nmessage_bytes: 1\n"
QUICK = ["--seconds", "0.2"]


def optimize(*arguments: str) -> str:
    shown = stageloom("optimize", *arguments)
    assert shown.status == 0, shown.err
    assert shown.err == ""
    return shown.out


@pytest.mark.parametrize("placement", ["line", "v", "two-way", "best"])
def test_with_busy_links_value_gap_and_proof_are_of_the_simulated_order(placement: str, tmp_path: Path) -> None:
    costs, out = tmp_path / "busy.yaml", tmp_path / "found.loom"
    costs.write_text(BUSY)
    words = ["-p", "2", "-m", "4", "--costs", str(costs), "--placement", placement, *QUICK]
    data = json.loads(optimize(*words, "--json", "--compare", "-o", str(out)))
    assert data["gap"] == pytest.approx(data["value"] / data["bound"] - 1)
    assert data["optimal"] == (data["value"] <= data["bound"] * (1 + 1e-9))
    ours = [row["makespan"] for row in data["published"] if row["fits"] and row["same_placement"]]
    assert data["value"] <= min(ours, default=1e9)
    taken = json.loads(stageloom("simulate", str(out), "--costs", str(costs), "--json").out)["makespan"]
    assert taken == data["value"]
    text = optimize(*words)
    assert ("proven optimal" in text) == data["optimal"]
    assert "busy links" in text


def test_the_curve_with_busy_links_is_simulated_and_falls() -> None:
    costs = sl.Costs(occupancy=True, blocking=True, bandwidth=1, message_bytes=1)
    points = curve(lambda memory: pose(sl.line(2), 4, costs, limit=2 * memory), [0.5, 1.0, 1.5, 2.0],
                   objective="makespan", seconds=0.05, seed=0)  # fmt: skip
    values = [point.value for point in points]
    assert values == sorted(values, reverse=True)
    for point in points:
        assert sl.measure(sl.simulate(point.outcome.schedule("found"), costs)).makespan == pytest.approx(point.value)


def test_published_schedules_join_what_is_fused() -> None:
    problem = pose(sl.line(4), 8, sl.Costs(), limit=4, fused=[1, 2])
    for name, schedule in built(problem):
        assert sl.problems(schedule) == [], name
        split = set(schedule.stage[(schedule.kind == Kind.B) | (schedule.kind == Kind.W)].tolist())
        if schedule.stages == 4:
            assert not split & {1, 2}, name
    everything, _ = standings(pose(sl.line(4), 8, sl.Costs(), fused=range(4)), "makespan")
    whole = next(row for row in everything if row.name == "zb-h1")
    assert whole.makespan >= 33  # 1F1B's
    assert "joined where they are here" in optimize("-p", "4", "-m", "8", "--fused", "all", *QUICK)


def test_memory_is_shown_by_rank_and_with_one_unit(tmp_path: Path) -> None:
    assert "memory     4 of 4, 3 of 3, 2 of 2, " in optimize("-p", "4", "-m", "8", "--memory", "1,.75,.5,.5", *QUICK)
    costs = tmp_path / "bytes.yaml"
    costs.write_text("activation_bytes: 1055690.37\n")
    text = optimize("-p", "4", "-m", "8", "--memory", "2.11138MB", "--costs", str(costs), *QUICK)
    assert "MB of 2.11 MB\n" in text
    for limit in ("1e300u", "1e300TB"):
        text = optimize("-p", "2", "-m", "4", "--memory", limit, "--costs", str(costs), *QUICK)
        assert "; no limit" in text
    data = json.loads(optimize("-p", "2", "-m", "4", "--memory", "1e300u,1u", "--json", *QUICK))
    assert data["memory_limit"] == [None, 1]
    assert pose(sl.line(2), 4, sl.Costs(), limit=1e300).limit.tolist() == [UNLIMITED] * 2


@pytest.mark.parametrize("placement", [sl.line(3), sl.zigzag(3, 2)])
@pytest.mark.parametrize("size", [1.0, 3.3333333333, 1055690.37, 7.7777e11])
def test_the_smallest_limit_that_is_told_is_enough(placement: Placement, size: float, tmp_path: Path) -> None:
    costs = tmp_path / "bytes.yaml"
    costs.write_text(f"activation_bytes: {size}\n")
    sizes = ["-p", "3", "-m", "4", "--costs", str(costs), "--placement", "v" if placement.stages > 3 else "line"]
    for limit in ("1e-9B", "1e-9u"):
        refused = stageloom("optimize", *sizes, "--memory", limit)
        assert refused.status == 2
        told = refused.err.split("smallest feasible limit is ")[1].split(" ")[0]
        optimize(*sizes, "--memory", told, *QUICK)


def test_amounts_are_rounded_up() -> None:
    assert amount(4 / 3, "micro-batches") == "1.33334u"
    assert amount(2.0, "micro-batches") == "2u"
    assert amount(1055690.37, "bytes") == "1.0557MB"
    assert amount(1055700.1, "bytes") == "1.05571MB"
    assert amount(999.9999, "bytes") == "1000B"


def test_schedules_in_slices_are_compared_but_are_no_rival_of_whole_microbatches() -> None:
    words = ["-p", "4", "-m", "8", "--memory", "0.5", *QUICK]
    data = json.loads(optimize(*words, "--compare", "--json"))
    rows = {row["name"]: row for row in data["published"]}
    assert (rows["seq1f1b"]["slices"], rows["seq1f1b"]["fits"], rows["seq1f1b"]["same_placement"]) == (4, True, False)
    assert {row["slices"] for name, row in rows.items() if name != "seq1f1b"} == {1}
    text = optimize(*words, "--compare")
    assert "any placement: seq1f1b" in text
    assert "with micro-batches cut in 4 slices" in text
    assert "seq1f1b cuts micro-batches in 4 slices" in text


def test_published_is_longer_by_the_same_per_cent_everywhere() -> None:
    text = optimize("-p", "4", "-m", "8", "--memory", "1.5", "--compare", *QUICK)
    best = next(line for line in text.splitlines() if line.startswith("published  best that fits, same placement"))
    name = best.split(": ")[1].split(",")[0]
    row = next(line for line in text.splitlines() if line.startswith(f"{name}  "))
    more = float(row.split("%")[0].split()[-1])
    assert f"{more:.2f} % longer than this" in best if more else best.endswith(": the same")
    equal = optimize("-p", "2", "-m", "4", *QUICK)
    assert "same placement: zb-1p, 13: the same\n" in equal
    assert "with two copies of the parameters" in equal  # Chimera's


def test_the_costs_of_chosen_stages_fit_the_schedule(tmp_path: Path) -> None:
    layers, out, stages = tmp_path / "layers.yaml", tmp_path / "part.loom", tmp_path / "stages.yaml"
    ones = [1.0] * 9 + [3.0]
    layers.write_text(f"F: {ones}\nB: {ones}\nW: 2.5\nlatency: 0.1\nactivation_bytes: {ones}\n")
    words = ["-p", "4", "-m", "6", "--costs", str(layers), "--partition", *QUICK, "-o", str(out)]
    assert "add --costs-out stages.yaml" in optimize(*words)
    text = optimize(*words, "--costs-out", str(stages))
    assert f"wrote {stages}\n" in text
    assert "add --costs-out" not in text
    taken = json.loads(stageloom("simulate", str(out), "--costs", str(stages), "--json").out)["makespan"]
    found = json.loads(optimize(*words, "--costs-out", str(stages), "--json"))
    assert taken == pytest.approx(found["value"])
    assert stages.read_text().startswith("# by stage, of 10 layers: ")


def test_the_curve_says_equal_limits_once() -> None:
    words = ["-p", "2", "-m", "2", "--pareto", "--seconds", "0.5"]
    rows = [line for line in optimize(*words).splitlines() if line.endswith(" %")]
    assert rows[-1].split()[1:3] == ["to", "2"]
    assert len(rows) < 20
    assert len(json.loads(optimize(*words, "--json"))) == 31  # from 0.5, the least that a micro-batch needs


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-o", "no/x.loom", "--seconds", "9000"], "-o no/x.loom: there is no folder no"),
        (["-o", "x" * 300 + ".loom", "--seconds", "9000"], "File name too long"),
        (["--pareto", "-o", "no/x.svg", "--seconds", "9000"], "-o no/x.svg: there is no folder no"),
        (["--costs-out", "x.yaml"], "--costs-out: without --partition"),
        (["--partition", "--costs-out", "x.txt"], "ends in .yaml or .json"),
        (["--partition", "--costs-out", "no/x.yaml"], "--costs-out no/x.yaml: there is no folder no"),
        (["--pareto", "--memory", "2"], "--pareto: not with --memory"),
        (["--pareto", "--compare"], "--pareto: not with --compare"),
        (["--placement", "best", "--chunks", "-1"], "--chunks: at least 1"),
        (["--fused", "9"], "error: --fused: stage 9"),
        (["--memory", "1,2"], "error: --memory: 2 limits"),
        (["--seconds", "0"], "error: --seconds = 0"),
        (["--seed", "-1"], "error: --seed = -1"),
    ],
)
def test_refused_before_anything_is_searched(arguments: list[str], words: str) -> None:
    shown = stageloom("optimize", "-p", "4", "-m", "8", *arguments)
    assert shown.status == 2
    assert words in shown.err
    assert len(shown.err) < 300
    assert shown.out == ""
