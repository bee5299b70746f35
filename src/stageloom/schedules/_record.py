"""What a schedule's file states about it: tests, command line, documentation and gallery loop over these records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from stageloom.costs import Costs
from stageloom.errors import ConstraintError, InputError
from stageloom.schedule import Schedule


@dataclass(frozen=True)
class Case:
    """What a promise is a function of.

    `F, B, W` are times of a whole rank's layers for one micro-batch, `latency` that of a message, `pair` the time of an
    overlapped F&B(&W) pair, `w_share` the part of a micro-batch's activations that only W frees. `chunks` and
    `options` are as built.
    """

    ranks: int
    microbatches: int
    chunks: int = 1
    F: float = 1.0
    B: float = 1.0
    W: float = 1.0
    latency: float = 0.0
    pair: float | None = None
    w_share: float = 0.5
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def paired(self) -> float:
        """Time of an overlapped pair of a forward and a full backward."""
        return self.F + self.B + self.W if self.pair is None else self.pair


@dataclass(frozen=True)
class Promise:
    """What the paper says, and when it is exact: `text` for reading, `value` to compute it, `exact` the conditions."""

    text: str
    value: Callable[[Case], Any]
    exact: str
    holds: Callable[[Case], bool]


@dataclass(frozen=True)
class Option:
    """A keyword of a schedule's build function. Whole numbers from `least`, or one of `choices`, or any `fraction`."""

    name: str
    default: Any
    help: str
    least: int | None = None
    choices: Sequence[str] = ()
    fraction: bool = False


@dataclass(frozen=True)
class Refusal:
    """Why these sizes cannot be built, and the nearest that can."""

    reason: str
    remedy: str


def anything(ranks: int, microbatches: int, **options: Any) -> Refusal | None:
    """The limits of a schedule that has none beyond one rank and one micro-batch."""
    return None


@dataclass(frozen=True)
class Record:
    """A published schedule. `bubble` promises (cost - work), `activations` the peak of every rank in micro-batches;
    `variants` are the options that a comparison shows. `searched`: the order depends on the costs, so that
    `build` takes them as `costs`."""

    name: str
    title: str
    citation: str
    summary: str
    build: Callable[..., Schedule]
    bubble: Promise
    activations: Promise
    aliases: tuple[str, ...] = ()
    synchronous: bool = True
    options: tuple[Option, ...] = ()
    limits: Callable[..., Refusal | None] = anything
    variants: tuple[dict[str, Any], ...] = ({},)
    searched: bool = False

    def option_values(self, given: dict[str, Any]) -> dict[str, Any]:
        """The options to build with: `given` over the defaults. Raises InputError for one that is unknown or wrong."""
        values = {option.name: option.default for option in self.options}
        for name, value in given.items():
            if name not in values:
                known = ", ".join(values) if values else "none"
                raise InputError(f"{self.name}: no option {name!r}; its options: {known}")
            values[name] = value
        for option in self.options:
            _check_option(self.name, option, values[option.name])
        return values

    def refusal(self, ranks: int, microbatches: int, /, **given: Any) -> Refusal | None:
        """None where these sizes can be built; else the reason and the nearest that can."""
        for name, value in (("ranks", ranks), ("microbatches", microbatches)):
            _check_whole(f"{self.name}: {name}", value, 1)
        values = self.option_values(given)
        ops = 3 * ranks * microbatches * _multiple(values)
        if ops > LARGEST:
            raise InputError(f"{self.name}: {ops:,} ops at these sizes; Stageloom builds up to {LARGEST:,}")
        return self.limits(ranks, microbatches, **values)

    def __call__(self, ranks: int, microbatches: int, /, *, costs: Costs | None = None, **given: Any) -> Schedule:
        """Build it; a searched one for these costs (all times 1 unless given), which others do not look at.

        Raises ConstraintError where these sizes cannot be built, InputError for a wrong option.
        """
        refused = self.refusal(ranks, microbatches, **given)
        if refused is not None:
            raise ConstraintError(self.name, refused.reason, refused.remedy)
        values = self.option_values(given)
        if self.searched:
            values["costs"] = Costs() if costs is None else costs
        return self.build(ranks, microbatches, **values)


def _check_option(schedule: str, option: Option, value: Any) -> None:
    if option.choices:
        if value not in option.choices:
            raise InputError(
                f"{schedule}: {option.name} = {value!r}; expected one of {', '.join(map(str, option.choices))}"
            )
    elif option.fraction:
        fraction_of(f"{schedule}: {option.name}", value)
    else:
        _check_whole(f"{schedule}: {option.name}", value, option.least or 0)


def fraction_of(what: str, value: object) -> Fraction:
    """A positive number, given as one or as text such as 1.5 or 3/2. Raises InputError for anything else."""
    with suppress(ValueError, ZeroDivisionError, OverflowError):
        if not isinstance(value, bool) and len(str(value)) < 30 and 0 < Fraction(str(value)) <= 1_000_000:
            return Fraction(str(value))
    raise InputError(f"{what} = {value!r}; a number above 0 is needed, as 1.5 or 3/2")


def _check_whole(what: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise InputError(f"{what} = {value!r}; a whole number of at least {least} is needed")


def _multiple(options: dict[str, Any]) -> int:
    """How many times a whole-rank pass these options cut (chunks, waves of two chunks, slices)."""
    return int(options.get("chunks", 1)) * 2 * int(options.get("waves", 1)) * int(options.get("slices", 1))


LARGEST = 20_000_000
"""Ops a schedule may have: beyond it the columns would not fit an ordinary machine's memory."""

CHUNKS = Option("chunks", 2, "chunks a rank (v)", least=1)


def even_ranks(ranks: int) -> Refusal | None:
    """For schedules of two opposite directions: they meet in the middle of an even number of ranks."""
    if ranks % 2 == 0:
        return None
    near = "2" if ranks == 1 else f"{ranks - 1} or {ranks + 1}"
    return Refusal(f"P = {ranks}; its two directions need an even number of ranks", f"nearest: P = {near}")
