"""The legend: only what this picture shows, wrapped to its width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from stageloom import metrics
from stageloom.op import Kind
from stageloom.render._lanes import draw_gap, draw_underline
from stageloom.render._palette import CHUNK_LEVELS, PATH_LEVELS, op_paint
from stageloom.render._scene import Boxes, Scene, width_of
from stageloom.simulate import Timeline

SIZE: Final = 11.5  # font size
SWATCH: Final = (20.0, 12.0)
ROW: Final = 21.0
MEANING: Final = {
    Kind.F: "F  forward",
    Kind.B: "B  backward, input gradient",
    Kind.W: "W  backward, weight gradient",
    Kind.BW: "BW  backward, both",
}
IDLE: Final = {
    "warm-up": "idle: warm-up",
    "drain": "drain",
    "message": "waits for a message",
    "neighbour": "waits for a neighbour",
    "memory": "waits for memory",
}


class Entry(NamedTuple):
    """Draws its swatch at (x, middle y), `width` wide, before `text`."""

    draw: Callable[[Scene, float, float], None]
    width: float
    text: str


def entries(timelines: Sequence[Timeline], *, memory: str = "") -> list[Entry]:
    schedules = [timeline.schedule for timeline in timelines]
    kinds = sorted({int(kind) for schedule in schedules for kind in np.unique(schedule.kind)})
    names = [Kind(kind).name for kind in kinds]
    middle = CHUNK_LEVELS // 2
    found = [Entry(_swatches([op_paint(Kind(kind).name, middle, 0)]), SWATCH[0], MEANING[Kind(kind)]) for kind in kinds]
    chunks = max(schedule.chunks for schedule in schedules)
    if chunks > 1:
        steps = np.rint(np.linspace(0, CHUNK_LEVELS, min(chunks, 4))).astype(int).tolist()
        shades = [op_paint(names[0], step, 0) for step in steps]
        found.append(Entry(_swatches(shades), SWATCH[0] * len(shades) * 0.6, "first to last chunk"))
    if max(len(schedule.placement.paths) for schedule in schedules) > 1:
        found.append(Entry(_second(op_paint(names[0], middle, PATH_LEVELS)), SWATCH[0], "other direction"))
    if any(schedule.pair.any() for schedule in schedules):
        backward = op_paint("BW" if "BW" in names else names[-1], middle, 0)
        found.append(Entry(_pair(op_paint(names[0], middle, 0), backward), SWATCH[0], "overlapped pair"))
    causes = {int(cause) for timeline in timelines for cause in np.unique(metrics.gaps(timeline).cause)}
    idle = [cause for index, cause in enumerate(metrics.CAUSES) if index in causes]
    for position, cause in enumerate(idle):
        text = IDLE[cause] if position else "idle: " + IDLE[cause].removeprefix("idle: ")
        found.append(Entry(_idle(cause), SWATCH[0], text))
    if memory:
        found.append(Entry(_memory, SWATCH[0], memory))
    return found


def wrapped(found: Sequence[Entry], room: float) -> list[list[Entry]]:
    """As few rows as fit, about equally long."""
    rows = _filled(found, room)
    count, least = len(rows), 0.0
    while room - least > 1:
        middle = (least + room) / 2
        tried = _filled(found, middle)
        if len(tried) > count:
            least = middle
        else:
            rows, room = tried, middle
    return rows


def _filled(found: Sequence[Entry], room: float) -> list[list[Entry]]:
    rows: list[list[Entry]] = [[]]
    used = 0.0
    for entry in found:
        width = _width(entry)
        if rows[-1] and used + width > room:
            rows.append([])
            used = 0.0
        rows[-1].append(entry)
        used += width
    return rows


def draw(scene: Scene, rows: Sequence[Sequence[Entry]], left: float, top: float) -> None:
    for number, row in enumerate(rows):
        x, y = left, top + ROW * (number + 0.5)
        for entry in row:
            entry.draw(scene, x, y)
            scene.text(x + entry.width + 7, y, entry.text, SIZE, paint="soft")
            x += _width(entry)


def _width(entry: Entry) -> float:
    return entry.width + 7 + width_of(entry.text, SIZE) + 16


def _swatches(paints: Sequence[str]) -> Callable[[Scene, float, float], None]:
    each = SWATCH[0] if len(paints) == 1 else SWATCH[0] * 0.6

    def paint_them(scene: Scene, x: float, y: float) -> None:
        for number, paint in enumerate(paints):
            scene.box(paint, x + number * each, y - SWATCH[1] / 2, each, SWATCH[1])

    return paint_them


def _second(paint: str) -> Callable[[Scene, float, float], None]:
    def paint_it(scene: Scene, x: float, y: float) -> None:
        scene.box(paint, x, y - SWATCH[1] / 2, *SWATCH)
        at, top, width, height = (np.array([value]) for value in (x, y - SWATCH[1] / 2, *SWATCH))
        draw_underline(scene, paint, at, top, width, height)

    return paint_it


def _pair(upper: str, lower: str) -> Callable[[Scene, float, float], None]:
    def paint_it(scene: Scene, x: float, y: float) -> None:
        scene.box(upper, x, y - SWATCH[1] / 2, SWATCH[0], SWATCH[1] / 2)
        scene.box(lower, x, y, SWATCH[0], SWATCH[1] / 2)
        at, top, width, height = (np.array([value]) for value in (x, y - SWATCH[1] / 2, *SWATCH))
        scene.add(Boxes("bg", at, top, width, height, "outline", 1.2, filled=False))

    return paint_it


def _idle(cause: str) -> Callable[[Scene, float, float], None]:
    def paint_it(scene: Scene, x: float, y: float) -> None:
        draw_gap(scene, cause, np.array([x]), np.array([y - SWATCH[1] / 2]), np.array([SWATCH[0]]), SWATCH[1])

    return paint_it


def _memory(scene: Scene, x: float, y: float) -> None:
    base = y + SWATCH[1] / 2
    scene.boxes("memory", [x, x + 7, x + 13], [base - 5, base - 11, base - 7], [7, 6, 7], [5, 11, 7])
