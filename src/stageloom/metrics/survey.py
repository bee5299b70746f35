"""One walk over a timeline, rank by rank, from which all numbers come; compiled for big schedules.

The kernel looks at every row twice: once for what a rank does and holds, once, with its peak known, for its idle time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stageloom._kernel import Kernel
from stageloom.rules import ALLOCATES
from stageloom.simulate import Timeline

Floats = NDArray[np.float64]

CAUSES: Final = ("warm-up", "drain", "message", "neighbour", "memory")
"""Why a rank is idle; see `metrics.idle`. The kernel uses their positions."""

TOLERANCE: Final = 1e-9
"""Idle time below this part of the makespan is rounding, not idle time."""


@dataclass(frozen=True)
class Survey:
    """What each rank did: one value a rank, and its idle intervals one after another.

    `first`, `last`: its first start and last end (0 for a rank without ops); `busy`: its busy time, a pair once;
    `first_backward`, `last_forward`: the first start and the last end of those (inf, -inf where it has none);
    `units`, `bytes`: its peak of activations; `messages`: those it received from other ranks.
    """

    first: Floats
    last: Floats
    busy: Floats
    first_backward: Floats
    last_forward: Floats
    units: Floats
    bytes: Floats
    messages: NDArray[np.int64]
    gap_rank: NDArray[np.int32]
    gap_start: Floats
    gap_end: Floats
    gap_cause: NDArray[np.int8]


def span(timeline: Timeline) -> tuple[float, float]:
    """First start and last end; (0, 0) for a schedule without ops."""
    if not len(timeline.start):
        return 0.0, 0.0
    return float(timeline.start.min()), float(timeline.end.max())


def survey(timeline: Timeline) -> Survey:
    """Walk the timeline. The arrays for idle intervals are cut to what was found."""
    schedule, costs = timeline.schedule, timeline.costs
    ranks, rows = schedule.ranks, len(schedule)
    begin, finish = span(timeline)
    per_stage = isinstance(costs.activation_bytes, list)
    bytes_of = costs.pieces("activation_bytes", schedule.stages, ranks) / schedule.slices
    shares = np.array([1.0 - costs.w_share, costs.w_share])
    results = np.zeros((7, ranks))
    messages = np.zeros(ranks, dtype=np.int64)
    room = 3 * (rows + ranks)  # an interval has three pieces at most; only what is written takes memory
    gap_rank, gap_cause = np.empty(room, dtype=np.int32), np.empty(room, dtype=np.int8)
    gap_start, gap_end = np.empty(room), np.empty(room)
    found = _walk.pick(rows)(
        schedule.offsets,
        schedule.kind,
        schedule.stage,
        schedule.pair,
        schedule.links.source,
        timeline.start,
        timeline.end,
        timeline.arrival,
        begin,
        finish,
        TOLERANCE * (finish - begin),
        ALLOCATES.astype(np.int64),  # sums of 8 bits would overflow in plain Python
        shares,
        ALLOCATES @ shares,
        ranks / schedule.stages / schedule.slices,
        per_stage,
        bytes_of,
        results,
        messages,
        gap_rank,
        gap_start,
        gap_end,
        gap_cause,
    )
    first, last, busy, first_backward, last_forward, units, held = results
    if not per_stage:
        held = units * float(np.ravel(costs.activation_bytes)[0])
    gap = (gap_rank[:found], gap_start[:found], gap_end[:found], gap_cause[:found])
    return Survey(first, last, busy, first_backward, last_forward, units, held, messages, *gap)


@Kernel
def _walk(
    offsets: Any,
    kind: Any,
    stage: Any,
    pair: Any,
    source: Any,
    start: Any,
    end: Any,
    arrival: Any,
    begin: float,
    finish: float,
    small: float,
    allocates: Any,
    shares: Any,
    steps: Any,
    scale: float,
    per_stage: bool,
    bytes_of: Any,
    results: Any,
    messages: Any,
    gap_rank: Any,
    gap_start: Any,
    gap_end: Any,
    gap_cause: Any,
) -> int:
    """Fill `results[what, rank]` (in the order of `Survey`), `messages` and the gaps; returns the number of gaps."""
    gaps = 0
    for rank in range(offsets.shape[0] - 1):
        low = offsets[rank]
        high = offsets[rank + 1]
        # ------------------------------------------------------------------- what it does, and the most it holds
        busy = 0.0
        first_backward = np.inf
        last_forward = -np.inf
        by_b = 0
        by_w = 0
        held = 0.0
        units = 0.0
        peak = 0.0
        received = 0
        row = low
        while row < high:
            stop = row + 2 if pair[row] else row + 1
            busy += end[row] - start[row]
            # what is allocated at the start of the op (or pair) counts before what is freed at its end
            allocating = False
            for each in range(row, stop):
                if steps[kind[each]] > 0.0:
                    allocating = True
                    by_b += allocates[kind[each], 0]
                    by_w += allocates[kind[each], 1]
                    if per_stage:
                        held += steps[kind[each]] * bytes_of[stage[each]]
            if allocating:
                now = by_b * shares[0] + by_w * shares[1]
                if now > units:
                    units = now
                if held > peak:
                    peak = held
            for each in range(row, stop):
                if steps[kind[each]] <= 0.0:
                    by_b += allocates[kind[each], 0]
                    by_w += allocates[kind[each], 1]
                    if per_stage:
                        held += steps[kind[each]] * bytes_of[stage[each]]
            for each in range(row, stop):
                if kind[each] == 0:
                    if end[each] > last_forward:
                        last_forward = end[each]
                elif start[each] < first_backward:
                    first_backward = start[each]
                sender = source[each]
                if sender >= 0 and (sender < low or sender >= high):
                    received += 1
            row = stop
        results[2, rank] = busy
        results[3, rank] = first_backward
        results[4, rank] = last_forward
        results[5, rank] = units * scale
        results[6, rank] = peak
        messages[rank] = received
        # ------------------------------------------------------------------------------------ when it is idle, and why
        before = begin
        by_b = 0
        by_w = 0
        forward = low  # the first forward after the op in hand
        row = low
        while row < high:
            stop = row + 2 if pair[row] else row + 1
            if forward < stop:
                forward = stop
            while forward < high and kind[forward] != 0:
                forward += 1
            now = start[row]
            if now - before > small:
                own_forward = kind[row] == 0 or kind[stop - 1] == 0
                if row == low or (forward == high and not own_forward):
                    gap_rank[gaps] = rank
                    gap_start[gaps] = before
                    gap_end[gaps] = now
                    gap_cause[gaps] = 0 if row == low else 1
                    gaps += 1
                else:
                    # from when on what it waits for is on its way (where nothing is waited for, its own send held it)
                    late = row if arrival[row] >= arrival[stop - 1] else stop - 1
                    on_its_way = end[source[late]] if source[late] >= 0 else before
                    on_its_way = min(max(on_its_way, before), now)
                    # from when on the next forward could have run, had there been room for it
                    held_back = now
                    room = by_b * shares[0] + by_w * shares[1] + shares[0] + shares[1] <= units + 1e-9
                    if not own_forward and forward < high and not room:
                        held_back = min(max(arrival[forward], before), now)
                    cut = min(on_its_way, held_back)
                    for piece in range(3):
                        since = before if piece == 0 else cut if piece == 1 else held_back
                        until = cut if piece == 0 else held_back if piece == 1 else now
                        if until - since > small:
                            gap_rank[gaps] = rank
                            gap_start[gaps] = since
                            gap_end[gaps] = until
                            gap_cause[gaps] = 3 if piece == 0 else 2 if piece == 1 else 4
                            gaps += 1
            for each in range(row, stop):
                by_b += allocates[kind[each], 0]
                by_w += allocates[kind[each], 1]
            before = end[row]
            row = stop
        results[0, rank] = start[low] if high > low else 0.0
        results[1, rank] = before if high > low else 0.0
        if finish - before > small:
            gap_rank[gaps] = rank
            gap_start[gaps] = before
            gap_end[gaps] = finish
            gap_cause[gaps] = 1
            gaps += 1
    return gaps


@Kernel
def busy_between(offsets: Any, pair: Any, start: Any, end: Any, begin: float, finish: float, inside: Any) -> None:
    """Fill `inside[rank]` with the busy time of each rank between two instants."""
    for rank in range(offsets.shape[0] - 1):
        total = 0.0
        row = offsets[rank]
        while row < offsets[rank + 1]:
            if end[row] > begin and start[row] < finish:
                total += min(end[row], finish) - max(start[row], begin)
            row += 2 if pair[row] else 1
        inside[rank] = total
