"""Laws of the drawings: every op is drawn once, to scale, inside the picture, and text only where it fits."""

from __future__ import annotations

import io
import re
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from stageloom.costs import Costs
from stageloom.errors import MissingExtra
from stageloom.op import KIND_NAMES
from stageloom.placement import line
from stageloom.render import png, svg
from stageloom.render._chart import chart
from stageloom.render._lanes import MARKED
from stageloom.render._palette import KINDS, colour
from stageloom.render._scene import DIGIT, Boxes, Labels, Lines, Scene, Steps
from stageloom.render._slots import merged, slots
from stageloom.schedule import assemble
from stageloom.schedules import build
from stageloom.simulate import Timeline, simulate
from stageloom.tape import BW, F, numbered

SVG = "{http://www.w3.org/2000/svg}"


def sliced() -> Timeline:
    order = F * 6 + numbered(BW, (1, 0, 3, 2, 5, 4))
    return simulate(assemble("sliced", line(2), [order, order], 3, slices=2, cut="batch"))


CASES = {
    "1f1b": lambda: simulate(build("1f1b", 4, 8)),
    "one rank": lambda: simulate(build("gpipe", 1, 3)),
    "one micro-batch": lambda: simulate(build("gpipe", 4, 1)),
    "one op each": lambda: simulate(build("1f1b", 1, 1)),
    "dualpipe": lambda: simulate(build("dualpipe", 8, 20)),
    "dualpipe, faster pairs": lambda: simulate(build("dualpipe", 4, 10), Costs(overlap_fraction=0.7)),
    "chunks and messages": lambda: simulate(build("hanayo", 4, 8), Costs(latency=0.3, unit="ms")),
    "no time for W": lambda: simulate(build("zb-h1", 4, 8), Costs(W=0)),
    "slices": sliced,
    "versions": lambda: simulate(build("pipedream", 3, 5)),
    "bytes": lambda: simulate(build("1f1b", 4, 8), Costs(activation_bytes=1 << 30, unit="s", F=1e-5, B=1e-5, W=1e-5)),
    "dense": lambda: simulate(build("zb-h1", 16, 400)),
    "many ranks": lambda: simulate(build("1f1b", 128, 8)),
}


@pytest.fixture(params=list(CASES), scope="module")
def timeline(request: pytest.FixtureRequest) -> Timeline:
    return CASES[request.param]()


def op_boxes(scene: Scene) -> list[Boxes]:
    return [item for item in scene.items if isinstance(item, Boxes) and item.name.split("-")[0] in KIND_NAMES]


def labels(scene: Scene) -> list[Labels]:
    return [item for item in scene.items if isinstance(item, Labels)]


# ------------------------------------------------------------------------------------------------------------- laws


def test_every_op_is_drawn_once_and_to_scale(timeline: Timeline) -> None:
    boxes = op_boxes(chart(timeline))
    drawn = slots(timeline)
    scale = sum(box.width.sum() for box in boxes) / (timeline.end - timeline.start).sum()
    for box in boxes:
        paint = drawn.paints.index(box.name)
        own = drawn.paint == paint
        assert box.width.sum() == pytest.approx((drawn.end - drawn.start)[own].sum() * scale)
    count = sum(len(box.x) for box in boxes)
    assert count in (len(timeline.schedule), len(merged(drawn)))


def test_nothing_is_drawn_outside_the_picture(timeline: Timeline) -> None:
    scene = chart(timeline)
    for item in scene.items:
        if isinstance(item, Boxes):
            x, y = np.append(item.x, item.x + item.width), np.append(item.y, item.y + item.height)
            assert (item.width >= -1e-9).all()
            assert (item.height > 0).all()
        elif isinstance(item, Steps):
            x, y = np.append(item.x, item.right), np.append(item.y, item.base)
            assert (np.diff(item.x) >= 0).all()
        elif isinstance(item, Lines):
            x, y = item.ends[:, ::2].ravel(), item.ends[:, 1::2].ravel()
        else:
            width = np.array([len(text) for text in item.texts]) * item.size * 0.45
            before = {"start": 0.0, "middle": 0.5, "end": 1.0}[item.anchor]
            x, y = np.append(item.x - before * width, item.x + (1 - before) * width), item.y
        assert np.isfinite(x).all()
        assert np.isfinite(y).all()
        assert x.min(initial=0.0) >= 0
        assert x.max(initial=0.0) <= scene.width
        assert y.min(initial=0.0) >= 0
        assert y.max(initial=0.0) <= scene.height


