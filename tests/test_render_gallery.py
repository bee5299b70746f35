"""The gallery: many schedules to one scale; and files that are written whole or not at all."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from stageloom.costs import Costs
from stageloom.errors import InputError
from stageloom.op import KIND_NAMES
from stageloom.render import gallery
from stageloom.render._scene import Boxes, Labels, Scene
from stageloom.render.files import write_whole
from stageloom.schedules import build, records
from stageloom.simulate import Timeline, simulate

SVG = "{http://www.w3.org/2000/svg}"


def op_boxes(scene: Scene) -> list[Boxes]:
    return [item for item in scene.items if isinstance(item, Boxes) and item.name.split("-")[0] in KIND_NAMES]


def labels(scene: Scene) -> list[Labels]:
    return [item for item in scene.items if isinstance(item, Labels)]


# ---------------------------------------------------------------------------------------------------------- gallery


def all_timelines() -> list[Timeline]:
    return [simulate(r(8, 16)) for r in records() if r.refusal(8, 16) is None]


def test_gallery_draws_every_panel_to_one_scale() -> None:
    timelines = [simulate(build(name, 8, 16)) for name in ("gpipe", "zb-h1", "chimera")]
    boxes = op_boxes(gallery.scene(timelines))
    total = sum(float((t.end - t.start).sum()) for t in timelines)
    longest = max(float(t.end.max()) for t in timelines)
    right = max(float((box.x + box.width).max(initial=0.0)) for box in boxes)
    left = min(float(box.x.min(initial=1e9)) for box in boxes)
    scale = sum(box.width.sum() for box in boxes) / total
    assert sum(len(box.x) for box in boxes) == sum(len(t.schedule) for t in timelines)
    assert right - left >= longest * scale * (1 - 1e-9)


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_gallery_names_all(columns: int) -> None:
    timelines = all_timelines()
    text = gallery.svg(timelines, columns=columns, title="All")
    root = ET.fromstring(text)
    written = {node.text for node in root.iter(f"{SVG}text")}
    assert {t.schedule.name for t in timelines} <= written
    scene = gallery.scene(timelines, columns=columns)
    for box in op_boxes(scene):
        assert (box.x + box.width).max(initial=0.0) <= scene.width - 20
        assert (box.y + box.height).max(initial=0.0) <= scene.height


def numbers_of_ranks(scene: Scene) -> list[str]:
    return [item.texts[0] for item in labels(scene) if item.size == gallery.RANK and item.anchor == "end"]


def test_gallery_numbers_ranks_where_there_is_room() -> None:
    assert numbers_of_ranks(gallery.scene([simulate(build("1f1b", 8, 16))])) == list("01234567")
    many = gallery.scene([simulate(build("1f1b", ranks, 8)) for ranks in (64, 2)])
    assert numbers_of_ranks(many) == ["0", "63", "0"]


def test_gallery_states_costs_once_and_what_panels_differ_in() -> None:
    timelines = [simulate(build(name, 4, 8), Costs(unit="ms")) for name in ("pipedream", "zb-v")]
    said = [text for item in labels(gallery.scene(timelines)) for text in item.texts]
    assert "4 ranks  ·  8 micro-batches  ·  F 1, B 1, W 1 ms" in said
    assert sum(text.startswith("asynchronous") for text in said) == 1
    assert sum(text.startswith("2 chunks a rank") for text in said) == 1
    mixed = [timelines[0], simulate(build("zb-v", 4, 8), Costs(F=2, unit="ms"))]
    assert any("costs differ" in text for item in labels(gallery.scene(mixed)) for text in item.texts)


def test_gallery_cuts_what_would_squash_the_others() -> None:
    timelines = [simulate(build(name, 8, 16)) for name in ("gpipe", "1f1b", "naive")]
    scene = gallery.scene(timelines)
    said = [text for item in labels(scene) for text in item.texts]
    assert sum("goes on to the right" in text for text in said) == 1


def test_gallery_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    gallery.png([simulate(build("1f1b", 4, 8)), simulate(build("dualpipe", 8, 20))], tmp_path / "g.png")
    assert (tmp_path / "g.png").read_bytes().startswith(b"\x89PNG")


def test_gallery_refuses_nothing_and_mixed_units() -> None:
    with pytest.raises(InputError, match="at least one"):
        gallery.svg([])
    with pytest.raises(InputError, match="columns"):
        gallery.svg([simulate(build("1f1b", 4, 8))], columns=0)
    with pytest.raises(InputError, match="ms and none"):
        gallery.svg([simulate(build("1f1b", 4, 8)), simulate(build("hanayo", 4, 8), Costs(unit="ms"))])


# ------------------------------------------------------------------------------------------------------------ files


def test_files_are_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "a.svg"
    write_whole(target, "one")
    target.chmod(0o640)
    write_whole(target, b"two")
    assert target.read_text() == "two"
    assert target.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["a.svg"]


def test_a_link_stays_and_a_device_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    write_whole("/dev/null", "x")
    assert Path("/dev/null").is_char_device()


def test_files_that_cannot_be_written_say_why(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder"):
        write_whole(tmp_path, "x")
    with pytest.raises(InputError, match="there is no folder"):
        write_whole(tmp_path / "no" / "a.svg", "x")
    with pytest.raises(InputError, match="cannot be written"):
        write_whole(tmp_path / ("a" * 300), "x")
    assert not list(tmp_path.iterdir())
