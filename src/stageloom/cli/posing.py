"""What `optimize` is asked in words: placement, limits of memory and fused stages, as a problem."""

from __future__ import annotations

import math
import re
from collections.abc import Generator
from contextlib import contextmanager
from enum import StrEnum
from typing import Final

from stageloom.costs import Costs
from stageloom.errors import InputError
from stageloom.placement import Placement, line, loop, two_way, zigzag
from stageloom.search.problem import Problem, pose


class Place(StrEnum):
    line = "line"
    loop = "loop"
    v = "v"
    two_way = "two-way"
    best = "best"


SIZES: Final = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
FLAGS: Final = ("memory", "fused", "seconds", "seed", "partition", "pareto")


@contextmanager
def flags_named() -> Generator[None]:
    """The library's words for what is wrong, with the dashes of the flag that it came from."""
    try:
        yield
    except InputError as error:
        dashes = "--" if re.match(rf"({'|'.join(FLAGS)})\b(:| =)", str(error)) else ""
        raise InputError(f"{dashes}{error}") from None


def placed(placement: Place, ranks: int, chunks: int | None, microbatches: int) -> Placement:
    """Where the stages stand. Raises InputError for sizes that cannot be placed, or are too large."""
    if ranks < 1 or microbatches < 1:
        raise InputError(f"--ranks {ranks} --microbatches {microbatches}: at least 1 of each is needed")
    if 3 * ranks * microbatches * (chunks or 2) > 20_000_000:
        raise InputError(f"{ranks} ranks and {microbatches} micro-batches: up to 20,000,000 ops can be handled")
    if placement is Place.two_way and (ranks % 2 or microbatches < 2):
        raise InputError("--placement two-way: two directions need an even number of ranks and 2 micro-batches")
    if placement is Place.loop:
        return loop(ranks, chunks or 2)
    return {Place.line: line(ranks), Place.v: zigzag(ranks, 2), Place.two_way: two_way(ranks)}[placement]


def fused_stages(text: str | None, stages: int) -> list[int]:
    """The stages that cannot split B and W. Raises InputError for what names none."""
    if text is None:
        return []
    if text == "all":
        return list(range(stages))
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text):
        raise InputError(f"--fused {text!r}: stages are needed, as 0,7; or all")
    return [int(each) for each in text.split(",")]


def posed_in_words(placement: Placement, microbatches: int, costs: Costs, memory: str, fused: list[int]) -> Problem:
    """The problem of a limit in words. Raises InputError for one that is none."""
    limits: list[float] = []
    kinds: set[str] = set()
    for each in memory.split(","):
        match = re.fullmatch(r"([0-9.eE+-]+)\s*(u|B|kB|MB|GB|TB)?", each.strip())
        try:
            value = float(match[1]) if match else math.nan
        except ValueError:
            value = math.nan
        if match is None or not math.isfinite(value) or value <= 0:
            raise InputError(f"--memory {memory!r}: as 1.3 (times 1F1B's), 10u (micro-batches) or 40GB, all above 0")
        kinds.add("bytes" if match[2] in SIZES else "micro-batches")
        limits.append(min(value * (SIZES.get(match[2] or "", 1.0) if match[2] else placement.ranks), 1e300))
    if len(kinds) > 1:
        raise InputError(f"--memory {memory!r}: bytes and micro-batches cannot stand in one list")
    limit = limits[0] if len(limits) == 1 else limits
    if kinds == {"bytes"}:
        return pose(placement, microbatches, costs, limit_bytes=limit, fused=fused)
    return pose(placement, microbatches, costs, limit=limit, fused=fused)
