"""The vocabulary: what one slot of a pipeline does, to which micro-batch, on which stage.

Big schedules are columns of integers; an `Op` is a view of one row, for reading, printing and tests.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    """What an op computes. PyTorch calls our `BW` "B" and our `B` "I"; those letters live in `formats/` alone."""

    F = 0  # forward
    B = 1  # backward for the input gradient only
    W = 2  # backward for the weight gradient only
    BW = 3  # both in one


KIND_NAMES = tuple(kind.name for kind in Kind)


class Op(NamedTuple):
    """One op: its kind, the stage it runs on, the micro-batch and (where micro-batches are cut) the slice."""

    kind: Kind
    stage: int
    microbatch: int
    slice: int = 0

    def __str__(self) -> str:
        cut = f".{self.slice}" if self.slice else ""
        return f"{self.kind.name}{self.microbatch}{cut}@{self.stage}"
