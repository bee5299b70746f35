"""Orders in time: the longest path of one, what its ranks hold, and local search over it.

An order is one column of classes (`kind * places + place`), rank by rank; the n-th op of a class is the n-th
micro-batch of its path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from stageloom._kernel import Kernel
from stageloom.search.problem import Floats, Ints, Problem


@Kernel
def replay(
    stages: int,
    count: Any,
    rank_of: Any,
    time: Any,
    step: Any,
    lag: Any,
    limit: Any,
    offsets: Any,
    order: Any,
    spans: Any,
) -> int:
    """Run an order. Fills `spans` (first start, last end of every rank); 0, 1 for a deadlock, 2 for too much memory."""
    places = count.shape[0]
    ranks = limit.shape[0]
    most = 0
    for place in range(places):
        most = max(most, count[place])
    ends = np.full((2, places, most), -1.0)
    done = np.zeros((3, places), dtype=np.int64)
    held = np.zeros(ranks, dtype=np.int64)
    at = offsets[:-1].copy()
    stack = np.zeros(ranks + 1, dtype=np.int64)
    waiting = np.full((2, places), -1)
    depth = ranks
    ran = 0
    for rank in range(ranks):
        stack[rank] = rank
        spans[0, rank] = -1.0
        spans[1, rank] = 0.0
    while depth > 0:
        depth -= 1
        rank = stack[depth]
        row = at[rank]
        now = spans[1, rank]
        while row < offsets[rank + 1]:
            kind = order[row] // places
            place = order[row] % places
            which = done[kind, place]
            begin = now
            if kind == 0:
                if place % stages > 0:
                    if done[0, place - 1] <= which:
                        waiting[0, place - 1] = rank
                        break
                    begin = max(begin, ends[0, place - 1, which] + lag[0, place])
            elif kind == 1:
                if done[0, place] <= which:
                    break
                if place % stages < stages - 1:
                    if done[1, place + 1] <= which:
                        waiting[1, place + 1] = rank
                        break
                    begin = max(begin, ends[1, place + 1, which] + lag[1, place])
            elif done[1, place] <= which:
                break
            if step[kind, place] > 0 and held[rank] + step[kind, place] > limit[rank]:
                return 2
            held[rank] += step[kind, place]
            if spans[0, rank] < 0:
                spans[0, rank] = begin
            now = begin + time[kind, place]
            if kind < 2:
                ends[kind, place, which] = now
                if waiting[kind, place] >= 0:
                    stack[depth] = waiting[kind, place]
                    depth += 1
                    waiting[kind, place] = -1
            done[kind, place] += 1
            row += 1
            ran += 1
        at[rank] = row
        spans[1, rank] = now
    return 0 if ran == offsets[ranks] else 1


@dataclass(frozen=True)
class Value:
    """What an order takes: makespan (first start to last end) and cost (the longest rank's own span)."""

    makespan: float
    cost: float

    def of(self, objective: str) -> float:
        return self.cost if objective == "cost" else self.makespan


def value_of(spans: Floats) -> Value:
    return Value(float(spans[1].max() - spans[0].min()), float((spans[1] - spans[0]).max()))


def evaluate(problem: Problem, order: Ints) -> Value | None:
    """What an order takes; None where it cannot run, or holds more than a limit."""
    spans = np.zeros((2, problem.ranks))
    fault = replay.pick(problem.ops)(
        problem.stages, problem.count, problem.rank, problem.time, problem.step, problem.lag, problem.limit,
        problem.offsets, order, spans,
    )  # fmt: skip
    return None if fault else value_of(spans)


@Kernel
def longest(stages: int, count: Any, time: Any, lag: Any, offsets: Any, order: Any, start: Any, end: Any) -> int:
    """Start and end of every row of an order; how many ran."""
    places = count.shape[0]
    ranks = offsets.shape[0] - 1
    most = 0
    for place in range(places):
        most = max(most, count[place])
    row_at = np.full((3, places, most), -1)
    done = np.zeros((3, places), dtype=np.int64)
    at = offsets[:-1].copy()
    ran = 0
    moving = True
    while moving:
        moving = False
        for rank in range(ranks):
            row = at[rank]
            while row < offsets[rank + 1]:
                kind = order[row] // places
                place = order[row] % places
                which = done[kind, place]
                begin = end[row - 1] if row > offsets[rank] else 0.0
                if kind == 0:
                    if place % stages > 0:
                        if done[0, place - 1] <= which:
                            break
                        begin = max(begin, end[row_at[0, place - 1, which]] + lag[0, place])
                elif kind == 1:
                    if done[0, place] <= which:
                        break
                    if place % stages < stages - 1:
                        if done[1, place + 1] <= which:
                            break
                        begin = max(begin, end[row_at[1, place + 1, which]] + lag[1, place])
                elif done[1, place] <= which:
                    break
                start[row] = begin
                end[row] = begin + time[kind, place]
                row_at[kind, place, which] = row
                done[kind, place] += 1
                row += 1
                ran += 1
                moving = True
            at[rank] = row
    return ran


def starts(problem: Problem, order: Ints) -> tuple[Floats, Floats]:
    """(start, end) of every row of an order that can run."""
    start, end = np.zeros(problem.ops), np.zeros(problem.ops)
    longest.pick(problem.ops)(
        problem.stages, problem.count, problem.time, problem.lag, problem.offsets, order, start, end
    )
    return start, end
