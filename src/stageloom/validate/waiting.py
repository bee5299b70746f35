"""Ranks that wait for one another: circles in the graph of what waits for what, spelled out op by op."""

from __future__ import annotations

import numpy as np

from stageloom.schedule import Schedule
from stageloom.validate.circles import Step, circles
from stageloom.validate.messages import COMPUTE, RECEIVE, SEND, START, Events, Rows
from stageloom.validate.problem import Problem, at


def deadlocks(schedule: Schedule, sender: Rows, receiver: Rows) -> list[Problem]:
    """One problem for each group of ops that wait in a circle for order and messages between ranks.

    An op before what it waits for on its own rank is no circle here: `local` reports it.
    """
    lead = _leads(schedule)
    steps: list[list[Step]] = [[] for _ in range(len(schedule))]
    for rank in range(schedule.ranks):
        for row in range(int(schedule.offsets[rank]) + 1, int(schedule.offsets[rank + 1])):
            if lead[row] == row:
                steps[row].append(Step(lead[row - 1], "order", row, row - 1))
    messages: list[tuple[int, int]] = list(zip(sender.tolist(), receiver.tolist(), strict=True))
    for sends, receives in messages:
        steps[lead[receives]].append(Step(lead[sends], "message", receives, sends))
    return [_deadlock(schedule, circle) for circle in circles(steps)]


def _leads(schedule: Schedule) -> list[int]:
    """The first row of the pair that a row belongs to, or the row itself."""
    lead = list(range(len(schedule)))
    inner = set((schedule.offsets[1:] - 1).tolist())
    for row in np.flatnonzero(schedule.pair).tolist():
        if row not in inner and lead[row] == row:  # not so on a rank's last op, nor for the third of a chain
            lead[row + 1] = row
    return lead


def _deadlock(schedule: Schedule, circle: list[Step]) -> Problem:
    """`circle` ends with a message, so that it starts where a rank hands over; runs of order become one wait."""
    hops: list[tuple[str, int]] = []
    start = here = circle[-1].met
    for step in circle:
        if step.why == "order":
            continue
        if step.own != here:
            beside = abs(step.own - here) == 1 and bool(schedule.pair[min(step.own, here)])
            hops.append(("overlap" if beside else "order", step.own))
        hops.append(("message", step.met))
        here = step.met
    rank = int(schedule.rank[start])
    texts: list[str] = []
    for number, (why, row) in enumerate(hops, start=1):
        closing = number == len(hops)
        subject = "it" if not texts else "which"
        verb = "is overlapped with" if why == "overlap" else f"waits ({why}) for"
        moved = int(schedule.rank[row]) != rank
        rank = int(schedule.rank[row])
        texts.append(f"{subject} {verb} {schedule.op(row)}" + (f" on rank {rank}" if moved and not closing else ""))
    message = f"never starts: {', '.join(texts)}"
    rows = (start, *(row for _, row in hops[:-1]))
    code = "pair-cycle" if any(why == "overlap" for why, _ in hops) else "deadlock"
    return at(schedule, code, start, message, rows)


def rendezvous_deadlocks(schedule: Schedule, events: Events) -> list[Problem]:
    """The same for unbuffered sends, among the events of `messages.rendezvous`."""
    source = events.source.tolist()
    steps: list[list[Step]] = [[] for _ in source]
    starts = set(events.offsets.tolist())
    for event, partner in enumerate(source):
        if event not in starts:
            steps[event].append(Step(event - 1, "order", event, event - 1))
        if partner >= 0:
            steps[event].append(Step(partner, "meeting", event, partner))
    return [_no_meeting(schedule, events, circle) for circle in circles(steps)]


def _no_meeting(schedule: Schedule, events: Events, circle: list[Step]) -> Problem:
    rows: list[int] = []
    texts: list[str] = []
    meetings = [step for step in circle if step.why == "meeting"]
    for number, step in enumerate(meetings):
        partner = step.met + 1  # the other side of the send or receive; `met` is what stands right before it
        row, ahead = int(events.row[step.own]), meetings[(number + 1) % len(meetings)].own
        rows.append(row)
        here, there = int(schedule.rank[row]), int(schedule.rank[events.row[partner]])
        meets = "receives" if events.what[step.own] == SEND else "sends"
        stands = _event(schedule, events, ahead)
        texts.append(
            f"rank {here}'s {_event(schedule, events, step.own)} waits until rank {there} {meets} it, "
            f"which rank {there} does after its {stands}"
        )
    message = f"no send is buffered, and {'; '.join(texts)}"
    return at(schedule, "rendezvous", rows[0], message, tuple(rows))


def _event(schedule: Schedule, events: Events, event: int) -> str:
    what, row = int(events.what[event]), int(events.row[event])
    if what == START:
        return "start"
    verb = {RECEIVE: "receive for ", COMPUTE: "", SEND: "send of "}[what]
    return f"{verb}{schedule.op(row)}"
