"""The published schedules, one file each; a file with a `record` is found by being there.

Methods that search for an order stand further up (`stageloom.search`), which `add`s their records to these.
"""

from __future__ import annotations

import difflib
import pkgutil
from functools import cache
from importlib import import_module
from typing import Any

from stageloom.costs import Costs
from stageloom.errors import InputError
from stageloom.schedule import Schedule
from stageloom.schedules._record import Case, Option, Promise, Record, Refusal, fraction_of

__all__ = ["Case", "Option", "Promise", "Record", "Refusal", "add", "build", "find", "fraction_of", "records"]

_added: dict[str, Record] = {}


def add(*more: Record) -> None:
    """Make these records known by their names, beside those of this folder."""
    _added.update({record.name: record for record in more})
    records.cache_clear()


@cache
def records() -> tuple[Record, ...]:
    """All schedules, in the order of their names."""
    names = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]
    found: list[Record] = [import_module(f"{__name__}.{name}").record for name in names]
    return tuple(sorted([*found, *_added.values()], key=lambda record: record.name))


def find(name: str) -> Record:
    """The schedule of this name or alias (case, `_` and `-` do not matter). Raises InputError with near names."""
    wanted = name.lower().replace("_", "-")
    known: dict[str, Record] = {}
    for record in records():
        for known_as in (record.name, *record.aliases):
            known[known_as] = record
    if wanted in known:
        return known[wanted]
    near = difflib.get_close_matches(wanted, known, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(r.name for r in records())}"
    raise InputError(f"no schedule named {name!r}; {hint}")


def build(name: str, ranks: int, microbatches: int, *, costs: Costs | None = None, **options: Any) -> Schedule:
    """The schedule of this name at these sizes; `costs` are what a searched one is made for (all times 1 unless given).

    Raises InputError, or ConstraintError with the nearest sizes.
    """
    return find(name)(ranks, microbatches, costs=costs, **options)
