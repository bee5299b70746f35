"""A timeline in the terminal: a line a rank, scaled to the columns there are.

Where every op gets a cell or more it is written out (`F3`, `BW1`, `F3&bw1`); else a cell shows what its rank does for
most of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from rich.style import Style
from rich.text import Text

from stageloom.errors import InputError
from stageloom.op import Kind
from stageloom.render import _words
from stageloom.render._palette import CHUNK_LEVELS, PATH_LEVELS, colour, op_paint
from stageloom.render._slots import UPPER, WHOLE, Slots, captions, slots
from stageloom.simulate import Timeline

NARROWEST: Final = 20
WIDEST_SLOT: Final = 8  # cells for the shortest op, where there is room
IDLE: Final = "·"
# What stands for a kind in one cell; the second direction is written small, an overlapped pair is `&`.
LETTERS: Final = {"F": "F", "B": "B", "W": "W", "BW": "D"}
MEANING: Final = {"F": "forward", "B": "backward, input gradient", "W": "backward, weight gradient", "BW": "both"}


@dataclass(frozen=True)
class Look:
    """How the ops of one colour class look: `paint`, and whether they belong to a direction other than the first."""

    kind: str
    paint: str
    second: bool

    def word(self, text: str) -> str:
        return text.lower() if self.second else text

    def style(self, *, shifted: bool = False) -> Style:
        ink = colour(f"ink-{self.paint}", dark=True)
        shade = colour(self.paint, dark=True)
        return Style(color=ink, bgcolor=_shifted(shade) if shifted else shade, underline=self.second)


def timeline(timeline: Timeline, width: int, *, colour: bool = True) -> Text:
    """The timeline in `width` columns: legend, a line a rank, time axis. Without `colour` letters tell all.

    Raises InputError for a width below 20.
    """
    if width < NARROWEST:
        raise InputError(f"width = {width}; at least {NARROWEST} columns are needed to draw a timeline")
    drawn = slots(timeline)
    schedule = timeline.schedule
    margin = len(str(schedule.ranks - 1)) + 1
    cells, cell = _cells(timeline, width - margin)
    looks = tuple(_look(paint) for paint in drawn.paints)
    written = (drawn.end - drawn.start)[drawn.end > drawn.start].min(initial=math.inf) >= cell * (1 - 1e-9)
    lines = (
        _written(timeline, drawn, looks, cell, cells, colour)
        if written
        else _counted(drawn, looks, cell, cells, colour)
    )
    result = Text(no_wrap=True, overflow="crop", end="")
    for line in _legend(drawn, looks, width, written, colour):
        result.append_text(line).append("\n")
    dim = Style(dim=True) if colour else Style()
    for rank, line in enumerate(lines):
        result.append(f"{rank:>{margin - 1}} ", dim).append_text(line).append("\n")
    result.append(_axis(timeline, margin, cells, cell, width), dim)
    return result


def _cells(timeline: Timeline, room: int) -> tuple[int, float]:
    """How many cells the whole run takes, and the time of one; the shortest op gets a whole number if it can."""
    span = float(timeline.end.max())
    taken = timeline.end - timeline.start
    taken = taken[taken > 0]
    if span <= 0 or not len(taken):
        return room, 1.0
    shortest = float(taken.min())
    each = min(int(room * shortest / span * (1 + 1e-9)), WIDEST_SLOT)
    if each < 1:
        return room, span / room
    ratios = taken / shortest
    if np.abs(ratios * each - np.rint(ratios * each)).max() < 1e-6 or each == WIDEST_SLOT:
        cell = shortest / each
        return min(math.ceil(span / cell - 1e-6), room), cell
    return room, span / room


def _look(paint: str) -> Look:
    kind, _, path_level = paint.split("-")
    return Look(kind, paint, path_level != "0")


def _shifted(shade: str) -> str:
    """A little darker: neighbours of one colour take turns, so that it shows where one op ends."""
    return "#" + "".join(f"{int(int(shade[i : i + 2], 16) * 0.86):02x}" for i in (1, 3, 5))


# ------------------------------------------------------------------------------------------------- ops written out


def _written(
    timeline: Timeline, drawn: Slots, looks: Sequence[Look], cell: float, cells: int, colour: bool
) -> list[Text]:
    schedule = timeline.schedule
    left = np.floor(drawn.start / cell + 0.5 + 1e-9).astype(int).clip(0, cells).tolist()
    right = np.floor(drawn.end / cell + 0.5 + 1e-9).astype(int).clip(0, cells).tolist()
    texts = captions(schedule)
    half: list[int] = drawn.half.tolist()
    own: list[Look] = [looks[index] for index in drawn.paint.tolist()]
    second = np.append(False, schedule.pair[:-1]).tolist()
    idle = Style(dim=True) if colour else Style()
    lines: list[Text] = []
    for rank in range(schedule.ranks):
        line, at, turn = Text(), 0, False
        rows = range(int(schedule.offsets[rank]), int(schedule.offsets[rank + 1]))
        before: Look | None = None
        for row in rows:
            if second[row]:
                continue  # drawn with the first of its pair
            room = right[row] - left[row]
            line.append(IDLE * (left[row] - at), idle)
            turn = before is own[row] and at == left[row] and not turn
            if half[row] == WHOLE:
                line.append_text(_single(own[row], texts[row], room, turn, colour))
            else:
                upper, lower = (row, row + 1) if half[row] == UPPER else (row + 1, row)
                line.append_text(_pair((own[upper], texts[upper]), (own[lower], texts[lower]), room, colour))
            at, before = left[row] + room, own[row] if half[row] == WHOLE else None
        lines.append(line.append(IDLE * (cells - at), idle))
    return lines


def _single(look: Look, caption: str, room: int, turn: bool, colour: bool) -> Text:
    if colour:
        return Text((caption if len(caption) <= room else "").ljust(room), look.style(shifted=turn))
    name = look.word(look.kind)
    options = (name + caption, name, look.word(LETTERS[look.kind]))
    return Text(_first_fitting(options, room).ljust(room))


def _pair(upper: tuple[Look, str], lower: tuple[Look, str], room: int, colour: bool) -> Text:
    if not colour:
        names = [look.word(look.kind) for look, _ in (upper, lower)]
        options = (f"{names[0]}{upper[1]}&{names[1]}{lower[1]}", f"{names[0]}&{names[1]}", "&")
        return Text(_first_fitting(options, room).ljust(room))
    # Half blocks: the forward above, the backward below; numbers where a half block stays after each of them.
    both = Style(color=upper[0].style().bgcolor, bgcolor=lower[0].style().bgcolor)
    spare = room - len(upper[1]) - len(lower[1])
    if spare < 2:
        return Text("▀" * room, both)
    line = Text().append(upper[1], upper[0].style()).append("▀" * (spare - 1), both)
    return line.append(lower[1], lower[0].style()).append("▀", both)


def _first_fitting(options: Sequence[str], room: int) -> str:
    return next((option for option in options if len(option) <= room), "")


# ---------------------------------------------------------------------------------------------- cells of many ops


def _counted(drawn: Slots, looks: Sequence[Look], cell: float, cells: int, colour: bool) -> list[Text]:
    """A cell shows what takes most of its time: a class of ops, overlapped pairs together, or idle time."""
    edges = np.arange(cells + 1, dtype=np.float64) * np.float64(cell)
    # A pair counts once, under the class of its upper op, moved behind the classes of single ops.
    classes = np.where(drawn.half == WHOLE, drawn.paint, drawn.paint + len(looks))
    counted = drawn.half <= UPPER
    ranks = int(drawn.rank.max(initial=0)) + 1
    share = np.zeros((2 * len(looks) + 1, ranks, cells))
    for index in range(2 * len(looks)):
        own = np.flatnonzero(counted & (classes == index))
        for rank, rows in _by_rank(drawn.rank, own):
            share[index, rank] = _time_in_cells(drawn.start[rows], drawn.end[rows], edges)
    share[-1] = cell - share.sum(axis=0)
    lower = _partners(drawn, len(looks))
    symbols = [_cell_of(look, colour) for look in looks]
    symbols += [_pair_cell(look, looks[other], colour) for look, other in zip(looks, lower, strict=True)]
    symbols.append((IDLE, Style(dim=True) if colour else Style()))
    lines: list[Text] = []
    for winners in share.argmax(axis=0):
        line = Text()
        change = np.flatnonzero(np.append(True, winners[1:] != winners[:-1]))
        for at, count in zip(change.tolist(), np.diff(np.append(change, cells)).tolist(), strict=True):
            letter, style = symbols[int(winners[at])]
            line.append(letter * count, style)
        lines.append(line)
    return lines


def _by_rank(rank: NDArray[np.int32], rows: NDArray[np.intp]) -> list[tuple[int, NDArray[np.intp]]]:
    if not len(rows):
        return []
    parts = np.split(rows, np.flatnonzero(np.diff(rank[rows])) + 1)
    return [(int(rank[part[0]]), part) for part in parts]


def _time_in_cells(
    start: NDArray[np.float64], end: NDArray[np.float64], edges: NDArray[np.float64]
) -> NDArray[np.float64]:
    """How long intervals that follow one another cover each cell."""
    times = np.stack((start, end), axis=1).ravel()
    covered = np.cumsum(end - start)
    so_far = np.stack((covered - (end - start), covered), axis=1).ravel()
    return np.diff(np.interp(edges, times, so_far, left=0.0, right=float(covered[-1])))


def _partners(drawn: Slots, count: int) -> list[int]:
    """For each class of upper ops, the class that is mostly below it (its own where there are no pairs)."""
    upper, lower = drawn.half == UPPER, drawn.half > UPPER
    counts = np.zeros((count, count), dtype=np.int64)
    np.add.at(counts, (drawn.paint[upper], drawn.paint[lower]), 1)
    return [int(row.argmax()) if row.any() else index for index, row in enumerate(counts)]


def _cell_of(look: Look, colour: bool) -> tuple[str, Style]:
    return (" ", look.style()) if colour else (look.word(LETTERS[look.kind]), Style())


def _pair_cell(upper: Look, lower: Look, colour: bool) -> tuple[str, Style]:
    return ("▀", Style(color=upper.style().bgcolor, bgcolor=lower.style().bgcolor)) if colour else ("&", Style())


# ------------------------------------------------------------------------------------------------- legend and axis


def _legend(drawn: Slots, looks: Sequence[Look], width: int, written: bool, colour: bool) -> list[Text]:
    """What the marks mean, wrapped to the width."""
    entries: list[Text] = []
    middle = CHUNK_LEVELS // 2
    kinds = [kind.name for kind in Kind if any(look.kind == kind.name for look in looks)]
    for kind in kinds:
        look = Look(kind, op_paint(kind, middle, 0), second=False)
        alone = f"{kind} or {LETTERS[kind]}" if written and LETTERS[kind] != kind else LETTERS[kind]
        mark = Text().append(f" {kind} ", look.style()) if colour else Text(alone)
        entries.append(mark.append(f" {MEANING[kind]}"))
    if colour and len({look.paint.split("-")[1] for look in looks}) > 1:
        mark = Text()
        for level in (0, middle, CHUNK_LEVELS):
            mark.append(" ", Look(kinds[0], op_paint(kinds[0], level, 0), second=False).style())
        entries.append(mark.append(" first to last chunk"))
    if any(look.second for look in looks):
        second = Look(kinds[0], op_paint(kinds[0], middle, PATH_LEVELS), second=True)
        mark = Text().append(" 0 ", second.style()) if colour else Text("small letters:")
        entries.append(mark.append(" other direction"))
    if (drawn.half == UPPER).any():
        first, last = (Look(kind, op_paint(kind, middle, 0), second=False) for kind in (kinds[0], kinds[-1]))
        symbol, style = _pair_cell(first, last, colour)
        entries.append(Text().append(symbol * (2 if colour else 1), style).append(" overlapped"))
    entries.append(Text(IDLE).append(" idle"))
    return _wrap(entries, width)


def _wrap(entries: Sequence[Text], width: int) -> list[Text]:
    lines: list[Text] = []
    for entry in entries:
        entry.truncate(width, overflow="ellipsis")
        if lines and lines[-1].cell_len + 2 + entry.cell_len <= width:
            lines[-1].append("  ").append_text(entry)
        else:
            lines.append(entry)
    return lines


def _axis(timeline: Timeline, margin: int, cells: int, cell: float, width: int) -> str:
    """Tick labels under the cells where they fall; the unit after the last of them where it fits."""
    values = _words.ticks(cells * cell, max(cells // 12, 1))
    line = " " * margin
    for value, label in zip(values.tolist(), _words.tick_labels(values), strict=True):
        at = margin + round(value / cell)
        if (at > len(line) or at == margin) and at + len(label) <= width:
            line = line.ljust(at) + label
    unit = f" {timeline.costs.unit}" if timeline.costs.unit else ""
    return line + unit if len(line) + len(unit) <= width else line