def test_ops_of_a_rank_do_not_cover_one_another(timeline: Timeline) -> None:
    boxes = op_boxes(chart(timeline))
    columns = [np.concatenate([getattr(box, key) for box in boxes]) for key in ("x", "y", "width", "height")]
    columns = [column[columns[2] > 0] for column in columns]
    x, y, width, height = (column[np.lexsort((columns[0], columns[1]))] for column in columns)
    same_lane = y[1:] == y[:-1]
    assert (x[1:] - (x + width)[:-1])[same_lane].min(initial=0.0) > -1e-6
    assert (height[1:] == height[:-1])[same_lane].all() or timeline.schedule.pair.any()


def test_numbers_stand_only_where_they_fit(timeline: Timeline) -> None:
    scene = chart(timeline)
    boxes = op_boxes(scene)
    x, y, width, height = (np.concatenate([getattr(box, k) for box in boxes]) for k in ("x", "y", "width", "height"))
    for item in labels(scene):
        if item.name != "caption":
            continue
        assert item.size >= 6.5
        for at, middle, text in zip(item.x, item.y, item.texts, strict=True):
            inside = (x <= at) & (at <= x + width) & (y <= middle) & (middle <= y + height)
            room = width[inside & (width > 0)]
            assert len(room)
            assert room.max() >= len(text) * DIGIT * item.size
            assert height[inside].max() >= item.size * 0.7


def test_numbers_do_not_come_and_go_along_a_lane() -> None:
    drawn_somewhere = set[bool]()
    for name, microbatches in (("1f1b", 32), ("1f1b", 90), ("zb-v", 24), ("interleaved-1f1b", 32), ("gpipe", 200)):
        costs = Costs(F=[18.1, *[18.5] * 6, 22.4], B=[17.7, *[18.1] * 6, 21.6], W=[9.1, *[9.3] * 6, 12.9])
        timeline = simulate(build(name, 8, microbatches), costs)
        scene = chart(timeline)
        paints = {box.name: box for box in op_boxes(scene)}
        numbers: dict[tuple[str, float], int] = defaultdict(int)
        ops: dict[tuple[str, float], int] = defaultdict(int)
        for paint, box in paints.items():
            for y, height in zip(box.y, box.height, strict=True):
                ops[paint.split("-")[0], round(float(y + height / 2), 3)] += 1
        for item in labels(scene):
            for y in item.y if item.name == "caption" else ():
                numbers[item.paint.split("-")[1], round(float(y), 3)] += 1
        assert numbers.keys() <= ops.keys()
        assert all(numbers.get(key, 0) in (0, count) for key, count in ops.items())
        drawn_somewhere.add(bool(numbers))
    assert drawn_somewhere == {True, False}


def test_rank_numbers_do_not_touch() -> None:
    scene = chart(CASES["many ranks"]())
    for item in (one for one in labels(scene) if one.anchor == "end"):
        assert item.size >= 8
    ranks = sorted(float(item.y[0]) for item in labels(scene) if item.anchor == "end" and item.x[0] < 100)
    assert np.diff(ranks).min() >= 8


def test_numbers_are_those_of_the_micro_batches() -> None:
    timeline = CASES["1f1b"]()
    found = sorted(int(t) for item in labels(chart(timeline)) if item.name == "caption" for t in item.texts)
    assert found == sorted(timeline.schedule.microbatch.tolist())


def test_a_pair_shares_its_slot_forward_above() -> None:
    timeline = CASES["dualpipe"]()
    drawn = slots(timeline)
    first = np.flatnonzero(timeline.schedule.pair)
    assert (drawn.half[first] + drawn.half[first + 1] == 3).all()
    upper = np.where(drawn.half[first] == 1, first, first + 1)
    assert (timeline.schedule.kind[upper] == 0).all()
    outlines = [item for item in chart(timeline).items if isinstance(item, Boxes) and item.name == "pair"]
    assert sum(len(item.x) for item in outlines) == len(first)


