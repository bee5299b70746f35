"""A timeline as a trace for Perfetto and chrome://tracing (Trace Event Format, JSON).

A process a rank. Its threads: `compute`, `compute (overlapped)` for the second op of a pair (two slices of one time
cannot share a track), and `messages` for what the rank sends, on as many tracks as are on their way at once. Arrows run
from the op that sends to the op that waits; a counter shows the activations held.
"""

from __future__ import annotations

import heapq
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stageloom import metrics
from stageloom.op import KIND_NAMES
from stageloom.render._chart import held
from stageloom.render._slots import captions
from stageloom.simulate import Timeline

Event = dict[str, Any]
COMPUTE: Final = 0
OVERLAPPED: Final = 1
MESSAGES: Final = 2  # and up
MILLISECOND: Final = 1000.0  # microseconds that one unit becomes where the costs name no unit
TITLES: Final = ("forward", "backward, input gradient", "backward, weight gradient", "backward, both gradients")


def chrome(timeline: Timeline) -> dict[str, Any]:
    """The trace as a JSON object. Without a time unit, one unit becomes one millisecond (see otherData)."""
    schedule, seconds = timeline.schedule, timeline.costs.seconds
    scale = MILLISECOND if seconds is None else seconds * 1e6
    tracks = _message_tracks(timeline)
    body = _ops(timeline, scale) + _messages(timeline, tracks, scale) + _memory(timeline, scale)
    body.sort(key=lambda event: event["ts"])
    values = metrics.measure(timeline)
    note = "1 unit of the costs is drawn as 1 ms" if seconds is None else f"costs in {timeline.costs.unit}"
    return {
        "traceEvents": _names(timeline, tracks) + body,
        "displayTimeUnit": "ms",
        "otherData": {
            "producer": "stageloom",
            "schedule": schedule.name,
            "ranks": schedule.ranks,
            "microbatches": schedule.microbatches,
            "time": note,
            "makespan": float(values.makespan),
            "bubble_rate": float(values.bubble_rate),
        },
    }


def _names(timeline: Timeline, tracks: NDArray[np.int64]) -> list[Event]:
    """Metadata: names and order of processes and threads."""
    schedule, messages = timeline.schedule, timeline.messages
    sender_rank = schedule.rank[messages.sender]
    events: list[Event] = []

    def say(what: str, pid: int, tid: int, key: str, value: object) -> None:
        events.append({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {key: value}})

    for rank in range(schedule.ranks):
        say("process_name", rank, 0, "name", f"rank {rank}")
        say("process_sort_index", rank, 0, "sort_index", rank)
        threads = {COMPUTE: "compute"}
        if schedule.pair[schedule.offsets[rank] : schedule.offsets[rank + 1]].any():
            threads[OVERLAPPED] = "compute (overlapped)"
        own = np.unique(tracks[(sender_rank == rank) & (tracks >= 0)]).tolist()
        threads |= {MESSAGES + track: f"messages {track + 1}" if len(own) > 1 else "messages" for track in own}
        for tid, name in threads.items():
            say("thread_name", rank, tid, "name", name)
            say("thread_sort_index", rank, tid, "sort_index", tid)
    return events


def _clock(time: NDArray[np.float64], scale: float) -> NDArray[np.float64]:
    """Microseconds on a grid of nanoseconds, so that slices that touch in time also touch in the file."""
    return np.round(time * scale, 3)


def _ops(timeline: Timeline, scale: float) -> list[Event]:
    schedule = timeline.schedule
    start, end = _clock(timeline.start, scale), _clock(timeline.end, scale)
    second = np.append(False, schedule.pair[:-1])
    overlapped = schedule.pair | second
    columns = (
        schedule.kind.tolist(),
        schedule.stage.tolist(),
        schedule.microbatch.tolist(),
        schedule.slice.tolist(),
        schedule.path_of[schedule.microbatch].tolist(),
        schedule.versions.tolist(),
        overlapped.tolist(),
        schedule.rank.tolist(),
        np.where(second, OVERLAPPED, COMPUTE).tolist(),
        start.tolist(),
        np.round(end - start, 3).tolist(),
        captions(schedule),
    )
    return [
        {
            "ph": "X",
            "name": f"{KIND_NAMES[kind]}{caption}",
            "cat": TITLES[kind],
            "pid": rank,
            "tid": tid,
            "ts": ts,
            "dur": dur,
            "args": {
                "kind": KIND_NAMES[kind],
                "stage": stage,
                "microbatch": microbatch,
                "slice": cut,
                "path": path,
                "version": version,
                "overlapped": joined,
            },
        }
        for kind, stage, microbatch, cut, path, version, joined, rank, tid, ts, dur, caption in zip(
            *columns, strict=True
        )
    ]


