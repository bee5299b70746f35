"""List scheduling under memory limits: whenever a rank is free it takes the ready op of the best priority.

A rule's priorities are periodic: the i-th op of class (kind, place) has `phase[kind, place] + i * period`, smaller
first, so the difference of two phases over the period is how many micro-batches a place runs ahead. W fills waits; it
also runs when more than `hold` of a rank's are owed, or when a forward is wanted that memory keeps out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from stageloom._kernel import Kernel
from stageloom.search.problem import Floats, Ints, Longs, Problem

NEVER = 1e300


@Kernel
def dispatch(
    stages: int,
    count: Any,
    rank_of: Any,
    members: Any,
    first: Any,
    last_of: Any,
    time: Any,
    step: Any,
    lag: Any,
    fused: Any,
    limit: Any,
    offsets: Any,
    due: Any,
    ahead: Any,
    hold: Any,
    wait: float,
    fill: float,
    order: Any,
    spans: Any,
) -> bool:
    """Build one order. Fills `order` (classes, rank by rank) and `spans` (first start, last end of every rank).

    `due[kind, place, n]`: priority of every op, smaller first.
    `members[first[rank] : first[rank + 1]]`: the places of a rank; `last_of[place]`: the last place of its path on its
    rank. `ahead[place]`: the most micro-batches between its F and its B. `wait`: an op that arrives within this part
    of the best one's time goes before it where its priority is better. `fill`: the part of a W that may stick out of a
    wait. False where no op can run any more: a deadlock.
    """
    places = count.shape[0]
    ranks = limit.shape[0]
    most = 0
    for place in range(places):
        most = max(most, count[place])
    ends = np.zeros((2, places, most))
    done = np.zeros((3, places), dtype=np.int64)
    clock = np.zeros(ranks)
    look = np.zeros(ranks)
    held = np.zeros(ranks, dtype=np.int64)
    at = offsets[:-1].copy()
    for rank in range(ranks):
        spans[0, rank] = -1.0
    left = offsets[ranks]
    while left > 0:
        rank = 0
        for each in range(1, ranks):
            if look[each] < look[rank]:
                rank = each
        now = look[rank]
        if now >= 1e299:
            return False
        # The best op that can run now, the best that is on its way, and the W that is owed longest.
        best = -1
        best_priority = 1e300
        coming = 1e300
        coming_priority = 1e300
        coming_soonest = 1e300
        shut_out = False
        weight = -1
        weight_priority = 1e300
        owed = 0
        for member in range(first[rank], first[rank + 1]):
            place = members[member]
            stage = place % stages
            forward = done[0, place]
            back = done[1, place]
            if not fused[place] and done[2, place] < back:
                owed += back - done[2, place]
                priority = due[2, place, done[2, place]]
                if priority < weight_priority:
                    weight_priority = priority
                    weight = place
            if back < forward:
                ready = ends[0, place, back]
                if stage < stages - 1:
                    if done[1, place + 1] > back:
                        ready = max(ready, ends[1, place + 1, back] + lag[1, place])
                    else:
                        ready = 1e300
                priority = due[1, place, back]
                if step[1, place] > 0 and held[rank] + step[1, place] > limit[rank]:
                    shut_out = shut_out or ready <= now
                elif ready <= now:
                    if priority < best_priority:
                        best_priority = priority
                        best = places + place
                elif ready < 1e299:
                    coming_soonest = min(coming_soonest, ready)
                    if priority < coming_priority:
                        coming_priority = priority
                        coming = ready
            if forward < count[place] and forward - back < ahead[place]:
                ready = 0.0
                if stage > 0:
                    if done[0, place - 1] > forward:
                        ready = ends[0, place - 1, forward] + lag[0, place]
                    else:
                        ready = 1e300
                if ready >= 1e299:
                    continue
                priority = due[0, place, forward]
                # What must stay free: a micro-batch that has begun here has to reach its last place on this rank,
                # and the other path must not be shut out for good.
                reserve = 0
                for other_member in range(first[rank], first[rank + 1]):
                    other = members[other_member]
                    if other // stages != place // stages:
                        if done[0, other] == done[1, other] and done[0, other] < count[other]:
                            reserve += step[0, other]
                    elif other > place and done[0, other] <= done[0, last_of[place]]:
                        reserve += step[0, other]
                if held[rank] + step[0, place] + reserve > limit[rank]:
                    shut_out = shut_out or ready <= now
                elif ready <= now:
                    if priority < best_priority:
                        best_priority = priority
                        best = place
                else:
                    coming_soonest = min(coming_soonest, ready)
                    if priority < coming_priority:
                        coming_priority = priority
                        coming = ready
        chosen = best
        if best >= 0 and coming_priority < best_priority:
            taken = time[best // places, best % places]
            if coming <= now + wait * taken:
                chosen = -1
        if chosen < 0:
            until = coming if best >= 0 else coming_soonest
            if weight >= 0 and (shut_out or until - now >= (1.0 - fill) * time[2, weight]):
                chosen = 2 * places + weight
        elif weight >= 0 and owed > hold[rank]:
            chosen = 2 * places + weight
        if chosen < 0:
            until = coming if best >= 0 else coming_soonest
            look[rank] = until
            continue
        kind = chosen // places
        place = chosen % places
        which = done[kind, place]
        end = now + time[kind, place]
        if spans[0, rank] < 0:
            spans[0, rank] = now
        spans[1, rank] = end
        order[at[rank]] = chosen
        at[rank] += 1
        left -= 1
        done[kind, place] += 1
        held[rank] += step[kind, place]
        clock[rank] = end
        look[rank] = end
        if kind < 2:
            ends[kind, place, which] = end
            other = place + 1 if kind == 0 else place - 1
            if other // stages == place // stages and other >= 0:
                target = rank_of[other]
                if target != rank:
                    arrival = max(clock[target], end + lag[kind, other])
                    if arrival < look[target]:
                        look[target] = arrival
        if left > 0 and at[rank] == offsets[rank + 1]:
            look[rank] = 1e300
    return True


@dataclass(frozen=True)
class Rule:
    """Parameters of one run of `dispatch`, as described there."""

    phase: Floats
    period: float
    ahead: Longs
    hold: Longs
    wait: float
    fill: float

    def due(self, problem: Problem) -> Floats:
        """Priority `[kind, place, n]` of every op."""
        most = int(problem.count.max())
        return self.phase[:, :, None] + self.period * np.arange(most)


def scheduled(problem: Problem, rule: Rule, due: Floats | None = None) -> tuple[Ints, Floats] | None:
    """(order, spans) of one run, with `due` in place of the rule's priorities where given; None where it deadlocks."""
    order = np.empty(problem.ops, dtype=np.int32)
    spans = np.zeros((2, problem.ranks))
    members, first, last_of = problem.members
    done = dispatch.pick(problem.ops)(
        problem.stages, problem.count, problem.rank, members, first, last_of, problem.time, problem.step, problem.lag,
        problem.fused, problem.limit, problem.offsets, rule.due(problem) if due is None else due, rule.ahead, rule.hold,
        rule.wait, rule.fill, order, spans,
    )  # fmt: skip
    return (order, spans) if done else None
