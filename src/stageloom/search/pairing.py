"""Orders with overlapped pairs: a forward together with the full backward of another micro-batch.

An order of a rank is a list of *items*. An item has a forward part (`front`: its place, or -1), a backward part
(`rear`: its class, `kind * places + place` with the kind B, W or BW, or -1), or both, and is then a pair; the backward
of a pair is always a BW. The n-th forward of a place is its n-th micro-batch, the n-th B or BW too; a W belongs to the
oldest B of its place that has none yet. A rank's items stand at the beginning of its rows, of which it has one an op.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from stageloom._kernel import Kernel
from stageloom.op import Kind
from stageloom.schedule import Schedule
from stageloom.search.order import Value
from stageloom.search.problem import Floats, Ints, Longs, Problem

NONE: Final = -1


@dataclass(frozen=True, eq=False)
class Tables:
    """What a problem is with pairs: `time` and `step` have rows F, B, W, BW. A pair of a forward at place f and a
    backward at place b takes `paired[0, f] + paired[1, b]`."""

    problem: Problem
    time: Floats
    paired: Floats
    step: Longs

    @property
    def whole(self) -> Floats:
        """The least time of every place's backward where it is not overlapped."""
        apart = np.where(self.problem.fused, np.inf, self.time[1] + self.time[2])
        return np.minimum(apart, self.time[3])


@dataclass(frozen=True, eq=False)
class Items:
    """An order with pairs; `size[rank]` items stand from `problem.offsets[rank]` on."""

    front: Ints
    rear: Ints
    size: Longs


def tables_of(problem: Problem) -> Tables:
    """The same times that `simulate.durations` gives to ops and pairs."""
    costs, paths = problem.costs, len(problem.placement.paths)
    times = np.tile(costs.stage_times(problem.stages, problem.ranks), (1, paths))
    factors = costs.rank_factors(problem.ranks)[problem.rank]
    share = costs.overlap_factor()
    step = np.vstack((problem.step, -problem.step[:1]))
    return Tables(
        problem=problem,
        time=(times + costs.overhead) * factors,
        paired=(times[[Kind.F, Kind.BW]] * share + costs.overhead) * factors,
        step=step,
    )


def gains(problem: Problem) -> bool:
    """Whether an overlapped pair takes less than its two ops one after the other."""
    return problem.costs.overlap_factor() < 1


def from_paired(problem: Problem, schedule: Schedule) -> Items | None:
    """The items of a schedule; None where it cannot be said in them, or a stage that is fused splits its backward."""
    if (
        schedule.placement != problem.placement
        or schedule.microbatches != problem.microbatches
        or schedule.slices > 1
        or not schedule.synchronous
        or not np.array_equal(schedule.path_of, problem.path_of)
    ):
        return None
    place = schedule.path_of[schedule.microbatch].astype(np.int64) * problem.stages + schedule.stage
    kind = schedule.kind.astype(np.int64)
    if (problem.fused[place] & ((kind == Kind.B) | (kind == Kind.W))).any():
        return None
    first = np.flatnonzero(schedule.pair)
    both = np.sort(np.stack((kind[first], kind[first + 1])), axis=0)
    if len(first) and ((both[0] != Kind.F) | (both[1] != Kind.BW)).any():
        return None
    front = np.where(kind == Kind.F, place, NONE)
    rear = np.where(kind == Kind.F, NONE, kind * problem.places + place)
    front[first] = np.maximum(front[first], front[first + 1])
    rear[first] = np.maximum(rear[first], rear[first + 1])
    kept = np.ones(len(schedule), dtype=np.bool_)
    kept[first + 1] = False
    return _packed(problem, schedule.rank[kept], front[kept], rear[kept])


def from_order(problem: Problem, order: Ints, pairs: bool) -> Items:
    """The items of an order without pairs; `pairs`: every forward that stands next to a B is overlapped with it, the B
    taking its W along from wherever that stands."""
    places = problem.places
    rank: list[int] = []
    front: list[int] = []
    rear: list[int] = []
    for each in range(problem.ranks):
        found: list[tuple[int, int]] = []
        gone: dict[int, int] = {}  # W's of each place that have gone into a BW
        for code in order[problem.offsets[each] : problem.offsets[each + 1]].tolist():
            kind, place = divmod(code, places)
            if kind == Kind.W and gone.get(place):
                gone[place] -= 1
                continue
            if kind == Kind.F:
                item = (place, NONE)
            else:
                item = (NONE, places * (Kind.BW if kind == Kind.B and problem.fused[place] else kind) + place)
            before = found[-1] if found else (NONE, NONE)
            one, other = (before, item) if kind == Kind.B else (item, before)
            # A forward and a B of one place may be of one micro-batch: the longest path says so, and the order is left.
            if pairs and one[0] >= 0 and one[1] < 0 and other[0] < 0 and other[1] >= 0:
                what, where = divmod(other[1], places)
                if what in (Kind.B, Kind.BW) and one[0] != where:
                    if what == Kind.B:
                        gone[where] = gone.get(where, 0) + 1
                    found[-1] = (one[0], Kind.BW * places + where)
                    continue
            found.append(item)
        rank += [each] * len(found)
        front += [item[0] for item in found]
        rear += [item[1] for item in found]
    return _packed(problem, np.array(rank), np.array(front), np.array(rear))


