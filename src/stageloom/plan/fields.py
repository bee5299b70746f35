"""Reading a mapping key by key: what is missing, wrong or unknown is refused with the place, the key and what would
be right.
"""

from __future__ import annotations

import difflib
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, Final, cast

from stageloom.errors import InputError
from stageloom.files import short
from stageloom.plan.quantities import Dimension, quantity

MOST: Final = 10**9
"""No width, count or size of a model, a cluster or a job is larger."""


class Fields:
    """The mapping at `place` (a file, or a file and a key). Remembers which keys were asked for, for `done`.

    Every method returns `default` where the key is absent or null, and raises InputError where there is none, or
    where the value is not of the kind asked for.
    """

    def __init__(self, data: Mapping[str, Any], place: str) -> None:
        self.data = data
        self.place = place
        self.known: list[str] = []

    def has(self, key: str) -> bool:
        self._know(key)
        return self.data.get(key) is not None

    def whole(self, key: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        """A whole number from `least` to `most`; 4096.0 and "4096" are not taken for one."""
        value = self._value(key, default, f"a whole number from {least:,} to {most:,}")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(key, f"a whole number from {least:,} to {most:,} is needed")
        return value

    def maybe_whole(self, key: str, least: int = 1, most: int = MOST) -> int | None:
        return self.whole(key, None, least, most) if self.has(key) else None

    def number(self, key: str, default: float | None = None, least: float = 0.0, most: float = 1e30) -> float:
        value = self._value(key, default, f"a number from {least:g} to {most:g}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self.wrong(key, f"a number from {least:g} to {most:g} is needed")
        return float(value)

    def amount(self, key: str, dimension: Dimension, default: float | None = None) -> float:
        """A quantity with its unit, such as `80 GB`, or a number in bytes, bytes/s, flop/s or seconds."""
        value = self._value(key, default, f"{dimension.title}, such as {dimension.example}")
        return quantity(value, dimension, f"{self.place}: {key}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default, "text")
        if not isinstance(value, str) or not value:
            raise self.wrong(key, "text is needed")
        return value

    def truth(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default, "true or false")
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false is needed")
        return value

    def choice(self, key: str, choices: Iterable[str], default: str | None = None) -> str:
        names = list(choices)
        value = self._value(key, default, f"one of {', '.join(names)}")
        if not isinstance(value, str) or value not in names:
            raise self.wrong(key, f"one of {', '.join(names)} is needed")
        return value

    def inner(self, key: str) -> Fields:
        """The mapping under `key`."""
        return fields(self._value(key, None, "a mapping of keys to values"), f"{self.place}: {key}")

    def list(self, key: str) -> list[Any]:
        value = self._value(key, None, "a list")
        if not isinstance(value, list) or not value:
            raise self.wrong(key, "a list of at least one entry is needed")
        return cast("list[Any]", value)

    def wrong(self, key: str, remedy: str) -> InputError:
        """The error for the value of `key`; for the caller to raise."""
        return InputError(f"{self.place}: {key}: {short(self.data.get(key))}; {remedy}")

    def done(self) -> None:
        """Refuse a key that nobody asked for."""
        for key in self.data:
            if key not in self.known:
                near = difflib.get_close_matches(key, self.known, n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise InputError(f"{self.place}: {key}: unknown key; {hint}known keys: {', '.join(self.known)}")

    def _know(self, key: str) -> None:
        if key not in self.known:
            self.known.append(key)

    def _value(self, key: str, default: object, wanted: str) -> Any:
        self._know(key)
        value = self.data.get(key)
        if value is not None:
            return value
        if default is None:
            raise InputError(f"{self.place}: {key} is missing; {wanted} is needed")
        return default


def fields(data: object, place: str) -> Fields:
    """The fields of a mapping. Raises InputError where `data` is none."""
    if not isinstance(data, dict):
        raise InputError(f"{place}: {short(data)}; a mapping of keys to values is needed")
    return Fields({str(key): value for key, value in cast("dict[object, Any]", data).items()}, place)


@contextmanager
def at(place: str) -> Generator[None]:
    """Give an InputError from within the place it is about, unless it names it already."""
    try:
        yield
    except InputError as error:
        if str(error).startswith(place):
            raise
        raise InputError(f"{place}: {error}") from None
