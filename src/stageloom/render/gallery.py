"""Many timelines side by side to one time scale."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from stageloom import metrics
from stageloom.errors import InputError
from stageloom.render import _legend, _words
from stageloom.render._chart import axis_title, draw_axis
from stageloom.render._lanes import Frame, draw_lanes
from stageloom.render._scene import Scene, fitted, width_of
from stageloom.render.png import deliver
from stageloom.render.svg import serialise
from stageloom.simulate import Timeline

PAD: Final = 28.0
ALLEY: Final = 36.0  # between columns
HEAD: Final = 24.0  # a panel's name and numbers
SPACE: Final = 22.0  # between panels
WIDTH: Final = 1640.0  # of the whole picture
RANK: Final = 9.0  # font size of rank numbers
LONG: Final = 2.0  # times the usual makespan: what takes longer is cut
SHARE: Final = 2 / 3  # of a lane's pitch that its slots take, at least


def svg(timelines: Sequence[Timeline], *, columns: int = 2, title: str | None = None) -> str:
    """All timelines as one SVG, in the order given, row by row. Raises InputError for none, or for mixed time units."""
    return serialise(scene(timelines, columns=columns, title=title))


def png(
    timelines: Sequence[Timeline],
    path: str | Path | io.BytesIO,
    *,
    columns: int = 2,
    title: str | None = None,
    dark: bool = False,
) -> None:
    """The same as a PNG file, or into a buffer."""
    deliver(scene(timelines, columns=columns, title=title), path, dark=dark)


def scene(timelines: Sequence[Timeline], *, columns: int = 2, title: str | None = None) -> Scene:
    if not timelines:
        raise InputError("gallery: no timelines; at least one is needed")
    if columns < 1:
        raise InputError(f"gallery: {columns} columns; at least 1 is needed")
    units = sorted({timeline.costs.unit or "none" for timeline in timelines})
    if len(units) > 1:
        raise InputError(f"gallery: time units {' and '.join(units)}; one scale needs the same unit for all")
    columns = min(columns, len(timelines))
    rows = math.ceil(len(timelines) / columns)
    span = _span([float(timeline.end.max()) for timeline in timelines])
    gutter = width_of(str(max(timeline.schedule.ranks for timeline in timelines) - 1), RANK) + 6
    plot = (WIDTH - 2 * PAD - ALLEY * (columns - 1)) / columns - gutter
    scale = plot / span

    pitch = _pitch(timelines)
    heights = [
        HEAD + pitch * max(timeline.schedule.ranks for timeline in timelines[row * columns : (row + 1) * columns])
        for row in range(rows)
    ]
    legend = _legend.wrapped(_legend.entries(timelines), WIDTH - 2 * PAD)
    facts = _facts(timelines)
    head = PAD + (30 if title else -6)
    top = head + 28 + _legend.ROW * len(legend) + 22
    bottom = top + sum(heights) + SPACE * (rows - 1)
    names = ", ".join(timeline.schedule.name for timeline in timelines)
    drawn = Scene(WIDTH, bottom + 46 + PAD * 0.4, title or "Pipeline schedules", f"Timelines to one scale: {names}.")
    if title:
        drawn.text(PAD, PAD + 8, fitted(title, 20, WIDTH - 2 * PAD, bold=True), 20, bold=True)
    drawn.text(PAD, head + 8, fitted(facts, 13, WIDTH - 2 * PAD), 13, paint="soft")
    _legend.draw(drawn, legend, PAD, head + 24)
    for column in range(columns):
        left = PAD + gutter + column * (plot + gutter + ALLEY)
        # The axis belongs to the column; its grid runs behind all panels.
        draw_axis(drawn, Frame(left, scale, np.array([top + 6]), pitch), span, bottom, axis_title(timelines[0]))
    for number, timeline in enumerate(timelines):
        row, column = divmod(number, columns)
        left, y = PAD + gutter + column * (plot + gutter + ALLEY), top + sum(heights[:row]) + SPACE * row
        _draw_panel(drawn, timeline, left, y, plot, scale, pitch)
    return drawn


def _facts(timelines: Sequence[Timeline]) -> str:
    """What all panels have in common."""
    first = timelines[0]
    schedules = [timeline.schedule for timeline in timelines]
    parts: list[str] = []
    if len({schedule.ranks for schedule in schedules}) == 1:
        parts.append(_words.counted(schedules[0].ranks, "rank"))
    if len({schedule.microbatches for schedule in schedules}) == 1:
        parts.append(_words.counted(schedules[0].microbatches, "micro-batch", "micro-batches"))
    same = all(timeline.costs == first.costs for timeline in timelines)
    pairs = any(schedule.pair.any() for schedule in schedules)
    return _words.joined([*parts, _words.costs(first.costs, pairs=pairs) if same else "costs differ"])


def _span(ends: Sequence[float]) -> float:
    """The time that all panels show: the longest, unless that would squash the others: it is then cut, and says so."""
    usual = LONG * float(np.median(ends))
    return max(max(end for end in ends if end <= usual), 1e-300)


def _pitch(timelines: Sequence[Timeline]) -> float:
    """Height of a lane: enough for a number at few ranks, little at many."""
    ranks = max(timeline.schedule.ranks for timeline in timelines)
    return min(max(112.0 / ranks, 2.0), 18.0)


def _draw_panel(
    drawn: Scene, timeline: Timeline, left: float, top: float, plot: float, scale: float, pitch: float
) -> None:
    values = metrics.measure(timeline)
    results = _words.results(values, timeline.costs)
    limit = plot / scale * (1 + 1e-9)
    if float(timeline.end.max()) > limit:
        results.insert(0, "goes on to the right")
    facts = _words.joined([*_words.shape(timeline.schedule), *results])
    if width_of(facts, 12) + width_of(timeline.schedule.name, 14, bold=True) + 16 > plot:
        facts = _words.joined(results)
    room = plot - width_of(facts, 12) - 16
    # The grid, drawn for the whole column, must not run through the words.
    drawn.box("bg", left - 1, top - SPACE * 0.4, plot + 2, HEAD + SPACE * 0.4 - 3)
    drawn.text(left, top + 10, fitted(timeline.schedule.name, 14, room, bold=True), 14, bold=True)
    drawn.text(left + plot, top + 10, facts, 12, paint="soft", anchor="end")
    first, ranks = top + HEAD, timeline.schedule.ranks
    tops = np.linspace(first, first + pitch * ranks, ranks, endpoint=False)
    frame = Frame(left, scale, tops, pitch - min(1.5, pitch * (1 - SHARE)), limit)
    draw_lanes(drawn, timeline, frame)
    for rank in _labelled(ranks, pitch):
        drawn.text(left - 6, float(tops[rank]) + frame.height / 2, str(rank), RANK, paint="soft", anchor="end")


def _labelled(ranks: int, pitch: float) -> Sequence[int]:
    """The ranks whose numbers stand before their lanes: all, or the first and the last, where those have room."""
    if pitch >= RANK:
        return range(ranks)
    return (0, ranks - 1) if (ranks - 1) * pitch >= RANK else (0,)
