"""Which layers stand on which stage: stages of even work, the embedding and the head counted as what they cost.

Exact dynamic programming for stages of even time, then single layers move while that makes the busiest rank (which may
hold several stages) less busy.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from stageloom.placement import Placement

Floats = NDArray[np.float64]
Counts = tuple[int, ...]

POWER = 8
"""Stages are evened out by the sum of this power of their times: near the smallest maximum, and even below it."""

DIGITS = 2
"""Times are told apart to this many digits of a layer, so that layouts that differ little are laid out once."""

ROUNDS = 24


def laid_out(work: Floats, placement: Placement) -> Counts:
    """Layers of every stage, first stage first. work: seconds of the embedding, of each layer, and of the head.

    Stages between the first and the last hold at least one layer. There have to be as many layers as stages.
    """
    unit = float(np.median(work[1:-1])) or 1.0
    key = tuple(np.round(work / unit, DIGITS).tolist())
    return _laid_out(key, placement)


@lru_cache(maxsize=65536)
def _laid_out(work: tuple[float, ...], placement: Placement) -> Counts:
    stages, layers = placement.stages, len(work) - 2
    if stages == 1:
        return (layers,)
    total = np.concatenate(([0.0], np.cumsum(np.asarray(work))))
    items = _refined(_even(total, stages), total, placement)
    items[0] -= 1
    items[-1] -= 1
    return tuple(items.tolist())


def _even(total: Floats, stages: int) -> NDArray[np.int64]:
    """Items of every stage: the smallest sum of powers, exact. `total`: running sum of the items' times."""
    size = len(total)
    mean = total[-1] / stages
    spans = np.maximum(total[None, :] - total[:, None], 0.0) / mean
    cost = np.where(np.tri(size, dtype=bool), np.inf, spans**POWER)  # [from, to), at least one item
    best = cost[0]
    came = np.zeros((stages, size), dtype=np.int64)
    for stage in range(1, stages):
        through = best[:, None] + cost
        came[stage] = through.argmin(axis=0)
        best = through[came[stage], np.arange(size)]
    edges = [size - 1]
    for stage in range(stages - 1, 0, -1):
        edges.append(int(came[stage, edges[-1]]))
    edges.append(0)
    return np.diff(np.array(edges[::-1], dtype=np.int64))


def _refined(items: NDArray[np.int64], total: Floats, placement: Placement) -> NDArray[np.int64]:
    stages = placement.stages
    holds = np.zeros((stages, placement.ranks))
    for path in placement.table:
        np.add.at(holds, (np.arange(stages), path), 1.0)

    def judged(counts: NDArray[np.int64]) -> tuple[Floats, Floats, Floats]:
        """(busiest rank, unevenness of stages, times of ranks) of each row of counts."""
        ends = np.cumsum(counts, axis=1)
        times = np.diff(total[ends], axis=1, prepend=total[0])
        ranks = times @ holds
        return ranks.max(axis=1), (times**2).sum(axis=1), ranks

    worst, uneven, ranks = judged(items[None])
    for _ in range(ROUNDS):
        busiest = int(ranks[0].argmax())
        moves: list[NDArray[np.int64]] = []
        for source in np.flatnonzero(holds[:, busiest]):
            if items[source] < 2:
                continue
            for target in range(stages):
                if target != source:
                    moved = items.copy()
                    moved[source] -= 1
                    moved[target] += 1
                    moves.append(moved)
        if not moves:
            break
        tried = np.stack(moves)
        each, spread, _ = judged(tried)
        at = int(np.lexsort((spread, np.round(each, 9)))[0])
        better = each[at] < worst[0] - 1e-9 or (each[at] < worst[0] + 1e-9 and spread[at] < uneven[0] - 1e-9)
        if not better:
            break
        items = tried[at]
        worst, uneven, ranks = judged(items[None])
    return items
