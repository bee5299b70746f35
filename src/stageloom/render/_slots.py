"""The ops of a timeline as columns to draw: when, on which rank, in which colour, whole or half of a pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stageloom.op import KIND_NAMES, Kind
from stageloom.render._palette import CHUNK_LEVELS, PATH_LEVELS, op_paint
from stageloom.schedule import Schedule
from stageloom.simulate import Timeline

Floats = NDArray[np.float64]
WHOLE: Final = 0
UPPER: Final = 1
LOWER: Final = 2


@dataclass(frozen=True)
class Slots:
    """One row an op: `row` in the schedule. `paint` indexes `paints`; `half` says where in its lane an op is drawn."""

    row: NDArray[np.int64]
    rank: NDArray[np.int32]
    start: Floats
    end: Floats
    paint: NDArray[np.int64]
    half: NDArray[np.int8]
    path: NDArray[np.int8]
    paints: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def typical(self) -> float:
        """The duration of a short op: most ops take this long or longer."""
        taken = (self.end - self.start)[self.end > self.start]
        return float(np.percentile(taken, 10)) if len(taken) else 1.0


def chunk_table(schedule: Schedule) -> NDArray[np.int32]:
    """`table[path, stage]` = the chunk that this stage is on its rank."""
    table = np.zeros(schedule.placement.table.shape, dtype=np.int32)
    for of_rank in schedule.placement.stages_of:
        for path, stages in enumerate(of_rank):
            table[path, list(stages)] = np.arange(len(stages))
    return table


def slots(timeline: Timeline) -> Slots:
    schedule = timeline.schedule
    path = schedule.path_of[schedule.microbatch]
    level = _levels(chunk_table(schedule)[path, schedule.stage], schedule.chunks, CHUNK_LEVELS, CHUNK_LEVELS // 2)
    path_level = _levels(path, len(schedule.placement.paths), PATH_LEVELS, 0)
    code = (schedule.kind.astype(np.int64) * (CHUNK_LEVELS + 1) + level) * (PATH_LEVELS + 1) + path_level
    codes, paint = np.unique(code, return_inverse=True)
    paints = tuple(_paint(int(code)) for code in codes)
    rows = np.arange(len(schedule))
    return Slots(rows, schedule.rank, timeline.start, timeline.end, paint, halves(schedule), path, paints)


def _levels(value: NDArray[np.integer], count: int, levels: int, alone: int) -> NDArray[np.int64]:
    if count == 1:
        return np.full(value.shape, alone, dtype=np.int64)
    return np.rint(value * (levels / (count - 1))).astype(np.int64)


def _paint(code: int) -> str:
    rest, path_level = divmod(code, PATH_LEVELS + 1)
    kind, level = divmod(rest, CHUNK_LEVELS + 1)
    return op_paint(KIND_NAMES[kind], level, path_level)


def halves(schedule: Schedule) -> NDArray[np.int8]:
    """Where each op stands in its lane: the forward of an overlapped pair above, the backward below."""
    half = np.zeros(len(schedule), dtype=np.int8)
    first = np.flatnonzero(schedule.pair)
    forward = Kind.F.value
    swapped = (schedule.kind[first] != forward) & (schedule.kind[first + 1] == forward)
    half[first] = np.where(swapped, LOWER, UPPER)
    half[first + 1] = np.where(swapped, UPPER, LOWER)
    return half


def captions(schedule: Schedule) -> list[str]:
    """What is written in a slot: the micro-batch, and its slice where micro-batches are cut."""
    numbers = schedule.microbatch.tolist()
    if schedule.slices == 1:
        return [str(number) for number in numbers]
    return [f"{number}.{cut}" for number, cut in zip(numbers, schedule.slice.tolist(), strict=True)]


def merged(drawn: Slots) -> Slots:
    """Neighbours of one colour that touch become one: the same picture where single slots are too narrow to be seen."""
    order = np.lexsort((drawn.start, drawn.half, drawn.rank))
    rank, half, paint = drawn.rank[order], drawn.half[order], drawn.paint[order]
    start, end = drawn.start[order], drawn.end[order]
    same = (rank[1:] == rank[:-1]) & (half[1:] == half[:-1]) & (paint[1:] == paint[:-1]) & (start[1:] == end[:-1])
    first = np.flatnonzero(np.append(True, ~same))
    last = np.append(first[1:], len(rank)) - 1
    columns = (rank[first], start[first], end[last], paint[first], half[first], drawn.path[order][first])
    return Slots(order[first], *columns, drawn.paints)


def until(drawn: Slots, limit: float) -> Slots:
    """What is to be seen before the time `limit`."""
    seen = drawn.start < limit
    columns = (drawn.paint[seen], drawn.half[seen], drawn.path[seen])
    return Slots(
        drawn.row[seen], drawn.rank[seen], drawn.start[seen], np.minimum(drawn.end[seen], limit), *columns, drawn.paints
    )
