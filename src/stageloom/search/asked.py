"""A bound that rises by deadlines asked: bisection between what is refuted and what is not, in three depths."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from stageloom.search.deadline import SPEED, Table, Windows
from stageloom.search.probe import Probe, probed

FINE: Final = 3e-4
"""How far apart, as a part, the largest refuted deadline and the smallest that is not may stay."""
HAIR: Final = 5e-10
"""What the best is shortened by, as a part, to ask whether an order is better."""
STEP: Final = 2e-3
"""The first step up from what is refuted, as a part of the best."""
LONGEST: Final = (1.0, 4e-3, 4e-3)
"""The longest step at each depth: one too far is probed in vain, and at length."""
DEPTHS: Final = 3
"""0: windows alone; 1: pairs of ops are probed; 2: halves of windows too."""


@dataclass
class Deadlines:
    """What is known of one problem's deadlines: the largest that is refuted, at each depth the smallest that was not,
    and the windows of the last that was not."""

    table: Table
    low: float
    high: list[float] = field(default_factory=lambda: [np.inf] * DEPTHS)
    effort: float = 0.0
    """Nominal seconds spent."""
    windows: Windows | None = None
    open: dict[int, Probe] = field(default_factory=dict[int, Probe])
    """At each depth, what was not finished when the budget was spent."""

    def pay(self, work: int) -> None:
        self.effort += work / SPEED

    def ask(self, deadline: float, depth: int = 0, budget: float = np.inf) -> bool:
        """Is this deadline refuted, by what `budget` nominal seconds allow?"""
        most = int(min(budget * SPEED, 1e15))
        again = self.open.pop(depth, None)
        if again is not None and again.deadline == deadline:
            probe, again.work = again, most
        else:
            probe, again = Probe(self.table, self.table.windows(deadline), deadline, most), None
        possible = probe.settle() if depth == 0 else probed(probe, halves=depth > 1)
        self.pay(most - probe.work)
        if not possible:
            self.low = max(self.low, deadline)
        elif depth and probe.spent and again is None:
            self.open[depth] = probe
        else:
            self.high[depth] = min(self.high[depth], deadline)
        if possible:
            self.windows = probe.windows
        return not possible

    def below(self, best: float, depth: int = 0, budget: float = np.inf) -> float:
        """A bound, close to the best that this depth gives or as good as `budget` nominal seconds allow; `best`: an
        order's makespan. If that is refuted but for a hair, it is optimal.

        What contradicts does so soon, what does not is probed to the end: so deadlines are asked from below, in steps
        that grow, and by halves once one was not refuted.
        """
        until, step, hair = self.effort + budget, STEP * best, best * (1 - HAIR)
        while self.effort < until and self.low < hair:
            high, asked = min(self.high[depth], hair), self.high[depth] <= hair
            if asked and high - self.low <= FINE * best:
                break
            step = min(step, 0.5 * (high - self.low)) if asked else step
            pending = self.open.get(depth)
            if pending is not None and self.low < pending.deadline <= high:
                deadline = pending.deadline
            else:
                deadline = high if not asked and self.low + 1.5 * step >= high else self.low + step
            if self.ask(deadline, depth, until - self.effort):
                step = min(2 * step, LONGEST[depth] * best)
        return self.low
