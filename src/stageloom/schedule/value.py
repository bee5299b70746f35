"""The schedule value: a placement, and one order of ops a rank, as columns."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from stageloom import _kernel
from stageloom.errors import InputError, ScheduleError
from stageloom.op import KIND_NAMES, Kind, Op
from stageloom.placement import Placement
from stageloom.rules import MESSAGE_FROM, MESSAGE_PART
from stageloom.tape import ANYWHERE, AUTO, Tape

Cut = Literal["sequence", "batch"]
CUTS: Final = ("sequence", "batch")

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Links:
    """Who does what, looked up once: see `_kernel.link`.

    `rows[part, stage, microbatch, slice]` is the row that does this part (Kind F, B or W; -1 where nobody does),
    `source[row]` the row whose message it waits for (-1: none), `faults` how many faults were met on the way.
    """

    rows: NDArray[np.int32]
    source: Ints
    faults: int


@dataclass(frozen=True, eq=False)
class Schedule:
    """What every rank does, in order; it says nothing about when.

    The rows of all ranks stand one after another: rank r owns rows offsets[r] to offsets[r + 1] - 1. `pair[row]` is
    true where the op is overlapped with the next one. `path_of[microbatch]` is the path a micro-batch takes. With
    `slices` above 1 every micro-batch is cut, along its "sequence" (slices depend on one another through attention) or
    along its "batch" (they do not).

    Asynchronous schedules state the weight `version` of each op (the number of updates its stage had seen) and after
    how many backwards a stage updates its weights (`update_every`); None and 0 mean that every op uses the version the
    step began with.
    """

    name: str
    placement: Placement
    microbatches: int
    offsets: NDArray[np.int64]
    kind: NDArray[np.int8]
    stage: Ints
    microbatch: Ints
    slice: Ints
    pair: NDArray[np.bool_]
    path_of: NDArray[np.int8]
    slices: int = 1
    cut: Cut = "sequence"
    version: Ints | None = field(default=None)
    update_every: int = 0

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @property
    def stages(self) -> int:
        return self.placement.stages

    @property
    def chunks(self) -> int:
        """Chunks a rank on one path (v)."""
        return self.placement.chunks

    @property
    def synchronous(self) -> bool:
        """True where a step's gradients all belong to the weights the step began with."""
        return self.update_every == 0

    @property
    def sequence(self) -> bool:
        """True where slices of a micro-batch wait for one another."""
        return self.slices > 1 and self.cut == "sequence"

    def __len__(self) -> int:
        return len(self.kind)

    def op(self, row: int) -> Op:
        return Op(Kind(self.kind[row]), int(self.stage[row]), int(self.microbatch[row]), int(self.slice[row]))

    def ops(self, rank: int) -> Iterator[Op]:
        """The ops of a rank in order, as objects (for reading; use the columns for work)."""
        return map(self.op, range(int(self.offsets[rank]), int(self.offsets[rank + 1])))

    @cached_property
    def rank(self) -> Ints:
        """The rank of every row."""
        return np.repeat(np.arange(self.ranks, dtype=np.int32), np.diff(self.offsets))

    @cached_property
    def links(self) -> Links:
        source = np.empty(len(self), dtype=np.int32)
        rows = np.full((3, self.stages, self.microbatches, self.slices), -1, dtype=np.int32)
        faults = _kernel.link.pick(len(self))(
            self.offsets,
            self.kind,
            self.stage,
            self.microbatch,
            self.slice,
            self.pair,
            self.placement.table,
            self.path_of,
            MESSAGE_FROM,
            MESSAGE_PART,
            self.sequence,
            rows,
            source,
        )
        return Links(rows, source, int(faults))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return (
            (self.name, self.placement, self.microbatches, self.slices, self.cut, self.update_every)
            == (other.name, other.placement, other.microbatches, other.slices, other.cut, other.update_every)
        ) and all(
            np.array_equal(mine, theirs)
            for mine, theirs in (
                (self.offsets, other.offsets),
                (self.kind, other.kind),
                (self.stage, other.stage),
                (self.microbatch, other.microbatch),
                (self.slice, other.slice),
                (self.pair, other.pair),
                (self.path_of, other.path_of),
                (self.versions, other.versions),
            )
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def versions(self) -> Ints:
        """The weight version of every row; zeros for a synchronous schedule."""
        return np.zeros(len(self), dtype=np.int32) if self.version is None else self.version

    def __repr__(self) -> str:
        return f"<{self.name}: {self.ranks} ranks, {self.microbatches} micro-batches, {len(self)} ops>"


def check_name(name: str, wrong: Callable[[str], Exception]) -> None:
    """Raise `wrong(what)` unless the name can stand in the text form and be read back: one printable line."""
    if not name or len(name) > 200 or not name.isprintable() or "#" in name or name != name.strip():
        shown = repr(name[:60])
        raise wrong(f"name {shown}: up to 200 printable characters without # and outer blanks are needed")


def assemble(
    name: str,
    placement: Placement,
    tapes: Sequence[Tape],
    microbatches: int,
    *,
    slices: int = 1,
    cut: Cut = "sequence",
    path_of: Sequence[int] | NDArray[np.int8] | None = None,
) -> Schedule:
    """Number the micro-batches of one tape a rank (rule in `tape`) and make the schedule.

    `path_of[microbatch]` defaults to equal runs of micro-batches over the paths, the first path first.
    Raises ScheduleError where a tape asks for a chunk, a micro-batch or a split backward that is not there.
    """
    check_name(name, lambda what: InputError(f"assemble: {what}"))
    if cut not in CUTS:
        raise InputError(f"{name}: micro-batches are cut along {cut!r}; expected one of {', '.join(CUTS)}")
    if len(tapes) != placement.ranks:
        raise InputError(f"{name}: {len(tapes)} tapes for {placement.ranks} ranks; one tape a rank is needed")
    if operator.index(microbatches) < 1 or operator.index(slices) < 1:
        raise InputError(f"{name}: {microbatches} micro-batches of {slices} slices; at least 1 of each is needed")
    paths = len(placement.paths)
    runs = np.arange(microbatches) * paths // microbatches if path_of is None else path_of
    which = np.clip(np.asarray(runs), -1, 127).astype(np.int8)
    if which.shape != (microbatches,) or which.min() < 0 or which.max() >= paths:
        raise InputError(
            f"{name}: path_of must name a path from 0 to {paths - 1} for each of {microbatches} micro-batches"
        )
    per_path = np.bincount(which, minlength=paths)
    codes = np.concatenate([tape.codes for tape in tapes]).astype(np.int32, copy=False)
    numbers = np.full(len(codes), AUTO, dtype=np.int32)
    offsets = np.zeros(placement.ranks + 1, dtype=np.int64)
    np.cumsum([len(tape) for tape in tapes], out=offsets[1:])
    for rank, tape in enumerate(tapes):
        if tape.numbers is not None:
            numbers[offsets[rank] : offsets[rank + 1]] = tape.numbers

    stage, microbatch, part = (np.empty(len(codes), dtype=np.int32) for _ in range(3))
    wrong = _kernel.number.pick(len(codes))(
        offsets,
        codes,
        numbers,
        _stage_table(placement),
        np.concatenate(([0], np.cumsum(per_path))),
        np.argsort(which, kind="stable"),
        slices,
        slices > 1 and cut == "sequence",
        stage,
        microbatch,
        part,
    )
    if wrong >= 0:
        raise ScheduleError(_unnumbered(name, placement, offsets, codes, int(wrong)))
    return Schedule(
        name=name,
        placement=placement,
        microbatches=microbatches,
        offsets=offsets,
        kind=(codes & 3).astype(np.int8),
        stage=stage,
        microbatch=microbatch,
        slice=part,
        pair=(codes & 4).astype(np.bool_),
        path_of=which,
        slices=slices,
        cut=cut if slices > 1 else "sequence",
    )


def keep_first(schedule: Schedule, microbatches: int) -> Schedule:
    """The schedule without the ops of micro-batches from `microbatches` on; its pairs must stay or go as a whole."""
    if microbatches >= schedule.microbatches:
        return schedule
    keep = schedule.microbatch < microbatches
    kept = np.concatenate(([0], np.cumsum(keep)))
    return replace(
        schedule,
        microbatches=microbatches,
        offsets=kept[schedule.offsets],
        kind=schedule.kind[keep],
        stage=schedule.stage[keep],
        microbatch=schedule.microbatch[keep],
        slice=schedule.slice[keep],
        pair=schedule.pair[keep],
        path_of=schedule.path_of[:microbatches],
        version=None if schedule.version is None else schedule.version[keep],
    )


def _stage_table(placement: Placement) -> NDArray[np.int32]:
    """stage_of[rank, path, chunk], -1 where the path does not visit the rank so often.

    The same as `placement.stages_of`, in columns: the chunk of a stage is its place among the stages of its rank.
    """
    table = np.full((placement.ranks, len(placement.paths), placement.chunks), -1, dtype=np.int32)
    for path, ranks in enumerate(placement.table):
        order = np.argsort(ranks, kind="stable")
        visits = np.bincount(ranks, minlength=placement.ranks)
        chunk = np.arange(len(ranks)) - np.repeat(np.cumsum(visits) - visits, visits)
        table[ranks[order], path, chunk] = order
    return table


def _unnumbered(name: str, placement: Placement, offsets: NDArray[np.int64], codes: Ints, row: int) -> str:
    rank = int(np.searchsorted(offsets, row, side="right")) - 1
    code = int(codes[row])
    kind, path, chunk = KIND_NAMES[code & 3], code >> 3 & 31, code >> 8
    where = f"{name}: rank {rank}, position {row - int(offsets[rank])}: {kind}"
    if kind == "W":
        return f"{where} finds no split backward (B) before it; each W needs a B of its own earlier on the rank"
    if path != ANYWHERE and (path >= len(placement.paths) or chunk >= len(placement.stages_of[rank][path])):
        return f"{where} of path {path}, chunk {chunk}: the placement gives this rank no such chunk"
    return f"{where} of path {path}, chunk {chunk}: there are no more micro-batches left for it"
