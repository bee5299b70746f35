"""Candidates are simulated here: in this process, or by several that know what the search is about."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import TracebackType
from typing import Final

from stageloom.plan.floors import Setup
from stageloom.plan.forms import Form
from stageloom.plan.layout import Layout
from stageloom.plan.score import Scored, score

WORTH: Final = 2.0
"""Seconds of simulating after which more processes are started: it takes them about as long to be ready."""


class Crew:
    """Scores candidates, in order, with up to `workers` processes. Close it, or use it as a context."""

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
            return list(self.pool.map(_score, batch))
        began = time.perf_counter()
        found = [score(self.setup, layout, form) for layout, form in batch]
        self.spent += time.perf_counter() - began
        return found


_setup: list[Setup] = []


def _begin(setup: Setup) -> None:
    _setup[:] = [setup]


def _score(one: tuple[Layout, Form]) -> Scored:
    return score(_setup[0], *one)
