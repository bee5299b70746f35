"""Measuring: repeat, keep the garbage collector out of it, best and median."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Runs:
    """Seconds of every run of a chain of steps, `[run][step]`."""

    seconds: tuple[tuple[float, ...], ...]

    def median(self, step: int) -> float:
        return statistics.median(run[step] for run in self.seconds)

    def best(self, step: int) -> float:
        return min(run[step] for run in self.seconds)

    @property
    def best_total(self) -> float:
        return min(map(sum, self.seconds))

    @property
    def median_total(self) -> float:
        return statistics.median(map(sum, self.seconds))


def time_steps(
    chain: Callable[[], Sequence[float]], runs: int, *, warm: int = 1, seconds: float = float("inf")
) -> Runs:
    """Run `chain`, which returns the instants between its steps, `warm` times, then `runs` times.

    Fewer times where `seconds` have passed before, but at least once.
    """
    for _ in range(warm):
        chain()
    collected: list[tuple[float, ...]] = []
    spent = 0.0
    gc.collect()
    gc.disable()
    try:
        while len(collected) < runs and spent <= seconds:
            instants = chain()
            spent += instants[-1] - instants[0]
            collected.append(tuple(after - before for before, after in pairwise(instants)))
    finally:
        gc.enable()
    return Runs(tuple(collected))


def time_once(work: Callable[[], object]) -> Callable[[], Sequence[float]]:
    """A chain of one step."""

    def chain() -> Sequence[float]:
        begin = time.perf_counter()
        work()
        return begin, time.perf_counter()

    return chain
