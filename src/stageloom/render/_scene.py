"""A picture before it is a file: boxes, areas, lines and labels in pixels, each with the name of its colour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Anchor = Literal["start", "middle", "end"]

DIGIT: Final = 0.58  # width of a digit over the font size, in the widest of the usual sans-serif fonts
BOLD: Final = 1.08  # how much wider bold text runs
WIDTHS: Final = dict.fromkeys("iljI.,:;'|! ", 0.28) | dict.fromkeys("frt()[]-/", 0.36) | dict.fromkeys("mwMW%…", 0.90)
DROP: Final = 0.355  # from the middle of a capital to the baseline, over the font size


@dataclass(frozen=True)
class Boxes:
    """Filled rectangles of one colour. `edge`: the colour of a stroke of `edge_width`; `name`: what they are."""

    paint: str
    x: Floats
    y: Floats
    width: Floats
    height: Floats
    edge: str | None = None
    edge_width: float = 0.0
    filled: bool = True
    name: str = ""


@dataclass(frozen=True)
class Steps:
    """The area under a step function: from `x[i]` on its top is `y[i]`; it ends at `right` and stands on `base`."""

    paint: str
    line: str
    x: Floats
    y: Floats
    right: float
    base: float


@dataclass(frozen=True)
class Lines:
    """Straight lines of one colour, `ends` rows of (x0, y0, x1, y1)."""

    paint: str
    ends: Floats
    width: float = 1.0


@dataclass(frozen=True)
class Labels:
    """Texts of one colour and size; `y` is the middle of the capitals."""

    paint: str
    x: Floats
    y: Floats
    texts: Sequence[str]
    size: float
    anchor: Anchor = "start"
    bold: bool = False
    name: str = ""


Item = Boxes | Steps | Lines | Labels


@dataclass
class Scene:
    """A canvas that items are added to, the first at the bottom. `title` and `description` are for screen readers."""

    width: float
    height: float
    title: str
    description: str
    items: list[Item] = field(default_factory=list[Item])

    def add(self, item: Item) -> None:
        self.items.append(item)

    def box(self, paint: str, x: float, y: float, width: float, height: float) -> None:
        self.boxes(paint, x, y, width, height)

    def boxes(self, paint: str, x: ArrayLike, y: ArrayLike, width: ArrayLike, height: ArrayLike) -> None:
        columns = np.broadcast_arrays(
            *(np.atleast_1d(np.asarray(value, dtype=float)) for value in (x, y, width, height))
        )
        self.add(Boxes(paint, columns[0], columns[1], columns[2], columns[3]))

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float,
        *,
        paint: str = "text",
        anchor: Anchor = "start",
        bold: bool = False,
    ) -> None:
        self.add(Labels(paint, np.array([x]), np.array([y]), [text], size, anchor, bold))

    def lines(self, paint: str, ends: ArrayLike, width: float = 1.0) -> None:
        self.add(Lines(paint, np.asarray(ends, dtype=float).reshape(-1, 4), width))


def width_of(text: str, size: float, *, bold: bool = False) -> float:
    """About how wide a text is; on the safe side."""
    ems = sum(WIDTHS.get(letter, 0.70 if letter.isupper() else DIGIT) for letter in text)
    return ems * size * (BOLD if bold else 1.0)


def fitted(text: str, size: float, room: float, *, bold: bool = False) -> str:
    """The text, or as much of it as fits in `room`, with an ellipsis."""
    if width_of(text, size, bold=bold) <= room:
        return text
    for keep in range(len(text) - 1, 0, -1):
        short = text[:keep].rstrip() + "…"
        if width_of(short, size, bold=bold) <= room:
            return short
    return ""
