"""A timeline in the terminal with every op written out: `F3`, `BW1'`, `F3&bw1`.

What an op is written with (number, mark of its chunk) is the same for all ops of its kind, so that the picture is
regular: where one caption of a kind does not fit, none of that kind is shown.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.style import Style
from rich.text import Text

from stageloom.op import KIND_NAMES, Kind
from stageloom.render._looks import IDLE, LETTERS, PAIR, Look, both, idle_style
from stageloom.render._slots import UPPER, WHOLE, Slots, captions, chunk_table
from stageloom.schedule import Schedule
from stageloom.simulate import Timeline

Counts = NDArray[np.int64]
CHUNKS: Final = string.ascii_lowercase  # the marks of more than two chunks


class Form(NamedTuple):
    """With what an op is written: the full name of its kind or one letter, its number, the mark of its chunk."""

    full: bool = True
    number: bool = False
    mark: bool = False


FORMS: Final = (
    Form(number=True, mark=True),
    Form(number=True),
    Form(mark=True),
    Form(),
    Form(full=False),
)


class Written(NamedTuple):
    """The lines of the ranks, and the form of every kind (that of pairs under `&`)."""

    lines: list[Text]
    forms: dict[str, Form]


@dataclass(frozen=True)
class _Sheet:
    """All that is needed to write; one row an op. An op takes the cells from `left` to before `right`."""

    schedule: Schedule
    half: NDArray[np.int8]
    left: Counts
    right: Counts
    look: list[Look]
    caption: list[str]
    mark: list[str]
    coloured: bool

    def word(self, row: int, form: Form) -> str:
        """What is written on an op; a colour says the kind and the chunk."""
        if self.coloured:
            return self.caption[row] * form.number
        look = self.look[row]
        name = look.kind if form.full else LETTERS[look.kind]
        return look.word(name) + self.caption[row] * form.number + self.mark[row] * form.mark

    def needs(self, form: Form) -> Counts:
        """How long the words of all ops are."""
        names = np.array([len(name if form.full else LETTERS[name]) for name in KIND_NAMES])
        caption, mark = (np.array([len(text) for text in column]) for column in (self.caption, self.mark))
        if self.coloured:
            return caption * form.number
        return names[self.schedule.kind] + caption * form.number + mark * form.mark


def written(
    timeline: Timeline, drawn: Slots, looks: Sequence[Look], cell: float, cells: int, coloured: bool
) -> Written:
    """One line a rank; no op may be shorter than `cell`."""
    schedule = timeline.schedule
    left, right = (np.floor(x / cell + 0.5 + 1e-9).astype(np.int64).clip(0, cells) for x in (drawn.start, drawn.end))
    paint: list[int] = drawn.paint.tolist()
    look = [looks[index] for index in paint]
    marks = chunk_marks(schedule.chunks)
    chunk: list[int] = chunk_table(schedule)[schedule.path_of[schedule.microbatch], schedule.stage].tolist()
    own = [marks[number] for number in chunk]
    sheet = _Sheet(schedule, drawn.half, left, right, look, captions(schedule), own, coloured)
    forms = _forms(sheet)
    return Written([_line(sheet, rank, forms, cells) for rank in range(schedule.ranks)], forms)


def chunk_marks(chunks: int) -> list[str]:
    """What stands behind an op's number for each chunk of its rank: nothing where one is alone or they are too many."""
    if chunks == 2:
        return ["", "'"]
    return list(CHUNKS[:chunks]) if 2 < chunks <= len(CHUNKS) else [""] * chunks


def chunk_note(chunks: int, forms: dict[str, Form]) -> str:
    """What the legend says of the marks; empty where there is nothing to tell apart."""
    if chunks == 1:
        return ""
    marked = [kind for kind, form in forms.items() if form.mark]
    marks = chunk_marks(chunks)
    if not marked or not marks[-1]:
        return "chunks are not marked"
    meaning = "' later chunk" if chunks == 2 else f"{marks[0]}-{marks[-1]} first to last chunk"
    return meaning if len(marked) == len(forms) else f"{meaning} (only of {', '.join(marked)})"


def _forms(sheet: _Sheet) -> dict[str, Form]:
    """For every kind, and for pairs, the most telling form that fits all of its ops."""
    offered = (Form(number=True), Form()) if sheet.coloured else FORMS
    needs = {form: sheet.needs(form) for form in offered}
    room = sheet.right - sheet.left
    found: dict[str, Form] = {}

    def choose(name: str, fits: Callable[[Form], bool]) -> None:
        found[name] = next((form for form in offered if fits(form)), offered[-1])

    # Ops that take no time are not drawn.
    for kind, name in enumerate(KIND_NAMES):
        own = (sheet.half == WHOLE) & (sheet.schedule.kind == kind) & (room > 0)
        if own.any():
            choose(name, lambda form, own=own: bool((needs[form] <= room)[own].all()))
    first = np.flatnonzero(sheet.schedule.pair & (room > 0))
    if len(first):
        # A sign between two words; in colour a half block after each of two numbers.
        spare = 2 if sheet.coloured else 1
        choose(PAIR, lambda form: bool((needs[form][first] + needs[form][first + 1] + spare <= room[first]).all()))
    lone = (sheet.schedule.kind == Kind.B) & (sheet.half == WHOLE) & (room == 1)
    if not sheet.coloured and "BW" in found and lone.any():
        # A B in one cell and a W behind it would look like a BW.
        found["BW"] = found["BW"]._replace(full=False)
        if PAIR in found:
            found[PAIR] = Form(full=False)
    return found


def _line(sheet: _Sheet, rank: int, forms: dict[str, Form], cells: int) -> Text:
    idle = idle_style(sheet.coloured)
    low, high = (int(offset) for offset in sheet.schedule.offsets[rank : rank + 2])
    line, at, turn = Text(), 0, False
    before: Look | None = None
    for row in range(low, high):
        begin, end, look = int(sheet.left[row]), int(sheet.right[row]), sheet.look[row]
        whole = bool(sheet.half[row] == WHOLE)
        if begin == end or (row > low and sheet.schedule.pair[row - 1]):
            continue  # it takes no time, or was drawn with the first of its pair
        line.append(IDLE * (begin - at), idle)
        turn = before is look and at == begin and not turn
        if whole:
            style = look.style(shifted=turn) if sheet.coloured else Style()
            line.append(sheet.word(row, forms[look.kind]).ljust(end - begin), style)
        else:
            upper, lower = (row, row + 1) if sheet.half[row] == UPPER else (row + 1, row)
            line.append_text(_pair(sheet, upper, lower, forms[PAIR], end - begin))
        at, before = end, look if whole else None
    return line.append(IDLE * (cells - at), idle)


def _pair(sheet: _Sheet, upper: int, lower: int, form: Form, room: int) -> Text:
    words = sheet.word(upper, form), sheet.word(lower, form)
    if not sheet.coloured:
        return Text((f"{words[0]}{PAIR}{words[1]}" if form.full else PAIR).ljust(room))
    # Half blocks: the forward above, the backward below.
    blocks = both(sheet.look[upper], sheet.look[lower])
    if not form.number:
        return Text("▀" * room, blocks)
    line = Text().append(words[0], sheet.look[upper].style())
    line.append("▀" * (room - len(words[0]) - len(words[1]) - 1), blocks)
    return line.append(words[1], sheet.look[lower].style()).append("▀", blocks)
