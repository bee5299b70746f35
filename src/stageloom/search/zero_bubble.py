"""ZB-1p, ZB-2p and every limit between: the zero-bubble paper's greedy for one stage a rank.

Source: Qi et al., arXiv 2401.10241, section 3.1, and the choices that the authors' program makes where the paper is
short (sail-sg/zero-bubble-pipeline-parallelism, scheduler `zb`). The order is built a micro-batch at a time: a
warm-up of forwards, then in turn a forward on every rank from the first and a backward on every rank from the last,
with W put where a rank would wait or where its memory is full. Three yes-or-no choices are tried in all eight
combinations, and the order of the least cost is kept.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from stageloom._kernel import Kernel
from stageloom.costs import Costs
from stageloom.errors import ConstraintError
from stageloom.placement import line
from stageloom.schedule import Schedule
from stageloom.search.problem import Problem, pose, to_schedule

Found = tuple[float, Any]


@Kernel
def greedy(
    microbatches: int, time: Any, step: Any, lag: Any, limit: Any, late: bool, backward: bool, fill: bool, order: Any
) -> float:
    """One order, written to `order[rank, position]` as kinds. Returns its cost, or -1 where the memory is too small.

    late: the warm-up may hold up the first backward. backward: a forward that would hold up the next rank's backward
    waits. fill: a W fills a wait that is shorter than itself even where the rank is not the one that waits most.
    """
    ranks = time.shape[1]
    done = np.zeros((3, ranks), dtype=np.int64)
    ends = np.zeros((2, ranks, microbatches))
    clock = np.zeros(ranks)
    held = np.zeros(ranks, dtype=np.int64)
    waited = np.zeros(ranks)
    first = np.zeros(ranks)

    def put(kind: int, rank: int) -> None:
        which = done[kind, rank]
        begin = clock[rank]
        if kind == 0 and rank > 0:
            begin = max(begin, ends[0, rank - 1, which] + lag[0, rank])
        elif kind == 1 and rank < ranks - 1:
            begin = max(begin, ends[1, rank + 1, which] + lag[1, rank])
        if done[0, rank] > 0:
            waited[rank] += begin - clock[rank]
        else:
            first[rank] = begin
        order[rank, done[0, rank] + done[1, rank] + done[2, rank]] = kind
        clock[rank] = begin + time[kind, rank]
        if kind < 2:
            ends[kind, rank, which] = clock[rank]
        held[rank] += step[kind, rank]
        done[kind, rank] += 1

    def make_room(kind: int, rank: int) -> bool:
        while held[rank] + step[kind, rank] > limit[rank]:
            if done[2, rank] >= done[1, rank]:
                return False
            put(2, rank)
        return True

    def bridge(rank: int, arrival: float) -> None:
        """Put W's into the wait for what arrives; the last may stick out."""
        while done[2, rank] < done[1, rank] and clock[rank] + time[2, rank] <= arrival:
            put(2, rank)
        if (
            done[2, rank] < done[1, rank]
            and clock[rank] < arrival
            and (fill or arrival - clock[rank] > waited.max() - waited[rank])
        ):
            put(2, rank)

    # The warm-up: as many forwards as fit before the first backward arrives, fewer on every further rank.
    for rank in range(ranks):
        if not make_room(0, rank):
            return -1.0
        put(0, rank)
    more = np.zeros(ranks, dtype=np.int64)
    arrival = ends[0, ranks - 1, 0] + time[1, ranks - 1]
    for rank in range(ranks - 2, -1, -1):
        arrival += lag[1, rank]
        until = clock[rank]
        would = held[rank]
        while 1 + more[rank] < microbatches and would + step[0, rank] <= limit[rank]:
            if until + time[0, rank] > arrival if late else until >= arrival:
                break
            would += step[0, rank]
            until += time[0, rank]
            more[rank] += 1
        arrival = max(until, arrival) + time[1, rank]
    for rank in range(1, ranks):
        more[rank] = min(more[rank], more[rank - 1])  # it cannot run what has not been run before it
        while more[rank] > 0 and more[rank] >= more[rank - 1] and 1 + more[rank] < microbatches:
            more[rank] -= 1
    for rank in range(ranks):
        for _ in range(more[rank]):
            put(0, rank)
    for rank in range(ranks - 1, -1, -1):
        if not make_room(1, rank):
            return -1.0
        put(1, rank)

    go = np.zeros(ranks, dtype=np.bool_)
    for which in range(1, microbatches):
        for rank in range(ranks):
            go[rank] = done[0, rank] < microbatches
            if go[rank] and backward and rank + 1 < ranks and done[0, rank] >= done[0, rank + 1] + 2:
                arrival = clock[rank + 1] + time[0, rank + 1] + time[1, rank + 1] + lag[1, rank]
                if clock[rank] >= arrival:
                    go[rank] = False
                    continue
                owed = 0
                would = held[rank] + step[0, rank]
                while would > limit[rank] and done[2, rank] + owed < done[1, rank]:
                    would += step[2, rank]
                    owed += 1
                if clock[rank] + time[0, rank] + owed * time[2, rank] > arrival:
                    go[rank] = arrival - clock[rank] > waited.max() - waited[rank]
        for rank in range(ranks - 2, -1, -1):
            go[rank] = go[rank] and go[rank + 1]
        for rank in range(ranks):
            # This turn's backward needs its forward, which uneven stages may have held back (the authors' program then
            # stops with a failed assertion).
            if go[rank] or done[0, rank] <= which:
                if not make_room(0, rank):
                    return -1.0
                if rank > 0:
                    bridge(rank, ends[0, rank - 1, done[0, rank]] + lag[0, rank])
                put(0, rank)
        for rank in range(ranks - 1, -1, -1):
            if not make_room(1, rank):
                return -1.0
            if rank + 1 < ranks:
                bridge(rank, ends[1, rank + 1, which] + lag[1, rank])
            if rank == 0 and done[0, 0] == microbatches:
                while done[2, 0] < done[1, 0]:
                    put(2, 0)
            put(1, rank)
    cost = 0.0
    for rank in range(ranks):
        while done[2, rank] < microbatches:
            put(2, rank)
        cost = max(cost, clock[rank] - first[rank])
    return cost


def orders(problem: Problem) -> list[Found]:
    """(cost, order of kinds `[rank, position]`) of all eight choices that fit the limits, in the program's order."""
    found: list[Found] = []
    for choice in range(8):
        order = np.zeros((problem.ranks, 3 * problem.microbatches), dtype=np.int32)
        flags = [not choice & bit for bit in (4, 2, 1)]
        run = greedy.pick(8 * problem.ops)
        cost = float(run(problem.microbatches, problem.time, problem.step, problem.lag, problem.limit, *flags, order))
        if cost >= 0:
            found.append((cost, order))
    return found


def classes(problem: Problem, kinds: Any) -> Any:
    """Orders of kinds, one row a rank, as one column of classes."""
    return (kinds * problem.places + np.arange(problem.ranks)[:, None]).reshape(-1).astype(np.int32)


def zero_bubble(ranks: int, microbatches: int, costs: Costs, memory: Fraction, name: str) -> Schedule:
    """The order of the least cost that holds at most `memory` times 1F1B's P micro-batches on any rank."""
    problem = pose(line(ranks), microbatches, costs, limit=float(memory * ranks))
    found = orders(problem)
    if not found:
        raise ConstraintError(name, f"the greedy finds no order within {float(memory):g} of 1F1B's memory", "give more")
    _, kinds = min(found, key=lambda each: each[0])
    return to_schedule(problem, classes(problem, kinds), name)
