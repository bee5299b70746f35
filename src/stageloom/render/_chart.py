"""One timeline as a scene: title and key numbers, legend, a lane and a memory curve a rank, time axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stageloom import metrics
from stageloom.render import _legend, _words
from stageloom.render._lanes import Frame, draw_lanes
from stageloom.render._scene import Scene, Steps, fitted, width_of
from stageloom.simulate import Timeline

Floats = NDArray[np.float64]
PAD: Final = 26.0
LEFT: Final = 62.0  # rank numbers
RIGHT: Final = 112.0  # busy share and peak memory
SLOT: Final = 24.0  # the width a short op should get
PLOT: Final = (700.0, 1560.0)  # least and most width of the lanes
BUDGET: Final = 1000.0  # the height that many lanes share
FACTS: Final = 18.0  # between lines of the subtitle


@dataclass(frozen=True)
class Lane:
    """Heights of one rank's row: its slots, its memory curve, the gap to the next."""

    slots: float
    memory: float
    space: float

    @property
    def pitch(self) -> float:
        return self.slots + self.memory + self.space


def lane_of(ranks: int) -> Lane:
    pitch = min(max(BUDGET / ranks, 6.5), 56.0)
    return Lane(pitch * 0.55, pitch * 0.30, pitch * 0.15)


def chart(timeline: Timeline, title: str | None = None) -> Scene:
    schedule = timeline.schedule
    values = metrics.measure(timeline)
    span = max(float(timeline.end.max()), 1e-300)
    plot = _plot_width(timeline, span)
    width = PAD + LEFT + plot + RIGHT + PAD
    title = schedule.name if title is None else title
    facts = _facts(timeline, values, width - 2 * PAD)
    curve = metrics.memory_curve(timeline)
    highest = float(curve.units.max()) if len(curve.units) else 0.0
    held = f"activations held, full height = {_words.number(highest)} micro-batch{'' if highest == 1 else 'es'}"
    rows = _legend.wrapped(_legend.entries([timeline], memory=held if highest > 0 else ""), width - 2 * PAD)
    lane = lane_of(schedule.ranks)
    head = PAD + 36 + FACTS * (len(facts) - 1)
    top = head + 20 + _legend.ROW * len(rows) + 30
    bottom = top + lane.pitch * schedule.ranks
    frame = Frame(PAD + LEFT, plot / span, np.linspace(top, bottom, schedule.ranks, endpoint=False), lane.slots)

    scene = Scene(width, bottom + 46 + PAD * 0.5, title, f"Pipeline timeline. {'. '.join(facts)}.")
    scene.text(PAD, PAD + 9, fitted(title, 20, width - 2 * PAD, bold=True), 20, bold=True)
    for number, line in enumerate(facts):
        scene.text(PAD, PAD + 36 + FACTS * number, fitted(line, 13, width - 2 * PAD), 13, paint="soft")
    _legend.draw(scene, rows, PAD, head + 16)
    draw_axis(scene, frame, span, bottom, axis_title(timeline))
    draw_lanes(scene, timeline, frame)
    if highest > 0:
        _draw_memory(scene, timeline, curve, frame, lane, highest)
    _draw_rows(scene, timeline, values, frame, lane, PAD + LEFT + plot)
    return scene


def axis_title(timeline: Timeline) -> str:
    return f"time ({timeline.costs.unit})" if timeline.costs.unit else "time (units of the costs)"


def _plot_width(timeline: Timeline, span: float) -> float:
    taken = timeline.end - timeline.start
    short = float(np.percentile(taken[taken > 0], 10)) if (taken > 0).any() else span
    return min(max(SLOT * span / short, PLOT[0]), PLOT[1])


def _facts(timeline: Timeline, values: metrics.Metrics, room: float) -> list[str]:
    """What is drawn, and at which costs: one line, or two where one has no room."""
    parts = [*_words.sizes(timeline.schedule), *_words.results(values, timeline.costs)]
    costs = _words.costs(timeline.costs, pairs=bool(timeline.schedule.pair.any()))
    line = _words.joined([*parts, costs])
    return [line] if width_of(line, 13) <= room else [_words.joined(parts), costs]


