"""The program: what every rank executes, in order, as columns and as objects for reading.

A rank starts its instructions in the order of its list. A receive is waited for. A send, a reduction or a gather is
only started: it runs on in its own stream ("send", "reduce", "gather"), sends buffered, each stream in order. The first
op of a gathered stage waits for its gather.

Data parallel ranks (other processes that hold the same stages and train on other data) all run the program of their
pipeline rank; what they do together is a REDUCE, and a GATHER where they share out a stage's weights among them.
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
    GATHER = 7


STREAMS: Final = ("compute", "compute", "compute", "compute", "send", "receive", "reduce", "gather")
"""The stream that an instruction occupies, by code."""


class Instruction(NamedTuple):
    """A view of one instruction. `op` is what it computes, or the op whose result is sent, received or reduced, or that
    needs what is gathered."""

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
        if self.code in (Code.REDUCE, Code.GATHER):
            return f"{self.code.name.lower()} @{self.op.stage}"
        return str(self.op)


@dataclass(frozen=True, eq=False)
class Program:
    """The instructions of all ranks, one after another as columns: rank r's are offsets[r] to offsets[r + 1] - 1.

    `row` is a row of the schedule: the op computed; the op whose result is sent or received (the sender's on both
    sides, so it names the message); the last weight gradient before a reduction (another rank's where this one has
    none); the first op that needs what is gathered. `use` is the row that a received message is for, `peer` the other
    rank of a send or receive; -1 elsewhere. `data_parallel`: every stage has other holders, beside the pipeline.
    `sharded`: stages whose weights lie in shards between steps.
    """

    schedule: Schedule
    offsets: Rows
    code: NDArray[np.int8]
    row: Rows
    use: Rows
    peer: NDArray[np.int32]
    data_parallel: bool = False
    sharded: frozenset[int] = frozenset()

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
        """The ranks that hold this stage; with their data parallel ranks they take part in its reduction."""
        return tuple(sorted({path[stage] for path in self.schedule.placement.paths}))

    def reductions(self, stage: int) -> int:
        """How often each holder sums the gradients of this stage with others: once if there are any, in a synchronous
        schedule; before each update in an asynchronous one."""
        if not self.data_parallel and len(self.holders(stage)) < 2:
            return 0
        schedule = self.schedule
        return 1 if schedule.synchronous else schedule.microbatches * schedule.slices // schedule.update_every
