"""A timeline as PNG, through matplotlib: the same picture as the SVG, for a light background."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from stageloom.errors import MissingExtra
from stageloom.render._chart import chart
from stageloom.render._palette import colour
from stageloom.render._scene import DROP, Boxes, Floats, Item, Labels, Lines, Scene, Steps
from stageloom.render.files import write_whole
from stageloom.simulate import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI: Final = 100
SCALE: Final = 2.0  # PNG pixels a scene pixel, for screens of today
LARGEST: Final = 16_000.0  # PNG pixels along one side
FONTS: Final = ["Inter", "Helvetica Neue", "Helvetica", "Arial", "Liberation Sans", "DejaVu Sans"]
NARROWER: Final = 0.92  # DejaVu Sans, matplotlib's own font, runs wider than the others


def timeline(
    timeline: Timeline, path: str | Path | io.BytesIO, *, title: str | None = None, dark: bool = False
) -> None:
    """Write the timeline to a PNG file, or into a buffer. Raises MissingExtra without matplotlib, InputError where the
    file cannot be written."""
    deliver(chart(timeline, title), path, dark=dark)


def deliver(scene: Scene, path: str | Path | io.BytesIO, *, dark: bool = False) -> None:
    """The scene as PNG, to a file or into a buffer."""
    data = encode(scene, dark=dark)
    if isinstance(path, io.BytesIO):
        path.write(data)
    else:
        write_whole(path, data)


def encode(scene: Scene, *, dark: bool = False) -> bytes:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("PNG drawing", "matplotlib", "plot") from None

    # Figure and canvas of our own: pyplot and its global state stay untouched. One data unit is one scene pixel.
    figure = Figure(figsize=(scene.width / DPI, scene.height / DPI), dpi=DPI)
    canvas = FigureCanvasAgg(figure)
    axes: Axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))  # pyright: ignore[reportUnknownMemberType]
    axes.set_axis_off()
    axes.set_xlim(0, scene.width)
    axes.set_ylim(scene.height, 0)
    paint = partial(colour, dark=dark)
    for order, item in enumerate(scene.items):
        _draw(axes, item, paint, order)
    buffer = io.BytesIO()
    scale = min(SCALE, LARGEST / max(scene.width, scene.height))
    canvas.print_figure(  # pyright: ignore[reportUnknownMemberType]
        buffer,
        format="png",
        dpi=DPI * scale,
        facecolor=paint("bg"),
        metadata={"Title": scene.title, "Software": "stageloom"},
    )
    return buffer.getvalue()


def _draw(axes: Axes, item: Item, paint: Callable[[str], str], order: int) -> None:
    if isinstance(item, Labels):
        _draw_labels(axes, item, paint, order)
    elif isinstance(item, Lines):
        _collect_lines(axes, item.ends.reshape(-1, 2, 2), paint(item.paint), item.width, order)
    elif isinstance(item, Steps):
        _draw_steps(axes, item, paint, order)
    else:
        _draw_boxes(axes, item, paint, order)


def _draw_boxes(axes: Axes, item: Boxes, paint: Callable[[str], str], order: int) -> None:
    if not len(item.x):
        return
    left, right, top, bottom = item.x, item.x + item.width, item.y, item.y + item.height
    corners = np.stack((left, top, right, top, right, bottom, left, bottom), axis=1).reshape(-1, 4, 2)
    look: dict[str, Any] = {
        "facecolors": paint(item.paint) if item.filled else "none",
        "edgecolors": paint(item.edge) if item.edge else "none",
        "linewidths": _points(item.edge_width) if item.edge else 0.0,
        "joinstyle": "miter",
    }
    _collect(axes, corners, look, order)


def _draw_steps(axes: Axes, item: Steps, paint: Callable[[str], str], order: int) -> None:
    x = np.append(np.repeat(item.x, 2)[1:], item.right)
    y = np.repeat(item.y, 2)
    outline = np.column_stack((x, y))
    closed = np.concatenate(([[x[0], item.base]], outline, [[x[-1], item.base]]))
    _collect(axes, closed[None], {"facecolors": paint(item.paint), "edgecolors": "none"}, order)
    _collect_lines(axes, outline[None], paint(item.line), 0.8, order)


def _draw_labels(axes: Axes, item: Labels, paint: Callable[[str], str], order: int) -> None:
    look: dict[str, Any] = {
        "color": paint(item.paint),
        "fontsize": _points(item.size) * NARROWER,
        "fontfamily": _fonts(),
        "ha": {"start": "left", "middle": "center", "end": "right"}[item.anchor],
        "va": "baseline",
        "fontweight": "bold" if item.bold else "normal",
        "zorder": order,
        "parse_math": False,
    }
    for x, y, text in zip(item.x.tolist(), (item.y + DROP * item.size).tolist(), item.texts, strict=True):
        axes.text(x, y, text, **look)  # pyright: ignore[reportUnknownMemberType]


def _collect(axes: Axes, corners: Floats, look: dict[str, Any], order: int) -> None:
    from matplotlib.collections import PolyCollection

    shapes: Any = corners
    axes.add_collection(PolyCollection(shapes, zorder=order, **look), autolim=False)


def _collect_lines(axes: Axes, lines: Floats, paint: str, width: float, order: int) -> None:
    from matplotlib.collections import LineCollection

    shapes: Any = lines
    axes.add_collection(LineCollection(shapes, colors=paint, linewidths=_points(width), zorder=order), autolim=False)


def _points(pixels: float) -> float:
    """Points of 1/72 inch, in which matplotlib measures, of scene pixels."""
    return pixels * 72 / DPI


def _fonts() -> list[str]:
    """Those of our fonts that are there: matplotlib warns about every one that is not."""
    from matplotlib import font_manager

    known = {entry.name for entry in font_manager.fontManager.ttflist}
    return [name for name in FONTS if name in known] or ["sans-serif"]
