"""Numbers and units as they are written on pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stageloom.costs import Costs, Pieces
from stageloom.metrics import Metrics
from stageloom.schedule import Schedule


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


def joined(parts: Sequence[str]) -> str:
    return "  ·  ".join(part for part in parts if part)


def counted(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


def sizes(schedule: Schedule) -> list[str]:
    """How large a schedule is, and of which sort."""
    parts = [counted(schedule.ranks, "rank"), counted(schedule.microbatches, "micro-batch", "micro-batches")]
    return parts + shape(schedule)


def shape(schedule: Schedule) -> list[str]:
    """What differs from one chunk a rank, whole micro-batches and a synchronous step."""
    parts = [f"{schedule.chunks} chunks a rank"] if schedule.chunks > 1 else []
    parts += [f"{schedule.slices} slices"] if schedule.slices > 1 else []
    return parts if schedule.synchronous else [*parts, "asynchronous"]


def results(values: Metrics, costs: Costs) -> list[str]:
    return [f"makespan {time(values.makespan, costs)}", f"bubble {percent(values.bubble_rate)}"]


def costs(given: Costs, *, pairs: bool) -> str:
    """The costs of a drawing in a few words: `F 1, B 1, W 1 ms`."""
    parts = [f"F {_pieces(given.F)}", f"B {_pieces(given.B)}", f"W {_pieces(given.W)}"]
    if given.BW is not None:
        parts.append(f"BW {_pieces(given.BW)}")
    if pairs and given.overlap_time is not None:
        parts.append(f"overlapped pair {number(given.overlap_time)}")
    if given.overhead:
        parts.append(f"overhead {number(given.overhead)}")
    if given.latency:
        parts.append(f"latency {number(given.latency)}")
    text = ", ".join(parts) + (f" {given.unit}" if given.unit else "")
    if pairs and given.overlap_fraction is not None:
        text += f", pairs {number(given.overlap_fraction)} of their sum"
    if given.message_bytes:
        text += f", messages {size(given.message_bytes)}"
    if given.links:
        text += f", {counted(len(given.links), 'other link')}"
    if given.stragglers:
        text += f", {counted(len(given.stragglers), 'straggler')}"
    return text


def _pieces(value: Pieces) -> str:
    if not isinstance(value, list):
        return number(value)
    return number(value[0]) if len(set(value)) == 1 else f"{len(value)} values"
