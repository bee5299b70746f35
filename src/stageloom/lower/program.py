"""The program: what every rank executes, in order, as columns and as objects for reading.

A rank starts its instructions in the order of its list. A receive is waited for. A send or a reduction is only started:
it runs on in its own stream ("send", "reduce"), sends buffered, each stream in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stageloom.op import Op
from stageloom.schedule import Schedule

Rows = NDArray[np.int64]


class Code(IntEnum):
    """What an instruction does; the first four compute an op of that `Kind`."""

    F = 0
    B = 1
    W = 2
    BW = 3
    SEND = 4
    RECV = 5
    REDUCE = 6


STREAMS: Final = ("compute", "compute", "compute", "compute", "send", "receive", "reduce")
"""The stream that an instruction occupies, by code."""


class Instruction(NamedTuple):
    """A view of one instruction. `op` is what it computes, or the op whose result is sent, received or reduced."""

    code: Code
    op: Op
    peer: int | None

    @property
    def stream(self) -> str:
        return STREAMS[self.code]

    def __str__(self) -> str:
        if self.code is Code.SEND:
            return f"send {self.op} to {self.peer}"
        if self.code is Code.RECV:
            return f"receive {self.op} from {self.peer}"
        return f"reduce @{self.op.stage}" if self.code is Code.REDUCE else str(self.op)


@dataclass(frozen=True, eq=False)
class Program:
    """The instructions of all ranks, one after another as columns: rank r's are offsets[r] to offsets[r + 1] - 1.

    `row` is a row of the schedule: the op computed; the op whose result is sent or received (the sender's on both
    sides, so it names the message); the last weight gradient before a reduction (another rank's where this one has
    none). `use` is the row that a received message is for, `peer` the other rank of a send or receive; -1 elsewhere.
    """

    schedule: Schedule
    offsets: Rows
    code: NDArray[np.int8]
    row: Rows
    use: Rows
    peer: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.code)

    @cached_property
    def rank(self) -> NDArray[np.int32]:
        """The rank of every instruction."""
        return np.repeat(np.arange(self.schedule.ranks, dtype=np.int32), np.diff(self.offsets))

    def instruction(self, at: int) -> Instruction:
        peer = int(self.peer[at])
        return Instruction(Code(self.code[at]), self.schedule.op(int(self.row[at])), None if peer < 0 else peer)

    def instructions(self, rank: int) -> Iterator[Instruction]:
        """The instructions of a rank in order, as objects (for reading; use the columns for work)."""
        return map(self.instruction, range(int(self.offsets[rank]), int(self.offsets[rank + 1])))

    def holders(self, stage: int) -> tuple[int, ...]:
        """The ranks that hold this stage; the participants of its reduction where they are several."""
        return tuple(sorted({path[stage] for path in self.schedule.placement.paths}))
