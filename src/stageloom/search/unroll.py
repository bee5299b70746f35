"""The steady state: find the block that an order repeats, and repeat it as often as a larger step needs.

A cut through time takes from every rank the ops that start after it; where the next ops of every rank hold each class
the same number of times, they are a block. Between its ends each rank holds the same memory, so that the block can be
put in again and again.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from stageloom.search.order import evaluate, starts
from stageloom.search.problem import Ints, Problem, pose_again

LONGEST: Final = 32
"""Micro-batches in the longest block that is looked for."""
CUTS: Final = 400
TRIALS: Final = (2, 6)
"""Times that a block is repeated to see what it adds."""


def unrolled(small: Problem, order: Ints, large: Problem, objective: str) -> Ints | None:
    """The order of `small` made one of `large`, the best over all blocks and cuts; None where no block fits."""
    missing = large.microbatches - small.microbatches
    if len(small.placement.paths) > 1 or missing < 0:
        return None
    if missing == 0:
        return order
    best: tuple[float, int, list[int]] | None = None
    for size in range(1, min(LONGEST, missing, small.microbatches // 2) + 1):
        if missing % size:
            continue
        for cut in _cuts(small, order, size):
            tried: list[float] = []
            for times in TRIALS:
                more = pose_again(small, small.microbatches + times * size)
                value = evaluate(more, _repeated(small, order, cut, size, times))
                tried += [] if value is None else [value.of(objective)]
            if len(tried) < len(TRIALS):
                continue
            # What a block adds once the first are in, taken on to all that are missing.
            rate = (tried[1] - tried[0]) / (TRIALS[1] - TRIALS[0]) / size
            score = tried[1] + rate * (missing - TRIALS[1] * size)
            if best is None or score < best[0] - 1e-9:
                best = score, size, cut
    if best is None:
        return None
    _, size, cut = best
    return _repeated(small, order, cut, size, missing // size)


def _cuts(problem: Problem, order: Ints, size: int) -> list[list[int]]:
    """Where on every rank a block of `size` micro-batches begins, for each instant that gives one."""
    begins, _ = starts(problem, order)
    found: list[list[int]] = []
    middle = float(begins.max()) / 2
    instants: set[float] = set(begins.tolist())
    good = [_good_rows(problem, order, rank, size) for rank in range(problem.ranks)]
    for instant in sorted(instants, key=lambda instant: (abs(instant - middle), instant))[:CUTS]:
        cut: list[int] = []
        for rank in range(problem.ranks):
            low, high = int(problem.offsets[rank]), int(problem.offsets[rank + 1])
            at = int(np.searchsorted(begins[low:high], instant))
            if at >= len(good[rank]) or not good[rank][at]:
                break
            cut.append(at)
        if len(cut) == problem.ranks and cut not in found:
            found.append(cut)
        if len(found) >= 24:
            break
    return found


def _good_rows(problem: Problem, order: Ints, rank: int, size: int) -> list[bool]:
    """Does a block begin at this position of the rank: do the next ops hold each of its classes `size` times?"""
    low, high = int(problem.offsets[rank]), int(problem.offsets[rank + 1])
    _, codes = np.unique(order[low:high], return_inverse=True)
    classes = int(codes.max()) + 1 if len(codes) else 0
    width = classes * size
    if len(codes) < width:
        return []
    counts = np.zeros((classes, len(codes) + 1), dtype=np.int64)
    counts[codes, np.arange(1, len(codes) + 1)] = 1
    counts = counts.cumsum(axis=1)
    return (counts[:, width:] - counts[:, :-width] == size).all(axis=0).tolist()


def _repeated(problem: Problem, order: Ints, cut: list[int], size: int, times: int) -> Ints:
    parts: list[Ints] = []
    for rank, at in enumerate(cut):
        low, high = int(problem.offsets[rank]), int(problem.offsets[rank + 1])
        of_rank = order[low:high]
        width = len(of_rank) // problem.microbatches * size
        parts += [of_rank[:at], np.tile(of_rank[at : at + width], times), of_rank[at:]]
    return np.concatenate(parts)
