"""Run the command line in this process, as a user would from a shell."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

from stageloom.cli import main

if TYPE_CHECKING:
    from stageloom.execute.workers import Pool


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str


@contextlib.contextmanager
def workers_of(pool: Pool) -> Iterator[None]:
    """Within, the command line runs on the processes of a pool, which have started already, not on new ones."""

    def launch(task: Any, size: int, *args: object, **_: object) -> list[Any]:
        return pool.run(task, *args, size=size)

    with mock.patch("stageloom.execute.workers.launch", launch):
        yield


def stageloom(*arguments: str) -> Result:
    """`stageloom ARGUMENTS`: exit status, standard output, standard error."""
    out, err = io.StringIO(), io.StringIO()
    status = 0
    with (
        mock.patch.object(sys, "argv", ["stageloom", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as exit_:
            status = exit_.code if isinstance(exit_.code, int) else 0 if exit_.code is None else 1
    return Result(status, out.getvalue(), err.getvalue())
