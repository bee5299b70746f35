"""Schedules as the search tries them: a name with its options and chunks, and what follows for bounds.

What a schedule is like (its placement, whether it splits backwards, overlaps pairs, has two replicas) is read off a
small instance of it, so that a new schedule is tried without being mentioned here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import stageloom.search  # the published searches become known by name
from stageloom.errors import InputError
from stageloom.op import Kind
from stageloom.placement import Placement, line, loop, two_way, zigzag
from stageloom.schedule import Schedule
from stageloom.schedules import Record, find, records

__all__ = ["Form", "forms"]

_ = stageloom.search.SEARCHES
SMALL = (4, 8)
"""Ranks and micro-batches of the instance that is looked at."""


@dataclass(frozen=True, slots=True)
class Form:
    """A schedule with its options and chunks.

    chunks: stages of a rank on a path. paths: 2 where each rank holds two replicas' stages. split: some weight
    gradients are ops of their own. paired: some forwards are overlapped with backwards. slices: parts of a sequence.
    """

    name: str
    options: tuple[tuple[str, Any], ...]
    chunks: int
    paths: int
    split: bool
    paired: bool
    searched: bool
    synchronous: bool
    slices: int

    @property
    def label(self) -> str:
        """Name, options, and chunks where they are chosen."""
        words = [value if isinstance(value, str) else f"{key}={value}" for key, value in self.options]
        return " ".join([self.name, *words])

    @property
    def complexity(self) -> int:
        """How much a framework has to do for it, to tell a simpler schedule: replicas, pairs, split backwards, and
        chunks, in this order of weight."""
        return 8 * (self.paths > 1) + 4 * self.paired + 2 * self.split + (self.chunks > 1) + 16 * (not self.synchronous)

    @property
    def alone(self) -> bool:
        """Whether it has a say on one rank: 1F1B, which is there what every order is, and what runs beside what."""
        return self.paired or self.name == "1f1b"

    def placement(self, ranks: int) -> Placement:
        """Where its stages stand."""
        return _placement(self, ranks)

    def refusal(self, ranks: int, microbatches: int) -> str | None:
        """Why it cannot be built at these sizes, with the nearest that can; None where it can."""
        try:
            found = find(self.name).refusal(ranks, microbatches, **self.all_options)
        except InputError as error:
            return str(error)
        return None if found is None else f"{found.reason}; {found.remedy}"

    @property
    def all_options(self) -> dict[str, Any]:
        """The options to build with."""
        chosen = {"chunks": self.chunks} if _takes_chunks(find(self.name)) else {}
        return chosen | dict(self.options)


def forms(names: tuple[str, ...] | None, chunks: tuple[int, ...], *, asynchronous: bool = False) -> list[Form]:
    """Every schedule, or those of `names`, with its variants and each of `chunks` where it takes them.

    Unless they are named, asynchronous schedules come on request alone, and those that cut sequences into slices not at
    all: costs are of whole sequences. Raises InputError for an unknown name.
    """
    chosen = records() if names is None else [find(name) for name in dict.fromkeys(find(each).name for each in names)]
    found: list[Form] = []
    for record in chosen:
        for variant in record.variants:
            counts = chunks if _takes_chunks(record) else (0,)
            for count in counts:
                one = _form(record.name, tuple(sorted(variant.items())), count)
                if names is None and (one.slices > 1 or not (one.synchronous or asynchronous)):
                    continue
                found.append(one)
    return found


def _takes_chunks(record: Record) -> bool:
    return any(option.name == "chunks" for option in record.options)


@lru_cache(maxsize=512)
def _form(name: str, options: tuple[tuple[str, Any], ...], chunks: int) -> Form:
    record = find(name)
    small = _small(name, options, chunks)
    return Form(
        name=record.name,
        options=options,
        chunks=chunks or small.placement.chunks,
        paths=len(small.placement.paths),
        split=bool((small.kind == Kind.W).any()),
        paired=bool(small.pair.any()),
        searched=record.searched,
        synchronous=record.synchronous,
        slices=small.slices,
    )


@lru_cache(maxsize=512)
def _small(name: str, options: tuple[tuple[str, Any], ...], chunks: int) -> Schedule:
    given: dict[str, Any] = dict(options) | ({"chunks": chunks} if chunks else {})
    return find(name)(*SMALL, **given)


@lru_cache(maxsize=4096)
def _placement(form: Form, ranks: int) -> Placement:
    """The placement at these sizes, by what it is in the small instance."""
    chunks = form.chunks if _takes_chunks(find(form.name)) else 0
    small = _small(form.name, form.options, chunks).placement
    for make in (line, two_way):
        if small == make(SMALL[0]):
            return make(ranks)
    for cut in (loop, zigzag):
        if small == cut(SMALL[0], form.chunks):
            return cut(ranks, form.chunks)
    return find(form.name)(ranks, SMALL[1], **form.all_options).placement
