"""Probing windows: suppose one more thing; where that contradicts, the opposite is certain.

Windows that stand still may still have no order. Two ops of a rank run one way round or the other; an op starts before
the middle of its window or after. Each half that is refuted narrows the windows for good.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from stageloom.search.deadline import Table, Windows, shrink

PARTS: Final = (0.5, 0.25, 0.75)
"""Where in its window an op's start is parted."""
WORTH: Final = 1e-3
"""Windows with less room than this part of the deadline are left alone."""


@dataclass
class Probe:
    """Windows of one deadline, and the work (as `shrink` counts it) that may still be spent on them."""

    table: Table
    windows: Windows
    deadline: float
    work: int
    found: int = 0
    """Things that were found to be certain."""

    @property
    def spent(self) -> bool:
        return self.work <= 0

    def settle(self, rank: int | None = None) -> bool:
        """Narrow the windows; False where they contradict."""
        possible, work = shrink(self.table, self.windows, self.deadline, rank)
        self.work -= work
        return possible

    def fails(self, rank: int, column: int, at: tuple[int, ...], value: float) -> bool:
        """Do the windows contradict once this number of theirs (of `es`, `le` or `ahead`, of an op of this rank) is
        changed?"""
        supposed = self.windows[0].copy(), self.windows[1].copy(), self.windows[2].copy()
        supposed[column][at] = value
        possible, work = shrink(self.table, supposed, self.deadline, rank)
        self.work -= work
        return not possible

    def learn(self, rank: int, column: int, at: tuple[int, ...], value: float) -> bool:
        """Make it so; False where the windows then contradict."""
        self.windows[column][at] = value
        self.found += 1
        return self.settle(rank)


def probed(probe: Probe, *, halves: bool) -> bool:
    """Whether an order may keep the windows, which are narrowed in place; `halves`: by halves of windows too.

    Goes round until nothing more is found, or the work is spent (True then).
    """
    if not probe.settle():
        return False
    while not probe.spent:
        before = probe.found
        if not _by_pairs(probe) or (halves and not probe.spent and not _by_halves(probe)):
            return False
        if probe.found == before:
            break
    return True


def _by_pairs(probe: Probe) -> bool:
    """Both ways round for two ops of a rank, forwards and backwards, whose order is open."""
    t = probe.table
    places = len(t.size) // 3
    for rank, row in enumerate(t.classes):
        passes = [cls for cls in row.tolist() if 0 <= cls < 2 * places]
        for at, one in enumerate(passes):
            for two in passes[at + 1 :]:
                for n in range(int(t.size[one])):
                    if not _one_against(probe, rank, one, two, n):
                        return False
                    if probe.spent:
                        return True
    return True


def _one_against(probe: Probe, rank: int, one: int, two: int, n: int) -> bool:
    """Op n of class `one` against the first and the last of class `two` that may come on either side of it."""
    t, ahead = probe.table, probe.windows[2]
    x, first, many = int(t.base[one]) + n, int(t.base[two]), int(t.size[two])
    own, other = int(t.local[one]), int(t.local[two])
    while not probe.spent:
        low = int(ahead[x, other])
        if low >= _behind(ahead, first, many, own, n) or not probe.fails(rank, 2, (first + low, own), n + 1):
            break
        if not probe.learn(rank, 2, (x, other), max(low + 1, int(ahead[x, other]))):
            return False
    while not probe.spent:
        high = _behind(ahead, first, many, own, n)
        if int(ahead[x, other]) >= high or not probe.fails(rank, 2, (x, other), high):
            break
        if not probe.learn(rank, 2, (first + high - 1, own), max(n + 1, int(ahead[first + high - 1, own]))):
            return False
    return True


def _behind(ahead: np.ndarray, first: int, many: int, own: int, n: int) -> int:
    """The first of the ops from row `first` on that is known to come after op n of class `own` of the rank."""
    return int(np.searchsorted(ahead[first : first + many, own], n, side="right"))


def _by_halves(probe: Probe) -> bool:
    """Each forward's and each backward's start before and after a point of its window."""
    t = probe.table
    es, le, _ = probe.windows
    took = np.repeat(t.time, t.size)
    for cls in range(2 * (len(t.size) // 3)):
        rank = int(t.rank[cls % len(t.rank)])
        for x in range(int(t.base[cls]), int(t.base[cls] + t.size[cls])):
            for part in PARTS:
                room = float(le[x] - es[x] - took[x])
                if room < WORTH * probe.deadline:
                    break
                start = float(es[x]) + part * room
                end = start + float(took[x])
                if probe.fails(rank, 1, (x,), end) and not probe.learn(rank, 0, (x,), start):
                    return False
                if start > es[x] and probe.fails(rank, 0, (x,), start) and not probe.learn(rank, 1, (x,), end):
                    return False
                if probe.spent:
                    return True
    return True
