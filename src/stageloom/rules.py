"""Who waits for whom, who sends to whom, who allocates and who frees: each rule once, as data.

The validator, the simulator, lowering, the optimiser and the executor all read these tables; the compiled kernels get
them as the small integer arrays below. Sources: GPipe (arXiv 1811.06965) for F and BW, the zero-bubble paper
(arXiv 2401.10241, figure 1) for B and W, Seq1F1B (arXiv 2406.03488, section 3.2) for slices.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stageloom.op import Kind


class Wait(NamedTuple):
    """`kind` cannot start before an op that does `part` has ended, at `stage` and `slice` relative to its own.

    `message` is true where the value waited for crosses a stage boundary (and so, mostly, a link between two ranks).
    `sequence_only` rules hold only where micro-batches are cut along the sequence: attention needs the keys and values
    of earlier slices, and their gradients come back in the reverse order.
    """

    kind: Kind
    part: Kind
    stage: int
    slice: int
    message: bool
    sequence_only: bool


# A BW op does both the B and the W part, so "part B" is met by a B or a BW.
WAITS: tuple[Wait, ...] = (
    Wait(Kind.F, Kind.F, stage=-1, slice=0, message=True, sequence_only=False),
    Wait(Kind.F, Kind.F, stage=0, slice=-1, message=False, sequence_only=True),
    Wait(Kind.B, Kind.B, stage=+1, slice=0, message=True, sequence_only=False),
    Wait(Kind.B, Kind.F, stage=0, slice=0, message=False, sequence_only=False),
    Wait(Kind.B, Kind.B, stage=0, slice=+1, message=False, sequence_only=True),
    Wait(Kind.W, Kind.B, stage=0, slice=0, message=False, sequence_only=False),
)

PARTS: dict[Kind, tuple[Kind, ...]] = {
    Kind.F: (Kind.F,),
    Kind.B: (Kind.B,),
    Kind.W: (Kind.W,),
    Kind.BW: (Kind.B, Kind.W),
}
"""The parts of a micro-batch's work on a stage that each kind of op does. A whole pass is each part exactly once."""


def waits(kind: Kind, *, sequence: bool) -> tuple[Wait, ...]:
    """The rules that hold an op of `kind` back; a BW waits for what its B part waits for."""
    own = Kind.B if kind is Kind.BW else kind
    return tuple(rule for rule in WAITS if rule.kind is own and (sequence or not rule.sequence_only))


# Signs of a micro-batch's activations over its life on a stage, per kind, as (part freed by B, part only W frees):
# F allocates both, B frees the first, W the second, BW both.
ALLOCATES = np.array([[1, 1], [-1, 0], [0, -1], [-1, -1]], dtype=np.int8)

# The stage an op's message comes from, relative to its own, per kind; 0 means that it waits for no message.
MESSAGE_FROM = np.zeros(len(Kind), dtype=np.int8)
# The part that this message is (Kind), per kind.
MESSAGE_PART = np.zeros(len(Kind), dtype=np.int8)
for _kind in Kind:
    for _rule in waits(_kind, sequence=False):
        if _rule.message:
            MESSAGE_FROM[_kind] = _rule.stage
            MESSAGE_PART[_kind] = _rule.part
