"""What one rank does in a step: the lowered program of that rank, looked up once and kept as plain objects."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from stageloom.lower import Code, Program
from stageloom.op import KIND_NAMES, Kind


class Place(NamedTuple):
    """Whose value it is: one slice of one micro-batch on one stage of one path."""

    path: int
    stage: int
    microbatch: int
    slice: int

    def beside(self, step: int) -> Place:
        """The same slice on a neighbouring stage."""
        return self._replace(stage=self.stage + step)


@dataclass(frozen=True)
class Task:
    """One instruction of a rank.

    `place` is whose value is computed, sent, received, reduced or gathered for; of a message it is the receiver's, and
    `forward` tells an activation from a gradient; `peer` is the other rank. A computing op hands its result over on the
    same rank where `local` is true; `pair` marks one that is overlapped with the next. `row` is the schedule's.
    `whole`, of a forward: its backward is one op (BW).
    `reaps`, of a receive, are the rows of sends that are known to be done once it has arrived.
    """

    code: Code
    place: Place
    row: int
    peer: int = -1
    forward: bool = True
    local: bool = False
    pair: bool = False
    version: int = 0
    whole: bool = False
    reaps: tuple[int, ...] = ()

    @cached_property
    def target(self) -> Place:
        """For whom the result of a computing op is: the same slice on the next stage, or the one before."""
        return self.place.beside(1 if self.code is Code.F else -1)

    @cached_property
    def name(self) -> str:
        """The task in words, for messages; made once, as it is told before every run of the task."""
        cut = f".{self.place.slice}" if self.place.slice else ""
        where = f"{self.place.microbatch}{cut}@{self.place.stage}"
        if self.code in (Code.REDUCE, Code.GATHER):
            return f"{self.code.name.lower()} @{self.place.stage}"
        if self.code in (Code.SEND, Code.RECV):
            what = "activations" if self.forward else "gradients"
            verb = "send" if self.code is Code.SEND else "receive"
            return f"{verb} {what} for {where} {'to' if self.code is Code.SEND else 'from'} rank {self.peer}"
        return f"{KIND_NAMES[self.code]}{where}"

    def __str__(self) -> str:
        return self.name


def tasks_of(program: Program, rank: int) -> list[Task]:
    """The instructions of a rank, in order."""
    schedule = program.schedule
    source = schedule.links.source
    users = {int(sender): row for row, sender in enumerate(source.tolist()) if sender >= 0}
    ranks, versions = schedule.rank, schedule.versions

    def place(row: int) -> Place:
        op = schedule.op(row)
        return Place(int(schedule.path_of[op.microbatch]), op.stage, op.microbatch, op.slice)

    reaped = _reaped(program, rank)
    own = slice(int(program.offsets[rank]), int(program.offsets[rank + 1]))
    whole = {place(row) for row in program.row[own][program.code[own] == Code.BW].tolist()}
    tasks: list[Task] = []
    for at in range(int(program.offsets[rank]), int(program.offsets[rank + 1])):
        code, row, peer = Code(program.code[at]), int(program.row[at]), int(program.peer[at])
        if code in (Code.SEND, Code.RECV):
            user = int(program.use[at]) if code is Code.RECV else users[row]
            forward = int(schedule.kind[row]) == Kind.F
            reaps = reaped.get(row, ()) if code is Code.RECV else ()
            tasks.append(Task(code, place(user), row, peer, forward=forward, reaps=reaps))
        elif code in (Code.REDUCE, Code.GATHER):
            tasks.append(Task(code, place(row), row))
        else:
            user = users.get(row, -1)
            local = user >= 0 and int(ranks[user]) == rank
            of, pair = place(row), bool(schedule.pair[row])
            forward_of_whole = code is Code.F and of in whole
            tasks.append(
                Task(code, of, row, local=local, pair=pair, version=int(versions[row]), whole=forward_of_whole)
            )
    return tasks


def _reaped(program: Program, rank: int) -> dict[int, tuple[int, ...]]:
    """Which sends of this rank a message that it receives proves to be done, by rows.

    A message that a peer sends after it has received ours can only come after ours has arrived. So a send is let go of
    when the first such message is here: no thread has to watch it, and no wait for it can block.
    """
    code, row, peer, owner = program.code, program.row, program.peer, program.rank
    found: dict[int, list[int]] = {}
    for other in set(peer[owner == rank].tolist()) - {-1}:
        theirs = owner == other
        got = np.flatnonzero(theirs & (code == Code.RECV) & (peer == rank))  # ours, in the order sent
        sent = np.flatnonzero(theirs & (code == Code.SEND) & (peer == rank))
        after = np.searchsorted(sent, got)
        for mine, at in zip(row[got].tolist(), after.tolist(), strict=True):
            if at < len(sent):
                found.setdefault(int(row[sent[at]]), []).append(mine)
    return {key: tuple(rows) for key, rows in found.items()}


def forward_only(tasks: list[Task]) -> list[Task]:
    """The part of a program that an evaluation runs: forwards, the messages between them, and gathers."""
    moves = (Code.SEND, Code.RECV)
    return [task for task in tasks if task.code in (Code.F, Code.GATHER) or (task.code in moves and task.forward)]
