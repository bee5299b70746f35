"""Colours by name, for a light and a dark background.

Kinds take the hues of Okabe and Ito's colour-blind safe palette (sky blue, orange, bluish green, vermilion) at four
different lightnesses, so that they also differ in grey. Chunks are shades around a kind's colour; the second direction
is darker (and underlined by whoever draws it). Colours are computed in OKLCH, where equal steps look equal.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Final, NamedTuple

CHUNK_LEVELS: Final = 8  # an op's shade is one of 0 (first chunk) to 8 (last)
PATH_LEVELS: Final = 4  # and 0 (first direction) to 4 (last)


class Hue(NamedTuple):
    """Lightness on a light and on a dark background, chroma, hue angle."""

    light: float
    dark: float
    chroma: float
    angle: float


KINDS: Final = {
    "F": Hue(0.83, 0.78, 0.090, 235.0),
    "B": Hue(0.75, 0.70, 0.145, 70.0),
    "W": Hue(0.63, 0.57, 0.120, 165.0),
    "BW": Hue(0.575, 0.525, 0.160, 38.0),
}
CHUNK_SPAN: Final = 0.13  # lightness between the first and the last chunk
PATH_SPAN: Final = 0.11  # lightness between the first and the last direction

INKS: Final = ("#0d1218", "#ffffff")  # what is written on an op, whichever can be read better

# name: (on light, on dark)
PLAIN: Final = {
    "bg": ("#ffffff", "#0f141a"),
    "text": ("#1b2129", "#e7ebf0"),
    "soft": ("#5a6572", "#9aa6b4"),
    "grid": ("#e3e7ec", "#252d37"),
    "rule": ("#aab3bd", "#4a5563"),
    "outline": ("#1b2129", "#f2f5f8"),
    "memory": ("#c3b5d8", "#5d5178"),
    "memory-line": ("#7a6699", "#a896c9"),
    "gap-warm-up": ("#eaeef2", "#1d242d"),
    "gap-drain": ("#d9dee4", "#2c343f"),
    "gap-message": ("#fbeeb0", "#453d12"),
    "gap-neighbour": ("#f5dbe6", "#43222f"),
    "gap-memory": ("#e0d6f4", "#33284d"),
    "mark-message": ("#b89a10", "#c9ab2b"),
    "mark-neighbour": ("#c2628d", "#c9749a"),
    "mark-memory": ("#8361c4", "#a184e0"),
}


def op_paint(kind: str, level: int, path_level: int) -> str:
    """The name of an op's colour; `ink-` before it names what is written on it, `edge-` its underline."""
    return f"{kind}-{level}-{path_level}"


@cache
def colour(name: str, *, dark: bool = False) -> str:
    """The colour of this name as #rrggbb."""
    if name in PLAIN:
        return PLAIN[name][dark]
    role, rest = "", name
    for prefix in ("ink-", "edge-"):
        if name.startswith(prefix):
            role, rest = prefix, name.removeprefix(prefix)
    kind, level, path_level = rest.split("-")
    hue = KINDS[kind]
    lightness = hue.dark if dark else hue.light
    lightness += CHUNK_SPAN * (0.5 - int(level) / CHUNK_LEVELS) - PATH_SPAN * int(path_level) / PATH_LEVELS
    if role == "ink-":
        ground = _luminance(_oklch(lightness, hue.chroma, hue.angle))
        return max(INKS, key=lambda ink: abs(math.log((_luminance(ink) + 0.05) / (ground + 0.05))))
    if role == "edge-":
        lightness -= 0.19
    return _oklch(lightness, hue.chroma, hue.angle)


def _luminance(shade: str) -> float:
    """Relative luminance, from which WCAG computes contrast."""
    parts = [int(shade[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _oklch(lightness: float, chroma: float, angle: float) -> str:
    """OKLCH to sRGB; chroma gives way where the colour does not exist."""
    lightness = min(max(lightness, 0.0), 1.0)
    while True:
        a, b = chroma * math.cos(math.radians(angle)), chroma * math.sin(math.radians(angle))
        long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
        middle = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
        short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
        linear = (
            4.0767416621 * long - 3.3077115913 * middle + 0.2309699292 * short,
            -1.2684380046 * long + 2.6097574011 * middle - 0.3413193965 * short,
            -0.0041960863 * long - 0.7034186147 * middle + 1.7076147010 * short,
        )
        if chroma <= 0.001 or all(-1e-4 <= value <= 1.0001 for value in linear):
            return "#" + "".join(f"{_gamma(value):02x}" for value in linear)
        chroma *= 0.95


def _gamma(value: float) -> int:
    value = min(max(value, 0.0), 1.0)
    value = 12.92 * value if value <= 0.0031308 else 1.055 * value ** (1 / 2.4) - 0.055
    return round(255 * value)
