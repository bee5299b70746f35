"""Why a run of workers failed: the error that says so, and which of several failures was the first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stageloom.errors import StageloomError
from stageloom.execute._worker import Raised


class Failure(StageloomError):
    """A run that one rank has ended. Its text is one line.

    rank    the rank that failed first; None if it was none of them
    where   the op it had in hand, as the task named it with `doing`; "" if it named none
    cause   "ValueError: ...", "died (signal 9)", "gave no sign for 30 s", or a text that says all by itself
    kind    which of these four
    detail  the line at which a silent rank is
    """

    def __init__(
        self,
        rank: int | None,
        where: str,
        cause: str,
        kind: Literal["raised", "died", "silent", "told"] = "raised",
        detail: str = "",
    ) -> None:
        super().__init__(rank, where, cause, kind, detail)  # all of them, so that it can be pickled
        self.rank = rank
        self.where = where
        self.cause = cause
        self.kind = kind
        self.detail = detail

    def __str__(self) -> str:
        if self.kind == "told":
            return self.cause
        who = "the run" if self.rank is None else f"rank {self.rank}"
        at = f" at {self.where}" if self.where else ""
        if self.kind == "raised":
            return f"{who} failed{at}: {self.cause}"
        return f"{who} {self.cause}{at}" + (f": {self.detail}" if self.detail else "")


@dataclass(frozen=True)
class Died:
    """A worker process that is gone. `time` is when its parent saw it."""

    time: float
    where: str
    code: int | None

    second_hand = False


def first(heard: list[tuple[int, Raised | Died]]) -> Failure:
    """The failure that the others come from."""

    def order(told: tuple[int, Raised | Died]) -> tuple[bool, bool, float]:
        # No rank dies because another failed, so a death comes first, although the parent learns of it late.
        _, report = told
        return not isinstance(report, Died), report.second_hand, report.time

    rank, report = min(heard, key=order)
    if isinstance(report, Died):
        return Failure(rank, report.where, _death(report.code), "died")
    failure = Failure(rank, report.where, report.cause, "told" if report.says_all else "raised")
    failure.add_note(f"On rank {rank}:\n{report.trace}")
    return failure


def _death(code: int | None) -> str:
    if code is None:
        return "closed its connection"
    return f"died (signal {-code})" if code < 0 else f"died (exit status {code})"
