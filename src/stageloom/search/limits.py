"""Whether anything can run within the limits, and amounts of memory as they can be given back to `--memory`."""

from __future__ import annotations

import math

import numpy as np

from stageloom.errors import InputError
from stageloom.search.bounds import smallest_limits
from stageloom.search.joining import relaxed
from stageloom.search.problem import Problem

DIGITS = 6


def check_limits(problem: Problem) -> None:
    """Raise InputError where not even one micro-batch can pass, with the smallest limit that lets it."""
    need = smallest_limits(relaxed(problem))
    short = np.flatnonzero(need > problem.limit)
    if not len(short):
        return
    rank = int(short[0])
    allowed, here, all_ranks = (
        amount(parts / problem.unit, problem.unit_name) for parts in (problem.limit[rank], need[rank], need.max())
    )
    raise InputError(
        f"memory: rank {rank} may hold {allowed}, which is too little for one micro-batch to pass; the smallest "
        f"feasible limit is {here} there, and {all_ranks} on all ranks"
    )


def amount(value: float, unit_name: str) -> str:
    """An amount of memory, rounded up in its last digit: as a limit, what is printed is never less than what is meant.

    Bytes as kB, MB, ..., as `--memory` takes them; micro-batches with a `u`.
    """
    if unit_name != "bytes":
        return f"{_up(value)}u"
    names = ("B", "kB", "MB", "GB", "TB")
    power = 0
    while value >= 1000 and power < len(names) - 1:
        value, power = value / 1000, power + 1
    return f"{_up(value)}{names[power]}"


def _up(value: float) -> str:
    if not value > 0:
        return f"{value:g}"
    scale = 10.0 ** (DIGITS - 1 - math.floor(math.log10(value)))
    # Up to a hair above a number of few digits it is that number: limits have as much play.
    return f"{math.ceil(value * scale * (1 - 1e-11)) / scale:.12g}"
