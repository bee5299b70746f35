"""Idle time: where it is, what causes it, and when no rank has any.

Causes, first that applies:
    warm-up    before the rank's first op: nothing has reached it yet
    drain      the rank has no forward left: it waits for backwards of the stages after it, or for the end
    memory     a forward was there to run, but it would have held more activations than the rank's peak
    message    what the rank waits for has been computed and is on its way (or its own blocking send is)
    neighbour  what the rank waits for has not been computed yet
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stageloom.metrics.survey import CAUSES, TOLERANCE, Floats, Survey, span, survey
from stageloom.simulate import Timeline


@dataclass(frozen=True)
class Gaps:
    """Idle intervals of all ranks over the whole run, by rank and time; one is split where its cause changes.

    `cause` is a position in CAUSES.
    """

    rank: NDArray[np.int32]
    start: Floats
    end: Floats
    cause: NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.rank)

    def by_cause(self) -> dict[str, float]:
        """Idle time of all ranks together, by cause."""
        time = np.bincount(self.cause, weights=self.end - self.start, minlength=len(CAUSES))
        return {cause: float(time[index]) for index, cause in enumerate(CAUSES)}

    def rows(self) -> list[dict[str, float | int | str]]:
        """One record an interval."""
        columns = zip(self.rank.tolist(), self.start.tolist(), self.end.tolist(), self.cause.tolist(), strict=True)
        return [
            {"rank": rank, "start": start, "end": end, "cause": CAUSES[cause]} for rank, start, end, cause in columns
        ]

    def by_rank(self, ranks: int) -> Floats:
        """Idle time `[rank, cause]`."""
        time = np.zeros((ranks, len(CAUSES)))
        np.add.at(time, (self.rank, self.cause), self.end - self.start)
        return time


@dataclass(frozen=True)
class Window:
    """An interval of time."""

    start: float
    end: float


def gaps(timeline: Timeline, found: Survey | None = None) -> Gaps:
    """Every idle interval with its cause."""
    found = survey(timeline) if found is None else found
    return Gaps(found.gap_rank, found.gap_start, found.gap_end, found.gap_cause)


def whole_windows(timeline: Timeline, idle: Gaps | None = None) -> tuple[float | None, Window | None]:
    """(first instant with every rank busy, longest interval with every rank busy); None where there is none."""
    begin, finish = span(timeline)
    if finish <= begin:
        return None, None
    idle = gaps(timeline) if idle is None else idle
    order = np.argsort(idle.start)
    covered = np.concatenate(([begin], np.maximum.accumulate(idle.end[order])))
    opens = np.concatenate((idle.start[order], [finish]))
    width = opens - covered
    whole = np.flatnonzero(width > TOLERANCE * (finish - begin))
    if not len(whole):
        return None, None
    longest = whole[np.argmax(width[whole])]
    return float(covered[whole[0]]), Window(float(covered[longest]), float(opens[longest]))
