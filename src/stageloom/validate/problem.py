"""One thing that is wrong with a schedule, and where."""

from __future__ import annotations

from dataclasses import dataclass

from stageloom.schedule import Schedule


@dataclass(frozen=True)
class Problem:
    """`code` names the kind of problem (list in `stageloom.validate`), `message` says what is wrong.

    The place is `rank`, `row` of the schedule's columns, `position` on the rank and the `op` there; None where the
    problem has no rank or no row (an op that is missing). `rows` are further places it involves: a deadlock's circle.
    """

    code: str
    rank: int | None
    row: int | None
    position: int | None
    message: str
    op: str = ""
    rows: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.rank is None:
            return self.message
        if self.position is None:
            return f"rank {self.rank}: {self.message}"
        return f"rank {self.rank}, position {self.position} ({self.op}): {self.message}"


def at(schedule: Schedule, code: str, row: int, message: str, rows: tuple[int, ...] = ()) -> Problem:
    """A problem of the op in this row."""
    rank = int(schedule.rank[row])
    return Problem(code, rank, row, position(schedule, row), message, str(schedule.op(row)), rows)


def position(schedule: Schedule, row: int) -> int:
    """The place of this row on its rank, from 0."""
    return row - int(schedule.offsets[int(schedule.rank[row])])
