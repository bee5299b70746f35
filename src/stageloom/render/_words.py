"""Numbers and units as they are written on pictures."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from stageloom.costs import Costs


def number(value: float) -> str:
    """Four digits at most, no exponent for ordinary sizes: 33, 0.25, 1,725."""
    if value == 0:
        return "0"
    if abs(value) >= 1e7 or abs(value) < 1e-3:
        return f"{value:.3g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def time(value: float, costs: Costs) -> str:
    return f"{number(value)} {costs.unit}" if costs.unit else number(value)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def size(amount: float) -> str:
    """Bytes in binary units, three digits."""
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1000 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if abs(amount) >= 100 else f"{amount:.3g} {unit}"


def ticks(span: float, most: int) -> NDArray[np.float64]:
    """Round numbers from 0 to `span`, at most `most` + 1 of them."""
    if span <= 0:
        return np.zeros(1)
    raw = span / max(most, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9)), 10 * power)
    return np.arange(int(span / step * (1 + 1e-9)) + 1, dtype=np.float64) * np.float64(step)


def tick_labels(values: NDArray[np.float64]) -> list[str]:
    """Tick labels with as many decimals as their step needs."""
    step = float(values[1]) if len(values) > 1 else 1.0
    if step < 1e-4 or values[-1] >= 1e9:
        return [f"{value:g}" for value in values]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{value:,.{decimals}f}" for value in values]
