"""Amounts with units: `80 GB`, `400 Gb/s`, `989 TFLOP/s`, `3.3 us`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from stageloom.errors import InputError
from stageloom.files import short

_PREFIXES: Final = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY: Final = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_LARGE: Final = _PREFIXES | _BINARY


def _units(prefixes: dict[str, float], names: tuple[str, ...], factor: float = 1.0) -> dict[str, float]:
    return {prefix + name: scale * factor for prefix, scale in prefixes.items() for name in names}


@dataclass(frozen=True, slots=True)
class Dimension:
    """What is measured. A bare number is in `unit`; outside `least` to `most` it is taken for a slip of units."""

    title: str
    unit: str
    units: dict[str, float]
    least: float
    most: float
    example: str


MEMORY: Final = Dimension("an amount of memory", "bytes", _units(_LARGE, ("B",)), 1e8, 1e14, "80 GB")
RATE: Final = Dimension(
    "a bandwidth",
    "bytes/s",
    _units(_LARGE, ("B/s", "Bps")) | _units(_PREFIXES, ("b/s", "bit/s", "bps"), 1 / 8),
    1e6,
    1e15,
    "50 GB/s or 400 Gb/s",
)
SPEED: Final = Dimension(
    "a speed of arithmetic",
    "flop/s",
    _units(_PREFIXES, ("FLOP/s", "FLOPS", "flop/s", "flops")),
    1e9,
    1e18,
    "989 TFLOP/s",
)
TIME: Final = Dimension(
    "a time", "seconds", {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}, 0.0, 1.0, "3.3 us or 3.3e-6"
)
TOKENS: Final = Dimension(
    "a number of tokens",
    "tokens",
    {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "tokens": 1.0},
    1.0,
    1e18,
    "15T or 15e12",
)


def quantity(value: object, dimension: Dimension, place: str) -> float:
    """`value`, a number or a number with its unit, in `dimension.unit`.

    Raises InputError at `place` for what is no number, a unit of something else, or an amount that no hardware has.
    """
    amount = _amount(value, dimension, place)
    if not math.isfinite(amount) or not dimension.least <= amount <= dimension.most:
        raise InputError(
            f"{place}: {short(value)} is {amount:g} {dimension.unit}; {dimension.title} from {dimension.least:g} to "
            f"{dimension.most:g} {dimension.unit} is needed, such as {dimension.example}"
        )
    return amount


def _amount(value: object, dimension: Dimension, place: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    found = (
        re.fullmatch(r"\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*([^\s0-9]\S*)?\s*", value)
        if isinstance(value, str)
        else None
    )
    try:
        number = float(found[1]) if found else math.nan
    except ValueError:
        number = math.nan
    if found is None or math.isnan(number):
        raise InputError(f"{place}: {short(value)}; {dimension.title} is needed, such as {dimension.example}")
    unit = found[2]
    if unit is None:
        return number
    if unit not in dimension.units:
        raise InputError(
            f"{place}: {short(value)}: {unit} is no unit of {dimension.title}; write it as {dimension.example}"
        )
    return number * dimension.units[unit]
