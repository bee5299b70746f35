"""V-Min, V-Half and V-ZB: a building block repeated every 6 slots, then reordered under the memory it holds.

Source: Qi et al., arXiv 2405.15362, sections 3 and 4, appendix tables 8 and 9 (offsets of the blocks), and the order
in which the authors' program improves them (sail-sg/zero-bubble-pipeline-parallelism, scheduler `zbv_greedy`).

On rank r, the passes of a micro-batch are F of chunk 0, F of chunk 1, B of chunk 1, B of chunk 0, each in its slot of
the block; W takes the free slots. Repetition makes the steady phase; at both ends passes move to earlier free slots
("squeeze") as long as no rank holds more than it did. Passes are placed in slots of one length, so the order does not
depend on the costs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stageloom._kernel import Kernel
from stageloom.placement import zigzag
from stageloom.schedule import Schedule, assemble
from stageloom.tape import B, F, Tape, W, join

Block = Callable[[int], NDArray[np.int64]]
PERIOD: Final = 6
FAR: Final = np.iinfo(np.int64).max
LETTERS: Final = join(F, F, F.on(chunk=1), B.on(chunk=1), B, W.on(chunk=1), W.on(chunk=0)).codes
"""The tape's letter of every number in a slot: (none), F0, F1, B1, B0, W1, W0."""


def v_min(ranks: int) -> NDArray[np.int64]:
    """Offsets 1 and 1: a micro-batch's forward goes down the V and up again without waiting, its backward likewise."""
    rank = np.arange(ranks)
    gap = 2 if ranks % 3 == 0 else 0
    return np.stack((rank, 2 * ranks - 1 - rank, 2 * ranks + gap + rank, 4 * ranks + gap - 1 - rank), axis=1)


def v_half(ranks: int) -> NDArray[np.int64]:
    """Offsets 2 and 1: one slot more a rank on the way down."""
    rank = np.arange(ranks)
    gap = 3 if ranks % 2 == 0 else 0
    back = 3 * ranks + gap - 1 + 2 * rank
    return np.stack((2 * rank, 3 * ranks - 2 - rank, back, 6 * ranks + gap - 2 - rank), axis=1)


def v_zb(ranks: int) -> NDArray[np.int64]:
    """Offsets 4 and 2: both ways differ from rank to rank by the same slots modulo 6, so that no two passes meet."""
    rank = np.arange(ranks)
    top, deep = 6 * (ranks - 1), 12 * (ranks - 1)
    return np.stack((4 * rank, top + 1 - 2 * rank, top + 2 + 4 * rank, deep + 3 - 2 * rank), axis=1)


@Kernel
def held_most(slots: Any, placed: bool) -> int:
    """The most that a rank holds, in chunk activations that W frees; `slots` are kinds of pass + 1, 0 where free.

    Not `placed`: every free slot is taken to do a W that is owed, as placing them will.
    """
    now = 0
    most = 0
    owed = 0
    for slot in slots:
        if slot == 1 or slot == 2:
            now += 1
            if now > most:
                most = now
        elif slot == 3 or slot == 4:
            owed += 1
        elif slot == 5:
            now -= 1
        elif not placed and owed:
            now -= 1
            owed -= 1
    return most


@Kernel
def reorder(slots: Any, microbatches: int, with_w: bool, order: Any, time: Any, limit: int) -> None:
    """Move passes to earlier free slots; those between the first backward of rank 0 and its last forward stay.

    `slots[rank, slot]` as in `held_most`, `time[rank, pass, microbatch]` the slots of the passes, `order` all of them
    as one number by slot, rank and pass. `with_w`: the W's are placed, and move too; else they are not, and only
    passes at the end move.
    """
    last = slots.shape[1]
    ranks, passes, width = time.shape
    phase = 0
    for code in order:
        which = code % width
        kind = code // width % passes
        rank = code // width // passes
        now = time[rank, kind, which]
        if kind == 3 and rank == 0 and phase == 0:
            phase = 1
        if phase == 1:
            if kind == 0 and which == microbatches - 1:
                phase = 2
            continue
        if phase == 0 and not with_w:
            continue
        after = -1
        if (kind == 0 or kind == 2) and rank > 0:
            after = time[rank - 1, kind, which]
        elif (kind == 1 or kind == 3) and rank + 1 < ranks:
            after = time[rank + 1, kind, which]
        if kind == 4:
            # The W's of a rank follow its backwards of both chunks, in the order of those.
            rest = which
            for at in range(last):
                if slots[rank, at] == 3 or slots[rank, at] == 4:
                    if rest == 0:
                        after = max(after, at)
                        break
                    rest -= 1
        elif kind > 0:
            after = max(after, time[rank, kind - 1, which])
        if which > 0:
            after = max(after, time[rank, kind, which - 1])
        for earlier in range(after + 1, now):
            if slots[rank, earlier]:
                continue
            slots[rank, now] = 0
            slots[rank, earlier] = kind + 1
            # The most that the rank then holds, as in `held_most`.
            holds = 0
            owed = 0
            fits = True
            for at in range(last):
                slot = slots[rank, at]
                if slot == 1 or slot == 2:
                    holds += 1
                    if holds > limit:
                        fits = False
                        break
                elif slot == 3 or slot == 4:
                    owed += 1
                elif slot == 5:
                    holds -= 1
                elif not with_w and owed:
                    holds -= 1
                    owed -= 1
            if fits:
                time[rank, kind, which] = earlier
                break
            slots[rank, earlier] = 0
            slots[rank, now] = kind + 1


