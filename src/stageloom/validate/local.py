"""What can be seen one rank at a time: parts missing, double or misplaced, and ops before what they wait for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from stageloom.op import KIND_NAMES, Kind, Op
from stageloom.rules import PARTS, Wait, waits
from stageloom.schedule import Schedule
from stageloom.validate.problem import Problem, at, position

Part = tuple[int, int, int, int]
"""(part, stage, micro-batch, slice)"""
SHOWN = 8
"""Missing micro-batches that a message names before it only counts them."""


class Doers:
    """Who does which part: `first[part]` is the row that does it first (one on the right rank, if there is one),
    `home[row]` the rank that an op belongs on, `known[row]` whether its stage, micro-batch and slice exist.

    The slow twin of `Schedule.links`: it holds what is there, not a table of all there should be.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.kind = [Kind(kind) for kind in schedule.kind.tolist()]
        self.place: list[tuple[int, int, int]] = list(
            zip(schedule.stage.tolist(), schedule.microbatch.tolist(), schedule.slice.tolist(), strict=True)
        )
        self.rank: list[int] = schedule.rank.tolist()
        self.known = [self._exists(*place) for place in self.place]
        path_of, paths = schedule.path_of, schedule.placement.paths
        self.home = [
            paths[int(path_of[microbatch])][stage] if known else -1
            for known, (stage, microbatch, _) in zip(self.known, self.place, strict=True)
        ]
        self.first: dict[Part, int] = {}
        placed = [row for row, known in enumerate(self.known) if known]
        for row in sorted(placed, key=lambda row: self.home[row] != self.rank[row]):
            for part in PARTS[self.kind[row]]:
                self.first.setdefault((part, *self.place[row]), row)

    def _exists(self, stage: int, microbatch: int, cut: int) -> bool:
        schedule = self.schedule
        return 0 <= stage < schedule.stages and 0 <= microbatch < schedule.microbatches and 0 <= cut < schedule.slices

    def waits(self, row: int) -> Iterator[tuple[Wait, Op, int | None]]:
        """The rules that hold this row back, what each waits for, and the row that does it (None: nobody)."""
        if not self.known[row]:
            return
        stage, microbatch, cut = self.place[row]
        for rule in waits(self.kind[row], sequence=self.schedule.sequence):
            place = stage + rule.stage, microbatch, cut + rule.slice
            if self._exists(*place):
                yield rule, Op(rule.part, *place), self.first.get((rule.part, *place))

    def between_ranks(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(sender, receiver) rows of every message between two ranks, by receiver; a message has one receiver."""
        receiver_of: dict[int, int] = {}
        for row in range(len(self.kind)):
            for rule, _, doer in self.waits(row):
                if rule.message and doer is not None and self.rank[doer] != self.rank[row]:
                    receiver_of.setdefault(doer, row)
        pairs = sorted((receiver, sender) for sender, receiver in receiver_of.items())
        table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return table[:, 1], table[:, 0]


def local_problems(schedule: Schedule, doers: Doers) -> list[Problem]:
    found = _pair_marks(schedule)
    for row in range(len(schedule)):
        found += _of_place(schedule, doers, row)
        found += _of_order(schedule, doers, row)
    return found + _missing(schedule, doers)


def _pair_marks(schedule: Schedule) -> list[Problem]:
    found: list[Problem] = []
    last = set((schedule.offsets[1:] - 1).tolist())
    for row in np.flatnonzero(schedule.pair).tolist():
        first_of_rank = row == int(schedule.offsets[schedule.rank[row]])
        if row in last:
            found.append(at(schedule, "pair-open", row, "is marked as overlapped with the next op, but it is the last"))
        elif not first_of_rank and schedule.pair[row - 1]:
            message = "is overlapped with the op before it and the op after it; a pair has two ops"
            found.append(at(schedule, "pair-chain", row, message))
    return found


def _of_place(schedule: Schedule, doers: Doers, row: int) -> list[Problem]:
    stage, microbatch, cut = doers.place[row]
    if not doers.known[row]:
        for what, value, count in (
            ("stage", stage, schedule.stages),
            ("micro-batch", microbatch, schedule.microbatches),
            ("slice", cut, schedule.slices),
        ):
            if not 0 <= value < count:
                return [at(schedule, "unknown", row, f"there is no {what} {value}; the last is {count - 1}")]
    found: list[Problem] = []
    home = doers.home[row]
    if home != doers.rank[row]:
        path = f" of path {schedule.path_of[microbatch]}" if len(schedule.placement.paths) > 1 else ""
        found.append(at(schedule, "misplaced", row, f"belongs on rank {home}, which holds stage {stage}{path}"))
    again: dict[int, list[str]] = {}
    for part in PARTS[doers.kind[row]]:
        first = doers.first[(part, stage, microbatch, cut)]
        if first != row:
            again.setdefault(first, []).append(part.name)
    for first, parts in again.items():
        names = " and ".join(parts)
        message = f"does {names} a second time; {schedule.op(first)} at {_where(schedule, row, first)} has done it"
        found.append(at(schedule, "double", row, message, (first,)))
    return found


def _of_order(schedule: Schedule, doers: Doers, row: int) -> list[Problem]:
    found: list[Problem] = []
    pair = schedule.pair
    for rule, needed, doer in doers.waits(row):
        if doer is None:
            if not rule.message:  # a message that nobody sends is reported once, as the part that is missing
                found.append(at(schedule, "orphan", row, f"no {needed} before it; it stands nowhere in the schedule"))
            continue
        if doers.rank[doer] != doers.rank[row]:
            continue
        beside = (doer == row - 1 and bool(pair[doer])) or (doer == row + 1 and bool(pair[row]))
        if beside:
            message = f"is overlapped with {schedule.op(doer)}, which it waits for"
            found.append(at(schedule, "pair-self", row, message, (doer,)))
        elif doer > row:
            message = f"no {needed} before it; it stands later, at {_where(schedule, row, doer)}"
            found.append(at(schedule, "order", row, message, (doer,)))
    return found


def _where(schedule: Schedule, here: int, there: int) -> str:
    rank = int(schedule.rank[there])
    place = f"position {position(schedule, there)}"
    return place if rank == int(schedule.rank[here]) else f"rank {rank}, {place}"


def _missing(schedule: Schedule, doers: Doers) -> list[Problem]:
    """One problem for each stage of each path and each part: the micro-batches that nobody does."""
    slices = schedule.slices
    done: dict[tuple[int, int, int], set[int]] = {}
    for part, stage, microbatch, cut in doers.first:
        key = part, stage, int(schedule.path_of[microbatch])
        done.setdefault(key, set()).add(microbatch * slices + cut)
    found: list[Problem] = []
    for path, ranks in enumerate(schedule.placement.paths):
        of_path = np.flatnonzero(schedule.path_of == path)
        for stage, rank in enumerate(ranks):
            lacking: dict[str, list[str]] = {}
            for part in (Kind.F, Kind.B, Kind.W):
                present = done.get((part, stage, path), set())
                count = len(of_path) * slices - len(present)
                if count:
                    lacking.setdefault(_numbers(of_path, present, slices, count), []).append(KIND_NAMES[part])
            for numbers, parts in lacking.items():
                message = f"stage {stage}: no {' and no '.join(parts)} of {numbers}"
                found.append(Problem("missing", rank, None, None, message))
    return found


def _numbers(of_path: NDArray[np.int64], present: set[int], slices: int, count: int) -> str:
    """The first micro-batches (or slices) of a path that are not `present`, and how many more."""

    def absent() -> Iterator[str]:
        for microbatch in of_path:
            for cut in range(slices):
                if int(microbatch) * slices + cut not in present:
                    yield f"{microbatch}.{cut}" if slices > 1 else f"{microbatch}"

    names = ", ".join(islice(absent(), SHOWN))
    what = "micro-batch" if slices == 1 else "slice"
    if count == 1:
        return f"{what} {names}"
    return f"{what}{'es' if slices == 1 else 's'} {names}" + (f" and {count - SHOWN} more" if count > SHOWN else "")