def _packed(problem: Problem, rank: Any, front: Any, rear: Any) -> Items:
    size = np.bincount(rank, minlength=problem.ranks).astype(np.int64)
    at = problem.offsets[rank] + np.arange(len(rank)) - np.concatenate(([0], np.cumsum(size)))[rank]
    into = np.full((2, problem.ops), NONE, dtype=np.int32)
    into[0, at], into[1, at] = front, rear
    return Items(into[0], into[1], size)


def to_paired(problem: Problem, items: Items, name: str) -> Schedule:
    """The schedule of an order with pairs."""
    places, stages = problem.places, problem.stages
    paths = len(problem.placement.paths)
    numbers = np.argsort(problem.path_of, kind="stable")
    first = np.concatenate(([0], np.cumsum(np.bincount(problem.path_of, minlength=paths))))
    rows: list[tuple[int, int, int, bool]] = []
    offsets = [0]
    for rank in range(problem.ranks):
        done = np.zeros((2, places), dtype=np.int64)
        owed: list[list[int]] = [[] for _ in range(places)]
        low = int(problem.offsets[rank])
        for at in range(low, low + int(items.size[rank])):
            front, rear = int(items.front[at]), int(items.rear[at])
            for kind, place in ((0, front), divmod(rear, places)):
                if place < 0 or (kind and rear < 0):
                    continue
                if kind == Kind.W:
                    which = owed[place].pop(0)
                else:
                    which = int(done[min(kind, 1), place])
                    done[min(kind, 1), place] += 1
                    if kind == Kind.B:
                        owed[place].append(which)
                number = int(numbers[first[place // stages] + which])
                rows.append((kind, place % stages, number, kind == Kind.F and rear >= 0))
        offsets.append(len(rows))
    kind, stage, number, pair = np.array(rows, dtype=np.int64).T
    return Schedule(
        name=name,
        placement=problem.placement,
        microbatches=problem.microbatches,
        offsets=np.array(offsets, dtype=np.int64),
        kind=kind.astype(np.int8),
        stage=stage.astype(np.int32),
        microbatch=number.astype(np.int32),
        slice=np.zeros(len(rows), dtype=np.int32),
        pair=pair.astype(np.bool_),
        path_of=problem.path_of,
    )


@Kernel
def replay(
    stages: int, most: int, time: Any, paired: Any, step: Any, lag: Any, limit: Any, base: Any, front: Any, rear: Any,
    size: Any, start: Any, end: Any,
) -> int:  # fmt: skip
    """Start and end of every item. 0, 1 for an order that cannot run, 2 for too much memory.

    The plain one: it goes over the ranks until nothing moves. All that an item allocates counts before what it frees.
    """
    places = lag.shape[1]
    ranks = limit.shape[0]
    ends = np.full((2, places, most), -1.0)
    done = np.zeros((2, places), dtype=np.int64)
    owed = np.zeros(places, dtype=np.int64)
    held = np.zeros(ranks, dtype=np.int64)
    at = np.zeros(ranks, dtype=np.int64)
    moving = True
    while moving:
        moving = False
        for rank in range(ranks):
            while at[rank] < size[rank]:
                row = base[rank] + at[rank]
                fore = front[row]
                kind = rear[row] // places if rear[row] >= 0 else 0
                back = rear[row] % places if rear[row] >= 0 else -1
                now = end[row - 1] if at[rank] > 0 else 0.0
                if fore >= 0 and fore % stages > 0:
                    ready = ends[0, fore - 1, done[0, fore]]
                    if ready < 0.0:
                        break
                    now = max(now, ready + lag[0, fore])
                if kind == 2:
                    if owed[back] == 0:
                        return 1
                    owed[back] -= 1
                elif kind > 0:
                    if done[0, back] <= done[1, back]:
                        return 1
                    if back % stages < stages - 1:
                        ready = ends[1, back + 1, done[1, back]]
                        if ready < 0.0:
                            break
                        now = max(now, ready + lag[1, back])
                more = 0
                less = 0
                if fore >= 0:
                    more += step[0, fore]
                if back >= 0:
                    if step[kind, back] > 0:
                        more += step[kind, back]
                    else:
                        less -= step[kind, back]
                if more > 0 and held[rank] + more > limit[rank]:
                    return 2
                held[rank] += more - less
                start[row] = now
                if fore >= 0 and back >= 0:
                    now += paired[0, fore] + paired[1, back]
                elif fore >= 0:
                    now += time[0, fore]
                else:
                    now += time[kind, back]
                end[row] = now
                if fore >= 0:
                    ends[0, fore, done[0, fore]] = now
                    done[0, fore] += 1
                if kind == 1 or kind == 3:
                    ends[1, back, done[1, back]] = now
                    done[1, back] += 1
                if kind == 1:
                    owed[back] += 1
                at[rank] += 1
                moving = True
    for rank in range(ranks):
        if at[rank] < size[rank]:
            return 1
    return 0


def evaluate(tables: Tables, items: Items) -> Value | None:
    """What an order with pairs takes; None where it cannot run, or holds more than a limit."""
    problem = tables.problem
    start, end = np.zeros(problem.ops), np.zeros(problem.ops)
    fault = replay.pick(problem.ops)(
        problem.stages, int(problem.count.max()), tables.time, tables.paired, tables.step, problem.lag, problem.limit,
        problem.offsets, items.front, items.rear, items.size, start, end,
    )  # fmt: skip
    if fault:
        return None
    used = np.flatnonzero(items.size)
    begins = start[problem.offsets[used]]
    finishes = end[problem.offsets[used] + items.size[used] - 1]
    return Value(float(finishes.max() - begins.min()), float((finishes - begins).max()))
