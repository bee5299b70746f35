"""Who comes before whom: pairs and sets of ops of a rank that can run in one order only, read off their windows."""

from __future__ import annotations

from typing import Any

import numpy as np

from stageloom._kernel import Kernel


@Kernel
def take_sides(
    size: Any,
    base: Any,
    classes: Any,
    time: Any,
    es: Any,
    le: Any,
    ahead: Any,
    stale: Any,
    work: Any,
    sets: bool,
    eps: float,
) -> int:
    """Raise `ahead` in place, on stale ranks; arguments are `narrow`'s. -1: no order keeps the windows; else whether
    anything was raised.

    - Two ops of a rank: if x cannot end before y has to begin, y comes before x.
    - With `sets`, for every time by which ops have to end: those that have to end by then must fit, one after the
      other; an op that does not fit among them comes after all of them. And the same from the other side: an op that
      does not fit among those that start no earlier than some time comes before all of them.
    """
    ranks = classes.shape[0]
    width = classes.shape[1]
    ops = es.shape[0]
    finger = np.zeros(width, dtype=np.int64)
    row = np.zeros(ops, dtype=np.int64)
    row_class = np.zeros(ops, dtype=np.int64)
    took = np.zeros(ops)
    sums = np.zeros(ops)
    marks = np.zeros(ops)
    moved = 0

    def in_turn(rank: int, key: Any) -> int:
        """The ops of a rank by `key`, which rises within every class, into `row`, `row_class` and `took`."""
        rows = 0
        for c in range(width):
            finger[c] = 0
        while True:
            pick = -1
            least = 1e300
            for c in range(width):
                cls = classes[rank, c]
                if cls >= 0 and finger[c] < size[cls] and key[base[cls] + finger[c]] < least:
                    least = key[base[cls] + finger[c]]
                    pick = c
            if pick < 0:
                return rows
            row[rows] = base[classes[rank, pick]] + finger[pick]
            row_class[rows] = pick
            took[rows] = time[classes[rank, pick]]
            finger[pick] += 1
            rows += 1

    for rank in range(ranks):
        if not stale[3 if sets else 2, rank]:
            continue
        stale[2, rank] = 0
        moved_before = moved
        moved = 0
        rows = in_turn(rank, es)
        work[0] += rows * rows if sets else rows
        for at in range(rows):
            x = row[at]
            until = es[x] + took[at] - eps
            for c in range(width):
                cls = classes[rank, c]
                if cls < 0 or c == row_class[at]:
                    continue
                k = ahead[x, c]
                while k < size[cls] and le[base[cls] + k] - time[cls] < until:
                    k += 1
                if k > ahead[x, c]:
                    ahead[x, c] = k
                    moved = 1
        for each in range(rows if sets else 0):
            until = le[row[each]]
            load = 0.0
            for back in range(rows):
                at = rows - 1 - back
                if le[row[at]] <= until:
                    load += took[at]
                    marks[at] = es[row[at]] + load
                    if marks[at] > until + eps:
                        return -1
                sums[at] = load
            before = -1e300
            for at in range(rows):
                x = row[at]
                if le[x] <= until:
                    before = max(before, marks[at])
                elif max(before, es[x] + sums[at]) + took[at] > until + eps:
                    for c in range(width):
                        cls = classes[rank, c]
                        if cls < 0 or c == row_class[at]:
                            continue
                        k = ahead[x, c]
                        while k < size[cls] and le[base[cls] + k] <= until:
                            k += 1
                        if k > ahead[x, c]:
                            ahead[x, c] = k
                            moved = 1
        if sets:
            stale[3, rank] = 0
            rows = in_turn(rank, le)
        for each in range(rows if sets else 0):
            since = es[row[each]]
            load = 0.0
            for at in range(rows):
                if es[row[at]] >= since:
                    load += took[at]
                    marks[at] = le[row[at]] - load
                    if marks[at] < since - eps:
                        return -1
                sums[at] = load
            after = 1e300
            for back in range(rows):
                at = rows - 1 - back
                x = row[at]
                if es[x] >= since:
                    after = min(after, marks[at])
                elif min(after, le[x] - sums[at]) - took[at] < since - eps:
                    nth = x - base[classes[rank, row_class[at]]]
                    for c in range(width):
                        cls = classes[rank, c]
                        if cls < 0 or c == row_class[at]:
                            continue
                        low = 0
                        high = size[cls]
                        while low < high:
                            middle = (low + high) // 2
                            if es[base[cls] + middle] >= since:
                                high = middle
                            else:
                                low = middle + 1
                        if low < size[cls] and ahead[base[cls] + low, row_class[at]] <= nth:
                            ahead[base[cls] + low, row_class[at]] = nth + 1
                            moved = 1
        if moved:
            for each in range(4):
                stale[each, rank] = 1
        moved = max(moved, moved_before)
    return moved
