"""A timeline as SVG: one path a colour, crisp at any size, on light and dark backgrounds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Final
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from stageloom.render._chart import chart
from stageloom.render._palette import colour
from stageloom.render._scene import DROP, Boxes, Item, Labels, Lines, Scene, Steps
from stageloom.simulate import Timeline

FONT: Final = "Inter, 'Helvetica Neue', Helvetica, Arial, 'Liberation Sans', sans-serif"


def timeline(timeline: Timeline, *, title: str | None = None) -> str:
    """The timeline as the text of an SVG file. `title` defaults to the schedule's name."""
    return serialise(chart(timeline, title))


def serialise(scene: Scene) -> str:
    """The scene as SVG. Colours are CSS variables that a dark colour scheme exchanges; the light colour also stands in
    every element, for programs that know no variables."""
    width, height = f"{scene.width:.7g}", f"{scene.height:.7g}"
    paints = sorted({paint for item in scene.items for paint in _paints(item)} | {"bg"})
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="stageloom" role="img" aria-labelledby="title desc" '
        f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" style="max-width:100%;height:auto" '
        f'font-family="{escape(FONT)}">',
        f'<title id="title">{_clean(scene.title)}</title>',
        f'<desc id="desc">{_clean(scene.description)}</desc>',
        *_style(paints),
        f'<rect width="{width}" height="{height}" rx="8" {_fill("bg")}/>',
    ]
    lines += chain.from_iterable(map(_element, scene.items))
    lines.append("</svg>")
    return "\n".join(lines) + "\n"


def _clean(text: str) -> str:
    """Escaped, without the control characters that XML does not allow."""
    return escape("".join(c for c in text if c in "\t\n" or (ord(c) >= 32 and not 0xD800 <= ord(c) <= 0xDFFF)))


def _paints(item: Item) -> Iterator[str]:
    yield item.paint
    if isinstance(item, Boxes) and item.edge:
        yield item.edge
    if isinstance(item, Steps):
        yield item.line


def _style(paints: list[str]) -> Iterator[str]:
    yield "<style>"
    for dark in (False, True):
        values = "".join(f"--{paint}:{colour(paint, dark=dark)};" for paint in paints)
        rule = f".stageloom{{{values}}}"
        yield f"@media (prefers-color-scheme: dark) {{{rule}}}" if dark else rule
    yield "".join(f".f-{paint}{{fill:var(--{paint})}}" for paint in paints)
    yield "".join(f".s-{paint}{{stroke:var(--{paint})}}" for paint in paints)
    yield "text{white-space:pre}</style>"


def _fill(paint: str) -> str:
    return f'class="f-{paint}" fill="{colour(paint)}"'


def _element(item: Item) -> Iterator[str]:
    if isinstance(item, Boxes):
        return _boxes(item)
    if isinstance(item, Steps):
        return _steps(item)
    return _lines(item) if isinstance(item, Lines) else _labels(item)


def _boxes(item: Boxes) -> Iterator[str]:
    if not len(item.x):
        return
    # Both sides are rounded, not the width, so that neighbours meet.
    x, y = np.round(item.x, 3), np.round(item.y, 2)
    width, height = np.round(item.x + item.width, 3) - x, np.round(item.y + item.height, 2) - y
    columns = (x.tolist(), y.tolist(), width.tolist(), height.tolist(), (-width).tolist())
    data = "".join([f"M{a:.7g} {b:.6g}h{c:.5g}v{d:.4g}h{e:.5g}z" for a, b, c, d, e in zip(*columns, strict=True)])
    classes, attributes = [f"f-{item.paint}"] if item.filled else [], ""
    attributes += f' fill="{colour(item.paint) if item.filled else "none"}"'
    if item.edge:
        classes.append(f"s-{item.edge}")
        attributes += f' stroke="{colour(item.edge)}" stroke-width="{item.edge_width:.3g}"'
    name = f" data-name={quoteattr(item.name)}" if item.name else ""
    yield f'<path class="{" ".join(classes)}"{attributes}{name} d="{data}"/>'


def _steps(item: Steps) -> Iterator[str]:
    x, y = np.round(item.x, 2).tolist(), np.round(item.y, 2).tolist()
    moves = "".join([f"H{a:.7g}V{b:.6g}" for a, b in zip(x[1:], y[1:], strict=True)])
    top = f"V{y[0]:.6g}{moves}H{item.right:.7g}"
    start = f"M{x[0]:.7g} {item.base:.6g}"
    yield f'<path {_fill(item.paint)} d="{start}{top}V{item.base:.6g}z"/>'
    yield (
        f'<path class="s-{item.line}" stroke="{colour(item.line)}" stroke-width="0.8" fill="none" '
        f'd="M{x[0]:.7g} {y[0]:.6g}{moves}H{item.right:.7g}"/>'
    )


def _lines(item: Lines) -> Iterator[str]:
    data = "".join([f"M{a:.7g} {b:.7g}L{c:.7g} {d:.7g}" for a, b, c, d in item.ends.tolist()])
    yield (
        f'<path class="s-{item.paint}" stroke="{colour(item.paint)}" stroke-width="{item.width:.3g}" '
        f'fill="none" d="{data}"/>'
    )


def _labels(item: Labels) -> Iterator[str]:
    weight = ' font-weight="600"' if item.bold else ""
    name = f" data-name={quoteattr(item.name)}" if item.name else ""
    yield f'<g {_fill(item.paint)} font-size="{item.size:.4g}" text-anchor="{item.anchor}"{weight}{name}>'
    columns = (item.x.tolist(), (item.y + DROP * item.size).tolist(), item.texts)
    for x, y, text in zip(*columns, strict=True):
        yield f'<text x="{x:.6g}" y="{y:.6g}">{_clean(text)}</text>'
    yield "</g>"
