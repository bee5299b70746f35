"""The lanes of a timeline: one a rank, with its slots, what is written in them, and its idle time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stageloom import metrics
from stageloom.op import KIND_NAMES
from stageloom.render._scene import DIGIT, Boxes, Labels, Scene
from stageloom.render._slots import LOWER, UPPER, WHOLE, Slots, captions, merged, slots, until
from stageloom.simulate import Timeline

Floats = NDArray[np.float64]
READABLE: Final = 6.5  # the smallest font size worth drawing
DENSE: Final = 2.0  # slots narrower than this many pixels are merged and drawn without edges
EDGED: Final = 4.0  # slots wider than this are separated by an edge
MARKED: Final = {"message": 0.5, "neighbour": 1.0, "memory": 0.0}  # where in the lane the line of an idle cause runs


@dataclass(frozen=True)
class Frame:
    """Where lanes stand: time 0 at x = `left`, `scale` pixels a time unit, rank r's lane from y = `tops[r]`.

    What comes after the time `limit` is cut off.
    """

    left: float
    scale: float
    tops: Floats
    height: float
    limit: float = float("inf")

    def x(self, time: Floats) -> Floats:
        return self.left + time * self.scale


def draw_lanes(scene: Scene, timeline: Timeline, frame: Frame) -> None:
    drawn = slots(timeline)
    if drawn.end.max(initial=0.0) > frame.limit:
        drawn = until(drawn, frame.limit)
    _draw_gaps(scene, timeline, frame)
    dense = drawn.typical * frame.scale < DENSE
    _draw_slots(scene, merged(drawn) if dense else drawn, frame)
    if drawn.typical * frame.scale >= EDGED:
        _draw_pairs(scene, drawn, frame)
    if not dense:
        _draw_captions(scene, timeline, drawn, frame)


def _draw_gaps(scene: Scene, timeline: Timeline, frame: Frame) -> None:
    gaps = metrics.gaps(timeline)
    x, right = frame.x(gaps.start), frame.x(np.minimum(gaps.end, frame.limit))
    for index, cause in enumerate(metrics.CAUSES):
        of_cause = (gaps.cause == index) & (gaps.start < frame.limit)
        if not of_cause.any():
            continue
        left, width, top = x[of_cause], (right - x)[of_cause], frame.tops[gaps.rank[of_cause]]
        draw_gap(scene, cause, left, top, width, frame.height)


def draw_gap(scene: Scene, cause: str, x: Floats, y: Floats, width: Floats, height: float) -> None:
    """Idle time of one cause: its tint, and a line at its own height so that it can be told without colour."""
    tall = np.full(len(x), height)
    scene.add(Boxes(f"gap-{cause}", x, y, width, tall, name=f"idle: {cause}"))
    if cause in MARKED:
        thin = max(height * 0.06, 0.5)
        scene.boxes(f"mark-{cause}", x, y + (height - thin) * MARKED[cause], width, thin)


def _draw_slots(scene: Scene, drawn: Slots, frame: Frame) -> None:
    x, width = frame.x(drawn.start), (drawn.end - drawn.start) * frame.scale
    top, height = _extent(drawn, frame)
    edged = drawn.typical * frame.scale >= EDGED
    for index, paint in enumerate(drawn.paints):
        own = drawn.paint == index
        scene.add(Boxes(paint, x[own], top[own], width[own], height[own], "bg" if edged else None, 1.0, name=paint))
    for index, paint in enumerate(drawn.paints):
        own = (drawn.paint == index) & (drawn.path > 0)
        if own.any():
            inset = 0.5 if edged else 0.0
            draw_underline(scene, paint, x[own] + inset, top[own], np.maximum(width[own] - 2 * inset, 0), height[own])


def draw_underline(scene: Scene, paint: str, x: Floats, y: Floats, width: Floats, height: Floats) -> None:
    """The mark of the second direction, seen also where shades cannot be told apart."""
    thin = np.maximum(height * 0.10, 0.6)
    scene.add(Boxes(f"edge-{paint}", x, y + height - thin - (height > 8) * 0.5, width, thin))


def _extent(drawn: Slots, frame: Frame) -> tuple[Floats, Floats]:
    """Top and height of every slot."""
    half = drawn.half
    top = frame.tops[drawn.rank] + np.where(half == LOWER, frame.height / 2, 0.0)
    return top, np.where(half == WHOLE, frame.height, frame.height / 2)


def _draw_pairs(scene: Scene, drawn: Slots, frame: Frame) -> None:
    """The outline around the two ops of an overlapped pair."""
    own = drawn.half == UPPER
    if not own.any():
        return
    x, width = frame.x(drawn.start[own]) + 0.7, (drawn.end - drawn.start)[own] * frame.scale - 1.4
    y, height = frame.tops[drawn.rank[own]] + 0.2, np.full(int(own.sum()), frame.height - 0.4)
    stroke = min(1.2, 0.12 * drawn.typical * frame.scale, 0.06 * frame.height)
    scene.add(Boxes("bg", x, y, np.maximum(width, 0), height, "outline", stroke, filled=False, name="pair"))


def _draw_captions(scene: Scene, timeline: Timeline, drawn: Slots, frame: Frame) -> None:
    texts = np.array(captions(timeline.schedule))[drawn.row]
    kind = timeline.schedule.kind[drawn.row]
    length = np.char.str_len(texts)
    width = (drawn.end - drawn.start) * frame.scale
    top, height = _extent(drawn, frame)
    fits = (width - 2.5) / (length * DIGIT)
    # Decided for all ops of a kind and a rank together, so that numbers do not come and go along a lane. Slots that the
    # limit cuts have no say.
    judged = np.where((width > 0) & (drawn.end < frame.limit), fits, np.inf)
    group = (drawn.rank.astype(np.int64) * len(KIND_NAMES) + kind) * 3 + drawn.half
    least = np.full(int(group.max(initial=0)) + 1, np.inf)
    np.minimum.at(least, group, judged)
    for whole in (True, False):
        own = ((drawn.half == WHOLE) == whole) & (least[group] >= READABLE)
        most = min(frame.height * 0.58, 13.0) if whole else min(frame.height * 0.42, 11.0)
        if not own.any() or most < READABLE:
            continue
        # One size for all: the one that the narrowest of them has room for.
        font = min(float(judged[own].min()), most)
        shown = own & (fits >= font)
        for index, paint in enumerate(drawn.paints):
            here = np.flatnonzero(shown & (drawn.paint == index))
            if not len(here):
                continue
            x = frame.x((drawn.start[here] + drawn.end[here]) / 2)
            # A little up where the underline of the second direction stands below the number.
            y = (top + height / 2)[here] - np.where(drawn.path[here] > 0, height[here] * 0.04, 0.0)
            scene.add(Labels(f"ink-{paint}", x, y, texts[here].tolist(), round(font, 2), "middle", name="caption"))
