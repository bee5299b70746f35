"""How ops look in the terminal, in colour and without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rich.style import Style

from stageloom.render._palette import colour

IDLE: Final = "·"
PAIR: Final = "&"
# What stands for a kind in one cell; the second direction is written small, an overlapped pair is `&`.
LETTERS: Final = {"F": "F", "B": "B", "W": "W", "BW": "D"}


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


def look_of(paint: str) -> Look:
    kind, _, path_level = paint.split("-")
    return Look(kind, paint, path_level != "0")


def both(upper: Look, lower: Look) -> Style:
    """Of an upper half block: the forward of a pair above, the backward below."""
    return Style(color=upper.style().bgcolor, bgcolor=lower.style().bgcolor)


def idle_style(coloured: bool) -> Style:
    return Style(dim=True) if coloured else Style()


def op_cell(look: Look, coloured: bool) -> tuple[str, Style]:
    return (" ", look.style()) if coloured else (look.word(LETTERS[look.kind]), Style())


def pair_cell(upper: Look, lower: Look, coloured: bool) -> tuple[str, Style]:
    return ("▀", both(upper, lower)) if coloured else (PAIR, Style())


def _shifted(shade: str) -> str:
    """A little darker: neighbours of one colour take turns, so that it shows where one op ends."""
    return "#" + "".join(f"{int(int(shade[i : i + 2], 16) * 0.86):02x}" for i in (1, 3, 5))
