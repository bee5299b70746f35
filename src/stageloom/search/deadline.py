"""Bounds by deadlines: a makespan that is refuted is one that no order reaches, so the best is above it.

Every op gets a window of time that the deadline leaves it. `narrow` and `take_sides` shrink the windows, by rules that
hold for every order that keeps the deadline, until one is too short for its op (then no order does), or nothing moves.
Little memory makes long chains in time (a forward waits for backwards, these for the last stage, where forwards and
backwards take turns), and windows follow them through all ranks, both ways.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from stageloom.search.bounds import ways
from stageloom.search.narrow import narrow
from stageloom.search.problem import UNLIMITED, Floats, Longs, Problem
from stageloom.search.sides import take_sides

ROUNDING: Final = 1e-11
"""What sums of times may be off by, as a part of the deadline: windows contradict only where they miss by more."""
STILL: Final = 1e-7
"""A sweep that moves no window by more than this part of the deadline is the last."""
SWEEPS: Final = 20
TURNS: Final = 60
SPEED: Final = 1.5e8
"""Units of work in a nominal second; one is spent for each op of its rank when an op is looked at."""
CALL: Final = 30_000
"""What starting costs, in these units."""

Windows = tuple[Floats, Floats, Longs]
"""Earliest start and latest end of every op, and `ahead` (see `narrow`)."""


@dataclass(frozen=True, eq=False)
class Table:
    """A problem as `narrow` wants it; `head`, `tail`: the least time before and after every op; `ahead` at first."""

    stages: int
    size: Longs
    base: Longs
    rank: Any
    classes: Longs
    local: Longs
    time: Floats
    lag: Floats
    early: Longs
    late: Longs
    limit: Longs
    head: Floats
    tail: Floats
    ahead: Longs

    @property
    def sweep(self) -> float:
        """Nominal seconds in which every op is looked at once."""
        each = np.where(self.classes >= 0, self.size[self.classes], 0).sum(axis=1)
        return float((each.astype(float) ** 2).sum()) / SPEED

    def windows(self, deadline: float) -> Windows:
        """The windows of a deadline, before any is narrowed."""
        return self.head.copy(), deadline - self.tail, self.ahead.copy()


def tabled(problem: Problem) -> Table:
    places, stages = problem.places, problem.stages
    size = np.concatenate((problem.count, problem.count, np.where(problem.fused, 0, problem.count)))
    base = np.concatenate(([0], np.cumsum(size)))[:-1].astype(np.int64)
    on = [[kind * places + place for kind in range(3) for place in problem.places_of(r)] for r in range(problem.ranks)]
    classes = np.full((problem.ranks, max(map(len, on))), -1, dtype=np.int64)
    local = np.zeros(3 * places, dtype=np.int64)
    for rank, row in enumerate(on):
        classes[rank, : len(row)] = row
        local[row] = np.arange(len(row))
    forward, backward, _ = problem.time
    found = ways(problem)
    after = np.zeros(places)
    for place in range(places - 1, -1, -1):
        after[place] = backward[place] + found.tail[place]
        if place % stages < stages - 1:
            further = float(problem.lag[0, place + 1] + forward[place + 1] + after[place + 1])
            after[place] = max(float(after[place]), further)
    head = np.concatenate((found.head, found.back, found.back + backward))
    tail = np.concatenate((after, found.tail, np.zeros(places)))
    of = np.repeat(np.arange(3 * places), size)
    late = np.where(problem.fused, 0, -problem.step[2]).astype(np.int64)
    return Table(
        stages, size, base, problem.rank, classes, local, problem.time.reshape(-1).copy(), problem.lag,
        (problem.step[0] - late).astype(np.int64), late,
        np.where(problem.limit >= UNLIMITED // 2, -1, problem.limit).astype(np.int64), head[of], tail[of],
        _ahead(problem, size, base, classes, local),
    )  # fmt: skip


def _ahead(problem: Problem, size: Longs, base: Longs, classes: Longs, local: Longs) -> Longs:
    """What is ahead of every op whatever the deadline: its class in turn, and the way of its own micro-batch."""
    places, stages = problem.places, problem.stages
    ahead = np.zeros((int(size.sum()), classes.shape[1]), dtype=np.int64)
    for row in classes:
        for cls in row[row >= 0].tolist():
            kind, place = divmod(cls, places)
            nth = np.arange(int(size[cls]))
            ahead[base[cls] + nth, local[cls]] = nth
            for other in row[row >= 0].tolist():
                its_kind, its = divmod(other, places)
                if its // stages != place // stages or size[other] == 0:
                    continue
                forwards = its_kind == 0 and (kind > 0 or its < place)
                if forwards or (its_kind == 1 and ((kind == 2 and its >= place) or (kind == 1 and its > place))):
                    ahead[base[cls] + nth, local[other]] = nth + 1
    return ahead


def shrink(table: Table, windows: Windows, deadline: float, rank: int | None = None) -> tuple[bool, int]:
    """Narrow the windows in place; whether an order may keep them, and the work that it took (see `SPEED`).

    `rank`: the only one where they were changed since they last stood still.
    """
    rounding, work = ROUNDING * deadline, np.full(1, CALL, dtype=np.int64)
    stale = np.full((4, len(table.classes)), rank is None, dtype=np.int64)
    if rank is not None:
        stale[:, rank] = 1
    of_ops = narrow.pick(100 * len(table.head))
    of_ranks = take_sides.pick(100 * len(table.head))
    for _ in range(TURNS):
        swept = of_ops(
            table.stages, table.size, table.base, table.rank, table.classes, table.local, table.time, table.lag,
            table.early, table.late, table.limit, *windows, stale, work, SWEEPS, rounding, STILL * deadline,
        )  # fmt: skip
        if swept < 0:
            return False, int(work[0])
        moved = 0
        for sets in (False, True):
            moved = of_ranks(table.size, table.base, table.classes, table.time, *windows, stale, work, sets, rounding)
            if moved:
                break
        if moved <= 0:
            return moved == 0, int(work[0])
    return True, int(work[0])


def refuted(table: Table, deadline: float) -> bool:
    """Is it certain that no order ends by this time?"""
    return not shrink(table, table.windows(deadline), deadline)[0]
