"""Loops that run once per op: plain Python for small schedules, the same functions compiled by numba for big ones.

Importing numba costs more than a small schedule takes in plain Python, so it is imported when the first big one
comes (and from then on also serves small ones). `Kernel.plain` and `Kernel.compiled` are the two forms;
tests hold them equal.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from typing import Any, Final

SMALL: Final = 6_000
"""Ops below which plain Python is quicker than importing the compiler."""


class Kernel:
    """A function of numpy columns in both forms; calling it with the number of ops picks one."""

    ready = False  # set once any kernel has been compiled: numba is then loaded anyway

    def __init__(self, plain: Callable[..., Any]) -> None:
        self.plain = plain
        self.__doc__ = plain.__doc__

    @cached_property
    def compiled(self) -> Callable[..., Any]:
        import numba

        Kernel.ready = True
        return numba.njit(cache=_cache_works(), nogil=True)(self.plain)

    def pick(self, ops: int) -> Callable[..., Any]:
        """The form for a schedule of this many ops."""
        return self.compiled if Kernel.ready or ops >= SMALL else self.plain


def _cache_works() -> bool:
    """numba keeps compiled kernels beside this file, under NUMBA_CACHE_DIR or at home; one must be writable."""
    places = (os.path.dirname(__file__), os.environ.get("NUMBA_CACHE_DIR", ""), os.path.expanduser("~"))
    return any(place and os.access(place, os.W_OK) for place in places)


@Kernel
def number(
    offsets: Any,
    codes: Any,
    numbers: Any,
    stage_of: Any,
    path_first: Any,
    path_microbatches: Any,
    slices: int,
    reversed_slices: bool,
    stage: Any,
    microbatch: Any,
    cut: Any,
) -> int:
    """Give every op its stage, micro-batch and slice: the rule at the top of `tape`.

    Fills `stage`, `microbatch`, `cut`. Returns -1, or the row of the first op that asks for a micro-batch, a chunk or a
    split backward that is not there.
    """
    ranks = offsets.shape[0] - 1
    paths = stage_of.shape[1]
    chunks = stage_of.shape[2]
    places = paths * chunks
    for rank in range(ranks):
        forwards = [0] * places
        backwards = [0] * places
        low = offsets[rank]
        high = offsets[rank + 1]
        # A first-in-first-out list of split backwards (rows), and for each place a finger into it.
        pending = [0] * (high - low + 1)
        taken = [False] * (high - low + 1)
        count = 0
        oldest = 0
        finger = [0] * places
        for row in range(low, high):
            code = codes[row]
            kind = code & 3
            path = code >> 3 & 31
            chunk = code >> 8
            if kind == 2:
                # W: the oldest split backward of the rank, or of its own place
                if path == 31:
                    while oldest < count and taken[oldest]:
                        oldest += 1
                    at = oldest
                else:
                    if path >= paths or chunk >= chunks:
                        return row
                    place = path * chunks + chunk
                    at = finger[place]
                    while at < count and (
                        taken[at] or codes[pending[at]] >> 3 & 31 != path or codes[pending[at]] >> 8 != chunk
                    ):
                        at += 1
                    finger[place] = at
                if at >= count:
                    return row
                taken[at] = True
                source = pending[at]
                stage[row] = stage[source]
                microbatch[row] = microbatch[source]
                cut[row] = cut[source]
                continue
            if path >= paths or chunk >= chunks or stage_of[rank, path, chunk] < 0:
                return row
            place = path * chunks + chunk
            if kind == 0:
                index = forwards[place]
                forwards[place] += 1
            else:
                index = backwards[place]
                backwards[place] += 1
            if numbers[row] >= 0:
                index = numbers[row]
            first = path_first[path]
            if index >= (path_first[path + 1] - first) * slices:
                return row
            part = 0
            if slices > 1:  # a division takes as long as everything else here
                part = index % slices
                index //= slices
                if kind != 0 and reversed_slices:
                    part = slices - 1 - part
            stage[row] = stage_of[rank, path, chunk]
            microbatch[row] = path_microbatches[first + index]
            cut[row] = part
            if kind == 1:
                pending[count] = row
                taken[count] = False
                count += 1
    return -1


@Kernel
def link(
    offsets: Any,
    kind: Any,
    stage: Any,
    microbatch: Any,
    cut: Any,
    pair: Any,
    rank_of: Any,
    path_of: Any,
    message_from: Any,
    message_part: Any,
    sequence: bool,
    rows: Any,
    source: Any,
) -> int:
    """Find every op's place in the table of parts, and the row each op's message comes from.

    `rows[part, stage, microbatch, slice]` becomes the row that does that part (-1: nobody), `source[row]` the row whose
    message it waits for (-1: none). Returns the number of faults seen: a part done twice or never, an op on a rank
    that does not hold its stage, an op before (or overlapped with) what it waits for on its own rank, a pair that is
    no pair. The validator says which.
    """
    ranks = offsets.shape[0] - 1
    stages = rank_of.shape[1]
    microbatches = path_of.shape[0]
    slices = rows.shape[3]
    faults = 0
    parts = 0
    for rank in range(ranks):
        for row in range(offsets[rank], offsets[rank + 1]):
            what = kind[row]
            where = stage[row]
            which = microbatch[row]
            part = cut[row]
            source[row] = -1
            # the row this one is overlapped with, if that comes first: it cannot be what this one waits for
            beside = row - 1 if row > offsets[rank] and pair[row - 1] else -1
            if pair[row] and (beside >= 0 or row + 1 == offsets[rank + 1]):
                faults += 1
            if where < 0 or where >= stages or which < 0 or which >= microbatches or part < 0 or part >= slices:
                faults += 1
                continue
            if rank_of[path_of[which], where] != rank:
                faults += 1
            first = 1 if what == 3 else what
            last = 2 if what == 3 else what
            for does in range(first, last + 1):
                if rows[does, where, which, part] >= 0:
                    faults += 1
                else:
                    rows[does, where, which, part] = row
                    parts += 1
            # what must come earlier on this rank: F before B, B before W, slices in their order
            if what == 1 or what == 3:
                earlier = rows[0, where, which, part]
                if earlier < 0 or earlier == beside:
                    faults += 1
                if sequence and part + 1 < slices:
                    earlier = rows[1, where, which, part + 1]
                    if earlier < 0 or earlier == beside:
                        faults += 1
            elif what == 2:
                earlier = rows[1, where, which, part]
                if earlier < 0 or earlier == beside:
                    faults += 1
            elif sequence and part > 0:
                earlier = rows[0, where, which, part - 1]
                if earlier < 0 or earlier == beside:
                    faults += 1
    faults += 3 * stages * microbatches * slices - parts
    for row in range(offsets[ranks]):
        step = message_from[kind[row]]
        where = stage[row] + step
        if step == 0 or where < 0 or where >= stages:
            continue
        which = microbatch[row]
        part = cut[row]
        if which < 0 or which >= microbatches or part < 0 or part >= slices:
            continue
        source[row] = rows[message_part[kind[row]], where, which, part]
        if source[row] < 0:
            faults += 1
    return faults


@Kernel
def longest_path(
    offsets: Any, source: Any, delay: Any, duration: Any, pair: Any, start: Any, end: Any, waiter: Any
) -> int:
    """Start and end of every op: as early as the rank's previous op and the message allow. Returns ops that ran.

    `delay[row]` is the time its incoming message takes; `duration` of a pair's first row is the time of the pair. `end`
    comes in as -1 and `waiter` as -1 in every row. Fewer ops than rows come back where the order deadlocks.
    A rank that must wait is parked at the one row it waits for; running that row puts it back on the stack.
    """
    ranks = offsets.shape[0] - 1
    at = offsets[:-1].copy()
    stack = offsets[:-1].copy()
    clock = [0.0] * ranks
    for rank in range(ranks):
        stack[rank] = ranks - 1 - rank
    depth = ranks
    ran = 0
    while depth > 0:
        depth -= 1
        rank = stack[depth]
        row = at[rank]
        stop = offsets[rank + 1]
        now = clock[rank]
        while row < stop:
            sender = source[row]
            if sender >= 0:
                ready = end[sender]
                if ready < 0.0:
                    waiter[sender] = rank
                    break
                ready += delay[row]
                if ready > now:
                    now = ready
            if pair[row]:
                sender = source[row + 1]
                if sender >= 0:
                    ready = end[sender]
                    if ready < 0.0:
                        waiter[sender] = rank
                        break
                    ready += delay[row + 1]
                    if ready > now:
                        now = ready
                start[row] = now
                start[row + 1] = now
                now += duration[row]
                end[row] = now
                end[row + 1] = now
                if waiter[row] >= 0:
                    stack[depth] = waiter[row]
                    depth += 1
                if waiter[row + 1] >= 0:
                    stack[depth] = waiter[row + 1]
                    depth += 1
                row += 2
                ran += 2
                continue
            start[row] = now
            now += duration[row]
            end[row] = now
            if waiter[row] >= 0:
                stack[depth] = waiter[row]
                depth += 1
            row += 1
            ran += 1
        at[rank] = row
        clock[rank] = now
    return ran


@Kernel
def longest_path_links(
    offsets: Any,
    source: Any,
    link: Any,
    latency: Any,
    transfer: Any,
    links: int,
    occupancy: bool,
    blocking: bool,
    duration: Any,
    pair: Any,
    start: Any,
    end: Any,
    arrive: Any,
    waiter: Any,
) -> int:
    """`longest_path` with links that can be busy and senders that can be held up.

    `link[row]` is the directed link that this row's message takes (-1: none, it stays on its rank), `latency` and
    `transfer` its times. A message leaves when its op has ended and, with
    `occupancy`, when the link has sent the one before; it arrives `transfer + latency` later. With `blocking` the rank
    goes on only then. Fills `arrive[row]` for the message of each row. Messages of one directed link are sent by one
    rank, so its order is the order on the link.
    """
    ranks = offsets.shape[0] - 1
    at = offsets[:-1].copy()
    stack = offsets[:-1].copy()
    clock = [0.0] * ranks
    busy: Any = [0.0] * (links + 1)
    for rank in range(ranks):
        stack[rank] = ranks - 1 - rank
    depth = ranks
    ran = 0
    while depth > 0:
        depth -= 1
        rank = stack[depth]
        row = at[rank]
        now = clock[rank]
        while row < offsets[rank + 1]:
            last = row + 1 if pair[row] else row
            begin = now
            blocked = False
            for each in range(row, last + 1):
                sender = source[each]
                if sender >= 0:
                    if end[sender] < 0.0:
                        waiter[sender] = rank
                        blocked = True
                        break
                    if arrive[sender] > begin:
                        begin = arrive[sender]
            if blocked:
                break
            now = begin + duration[row]
            finish = now
            for each in range(row, last + 1):
                start[each] = begin
                end[each] = finish
                arrive[each] = finish
                if link[each] >= 0:
                    leaves = finish
                    if occupancy:
                        if busy[link[each]] > leaves:
                            leaves = busy[link[each]]
                        busy[link[each]] = leaves + transfer[each]
                    arrive[each] = leaves + transfer[each] + latency[each]
                    if blocking and arrive[each] > now:
                        now = arrive[each]
                if waiter[each] >= 0:
                    stack[depth] = waiter[each]
                    depth += 1
                ran += 1
            row = last + 1
        at[rank] = row
        clock[rank] = now
    return ran
