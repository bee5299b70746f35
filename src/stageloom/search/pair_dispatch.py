"""List scheduling with pairs: a free rank that has a forward and a backward ready does both at once.

A forward runs alone only while fewer than `ahead[place]` micro-batches of its place are under way; beyond that it waits
for a backward to run beside. A backward waits for a forward that arrives within `patience` of what a pair would save,
else it runs alone, as B; its W fills waits, or runs where memory keeps a forward out. Which of several places comes
first is said by periodic priorities, as in `dispatch`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stageloom._kernel import Kernel
from stageloom.search.bounds import ways
from stageloom.search.pairing import Items, Tables
from stageloom.search.problem import Floats, Longs


@Kernel
def dispatch_pairs(
    stages: int, most: int, count: Any, rank_of: Any, members: Any, first: Any, last_of: Any, time: Any, paired: Any,
    step: Any, lag: Any, fused: Any, limit: Any, base: Any, phase: Any, period: float, ahead: Any, patience: float,
    fill: float, front: Any, rear: Any, size: Any,
) -> bool:  # fmt: skip
    """Build one order into `front`, `rear`, `size`; `members`, `first`, `last_of` as in `Problem.members`. False where
    nothing can run any more: a deadlock."""
    places = count.shape[0]
    ranks = limit.shape[0]
    ends = np.zeros((2, places, most))
    done = np.zeros((2, places), dtype=np.int64)
    owed = np.zeros(places, dtype=np.int64)
    clock = np.zeros(ranks)
    look = np.zeros(ranks)
    held = np.zeros(ranks, dtype=np.int64)
    left = 0
    for place in range(places):
        left += 2 * count[place]
    for rank in range(ranks):
        size[rank] = 0
    forced = False
    while True:
        rank = 0
        for each in range(1, ranks):
            if look[each] < look[rank]:
                rank = each
        now = look[rank]
        if now >= 1e299:
            # All wait for one another: one forward more than `ahead` says is let through.
            if forced or left == 0:
                break
            forced = True
            for each in range(ranks):
                look[each] = clock[each]
            continue
        # The best forward and the best backward that can run now, those to come, and the W that is owed longest.
        fore = -1
        back = -1
        fore_priority = 1e300
        back_priority = 1e300
        fore_coming = 1e300
        back_coming = 1e300
        weight = -1
        weight_priority = 1e300
        shut_out = False
        room = limit[rank] - held[rank]
        for member in range(first[rank], first[rank + 1]):
            place = members[member]
            stage = place % stages
            forward = done[0, place]
            behind = done[1, place]
            if owed[place] > 0:
                priority = phase[1, place] + (behind - owed[place]) * period
                if priority < weight_priority:
                    weight_priority = priority
                    weight = place
            if behind < forward:
                ready = ends[0, place, behind]
                if stage < stages - 1:
                    ready = (
                        max(ready, ends[1, place + 1, behind] + lag[1, place]) if done[1, place + 1] > behind else 1e300
                    )
                priority = phase[1, place] + behind * period
                if ready > now:
                    back_coming = min(back_coming, ready)
                elif priority < back_priority:
                    back_priority = priority
                    back = place
            if forward < count[place]:
                ready = 0.0
                if stage > 0:
                    ready = ends[0, place - 1, forward] + lag[0, place] if done[0, place - 1] > forward else 1e300
                if ready >= 1e299:
                    continue
                # What must stay free, so that what has begun here reaches its last place on this rank.
                reserve = 0
                for other_member in range(first[rank], first[rank + 1]):
                    other = members[other_member]
                    if other // stages != place // stages:
                        if done[0, other] == done[1, other] and done[0, other] < count[other]:
                            reserve += step[0, other]
                    elif other > place and done[0, other] <= done[0, last_of[place]]:
                        reserve += step[0, other]
                if step[0, place] + reserve > room:
                    shut_out = shut_out or ready <= now
                    continue
                priority = phase[0, place] + forward * period
                if ready > now:
                    fore_coming = min(fore_coming, ready)
                elif priority < fore_priority:
                    fore_priority = priority
                    fore = place
        kind = 0
        until = min(fore_coming, back_coming)
        if fore >= 0 and back >= 0:
            kind = 3
        elif back >= 0:
            # alone, unless a forward comes soon enough or memory lets a B that allocates not in
            kind = 3 if fused[back] else 1
            saves = paired[1, back] - time[3, back]
            if fore_coming - now <= -patience * saves:
                back = -1
                until = fore_coming
            elif step[kind, back] > room and step[kind, back] > 0:
                kind = 3
        elif fore >= 0 and not forced and done[0, fore] - done[1, fore] >= ahead[fore]:
            until = back_coming
            fore = -1
        if (
            weight >= 0
            and (back < 0 or fore < 0)
            and ((shut_out and back < 0) or (fore < 0 and back < 0 and until - now >= (1.0 - fill) * time[2, weight]))
        ):
            kind = 2
            fore = -1
            back = weight
        if fore < 0 and back < 0:
            look[rank] = until
            continue
        if fore >= 0 and back >= 0:
            end = now + paired[0, fore] + paired[1, back]
        elif fore >= 0:
            end = now + time[0, fore]
        else:
            end = now + time[kind, back]
        forced = False
        row = base[rank] + size[rank]
        front[row] = fore
        rear[row] = kind * places + back if back >= 0 else -1
        size[rank] += 1
        clock[rank] = end
        look[rank] = end
        for turn in range(2):
            place = fore if turn == 0 else back
            if place < 0:
                continue
            part = 0 if turn == 0 else kind
            held[rank] += step[part, place]
            if part == 2:
                owed[place] -= 1
                continue
            if part == 1:
                owed[place] += 1
            which = done[turn, place]
            ends[turn, place, which] = end
            done[turn, place] = which + 1
            left -= 1
            other = place + 1 if turn == 0 else place - 1
            if other >= 0 and other // stages == place // stages:
                target = rank_of[other]
                arrival = max(clock[target], end + lag[turn, other])
                if arrival < look[target]:
                    look[target] = arrival
        # no message comes any more: what is left are W's
        if left == 0:
            for each in range(ranks):
                if look[each] >= 1e299:
                    look[each] = clock[each]
    return left == 0 and owed.sum() == 0


@dataclass(frozen=True)
class PairRule:
    """Parameters of one run of `dispatch_pairs`, as described there."""

    phase: Floats
    period: float
    ahead: Longs
    patience: float
    fill: float


def scheduled(tables: Tables, rule: PairRule) -> Items | None:
    """The order of one run; None where it deadlocks."""
    problem = tables.problem
    into = np.full((2, problem.ops), -1, dtype=np.int32)
    size = np.zeros(problem.ranks, dtype=np.int64)
    members, first, last_of = problem.members
    done = dispatch_pairs.pick(problem.ops)(
        problem.stages, int(problem.count.max()), problem.count, problem.rank, members, first, last_of, tables.time,
        tables.paired, tables.step, problem.lag, problem.fused, problem.limit, problem.offsets, rule.phase, rule.period,
        rule.ahead, rule.patience, rule.fill, into[0], into[1], size,
    )  # fmt: skip
    return Items(into[0], into[1], size) if done else None


def grid(tables: Tables) -> Iterator[PairRule]:
    """Rules to begin with: how far forwards run ahead, and how long a backward waits for one."""
    problem = tables.problem
    found = ways(problem)
    busy = np.zeros(problem.ranks)
    np.add.at(busy, problem.rank, problem.count * tables.paired.sum(axis=0))
    period = float(busy.max()) / problem.microbatches
    trip = found.back - found.head + problem.time[0]
    phase = np.stack((found.head, found.back))
    for reach in (1.0, 1.3, 0.75, 1.6, 0.5, 2.0, 3.0):
        ahead = np.maximum(1, np.rint(trip * reach / period)).astype(np.int64)
        for patience in (0.5, 0.0, 1.0, 2.0):
            for lead in (0.0, 1.0, -1.0):
                late = phase + np.array([[0.0], [lead * period]])
                yield PairRule(late, period, ahead, patience, 0.3)


def changed(rule: PairRule, random: np.random.Generator) -> PairRule:
    """A rule near this one."""
    what = random.integers(0, 10)
    if what < 5:
        mask = random.random(len(rule.ahead)) < float(random.choice((0.1, 0.4)))
        mask[random.integers(0, len(mask))] = True
        return replace(rule, ahead=np.maximum(1, rule.ahead + mask * random.integers(-2, 3, len(mask))))
    if what < 9:
        mask = random.random(rule.phase.shape) < float(random.choice((0.1, 0.4)))
        size = rule.period * float(random.choice((0.3, 1.0, 3.0)))
        return replace(rule, phase=rule.phase + mask * random.normal(0, size, rule.phase.shape))
    return replace(rule, patience=float(random.random() * 2), fill=float(random.random()))