@Kernel
def squeeze(order: Any, time: Any) -> None:
    """The same order on every rank, every pass as early as it can be, in slots; fills `time`."""
    ranks, passes, width = time.shape
    clock = [0] * ranks
    for code in order:
        which = code % width
        kind = code // width % passes
        rank = code // width // passes
        begin = clock[rank]
        if (kind == 0 or kind == 2) and rank > 0:
            begin = max(begin, time[rank - 1, kind, which] + 1)
        elif (kind == 1 or kind == 3) and rank + 1 < ranks:
            begin = max(begin, time[rank + 1, kind, which] + 1)
        if 0 < kind < 4:
            begin = max(begin, time[rank, kind - 1, which] + 1)
        time[rank, kind, which] = begin
        clock[rank] = begin + 1


@Kernel
def place_w(slots: Any, split: bool) -> None:
    """Put a W into every free slot of a rank where one is owed: 5, or with `split` 5 for chunk 1 and 6 for chunk 0."""
    for rank in range(slots.shape[0]):
        first = 0
        second = 0
        for at in range(slots.shape[1]):
            slot = slots[rank, at]
            if slot == 3 or (slot == 4 and not split):
                first += 1
            elif slot == 4:
                second += 1
            elif slot == 0 and first:
                slots[rank, at] = 5
                first -= 1
            elif slot == 0 and second:
                slots[rank, at] = 6
                second -= 1


def _in_slots(time: NDArray[np.int64]) -> NDArray[np.int8]:
    """`slots[rank, slot]` from `time[rank, pass, microbatch]`, with room for the W's behind."""
    slots = np.zeros((len(time), int(time[time < FAR].max()) + 1 + time.shape[2]), dtype=np.int8)
    rank, kind, _ = np.nonzero(time < FAR)
    slots[rank, time[time < FAR]] = kind + 1
    return slots


def _in_order(time: NDArray[np.int64]) -> NDArray[np.int64]:
    """All (rank, pass, microbatch) that have a slot, as one number each, by slot, then rank, then pass."""
    order = np.argsort(time, axis=None, kind="stable")
    return order[: int((time < FAR).sum())]


def _improve(time: NDArray[np.int64], microbatches: int, *, with_w: bool) -> None:
    """Reorder under the memory that is held, and squeeze. The W's then leave their slots again."""
    effort = time.size * len(time)
    if with_w:
        slots = _in_slots(time)
        place_w.pick(effort)(slots, False)
        time[:, 4] = np.stack([np.flatnonzero(row == 5) for row in slots])
    slots = _in_slots(time)
    most = held_most.pick(effort)
    limit = max(int(most(row, with_w)) for row in slots)
    reorder.pick(effort)(slots, microbatches, with_w, _in_order(time), time, limit)
    if not with_w:
        slots = _in_slots(time)
        place_w.pick(effort)(slots, False)
        time[:, 4] = np.stack([np.flatnonzero(row == 5) for row in slots])
    squeeze.pick(effort)(_in_order(time), time)
    time[:, 4] = FAR


def repeated(block: Block, ranks: int, microbatches: int, name: str) -> Schedule:
    """The schedule that repeats this block, its ends squeezed, W's in the free slots."""
    time = np.full((ranks, 5, 2 * microbatches), FAR)
    time[:, :4, :microbatches] = block(ranks)[:, :, None] + PERIOD * np.arange(microbatches)
    _improve(time, microbatches, with_w=True)
    _improve(time, microbatches, with_w=False)
    slots = _in_slots(time)
    place_w.pick(time.size * ranks)(slots, True)
    return assemble(name, zigzag(ranks, 2), [Tape(LETTERS[row[row > 0]]) for row in slots], microbatches)
