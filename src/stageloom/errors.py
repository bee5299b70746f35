"""Every error Stageloom raises on purpose.

    StageloomError
    ├── InputError            a value, file or command line that cannot be used: what, where, what would be right
    │   └── ConstraintError   a schedule that cannot be built at these ranks / micro-batches / chunks
    ├── ScheduleError         a schedule that cannot run (carries the validator's problems)
    ├── RankError             what one rank of several failed at, told on all of them
    └── MissingExtra          a feature whose optional dependency is not installed

The command line turns any of them into one message and exit status 2.
"""

from __future__ import annotations

from collections.abc import Sequence


class StageloomError(Exception):
    """Base of all errors raised on purpose; its text is meant for the user as it is."""


class InputError(StageloomError):
    """A wrong value. The message names what was wrong, where, and what would be right."""


class ConstraintError(InputError):
    """A schedule that these sizes do not allow; `remedy` names the nearest sizes that do."""

    def __init__(self, schedule: str, reason: str, remedy: str) -> None:
        super().__init__(f"{schedule}: {reason}; {remedy}")
        self.schedule = schedule
        self.reason = reason
        self.remedy = remedy


class ScheduleError(StageloomError):
    """A schedule that would not run to its end. `problems` are the validator's lines."""

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class RankError(StageloomError):
    """A failure of one rank that all ranks raise together. `rank` is whose it is, `here` whether it is this one's."""

    def __init__(self, message: str, rank: int, here: bool) -> None:
        super().__init__(message, rank, here)  # all of them, so that it can be pickled
        self.rank = rank
        self.here = here

    def __str__(self) -> str:
        return str(self.args[0])


class MissingExtra(StageloomError):
    """An optional dependency that is not installed."""

    def __init__(self, feature: str, package: str, extra: str) -> None:
        super().__init__(f"{feature} needs {package}, which is not installed: pip install 'stageloom[{extra}]'")
