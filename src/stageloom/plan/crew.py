"""Candidates are simulated here: in this process, or by several that know what the search is about."""

from __future__ import annotations

import signal
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from types import TracebackType
from typing import Final

from stageloom.errors import StageloomError
from stageloom.plan.floors import Setup
from stageloom.plan.forms import Form
from stageloom.plan.layout import Layout
from stageloom.plan.score import Scored, score

WORTH: Final = 2.0
"""Seconds of simulating after which more processes are started: it takes them about as long to be ready."""


class Crew:
    """Scores candidates, in order, with up to `workers` processes. Close it, or use it as a context.

    Raises StageloomError where one of the processes is ended by somebody else.
    """

    def __init__(self, setup: Setup, workers: int) -> None:
        self.setup, self.workers = setup, workers
        self.spent = 0.0
        self.pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)

    def scores(self, batch: Sequence[tuple[Layout, Form]]) -> list[Scored]:
        if self.pool is None and self.workers > 1 and self.spent > WORTH:
            # spawned, for a fork of a process with threads may hang
            self.pool = ProcessPoolExecutor(
                self.workers, mp_context=get_context("spawn"), initializer=_begin, initargs=(self.setup,)
            )
        if self.pool is not None:
            try:
                with _held_interrupts():
                    results = self.pool.map(_score, batch)  # starts processes that are still to be started
                return list(results)
            except BrokenProcessPool:
                raise StageloomError(
                    "a process that simulates was ended from outside, perhaps for want of memory; fewer --workers need "
                    "less"
                ) from None
        began = time.perf_counter()
        found = [score(self.setup, layout, form) for layout, form in batch]
        self.spent += time.perf_counter() - began
        return found


@contextmanager
def _held_interrupts() -> Generator[None]:
    """Interrupts wait for the end. A process that is started meanwhile has them wait until `_begin`, rather than print
    where in its imports it was interrupted."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_setup: list[Setup] = []


def _begin(setup: Setup) -> None:
    if hasattr(signal, "pthread_sigmask"):  # an interrupt ends a worker without a word; its parent has the say
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _setup[:] = [setup]


def _score(one: tuple[Layout, Form]) -> Scored:
    return score(_setup[0], *one)
