"""The Perfetto trace: slices nest, arrows bind, counters follow memory."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from stageloom import metrics
from stageloom.costs import Costs
from stageloom.render import trace
from stageloom.schedules import build
from stageloom.simulate import Timeline, simulate

CASES = {
    "1f1b": lambda: simulate(build("1f1b", 4, 8)),
    "one rank": lambda: simulate(build("gpipe", 1, 1)),
    "dualpipe": lambda: simulate(build("dualpipe", 4, 10), Costs(unit="us", latency=0.37)),
    "slow messages": lambda: simulate(build("hanayo", 4, 8), Costs(latency=3.3, unit="ms")),
    "no time for W": lambda: simulate(build("zb-h1", 4, 8), Costs(W=0)),
    "bytes": lambda: simulate(build("1f1b", 4, 8), Costs(activation_bytes=1000, unit="s", F=0.1, B=0.2, W=1 / 3)),
}


@pytest.fixture(params=list(CASES))
def timeline(request: pytest.FixtureRequest) -> Timeline:
    return CASES[request.param]()


def events(timeline: Timeline, phase: str) -> list[dict[str, Any]]:
    return [event for event in trace.chrome(timeline)["traceEvents"] if event["ph"] == phase]


def test_every_op_is_one_slice(timeline: Timeline) -> None:
    found = [e for e in events(timeline, "X") if e["cat"] != "message"]
    schedule = timeline.schedule
    expected = [(r, o.kind.name, o.stage, o.microbatch) for r in range(schedule.ranks) for o in schedule.ops(r)]
    assert sorted((e["pid"], e["args"]["kind"], e["args"]["stage"], e["args"]["microbatch"]) for e in found) == sorted(
        expected
    )
    assert sum(e["args"]["overlapped"] for e in found) == 2 * int(schedule.pair.sum())
    scale = 1e6 * (timeline.costs.seconds or 1e-3)
    assert max(e["ts"] + e["dur"] for e in found) == pytest.approx(timeline.end.max() * scale)


def test_time_ascends_and_no_duration_is_negative(timeline: Timeline) -> None:
    timed = [event for event in trace.chrome(timeline)["traceEvents"] if event["ph"] != "M"]
    assert all(first["ts"] <= second["ts"] for first, second in pairwise(timed))
    assert all(event["dur"] >= 0 for event in timed if event["ph"] == "X")


def test_slices_of_a_track_follow_one_another(timeline: Timeline) -> None:
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events(timeline, "X"):
        tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        spans.sort()
        assert all(first[1] <= second[0] + 1e-6 for first, second in pairwise(spans))


def test_arrows_bind(timeline: Timeline) -> None:
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events(timeline, "X"):
        slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    leaving = {event["id"]: event for event in events(timeline, "s")}
    meeting = {event["id"]: event for event in events(timeline, "f")}
    assert len(leaving) == len(meeting) == len(timeline.messages)
    assert leaving.keys() == meeting.keys()
    for number, left in leaving.items():
        met = meeting[number]
        assert met["bp"] == "e"
        assert left["ts"] <= met["ts"]
        assert left["pid"] != met["pid"]
        for end in (left, met):
            assert any(a <= end["ts"] <= b for a, b in slices[end["pid"], end["tid"]])


def test_message_slices_only_where_messages_take_time(timeline: Timeline) -> None:
    found = [event for event in events(timeline, "X") if event["cat"] == "message"]
    slow = timeline.messages.arrive > timeline.messages.depart
    assert len(found) == int(slow.sum())


def test_tracks_have_names(timeline: Timeline) -> None:
    named = {(e["pid"], e["tid"]) for e in events(timeline, "M") if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events(timeline, "X")} == named
    processes = [e["args"]["name"] for e in events(timeline, "M") if e["name"] == "process_name"]
    assert processes == [f"rank {rank}" for rank in range(timeline.schedule.ranks)]


def test_counters_reach_the_peak(timeline: Timeline) -> None:
    peaks = metrics.measure(timeline).peak_activations
    counted = [event for event in events(timeline, "C") if event["name"] == "activations held"]
    for rank, peak in enumerate(peaks):
        assert max(e["args"]["micro-batches"] for e in counted if e["pid"] == rank) == pytest.approx(peak)


def test_time_unit_is_stated() -> None:
    assert "1 ms" in trace.chrome(CASES["1f1b"]())["otherData"]["time"]
    assert trace.chrome(CASES["dualpipe"]())["otherData"]["time"] == "costs in us"


def test_it_is_json_without_nan(timeline: Timeline) -> None:
    assert json.loads(json.dumps(trace.chrome(timeline), allow_nan=False))["displayTimeUnit"] == "ms"
