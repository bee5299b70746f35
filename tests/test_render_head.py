"""The head of a picture: what its subtitle states, and how its legend is laid out."""

from __future__ import annotations

from stageloom.costs import Costs
from stageloom.render._chart import chart
from stageloom.render._legend import SIZE, entries, wrapped
from stageloom.render._scene import Labels, width_of
from stageloom.schedules import build
from stageloom.simulate import Timeline, simulate


def subtitle(timeline: Timeline) -> str:
    return chart(timeline).description


def test_subtitle_states_costs_and_shape() -> None:
    assert subtitle(simulate(build("1f1b", 4, 8))).endswith("F 1, B 1, W 1.")
    listed = Costs(F=[1, 2, 3, 4], B=[2, 2, 2, 2], BW=5, latency=0.3, unit="ms")
    assert "F 4 values, B 2, W 1, BW 5, latency 0.3 ms" in subtitle(simulate(build("pipedream", 4, 8), listed))
    assert "asynchronous" in subtitle(simulate(build("pipedream", 3, 5)))
    assert "asynchronous" not in subtitle(simulate(build("1f1b", 4, 8)))
    assert "4 slices" in subtitle(simulate(build("seq1f1b", 4, 8)))
    assert "2 chunks a rank" in subtitle(simulate(build("zb-v", 4, 8)))
    assert "pairs 0.7 of their sum" in subtitle(simulate(build("dualpipe", 4, 10), Costs(overlap_fraction=0.7)))


def test_a_long_subtitle_takes_two_lines() -> None:
    costs = Costs(F=1.25, B=1.5, W=1.75, overhead=0.01, latency=0.125, message_bytes=1e6, bandwidth=1e9, unit="ms")
    scene = chart(simulate(build("pipedream", 2, 3), costs.model_copy(update={"stragglers": {1: 1.5}})))
    lines = [item for item in scene.items if isinstance(item, Labels) and item.size == 13 and not item.name]
    assert [item.texts[0].split()[0] for item in lines] == ["2", "F"]
    assert not any("…" in item.texts[0] for item in lines)


def test_legend_lines_are_about_equally_long() -> None:
    found = entries(
        [simulate(build("dualpipe", 8, 20)), simulate(build("hanayo", 4, 8), Costs(latency=0.3, unit="ms"))]
    )
    rows = wrapped(found, 900)
    assert len(rows) == 2
    assert [entry for row in rows for entry in row] == found
    widths = [sum(entry.width + width_of(entry.text, SIZE) + 23 for entry in row) for row in rows]
    assert max(widths) <= 900
    assert max(widths) - min(widths) < 250
