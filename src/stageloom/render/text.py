"""A timeline in the terminal: a line a rank, scaled to the columns there are.

Where every op gets a cell or more it is written out (`F3`, `BW1`, `F3&bw1`); else cells show how
time is shared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from rich.text import Text

from stageloom.errors import InputError
from stageloom.op import KIND_NAMES
from stageloom.render import _counted, _words, _written
from stageloom.render._looks import IDLE, LETTERS, Look, idle_style, look_of, pair_cell
from stageloom.render._palette import CHUNK_LEVELS, PATH_LEVELS, op_paint
from stageloom.render._slots import UPPER, Slots, slots
from stageloom.simulate import Timeline

NARROWEST: Final = 20
WIDEST_SLOT: Final = 8  # cells for the shortest op, where there is room
MEANING: Final = {
    "F": "forward",
    "B": "backward, input gradient",
    "W": "backward, weight gradient",
    "BW": "backward, both",
}


def timeline(timeline: Timeline, width: int, *, colour: bool = True, draws: str = "-o FILE.svg") -> Text:
    """The timeline in `width` columns: legend, a line a rank, time axis. Without `colour` letters tell all.

    `draws`: the option of the command line that draws every op, for a note where they do not fit; "" for none.

    Raises InputError for a width below 20.
    """
    if width < NARROWEST:
        raise InputError(f"width = {width}; at least {NARROWEST} columns are needed to draw a timeline")
    drawn = slots(timeline)
    schedule = timeline.schedule
    margin = len(str(schedule.ranks - 1)) + 1
    cells, cell = _cells(timeline, width - margin)
    looks = tuple(look_of(paint) for paint in drawn.paints)
    names, notes = LETTERS, list[str]()
    if (drawn.end - drawn.start)[drawn.end > drawn.start].min(initial=math.inf) >= cell * (1 - 1e-9):
        lines, forms = _written.written(timeline, drawn, looks, cell, cells, colour)
        names = {kind: LETTERS[kind] if kind in forms and not forms[kind].full else kind for kind in KIND_NAMES}
        notes += [] if colour else [_written.chunk_note(schedule.chunks, forms)]
    else:
        lines = _counted.counted(timeline, drawn, looks, cell, cells, colour)
        notes += [] if colour else [_written.chunk_note(schedule.chunks, {})]
        notes.append(_counted.note(drawn, cell, draws))
    result = Text(no_wrap=True, overflow="crop", end="")
    for line in _wrap(_legend(drawn, looks, names, colour) + [Text(note) for note in notes if note], width):
        result.append_text(line).append("\n")
    dim = idle_style(colour)
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


def _legend(drawn: Slots, looks: Sequence[Look], names: Mapping[str, str], colour: bool) -> list[Text]:
    """What the marks mean; `names`: how the kinds are written."""
    entries: list[Text] = []
    middle = CHUNK_LEVELS // 2
    kinds = [kind for kind in KIND_NAMES if any(look.kind == kind for look in looks)]
    for kind in kinds:
        look = Look(kind, op_paint(kind, middle, 0), second=False)
        mark = Text().append(f" {kind} ", look.style()) if colour else Text(names[kind])
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
        symbol, style = pair_cell(first, last, colour)
        entries.append(Text().append(symbol * (2 if colour else 1), style).append(" overlapped"))
    entries.append(Text(IDLE).append(" idle"))
    return entries


def _wrap(entries: Sequence[Text], width: int) -> list[Text]:
    """Entries side by side as far as the width allows; one that is wider alone is broken between words."""
    lines: list[Text] = []
    for entry in entries:
        if lines and lines[-1].cell_len + 2 + entry.cell_len <= width:
            lines[-1].append("  ").append_text(entry)
            continue
        while entry.cell_len > width:
            cut = entry.plain.rfind(" ", 1, width + 1)
            start, entry = entry.divide([cut if cut > 0 else width])
            start.rstrip()
            lines.append(start)
            entry = entry[1:] if cut > 0 else entry
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