def test_idle_time_fills_what_ops_leave(timeline: Timeline) -> None:
    scene = chart(timeline)
    lanes = min(box.y.min() for box in op_boxes(scene))
    gaps = [item for item in scene.items if isinstance(item, Boxes) and item.name.startswith("idle")]
    idle = sum(item.width[item.y >= lanes].sum() for item in gaps)
    second = np.append(False, timeline.schedule.pair[:-1])
    busy = np.where(second, 0, timeline.end - timeline.start).sum()
    scale = sum(box.width.sum() for box in op_boxes(scene)) / (timeline.end - timeline.start).sum()
    assert idle + busy * scale == pytest.approx(timeline.end.max() * timeline.schedule.ranks * scale, rel=1e-6)


# ---------------------------------------------------------------------------------------------------------- colours


@pytest.mark.parametrize("dark", [False, True])
def test_kinds_differ_in_lightness_alone(dark: bool) -> None:
    def grey(paint: str) -> float:
        red, green, blue = (int(colour(paint, dark=dark)[i : i + 2], 16) / 255 for i in (1, 3, 5))
        return 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2

    levels = sorted(grey(f"{kind}-4-0") for kind in KINDS)
    assert np.diff(np.cbrt(levels)).min() > 0.04


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("path", [0, 4])
@pytest.mark.parametrize("chunk", [0, 4, 8])
@pytest.mark.parametrize("kind", list(KINDS))
def test_numbers_can_be_read_on_their_slots(kind: str, chunk: int, path: int, dark: bool) -> None:
    def luminance(name: str) -> float:
        parts = [int(colour(name, dark=dark)[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted(luminance(f"{role}{kind}-{chunk}-{path}") for role in ("", "ink-"))
    assert (high + 0.05) / (low + 0.05) >= 4.0


def test_marks_of_idle_causes_differ_by_height() -> None:
    assert len(set(MARKED.values())) == len(MARKED)


# -------------------------------------------------------------------------------------------------------------- svg


def test_svg_is_well_formed_and_accessible(timeline: Timeline) -> None:
    text = svg.timeline(timeline, title='A < B & "C" \x07 é')
    root = ET.fromstring(text)
    assert root.get("role") == "img"
    assert root.get("style") == "max-width:100%;height:auto"
    title = root.find(f"{SVG}title")
    assert title is not None
    assert title.text == 'A < B & "C"  é'
    assert root.find(f"{SVG}desc") is not None
    assert "nan" not in re.sub(r"<style>.*?</style>", "", text, flags=re.S).lower()
    assert "prefers-color-scheme: dark" in text
    used = set(re.findall(r"var\(--([\w-]+)\)", text))
    assert used
    assert all(f"--{name}:" in text for name in used)


def test_svg_draws_each_op_as_one_subpath() -> None:
    timeline = CASES["dualpipe"]()
    root = ET.fromstring(svg.timeline(timeline))
    paths = [p for p in root.iter(f"{SVG}path") if (p.get("data-name") or "").split("-")[0] in KIND_NAMES]
    assert sum((p.get("d") or "").count("M") for p in paths) == len(timeline.schedule)


def test_svg_of_64_ranks_and_512_microbatches_stays_small() -> None:
    text = svg.timeline(simulate(build("zb-h1", 64, 512)))
    assert len(text) < 15e6
    assert text.count("<text") < 400


# -------------------------------------------------------------------------------------------------------------- png


def test_png_is_written(timeline: Timeline, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png.timeline(timeline, tmp_path / "a.png", title="a title $with$ é")
    data = (tmp_path / "a.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n")
    scene = chart(timeline)
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert width / height == pytest.approx(scene.width / scene.height, rel=0.01)


def test_png_goes_into_a_buffer_and_leaves_pyplot_alone() -> None:
    pytest.importorskip("matplotlib")
    buffer = io.BytesIO()
    png.timeline(CASES["1f1b"](), buffer, dark=True)
    assert buffer.getvalue().startswith(b"\x89PNG")


def test_png_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=r"PNG drawing needs matplotlib.*stageloom\[plot\]"):
        png.timeline(CASES["1f1b"](), tmp_path / "a.png")
    assert not list(tmp_path.iterdir())
