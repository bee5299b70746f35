"""Messages between ranks as channels: one queue for each directed pair, or a meeting of sender and receiver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stageloom.schedule import Schedule
from stageloom.validate.problem import Problem, at

Rows = NDArray[np.int64]
SHOWN: Final = 6
"""Messages that are named of either order, from the first difference on."""


def between_ranks(schedule: Schedule) -> tuple[Rows, Rows]:
    """(sender, receiver) rows of every message between two ranks, by receiver, of a sound schedule."""
    source = schedule.links.source
    receiver = np.flatnonzero(source >= 0)
    receiver = receiver[schedule.rank[source[receiver]] != schedule.rank[receiver]]
    return source[receiver].astype(np.int64), receiver


def _channel(schedule: Schedule, sender: Rows, receiver: Rows) -> Rows:
    return schedule.rank[sender].astype(np.int64) * schedule.ranks + schedule.rank[receiver]


def in_order(schedule: Schedule, sender: Rows, receiver: Rows) -> bool:
    """Is every channel emptied in the order in which it is filled?"""
    channel = _channel(schedule, sender, receiver)
    order = np.argsort(channel, kind="stable")
    return not ((np.diff(sender[order]) < 0) & (np.diff(channel[order]) == 0)).any()


def fifo_problems(schedule: Schedule, sender: Rows, receiver: Rows) -> list[Problem]:
    """For each channel the first message that is used out of turn, with both orders from there on."""
    found: list[Problem] = []
    channel = _channel(schedule, sender, receiver)
    for number in np.unique(channel).tolist():
        of_channel = np.flatnonzero(channel == number)
        used = sender[of_channel]
        sent = np.sort(used)
        differ = np.flatnonzero(used != sent)
        if not len(differ):
            continue
        first = int(differ[0])
        source, target = divmod(int(number), schedule.ranks)
        message = (
            f"takes message {first} of the channel from rank {source} to rank {target} out of turn: it is sent in the "
            f"order {_names(schedule, sent[first:])} and used in the order {_names(schedule, used[first:])}"
        )
        rows = int(used[first]), int(sent[first])
        found.append(at(schedule, "fifo", int(receiver[of_channel[first]]), message, rows))
    return found


def _names(schedule: Schedule, rows: Rows) -> str:
    names = ", ".join(str(schedule.op(int(row))) for row in rows[:SHOWN])
    return names + (", .." if len(rows) > SHOWN else "")


START, RECEIVE, COMPUTE, SEND = range(4)


@dataclass(frozen=True)
class Events:
    """What each rank does, one thing at a time: start, and for every op receive, compute, send.

    `what` is one of the four above, `row` the op's row. For a send or receive `source[event]` is what must be over on
    the other side, the event right before its partner; -1 elsewhere.
    """

    offsets: Rows
    what: NDArray[np.int8]
    row: Rows
    source: NDArray[np.int32]


def rendezvous(schedule: Schedule, sender: Rows, receiver: Rows) -> Events:
    """The events of unbuffered sends. A pair receives for both its ops, computes, then sends for both."""
    rows = np.arange(len(schedule))
    first = rows - np.concatenate(([False], schedule.pair[:-1]))[: len(rows)]  # a pair goes by its first row
    starts = schedule.offsets[:-1]
    row = np.concatenate((starts, receiver, rows, sender))
    what = np.repeat(np.arange(4, dtype=np.int8), [len(starts), len(receiver), len(rows), len(sender)])
    rank = np.concatenate((np.arange(schedule.ranks), schedule.rank[receiver], schedule.rank, schedule.rank[sender]))
    anchor = np.concatenate((starts, first[receiver], first, first[sender]))
    order = np.lexsort((row, what, anchor, what != START, rank))
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    receives = place[len(starts) : len(starts) + len(receiver)]
    sends = place[len(place) - len(sender) :]
    source = np.full(len(order), -1, dtype=np.int32)
    source[sends] = receives - 1
    source[receives] = sends - 1
    offsets = np.concatenate(([0], np.cumsum(np.bincount(rank, minlength=schedule.ranks)))).astype(np.int64)
    return Events(offsets, what[order], row[order], source)
