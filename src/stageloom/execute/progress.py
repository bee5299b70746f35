"""What a run says while it works: one line that is written anew in a terminal, else one line a step or nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from stageloom.errors import RankError
from stageloom.execute.stragglers import Load, straggler

FEW: Final = 8  # ranks whose utilisation is shown one by one
READER_GONE: Final = "nobody reads standard output any more"
NOTABLE: Final = 0.05  # more work than the others', from which on a rank is named


class Line:
    """A bar with a text on the terminal, or nothing where there is none (or `show` is False).

    Nothing is drawn between two calls: a thread that draws would take time from the rank that computes.
    """

    def __init__(self, show: bool, *, error: bool = True) -> None:
        console = Console(stderr=error, highlight=False, markup=False)
        self.progress: Progress | None = None
        self.task: TaskID | None = None
        if show and console.is_terminal:
            columns = (MofNCompleteColumn(), BarColumn(16), TextColumn("{task.description}", markup=False))
            self.progress = Progress(
                *columns, TimeRemainingColumn(), console=console, auto_refresh=False, transient=error
            )

    def at(self, done: int, total: int, text: str) -> None:
        """So many of so many steps are done."""
        if self.progress is None:
            return
        if self.task is None:
            self.task = self.progress.add_task(text, total=total, completed=done)
            self.progress.start()
        self.progress.update(self.task, completed=done, total=total, description=text, refresh=True)

    def end(self) -> None:
        """The terminal is as it was."""
        if self.progress is not None and self.task is not None:
            self.progress.stop()


class Reporter:
    """Tells of training steps as they end. Where `show` is False it says nothing."""

    def __init__(self, steps: int, *, show: bool) -> None:
        self.steps = steps
        self.show = show
        self.line = Line(show, error=False)

    def say(self, text: str) -> None:
        """One line on standard error, before the first step."""
        print(text, file=sys.stderr, flush=True)

    def step(self, number: int, loss: float, taken: float, loads: Sequence[Load]) -> None:
        """Step `number` (from 1) has ended after `taken` seconds; `loads` are those of the last steps."""
        if not self.show:
            return
        text = f"loss {loss:.4f}  {1e3 * taken:.0f} ms  {busy(loads)}"
        if self.line.progress is None:
            try:
                sys.stdout.write(f"step {number}/{self.steps}  {text}\n")
                sys.stdout.flush()
            except BrokenPipeError:
                sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (what is left to write goes there at the end)
                raise RankError(READER_GONE, 0, True) from None
        else:
            self.line.at(number, self.steps, text)


def busy(loads: Sequence[Load]) -> str:
    """Utilisation by rank, and the rank that the others wait for, if there is one."""
    shares = [f"{100 * load.busy:.0f}" for load in loads]
    if len(shares) > FEW:
        each = sorted(load.busy for load in loads)
        shares = [f"{100 * each[0]:.0f} to {100 * each[-1]:.0f}"]
    slow = straggler(loads)
    told = ""
    if slow is not None and slow.excess >= NOTABLE:
        told = f"  rank {slow.rank} +{100 * slow.excess:.0f} %" + (f" ({slow.kind})" if slow.kind else "")
    return f"busy {' '.join(shares)} %{told}"
