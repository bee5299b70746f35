"""What no order can beat where forwards may be overlapped with full backwards.

Two ways to bound one. *Prices*: give F, B and W of every place times so small that no item, alone or a pair, takes less
than its parts together. An order with pairs then becomes one without by doing the parts of each item one after the
other in its place, which ends no later and holds no more; so a bound for orders without pairs at these times holds.
*Stretches* of a rank, with R the earliest start of a backward and X the time that the step needs after the last
forward: before R only forwards run, in the last X only backwards, neither overlapped; what is between holds all pairs.
With k pairs, work = overlapped + alone, and of what is alone no more than a stretch holds stands outside the middle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from stageloom.search.bounds import lower_bound, ways
from stageloom.search.pairing import Tables
from stageloom.search.problem import UNLIMITED, Floats, Problem


def paired_bound(tables: Tables, objective: str) -> float:
    """The largest bound for `makespan` or `cost` of any order whose pairs are a forward and a full backward."""
    best = max(lower_bound(each, objective) for each in _priced(tables))
    quick = _quickest(tables)
    found = ways(quick)
    for rank in range(tables.problem.ranks):
        places = [p for p in tables.problem.places_of(rank) if tables.problem.count[p]]
        if places:
            back = min(float(found.back[p]) for p in places)
            head = min(float(found.head[p]) for p in places)
            after = min(_after(quick, found.back, found.head, found.tail, p) for p in places)
            stretches = (head, back, after) if objective == "makespan" else (0.0, 0.0, 0.0)
            best = max(best, _of_rank(tables, rank, places, *stretches))
    return best


def _after(quick: Problem, back: Floats, head: Floats, tail: Floats, place: int) -> float:
    """Time from the end of a forward at this place to the end of the step, at least."""
    return float(back[place] - head[place] - quick.time[0, place] + quick.time[1, place] + tail[place])


def _relaxed(tables: Tables, forward: Floats, backward: Floats, weight: Floats) -> Problem:
    """The problem at other times. A B that adds to what is held adds nothing here, since in a BW it does not."""
    problem = tables.problem
    step = problem.step.copy()
    step[1] = np.minimum(step[1], 0)
    step[2] = np.where(problem.fused, 0, -step[0] - step[1])
    time = np.stack((forward, np.where(problem.fused, backward + weight, backward), weight * ~problem.fused))
    return replace(problem, time=np.maximum(time, 0.0), step=step)


def _priced(tables: Tables) -> Iterator[Problem]:
    """The problem at several prices; each keeps to F + B + W <= the pair, B + W <= the BW, and every op alone."""
    forward, back = tables.time[0], tables.time[1]
    whole, paired = tables.whole, tables.paired
    share = np.clip(back / np.maximum(tables.time[1] + tables.time[2], 1e-300), 0.0, 1.0)
    quick_forward = np.minimum(forward, paired[0])
    quick_whole = np.minimum(whole, paired[1])
    rest_whole = np.minimum(whole, paired[1] + _least(tables, paired[0] - forward))
    rest_forward = np.minimum(forward, paired[0] + _least(tables, paired[1] - whole))
    for early, late in ((quick_forward, quick_whole), (forward, rest_whole), (rest_forward, whole)):
        if (late < 0).any() or (early < 0).any():
            continue
        for first in (np.minimum(back, late), np.minimum(late * share, back)):
            yield _relaxed(tables, early, first, np.minimum(late - first, tables.time[2]))


def _least(tables: Tables, values: Floats) -> Floats:
    """For every place, the least value among the places of its rank."""
    least = np.full(tables.problem.ranks, np.inf)
    np.minimum.at(least, tables.problem.rank, values)
    return least[tables.problem.rank]


def _quickest(tables: Tables) -> Problem:
    """The problem with every part at the least time in which it can be over, for the way of one micro-batch."""
    pair = tables.paired[0] + _least(tables, tables.paired[1])
    other = tables.paired[1] + _least(tables, tables.paired[0])
    both = np.minimum(tables.whole, other)
    backward = np.where(tables.problem.fused, both, np.minimum(both, tables.time[1]))
    return _relaxed(tables, np.minimum(tables.time[0], pair), backward, both - backward)


def _of_rank(tables: Tables, rank: int, places: list[int], head: float, back: float, after: float) -> float:
    """The bound of one rank by its stretches; with (0, 0, 0) the bound of its work alone."""
    problem, limit = tables.problem, int(tables.problem.limit[rank])
    count = problem.count[places]
    forward, early = (np.repeat(row[places], count) for row in (tables.time[0], tables.paired[0]))
    whole, late = (np.repeat(row[places], count) for row in (tables.whole, tables.paired[1]))
    alone = float(forward.sum() + whole.sum())
    before = min(back - head, _held_forwards(tables, places, limit))
    last = min(after, _held_backwards(tables, places, limit))
    # The first item of a rank is a forward alone, and the last forward's own backward is not beside it or any other.
    most = len(forward) - 1
    middle = _least_middle(forward, early, before)[: most + 1] + _least_middle(whole, late, last)[: most + 1]
    # A step shorter than both stretches has no pair on this rank at all.
    return min(back + after + float(middle.min()), head + alone)


def _least_middle(alone: Floats, paired: Floats, outside: float) -> Floats:
    """For every number of overlapped ops, the least time that they and those alone take in the middle."""
    cheapest = np.concatenate(([0.0], np.cumsum(np.sort(paired))))
    saved = np.concatenate(([0.0], np.cumsum(np.sort(alone - paired)[::-1])))
    return np.maximum(cheapest, alone.sum() - saved - outside)


def _held_forwards(tables: Tables, places: list[int], limit: int) -> float:
    """The most forward work that memory lets a rank do before any backward."""
    step, time = tables.step[0, places], tables.time[0, places]
    if limit >= UNLIMITED // 2 or (step <= 0).any():
        return np.inf
    if (step == step[0]).all():
        return float(limit // int(step[0])) * float(time.max())
    return float(limit * (time / step).max())


def _held_backwards(tables: Tables, places: list[int], limit: int) -> float:
    """The most backward work that can be left on a rank once its last forward has ended, by what memory holds."""
    step = tables.step[:, places]
    if limit >= UNLIMITED // 2 or (step[0] <= 0).any() or (step[1] > 0).any():
        return np.inf
    split = ~tables.problem.fused[places]
    both = np.where(split, np.maximum(tables.time[1, places] + tables.time[2, places], tables.whole[places]), 0.0)
    densest = (np.maximum(both, tables.time[3, places]) / step[0]).max()
    if split.any():
        if (step[2, split] >= 0).any() and (tables.time[2, places][split] > 0).any():
            return np.inf
        owed = tables.time[2, places][split] / np.maximum(-step[2, split], 1)
        densest = max(densest, float(owed.max()))
    return float(limit * densest)
