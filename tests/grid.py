"""The sizes and options that laws over all schedules run on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from stageloom.schedule import Schedule
from stageloom.schedules import Record

RANKS = (1, 2, 3, 4, 6, 8)
MICROBATCHES = (1, 2, 3, 4, 5, 7, 8, 11, 12, 16, 17)


def choices(record: Record) -> list[dict[str, Any]]:
    """Every combination of a record's options, whole numbers up to 3 above the least."""
    values: list[Sequence[Any]] = [
        ("1", "3/2", "2") if option.fraction else option.choices or range(option.least or 0, (option.least or 0) + 3)
        for option in record.options
    ]
    names = [option.name for option in record.options]
    return [dict(zip(names, each, strict=True)) for each in itertools.product(*values)]


def sizes(record: Record) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """All sizes and options of the grid that this schedule allows."""
    for options in choices(record):
        for ranks, microbatches in itertools.product(RANKS, MICROBATCHES):
            if record.refusal(ranks, microbatches, **options) is None:
                yield ranks, microbatches, options


def schedules(record: Record) -> Iterator[Schedule]:
    for ranks, microbatches, options in sizes(record):
        yield record(ranks, microbatches, **options)
