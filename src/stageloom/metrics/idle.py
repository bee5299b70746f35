"""Idle time: where it is, what causes it, and when no rank has any.

Causes, first that applies:
    warm-up    before the rank's first op: nothing has reached it yet
    drain      the rank has no forward left: it waits for backwards of the stages after it, or for the end
    memory     a forward was there to run, but it would have held more activations than the rank's peak
    message    what the rank waits for has been computed and is on its way
    neighbour  what the rank waits for has not been computed yet
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stageloom.metrics._columns import TOLERANCE, Floats, firsts, per_rank
from stageloom.metrics.memory import MemoryCurve, memory_curve
from stageloom.op import Kind
from stageloom.simulate import Timeline

CAUSES: Final = ("warm-up", "drain", "message", "neighbour", "memory")
WARM_UP, DRAIN, MESSAGE, NEIGHBOUR, MEMORY = range(len(CAUSES))


@dataclass(frozen=True)
class Gaps:
    """Idle intervals of all ranks over the whole run, by rank and time; one is split where its cause changes."""

    rank: NDArray[np.int32]
    start: Floats
    end: Floats
    cause: NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.rank)

    def by_cause(self) -> dict[str, float]:
        """Idle time of all ranks together, by cause."""
        time = np.bincount(self.cause, weights=self.end - self.start, minlength=len(CAUSES))
        return {cause: float(time[index]) for index, cause in enumerate(CAUSES)}

    def rows(self) -> list[dict[str, float | int | str]]:
        """One record an interval."""
        columns = zip(self.rank.tolist(), self.start.tolist(), self.end.tolist(), self.cause.tolist(), strict=True)
        return [
            {"rank": rank, "start": start, "end": end, "cause": CAUSES[cause]} for rank, start, end, cause in columns
        ]

    def by_rank(self, ranks: int) -> Floats:
        """Idle time `[rank, cause]`."""
        time = np.zeros((ranks, len(CAUSES)))
        np.add.at(time, (self.rank, self.cause), self.end - self.start)
        return time


@dataclass(frozen=True)
class Window:
    """An interval of time."""

    start: float
    end: float


def idle(timeline: Timeline) -> tuple[NDArray[np.int64], Floats, Floats]:
    """(row, start, end) of idle intervals: before each row that starts later than its rank's previous op ended.

    The time after a rank's last op has row -1 - rank.
    """
    offsets, start, end = timeline.schedule.offsets, timeline.start, timeline.end
    begin, finish = _span(timeline)
    before = np.empty_like(start)
    before[1:] = end[:-1]
    before[firsts(offsets)] = begin
    rows = np.flatnonzero(start - before > TOLERANCE * (finish - begin))
    last = per_rank(np.maximum, end, offsets, begin)
    ranks = np.flatnonzero(finish - last > TOLERANCE * (finish - begin))
    return (
        np.concatenate((rows, -1 - ranks)),
        np.concatenate((before[rows], last[ranks])),
        np.concatenate((start[rows], np.full(len(ranks), finish))),
    )


def _span(timeline: Timeline) -> tuple[float, float]:
    if not len(timeline.start):
        return 0.0, 0.0
    return float(timeline.start.min()), float(timeline.end.max())


def gaps(timeline: Timeline, curve: MemoryCurve | None = None) -> Gaps:
    """Every idle interval with its cause."""
    schedule = timeline.schedule
    row, start, end = idle(timeline)
    after = row < 0
    rank = np.where(after, -1 - row, schedule.rank[np.maximum(row, 0)]).astype(np.int32)
    at = np.maximum(row, 0)
    first = np.zeros(len(schedule), dtype=np.bool_)
    first[firsts(schedule.offsets)] = True
    next_forward = _next_forward(timeline)

    # From when on what it waits for is on its way, and from when on a forward could have run but for memory.
    source = schedule.links.source[at]
    waits = ~after & (source >= 0)
    sent = np.where(waits, timeline.end[np.maximum(source, 0)], end)
    on_its_way = np.clip(sent, start, end)
    held_back = np.clip(_held_back(timeline, at, next_forward, curve), start, end)
    held_back[after] = end[after]

    warm, drain = first[at] & ~after, after | (next_forward[at] < 0)
    plain = ~warm & ~drain
    pieces = [
        (warm, start, end, WARM_UP),
        (drain & ~warm, start, end, DRAIN),
        (plain, start, np.minimum(on_its_way, held_back), NEIGHBOUR),
        (plain, np.minimum(on_its_way, held_back), held_back, MESSAGE),
        (plain, held_back, end, MEMORY),
    ]
    small = TOLERANCE * (float(timeline.end.max(initial=0.0)) - float(timeline.start.min(initial=0.0)))
    kept = [(np.flatnonzero(which & (to - since > small)), since, to, cause) for which, since, to, cause in pieces]
    ranks = np.concatenate([rank[which] for which, _, _, _ in kept])
    starts = np.concatenate([since[which] for which, since, _, _ in kept])
    ends = np.concatenate([to[which] for which, _, to, _ in kept])
    causes = np.concatenate([np.full(len(which), cause, dtype=np.int8) for which, _, _, cause in kept])
    order = np.lexsort((starts, ranks))
    return Gaps(ranks[order], starts[order], ends[order], causes[order])


def _next_forward(timeline: Timeline) -> NDArray[np.int64]:
    """For every row the first forward at or after it on its rank, -1 where none is left."""
    schedule = timeline.schedule
    rows = len(schedule)
    candidate = np.where(schedule.kind == Kind.F, np.arange(rows), rows)
    following = np.minimum.accumulate(candidate[::-1])[::-1]
    stop = np.repeat(schedule.offsets[1:], np.diff(schedule.offsets))
    return np.where(following < stop, following, -1)


def _held_back(
    timeline: Timeline, at: NDArray[np.int64], next_forward: NDArray[np.int64], curve: MemoryCurve | None
) -> Floats:
    """When the rank's next forward could have run in the gap before row `at`, had memory allowed; inf where never."""
    schedule = timeline.schedule
    if not len(schedule):
        return np.full(len(at), np.inf)
    curve = memory_curve(timeline) if curve is None else curve
    peak = per_rank(np.maximum, curve.units, schedule.offsets, 0.0)[schedule.rank[at]]
    one = schedule.ranks / schedule.stages / schedule.slices
    held = curve.units[np.maximum(at - 1, 0)]
    forward = next_forward[at]
    # A forward that is itself what the rank waits for is not held back by memory.
    blocked = (forward > at) & (held + one > peak + 1e-9)
    return np.where(blocked, timeline.arrival[np.maximum(forward, 0)], np.inf)


def whole_windows(timeline: Timeline) -> tuple[float | None, Window | None]:
    """(first instant with every rank busy, longest interval with every rank busy); None where there is none."""
    begin, finish = _span(timeline)
    _, start, end = idle(timeline)
    if finish <= begin:
        return None, None
    order = np.argsort(start)
    covered = np.concatenate(([begin], np.maximum.accumulate(end[order])))
    opens = np.concatenate((start[order], [finish]))
    width = opens - covered
    found = np.flatnonzero(width > TOLERANCE * (finish - begin))
    if not len(found):
        return None, None
    longest = found[np.argmax(width[found])]
    return float(covered[found[0]]), Window(float(covered[longest]), float(opens[longest]))
