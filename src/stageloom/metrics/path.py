"""The critical path: the chain of ops and messages that makes the run as long as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from stageloom.metrics.survey import TOLERANCE
from stageloom.simulate import Timeline


@dataclass(frozen=True)
class Step:
    """One link of the critical path: an op on its rank, or the message from it (`row` is the sender's) to another."""

    what: Literal["op", "message"]
    row: int
    rank: int
    start: float
    end: float
    text: str


def critical_path(timeline: Timeline) -> list[Step]:
    """From the first op to the last end; each step starts when the one before ends. Empty for an empty schedule."""
    schedule = timeline.schedule
    if not len(schedule):
        return []
    source, offsets, rank = schedule.links.source, schedule.offsets, schedule.rank
    small = TOLERANCE * float(timeline.end.max() - timeline.start.min())
    row = int(np.argmax(timeline.end))
    steps: list[Step] = []
    while True:
        start = float(timeline.start[row])
        steps.append(Step("op", row, int(rank[row]), start, float(timeline.end[row]), str(schedule.op(row))))
        # An overlapped pair is one op here: what held it back may have come for either half.
        low = row - 1 if row > offsets[rank[row]] and schedule.pair[row - 1] else row
        high = low + 1 if schedule.pair[low] else low
        late = max(range(low, high + 1), key=lambda each: float(timeline.arrival[each]))
        sender = int(source[late])
        if sender >= 0 and timeline.arrival[late] >= start - small:
            if rank[sender] != rank[row]:
                text = f"{schedule.op(sender)} from rank {rank[sender]} to rank {rank[row]}"
                leaves = float(timeline.end[sender])
                steps.append(Step("message", sender, int(rank[sender]), leaves, start, text))
            row = sender
        elif low > offsets[rank[row]]:
            row = low - 1
        else:
            return steps[::-1]
