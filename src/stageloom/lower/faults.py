"""What can be wrong with a program, found in plain Python."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import numpy as np

from stageloom.lower.program import Code, Program


@dataclass(frozen=True)
class Fault:
    """What is wrong with a program: `code` is ops, unmatched, order, early, late or circle; `at` the instruction."""

    code: str
    rank: int
    at: int | None
    message: str

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.message}"


def problems(program: Program) -> list[Fault]:
    """All faults of a program, in plain Python: an empty list where it runs to its end and computes the schedule.

    ops: other ops, or in another order, than the schedule's. unmatched: a send or receive without its partner, a
    reduction or gather that a holder leaves out or does twice. order: the two sides of a queue, or of reductions,
    differ. early: an op before its message, a send or reduction before its op. late: a gather, or the reduction of
    an asynchronous update, after an op that needs it. circle: instructions that wait for one another.
    """
    seen = _Seen(program)
    return [
        *_ops(program),
        *_channels(program, seen),
        *_early(program, seen),
        *_reduces(program, seen),
        *_gathers(program, seen),
        *_circle(program, seen),
    ]


class _Seen:
    """Where everything stands: the first instruction that computes a row, and messages by (row, from rank, to rank)."""

    def __init__(self, program: Program) -> None:
        self.computes: dict[int, int] = {}
        self.sends: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        self.receives: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        self.reduces: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(program.schedule.ranks)}
        self.gathers: dict[tuple[int, int], list[int]] = defaultdict(list)
        columns = (program.code, program.row, program.peer, program.rank)
        for at, (code, row, peer, rank) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            if code == Code.SEND:
                self.sends[row, rank, peer].append(at)
            elif code == Code.RECV:
                self.receives[row, peer, rank].append(at)
            elif code == Code.REDUCE:
                self.reduces[rank].append((int(program.schedule.stage[row]), at))
            elif code == Code.GATHER:
                self.gathers[rank, int(program.schedule.stage[row])].append(at)
            else:
                self.computes.setdefault(row, at)


def _ops(program: Program) -> list[Fault]:
    found: list[Fault] = []
    schedule = program.schedule
    for rank in range(schedule.ranks):
        low, high = program.offsets[rank], program.offsets[rank + 1]
        computed = program.row[low:high][program.code[low:high] < Code.SEND]
        planned = np.arange(int(schedule.offsets[rank]), int(schedule.offsets[rank + 1]))
        if not np.array_equal(computed, planned):
            same = min(len(computed), len(planned))
            differ = np.flatnonzero(computed[:same] != planned[:same])
            place = int(differ[0]) if len(differ) else same
            what = schedule.op(int(planned[place])) if place < len(planned) else "the end"
            found.append(
                Fault(
                    "ops",
                    rank,
                    None,
                    f"computes something else than the schedule's {what} at position {place}",
                )
            )
    return found


def _channels(program: Program, seen: _Seen) -> list[Fault]:
    """Every message that an op needs is sent and received once, nothing else is, and both sides of a queue agree."""
    schedule = program.schedule
    needed: set[tuple[int, int, int]] = set()
    for row, source in enumerate(schedule.links.source.tolist()):
        if source >= 0 and schedule.rank[source] != schedule.rank[row]:
            needed.add((source, int(schedule.rank[source]), int(schedule.rank[row])))
    found: list[Fault] = []
    queues: dict[tuple[int, int], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for side, (name, of_side) in enumerate((("sent", seen.sends), ("received", seen.receives))):
        for message in sorted(needed | of_side.keys()):
            row, source, target = message
            count, wanted = len(of_side.get(message, ())), int(message in needed)
            if count != wanted:
                text = f"{schedule.op(row)} of rank {source} is {name} {count} times for rank {target}; {wanted} needed"
                found.append(Fault("unmatched", target if side else source, None, text))
            queues[source, target][side].extend(of_side.get(message, ()))
    for (source, target), sides in sorted(queues.items()):
        sent, taken = ([int(program.row[at]) for at in sorted(side)] for side in sides)
        pairs = enumerate(zip(sent, taken, strict=False))
        differ = next((place for place, (left, right) in pairs if left != right), None)
        if differ is not None and Counter(sent) == Counter(taken):
            orders = (", ".join(str(schedule.op(row)) for row in side[differ : differ + 6]) for side in (sent, taken))
            text = f"receives from rank {source} in another order than they are sent: sent {{}}, received {{}}"
            found.append(Fault("order", target, sorted(sides[1])[differ], text.format(*orders)))
    return found


def _early(program: Program, seen: _Seen) -> list[Fault]:
    """An op before its message was received, or what follows from an op before the op."""
    found: list[Fault] = []
    schedule = program.schedule
    for at, (code, row) in enumerate(zip(program.code.tolist(), program.row.tolist(), strict=True)):
        rank = int(program.rank[at])
        if code == Code.RECV:
            use = int(program.use[at])
            mate = use - 1 if use > schedule.offsets[rank] and schedule.pair[use - 1] else use
            if schedule.links.source[use] != row or at > min(seen.computes.get(mate, at), seen.computes.get(use, at)):
                text = f"{program.instruction(at)} stands after {schedule.op(use)}, or is not what that waits for"
                found.append(Fault("early", rank, at, text))
        elif code in (Code.SEND, Code.REDUCE) and schedule.rank[row] == rank and at < seen.computes.get(row, at):
            found.append(Fault("early", rank, at, f"{program.instruction(at)} stands before {schedule.op(row)}"))
    return found


def _reduces(program: Program, seen: _Seen) -> list[Fault]:
    """Every holder of a stage reduces it as often as it has to, and the ranks agree on an order."""
    found: list[Fault] = []
    after: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    for stage in range(program.schedule.stages):
        holders = program.holders(stage)
        for rank, reduces in seen.reduces.items():
            count = sum(reduced == stage for reduced, _ in reduces)
            wanted = program.reductions(stage) if rank in holders else 0
            if count != wanted:
                found.append(Fault("unmatched", rank, None, f"reduces stage {stage} {count} times; {wanted} needed"))
    for reduces in seen.reduces.values():
        done: Counter[int] = Counter()
        turns: list[tuple[int, int]] = []  # which reduction of which stage
        for stage, at in reduces:
            turns.append((stage, done[stage]))
            done[stage] += 1
            found.extend(_late(program, at))
        for turn, following in pairwise(turns):
            after[following].add(turn)
    try:
        TopologicalSorter(after).prepare()
    except CycleError as error:
        stages = ", ".join(str(stage) for stage, _ in error.args[1])
        rank = next(rank for rank, reduces in seen.reduces.items() if reduces)
        found.append(Fault("order", rank, None, f"ranks reduce stages in orders that wait in a circle: {stages}"))
    return found


def _late(program: Program, at: int) -> list[Fault]:
    """An asynchronous update after an op that runs on its weights, or takes part in the next one."""
    schedule, rank, row = program.schedule, int(program.rank[at]), int(program.row[at])
    if schedule.synchronous or schedule.rank[row] != rank:
        return []
    for before in range(at - 1, int(program.offsets[rank]) - 1, -1):
        other = int(program.row[before])
        if program.code[before] < Code.SEND and schedule.stage[other] == schedule.stage[row]:
            if other == row:
                return []
            return [Fault("late", rank, at, f"{program.instruction(at)} stands after {schedule.op(other)}")]
    return []  # before the op itself, which is told of elsewhere


def _gathers(program: Program, seen: _Seen) -> list[Fault]:
    """A rank gathers each sharded stage that it runs once, before the stage's first op there."""
    found: list[Fault] = []
    schedule = program.schedule
    first: dict[tuple[int, int], int] = {}
    for row, (rank, stage) in enumerate(zip(schedule.rank.tolist(), schedule.stage.tolist(), strict=True)):
        first.setdefault((rank, stage), row)
    for (rank, stage), row in sorted(first.items()):
        gathers = seen.gathers.get((rank, stage), [])
        wanted = int(stage in program.sharded)
        if len(gathers) != wanted:
            text = f"gathers stage {stage} {len(gathers)} times; {wanted} needed"
            found.append(Fault("unmatched", rank, None, text))
        if gathers and gathers[0] > seen.computes.get(row, gathers[0]):
            text = f"gathers stage {stage} after {schedule.op(row)}"
            found.append(Fault("late", rank, gathers[0], text))
    for rank, stage in sorted(seen.gathers.keys() - first.keys()):
        found.append(Fault("unmatched", rank, None, f"gathers stage {stage}, which it does not run"))
    return found


def _circle(program: Program, seen: _Seen) -> list[Fault]:
    """Every instruction waits for the one before it on its rank, a receive for its send."""
    graph: dict[int, list[int]] = {at: [at - 1] for at in range(len(program))}
    for start in program.offsets[:-1].tolist():
        if start < len(program):
            graph[start] = []
    sent: dict[int, int] = {}
    for message, receives in seen.receives.items():
        for send, receive in zip(seen.sends.get(message, ()), receives, strict=False):
            graph[receive].append(send)
            sent[receive] = send
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        # The circle lists an instruction before those that wait for it.
        circle: list[int] = error.args[1][1:]
        waits = [at for before, at in zip([circle[-1], *circle], circle, strict=False) if sent.get(at) == before]
        waits.reverse()
        first = waits[0]
        texts = [str(program.instruction(first))]
        for at in [*waits[1:], first]:
            texts.append(f"waits for its send, on rank {program.rank[at]} behind {program.instruction(at)}")
        message = f"{texts[0]} {', which '.join(texts[1:])}"
        return [Fault("circle", int(program.rank[first]), first, message)]
    return []