def _message_tracks(timeline: Timeline) -> NDArray[np.int64]:
    """The track of every message among its sender's, -1 for one that takes no time: no two on a track overlap."""
    messages = timeline.messages
    rank = timeline.schedule.rank[messages.sender].tolist()
    depart, arrive = messages.depart.tolist(), messages.arrive.tolist()
    tracks = np.full(len(messages), -1, dtype=np.int64)
    free: dict[int, list[int]] = {}
    busy: dict[int, list[tuple[float, int]]] = {}
    for at in np.argsort(messages.depart, kind="stable").tolist():
        if arrive[at] <= depart[at]:
            continue
        idle, running = free.setdefault(rank[at], []), busy.setdefault(rank[at], [])
        while running and running[0][0] <= depart[at]:
            heapq.heappush(idle, heapq.heappop(running)[1])
        track = heapq.heappop(idle) if idle else len(running)
        heapq.heappush(running, (arrive[at], track))
        tracks[at] = track
    return tracks


def _messages(timeline: Timeline, tracks: NDArray[np.int64], scale: float) -> list[Event]:
    """A slice for each message that takes time, and an arrow from sender to receiver for each."""
    schedule, messages = timeline.schedule, timeline.messages
    if not len(messages):
        return []
    second = np.append(False, schedule.pair[:-1])
    tid = np.where(second, OVERLAPPED, COMPUTE)
    start, end = _clock(timeline.start, scale), _clock(timeline.end, scale)
    # The arrow leaves just inside its slice: at the very end it would bind to the slice after it.
    leave = np.round(np.maximum(start, end - np.minimum((end - start) / 100, 1.0)), 3)[messages.sender]
    depart, arrive = _clock(messages.depart, scale), _clock(messages.arrive, scale)
    columns = (
        schedule.rank[messages.sender].tolist(),
        schedule.rank[messages.receiver].tolist(),
        tid[messages.sender].tolist(),
        tid[messages.receiver].tolist(),
        tracks.tolist(),
        schedule.kind[messages.receiver].tolist(),
        schedule.microbatch[messages.receiver].tolist(),
        leave.tolist(),
        start[messages.receiver].tolist(),
        depart.tolist(),
        np.round(arrive - depart, 3).tolist(),
    )
    events: list[Event] = []
    rows = zip(*columns, strict=True)
    for number, (source, target, out, into, track, kind, microbatch, left, met, ts, dur) in enumerate(rows):
        what = "activations" if kind == 0 else "gradients"
        if track >= 0:
            name, args = (
                f"{what} {microbatch} to rank {target}",
                {"from": source, "to": target, "microbatch": microbatch},
            )
            slot = {"ph": "X", "name": name, "cat": "message", "pid": source, "tid": MESSAGES + track}
            events.append(slot | {"ts": ts, "dur": dur, "args": args})
        arrow = {"name": what, "cat": "message", "id": number}
        events.append(arrow | {"ph": "s", "pid": source, "tid": out, "ts": left})
        events.append(arrow | {"ph": "f", "bp": "e", "pid": target, "tid": into, "ts": met})
    return events


def _memory(timeline: Timeline, scale: float) -> list[Event]:
    """Counters: activations in micro-batches of a rank's layers, and in bytes where the costs give bytes."""
    curve = metrics.memory_curve(timeline)
    events: list[Event] = []
    counters = [("activations held", "micro-batches", curve.units)]
    if curve.bytes.any():
        counters.append(("activation bytes", "bytes", curve.bytes))
    for rank in range(timeline.schedule.ranks):
        own = slice(int(curve.offsets[rank]), int(curve.offsets[rank + 1]))
        if own.start == own.stop:
            continue
        for name, unit, values in counters:
            time, value = held(curve.time[own], values[own])
            ts = _clock(time, scale).tolist()
            events += [
                {"ph": "C", "name": name, "pid": rank, "ts": at, "args": {unit: amount}}
                for at, amount in zip(ts, np.round(value, 9).tolist(), strict=True)
            ]
    return events
