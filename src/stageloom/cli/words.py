"""Numbers as the command line writes them, and where it writes."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from rich.console import Console


def console() -> Console:
    """Standard output; at least 120 columns wide where it is no terminal."""
    out = _Screen(highlight=False, markup=False)
    if out.is_terminal:
        return out
    given = os.environ.get("COLUMNS", "")
    return _Screen(
        highlight=False, markup=False, width=int(given) if given.isascii() and given.isdigit() and int(given) else 120
    )


class _Screen(Console):
    def on_broken_pipe(self) -> None:
        """The reader (head, less) has gone: for `main` to end on; rich would end the program as if it had failed."""
        raise BrokenPipeError


def print_json(data: Any) -> None:
    """JSON on standard output. Floats are written with all their digits."""
    sys.stdout.write(json.dumps(data, indent=2, allow_nan=False) + "\n")


def time(value: float) -> str:
    """A time with five or six significant digits and no trailing zeros, thousands apart."""
    if value == 0:
        return "0"
    if abs(value) >= 1e7 or abs(value) < 1e-4:
        return f"{value:.6g}"
    digits = max(0, 5 - len(str(int(abs(value)))) + (abs(value) < 1))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def count(value: float) -> str:
    """Micro-batches of activations: whole where it is whole."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def size(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.4g} TB"


def many(number: int, what: str) -> str:
    """`1 rank`, `8 ranks`."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}{'es' if what.endswith(('ch', 's')) else 's'}"