def draw_axis(scene: Scene, frame: Frame, span: float, bottom: float, title: str) -> None:
    """Grid lines behind the lanes, tick numbers and the name of the axis below them."""
    right = frame.left + span * frame.scale
    values = _words.ticks(span, int((right - frame.left) // 95))
    x = frame.x(values)
    top = float(frame.tops[0]) - 6
    scene.lines("grid", np.column_stack((x, np.full(len(x), top), x, np.full(len(x), bottom + 4))))
    scene.lines("rule", [[frame.left, bottom + 4, right, bottom + 4]])
    for at, text in zip(x.tolist(), _words.tick_labels(values), strict=True):
        scene.text(at, bottom + 15, text, 11, paint="soft", anchor="middle")
    scene.text((frame.left + right) / 2, bottom + 34, title, 12, paint="soft", anchor="middle")


def _draw_rows(
    scene: Scene, timeline: Timeline, values: metrics.Metrics, frame: Frame, lane: Lane, right: float
) -> None:
    """The rank before each lane; how busy it is and its peak memory behind it."""
    size = min(12.5, max(lane.pitch * 0.8, 8.0))
    every = next(n for n in (1, 2, 4, 8, 16, 32, 64, 128, 1 << 30) if n * lane.pitch >= size * 1.05)
    head = float(frame.tops[0]) - 15
    scene.text(frame.left - 12, head, "rank", 11, paint="soft", anchor="end")
    scene.text(right + 50, head, "busy", 11, paint="soft", anchor="end")
    scene.text(right + RIGHT, head, "peak", 11, paint="soft", anchor="end")
    if values.peak_activation_bytes is not None:
        peaks = [_words.size(float(peak)) for peak in values.peak_activation_bytes]
    else:
        peaks = [_words.number(float(peak)) for peak in values.peak_activations]
    for rank in range(0, timeline.schedule.ranks, every):
        y = float(frame.tops[rank]) + (lane.slots if every == 1 else lane.pitch) / 2
        scene.text(frame.left - 12, y, str(rank), size, anchor="end")
        scene.text(right + 50, y, f"{100 * float(values.utilization_per_rank[rank]):.0f} %", size, anchor="end")
        scene.text(right + RIGHT, y, peaks[rank], size, anchor="end")


def _draw_memory(
    scene: Scene, timeline: Timeline, curve: metrics.MemoryCurve, frame: Frame, lane: Lane, highest: float
) -> None:
    span = float(timeline.end.max())
    for rank in range(timeline.schedule.ranks):
        own = slice(int(curve.offsets[rank]), int(curve.offsets[rank + 1]))
        if own.start == own.stop:
            continue
        time, units = held(curve.time[own], curve.units[own])
        x, units = _thinned(frame.x(time), units)
        base = float(frame.tops[rank]) + frame.height + lane.memory
        y = base - np.clip(units, 0, None) / highest * lane.memory * 0.82
        scene.add(Steps("memory", "memory-line", x, y, float(frame.x(np.array([span]))[0]), base))


def held(time: Floats, value: Floats) -> tuple[Floats, Floats]:
    """A step function with one value an instant (the last), from time 0, when nothing is held."""
    last = np.append(time[1:] != time[:-1], True)
    time, value = time[last], value[last]
    if time[0] > 0:
        time, value = np.append(0.0, time), np.append(0.0, value)
    return time, value


def _thinned(x: Floats, value: Floats, column: float = 0.5) -> tuple[Floats, Floats]:
    """The highest value in every `column` pixels, where there are more steps than columns."""
    if len(x) <= (x[-1] - x[0]) / column:
        return x, value
    which = np.floor((x - x[0]) / column)
    first = np.flatnonzero(np.append(True, which[1:] != which[:-1]))
    # What holds when a column begins counts in it too.
    before = np.append(value[0], value[first[1:] - 1])
    return x[0] + which[first] * column, np.maximum(np.maximum.reduceat(value, first), before)
