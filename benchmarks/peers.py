"""Other tools on the same sizes. None is a dependency: what is not installed is left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

PYTORCH: Final = {
    "gpipe": ("ScheduleGPipe", 1),
    "1f1b": ("Schedule1F1B", 1),
    "breadth-first": ("ScheduleLoopedBFS", 2),
    "interleaved-1f1b": ("ScheduleInterleaved1F1B", 2),
    "interleaved-zb": ("ScheduleInterleavedZeroBubble", 2),
    "zb-v": ("ScheduleZBVZeroBubble", 2),
    # ScheduleDualPipeV: PyTorch's simulation knows no overlapped pairs.
}
"""The schedules that PyTorch can validate, lower and simulate, with the chunks that ours have by default."""


def pytorch(schedule: str, ranks: int, microbatches: int) -> Callable[[], object] | None:
    """PyTorch's way from sizes to a simulated run: order, validate, add sends and receives, simulate."""
    if schedule not in PYTORCH:
        return None
    try:
        from tests import pytorch_orders
    except ImportError:
        return None
    name, chunks = PYTORCH[schedule]

    def work() -> object:
        if name == "Schedule1F1B":
            order = pytorch_orders.mended_1f1b(ranks, microbatches)
        else:
            order = pytorch_orders.computing(pytorch_orders.actions(name, ranks, microbatches, chunks))
        return pytorch_orders.check_as_pytorch(order, ranks, microbatches, chunks)

    return work
