"""Measured timelines: an emulated run takes the time that the simulator predicts; a real one can be measured and drawn.

Other programs may keep the machine busy, which only ever adds time: a run that misses is repeated, slower, so that the
same disturbance weighs less; where the machine has far more to do than it has cores, nothing can be said.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

import stageloom as sl
from command import stageloom
from profile_tasks import emulated_apart
from stageloom.costs import Costs
from stageloom.errors import InputError
from stageloom.execute.emulate import cores, default_scale, emulate
from stageloom.execute.measure import gather_timeline, measured_costs, timeline_of
from stageloom.execute.workers import Pool, Seat
from stageloom.metrics import Metrics, gaps, measure
from stageloom.render import svg, text
from stageloom.schedule import Schedule
from stageloom.simulate import Timeline, simulate

pytestmark = pytest.mark.torch
RANKS, MICROBATCHES = 8, 16
SECONDS = (3.5, 7.0, 14.0)  # that a run is meant to take: the first try, and those after a miss
MAKESPAN, BUSY = 0.03, 0.02  # how far a run may be from its prediction


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(RANKS, timeout=300) as pool:
        yield pool


def run(pool: Pool, schedule: Schedule, costs: Costs, seconds: float) -> tuple[Timeline, Metrics, Metrics]:
    """(measured timeline, its numbers, those predicted) of an emulated run that is meant to take so long."""
    predicted = measure(simulate(schedule, costs))
    scale = seconds / predicted.makespan
    spans = pool.run(emulate, schedule, costs, scale, size=schedule.ranks)
    timeline = timeline_of(schedule, spans, costs, unit_seconds=scale)
    return timeline, measure(timeline), predicted


def check_valid(timeline: Timeline) -> None:
    """What holds for simulated timelines holds for this one."""
    schedule, source = timeline.schedule, timeline.schedule.links.source
    assert timeline.start.min() == 0
    first = np.flatnonzero(schedule.pair)
    assert np.array_equal(timeline.start[first], timeline.start[first + 1])
    assert np.array_equal(timeline.end[first], timeline.end[first + 1])
    same = (np.diff(schedule.rank) == 0) & ~schedule.pair[:-1]  # neighbours on a rank
    assert (timeline.end[:-1] <= timeline.start[1:])[same].all()
    waits = source >= 0
    assert np.isneginf(timeline.arrival[~waits]).all()
    assert (timeline.end[source[waits]] <= timeline.start[waits]).all()
    assert (timeline.arrival <= timeline.start).all()
    idle = gaps(timeline).by_rank(schedule.ranks).sum(axis=1)
    makespan = timeline.end.max()
    assert idle == pytest.approx(makespan * (1 - np.array(measure(timeline).utilization_per_rank)), abs=1e-3 * makespan)
    assert text.timeline(timeline, 120).plain.count("\n") > schedule.ranks
    ET.fromstring(svg.timeline(timeline))


@pytest.mark.slow  # measures time: for a machine that does nothing else
@pytest.mark.parametrize(
    ("name", "costs"),
    [
        ("gpipe", Costs()),
        ("1f1b", Costs(B=1.5, latency=0.5)),
        ("interleaved-1f1b", Costs()),
        ("zb-h1", Costs()),
        ("zb-v", Costs()),
        ("dualpipe", Costs(overlap_fraction=0.8)),
        ("chimera", Costs(stragglers={3: 1.2})),
    ],
)
def test_an_emulated_run_takes_the_predicted_time(pool: Pool, name: str, costs: Costs) -> None:
    schedule = sl.build(name, RANKS, MICROBATCHES)
    missed: list[str] = []
    for seconds in SECONDS:
        timeline, real, predicted = run(pool, schedule, costs, seconds)
        check_valid(timeline)
        longer = real.makespan / predicted.makespan - 1
        apart = np.abs(np.subtract(real.utilization_per_rank, predicted.utilization_per_rank)).max()
        if abs(longer) <= MAKESPAN and apart <= BUSY:
            return
        missed.append(f"{longer:+.2%} in time, {100 * apart:.2f} points of utilisation at {seconds} s")
    pytest.fail("; ".join(missed))


@pytest.mark.parametrize("name", ["seq1f1b", "pipedream", "chimera:concatenation=halving", "zb-h2"])
def test_every_kind_of_schedule_is_emulated(pool: Pool, name: str) -> None:
    """Slices, weight versions, halves of micro-batches: never faster than predicted."""
    name, _, option = name.partition(":")
    schedule = sl.build(name, 4, 8, **(dict([option.split("=")]) if option else {}))
    timeline, real, predicted = run(pool, schedule, Costs(latency=0.1), 0.5)
    check_valid(timeline)
    assert real.makespan > predicted.makespan * (1 - 1e-3)


def test_a_latency_of_one_link_is_felt(pool: Pool) -> None:
    schedule = sl.build("naive", 2, 1)
    costs = Costs.model_validate({"links": [{"from": 1, "to": 0, "latency": 3}]})
    timeline, real, predicted = run(pool, schedule, costs, 0.3)
    assert predicted.makespan == 9
    assert real.makespan >= 9
    check_valid(timeline)
    sender, receiver = int(schedule.links.source[1]), 1  # the backwards
    assert timeline.start[receiver] >= timeline.end[sender] + 3
    assert timeline.arrival[receiver] == pytest.approx(timeline.end[sender] + 3)


@pytest.mark.parametrize("ahead", [1000.0, -1000.0])
def test_ranks_whose_clocks_differ_are_emulated_in_one_time(pool: Pool, ahead: float) -> None:
    schedule, costs, scale = sl.build("zb-h1", 3, 4), Costs(latency=0.5), 0.01
    spans = pool.run(emulated_apart, schedule, costs, scale, ahead, size=3)
    timeline = timeline_of(schedule, spans, costs, unit_seconds=scale)
    predicted, real = measure(simulate(schedule, costs)).makespan, measure(timeline).makespan
    # a receiver may be told a time that is off by half of a message there and back
    assert predicted * 0.5 < real < predicted + 500 / scale


# ------------------------------------------------------------------------------------------------------------ measure


def gathered(seat: Seat, schedule: Schedule) -> Timeline | None:
    """Spans that are known: op i of a rank runs from i to i + 1/2, and the rank started as much later as its number."""
    low, high = schedule.offsets[seat.rank], schedule.offsets[seat.rank + 1]
    spans = {int(row): (100.0 + seat.rank + at, 100.5 + seat.rank + at) for at, row in enumerate(range(low, high))}
    dist.barrier(seat.group)
    return gather_timeline(seat.group, schedule, spans, Costs(unit="ms"), 99.0)


def test_spans_are_gathered_on_the_first_rank(pool: Pool) -> None:
    schedule = sl.build("1f1b", 2, 3)
    timeline, nothing = pool.run(gathered, schedule, size=2)
    assert nothing is None
    assert timeline is not None
    count = len(schedule) // 2
    assert timeline.start.tolist() == [1000.0 * (1 + rank + at) for rank in range(2) for at in range(count)]
    assert timeline.end == pytest.approx(timeline.start + 500)


def test_a_missing_row_is_named() -> None:
    schedule = sl.build("1f1b", 2, 3)
    spans = {row: (0.0, 1.0) for row in range(len(schedule)) if row != 1}
    with pytest.raises(InputError, match="1 of 12 ops have no measured time, first F1@0 on rank 0"):
        timeline_of(schedule, [spans], Costs())
    with pytest.raises(InputError, match="no measured time"):
        measured_costs(schedule, [])


@pytest.mark.parametrize("name", ["zb-v", "1f1b", "dualpipe", "seq1f1b"])
def test_measured_costs_are_those_of_the_run(name: str) -> None:
    """Spans of a simulated run give its costs back, up to pairs, which run one after the other in a real run."""
    schedule = sl.build(name, 4, 8)
    timeline = simulate(schedule, Costs(unit="ms", F=1, B=2, W=3))
    end = timeline.end / 1e3
    first = np.flatnonzero(schedule.pair)
    start = timeline.start / 1e3
    share = np.where(schedule.kind[first] == 0, 1 / 6, 5 / 6)
    middle = start[first] + (end[first] - start[first]) * share
    end[first], start[first + 1] = middle, middle
    found = measured_costs(schedule, [{row: (start[row], end[row]) for row in range(len(schedule))}])
    again = simulate(schedule, found)
    assert again.end == pytest.approx(timeline.end)
    assert timeline_of(schedule, [dict(enumerate(zip(start, end, strict=True)))], found).end == pytest.approx(again.end)


def test_the_default_scale_gives_the_shortest_op_its_time_but_ends() -> None:
    schedule = sl.build("zb-v", 4, 8)
    usual = default_scale(schedule, Costs())
    assert usual == pytest.approx(0.03 * max(2, 4 / cores()))  # two chunks a rank: the shortest op takes 1/2
    assert default_scale(schedule, Costs(W=1e-9)) * measure(simulate(schedule, Costs(W=1e-9))).makespan <= 60.001


# ------------------------------------------------------------------------------------------------------- command line


def test_run_emulated(tmp_path: Path) -> None:
    drawn = tmp_path / "both.svg"
    result = stageloom("run", "zb-h1", "-p", "2", "-m", "4", "--emulate", "--latency", "0.5", "--svg", str(drawn))
    assert result.status == 0, result.err
    for words in ("zb-h1: 2 processes, 4 micro-batches; emulated, a time unit in 30 ms", " predicted, ", "measured: "):
        assert words in result.out
    assert result.out.count("F forward") == 2
    names = [element.text for element in ET.fromstring(drawn.read_text()).iter() if element.text]
    assert {"zb-h1, predicted", "zb-h1, measured"} <= set(names)


def test_run_emulated_as_json(tmp_path: Path) -> None:
    file = tmp_path / "costs.yaml"
    file.write_text("{unit: ms, F: 1, B: 2, W: 1}")
    result = stageloom(
        "run", "1f1b", "-p", "2", "-m", "4", "--emulate", "--costs", str(file), "--scale", "0.01", "--json"
    )
    assert result.status == 0, result.err
    data = json.loads(result.out)
    predicted, measured = data["predicted"], data["measured"]
    assert data["unit_seconds"] == 0.01
    assert (predicted["makespan"], predicted["unit"]) == (20, "ms")
    assert data["difference"] == pytest.approx(measured["makespan"] / 20 - 1)
    assert [len(of_rank) for of_rank in measured["times"]["start"]] == [8, 8]


def test_run_measures_its_last_step(tmp_path: Path) -> None:
    drawn = tmp_path / "last.svg"
    size = ["--steps", "2", "--width", "16", "--context", "16", "--size", "2"]
    result = stageloom("run", "zb-h1", "-p", "2", "-m", "4", *size, "--svg", str(drawn))
    assert result.status == 0, result.err
    assert "2 processes, 4 micro-batches; the last step; predicted from the mean times of its ops" in result.out
    assert "zb-h1, measured: 2 ranks" in result.out
    assert "slowest: rank " in result.out
    heads = next(line for line in result.out.splitlines() if line.startswith("rank"))
    assert heads.split() == ["rank", "predicted", "measured", "steps", "of", "F", "of", "B", "of", "W", "of", "BW"]
    ET.fromstring(drawn.read_text())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--emulate --steps 3", "--steps: an emulation runs one step"),
        ("--emulate --checkpoint x", "--checkpoint is of a model"),
        ("--f 2", "--f is for emulation"),
        ("--costs x.yaml", "--costs is for emulation"),
        ("--scale 2", "--scale is for emulation"),
        ("--emulate --scale 0", "--scale 0: a number of seconds above 0 is needed"),
        ("--emulate --scale inf", "--scale inf: a number of seconds above 0 is needed"),
        ("--emulate --b -1", "--b -1: a finite number of at least 0 is needed"),
        ("--emulate --costs nowhere.yaml", "nowhere.yaml"),
        ("--emulate --svg nowhere/x.svg", "--svg nowhere/x.svg: there is no folder nowhere"),
        ("--svg .", "--svg .: is a folder"),
        ("--emulate --timeout 0", "the timeout must be above 0"),
    ],
)
def test_wrong_invocations(arguments: str, message: str) -> None:
    result = stageloom("run", "1f1b", "-p", "2", "-m", "2", *arguments.split())
    assert result.status == 2, result
    assert message in result.err
    assert len(result.err.splitlines()) == 1


@pytest.mark.parametrize("what", ["occupancy", "blocking"])
def test_costs_that_cannot_be_emulated(what: str, tmp_path: Path) -> None:
    file = tmp_path / "costs.yaml"
    file.write_text(f"{what}: true")
    result = stageloom("run", "1f1b", "-p", "2", "-m", "2", "--emulate", "--costs", str(file))
    message = f"{file}: {what} cannot be emulated: messages between local processes do not queue; drop the key {what}"
    assert (result.status, message in result.err) == (2, True)
    assert stageloom("run", "1f1b", "-p", "65", "-m", "2", "--emulate").status == 2
