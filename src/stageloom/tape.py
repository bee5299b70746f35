"""The algebra in which schedules are written.

A rank's order is a word over kinds: `+` then, `*` repeat, `&` overlapped with.

    1F1B on rank r of P:   F * w + (BW + F) * (M - w) + BW * w        with w = min(P - r, M)

A word names kinds, not micro-batches: micro-batches number themselves when the schedule is assembled. The n-th F of a
path and chunk is that path's micro-batch n, likewise the n-th backward (B or BW), and a bare `W` takes the oldest split
backward of the rank. A schedule that meets micro-batches in another order says so with `numbered`.

Python binds `*` before `+` before `&`, so an overlapped pair stands in brackets: `((F0 & BW1) + (F1 & BW0)) * k`.

Underneath, a tape is one column of small integers, so `*` is a tile and `+` a concatenation.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stageloom.errors import InputError
from stageloom.op import KIND_NAMES, Kind

# One code is kind (2 bits), "overlapped with the next" (1 bit), path (5 bits), chunk (the rest).
PAIR_BIT: Final = 1 << 2
PATH_SHIFT: Final = 3
CHUNK_SHIFT: Final = 8
ANYWHERE: Final = 31  # the path of a W that takes the rank's oldest split backward, whichever it is
AUTO: Final = -1  # the number of an op that numbers itself


@dataclass(frozen=True, eq=False)
class Tape:
    """A word of the algebra. `numbers` are explicit micro-batches, AUTO where an op numbers itself; None: all do."""

    codes: NDArray[np.int32]
    numbers: NDArray[np.int32] | None = field(default=None)

    def __len__(self) -> int:
        return len(self.codes)

    def __add__(self, other: Tape) -> Tape:
        return join(self, other)

    def __mul__(self, times: int) -> Tape:
        try:
            times = operator.index(times)
        except TypeError:
            raise InputError(f"tape: a word cannot be repeated {times!r} times; a whole number is needed") from None
        if times < 0:
            raise InputError(f"tape: a word cannot be repeated {times} times; 0 or more is needed")
        return Tape(_tiled(self.codes, times), None if self.numbers is None else _tiled(self.numbers, times))

    def __rmul__(self, times: int) -> Tape:
        return self * times

    def __and__(self, other: Tape) -> Tape:
        if len(self) != 1 or len(other) != 1:
            raise InputError(
                f"tape: & joins one op with one op, not {len(self)} with {len(other)}; "
                "put each pair in brackets: ((F0 & BW1) + (F1 & BW0))"
            )
        first = Tape(self.codes | PAIR_BIT, self.numbers)
        return first + other

    def __getitem__(self, part: slice) -> Tape:
        return Tape(self.codes[part], None if self.numbers is None else self.numbers[part])

    def __repr__(self) -> str:
        """The word in the algebra, runs of one op joined: `F*2 + (BW & F)`."""
        words: list[tuple[str, int]] = []
        joined = False
        for code, number in zip(self.codes.tolist(), _numbers(self).tolist(), strict=True):
            word = _name(code) if number == AUTO else f"{_name(code)}:{number}"
            if joined:
                word = f"({words.pop()[0]} & {word})"
            joined = bool(code & PAIR_BIT)
            if words and words[-1][0] == word and not joined:
                words[-1] = word, words[-1][1] + 1
            else:
                words.append((word, 1))
        return " + ".join(word if times == 1 else f"{word}*{times}" for word, times in words) or "EMPTY"

    def on(self, *, path: int = 0, chunk: int = 0) -> Tape:
        """The same word with every op on this path and chunk (a W too: it then takes that chunk's oldest backward)."""
        if not 0 <= path < ANYWHERE or chunk < 0:
            raise InputError(f"tape: path {path}, chunk {chunk}; 0 <= path < {ANYWHERE} and chunk >= 0 are needed")
        place = path << PATH_SHIFT | chunk << CHUNK_SHIFT
        return Tape(self.codes & (PAIR_BIT | 3) | np.int32(place), self.numbers)


def _numbers(tape: Tape) -> NDArray[np.int32]:
    return np.full(len(tape), AUTO, dtype=np.int32) if tape.numbers is None else tape.numbers


def _tiled(column: NDArray[np.int32], times: int) -> NDArray[np.int32]:
    """`np.tile` of one column; that function spends several times as long on arguments of other shapes."""
    result = np.empty((times, len(column)), dtype=np.int32)
    result[:] = column
    return result.reshape(-1)


def _name(code: int) -> str:
    """`F`, `W`, or with its place where that is not the first: `F[1]` (chunk), `F[1,0]` (path, chunk)."""
    kind, path, chunk = KIND_NAMES[code & 3], code >> PATH_SHIFT & ANYWHERE, code >> CHUNK_SHIFT
    if path == ANYWHERE or (path == 0 and chunk == 0 and kind != "W"):
        return kind
    return f"{kind}[{chunk}]" if path == 0 else f"{kind}[{path},{chunk}]"


def _letter(kind: Kind, path: int = 0) -> Tape:
    return Tape(np.array([kind | path << PATH_SHIFT], dtype=np.int32))


F: Final = _letter(Kind.F)
B: Final = _letter(Kind.B)
W: Final = _letter(Kind.W, ANYWHERE)
BW: Final = _letter(Kind.BW)
EMPTY: Final = Tape(np.array([], dtype=np.int32))


def join(*words: Tape) -> Tape:
    """The words one after another: `+` over many at once, which is quicker for big schedules."""
    codes = np.concatenate([word.codes for word in words])
    if all(word.numbers is None for word in words):
        return Tape(codes)
    return Tape(codes, np.concatenate([_numbers(word) for word in words]))


def mirrored(word: Tape) -> Tape:
    """The same word with paths 0 and 1 exchanged: what the opposite rank of a two-way placement does."""
    anywhere = (word.codes >> PATH_SHIFT & ANYWHERE) == ANYWHERE
    return Tape(np.where(anywhere, word.codes, word.codes ^ 1 << PATH_SHIFT), word.numbers)


def numbered(op: Tape, microbatches: Iterable[int]) -> Tape:
    """`op` once for each of these micro-batches, in this order (GPipe: `numbered(BW, range(M - 1, -1, -1))`).

    On a cut micro-batch the number counts slices: micro-batch n // slices, the (n % slices)-th of its slices.
    """
    if len(op) != 1:
        raise InputError(f"tape: numbered() takes one op, not a word of {len(op)}")
    numbers = np.fromiter(microbatches, dtype=np.int32)
    return Tape(np.tile(op.codes, len(numbers)), numbers)


def alternate(*words: Tape) -> Tape:
    """One op of each word in turn, then the next of each: words of one length merged (Megatron-LM's steady phase)."""
    if len({len(word) for word in words}) != 1:
        raise InputError(f"tape: alternate() takes words of one length, not of {[len(word) for word in words]}")
    codes = np.column_stack([word.codes for word in words]).ravel()
    if all(word.numbers is None for word in words):
        return Tape(codes)
    return Tape(codes, np.column_stack([_numbers(word) for word in words]).ravel())


def in_slots(*entries: tuple[Tape, NDArray[np.int64]]) -> Tape:
    """The word of a schedule that its paper draws on a grid: each op of `entries` in its time slots, in slot order.

    Two ops in one slot keep the order of the entries. Numbers stay automatic, so each entry's slots must ascend.
    """
    codes = np.concatenate([np.repeat(op.codes, len(slots)) for op, slots in entries])
    slots = np.concatenate([slots for _, slots in entries])
    return Tape(codes[np.argsort(slots, kind="stable")])
