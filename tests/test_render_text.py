"""The terminal timeline: goldens without colour, and laws over widths."""

from __future__ import annotations

import io
import re
from collections import Counter, defaultdict

import pytest
from rich.console import Console

from stageloom.costs import Costs
from stageloom.errors import InputError
from stageloom.render import text
from stageloom.schedules import build
from stageloom.simulate import Timeline, simulate

GOLDEN_1F1B = """\
F forward  BW backward, both  · idle
0 F0F1F2F3············BW0 F4BW1 F5BW2 ··BW3 ··BW4 ··BW5
1 ··F0F1F2········BW0 F3BW1 F4BW2 F5BW3 ··BW4 ··BW5 ····
2 ····F0F1····BW0 F2BW1 F3BW2 F4BW3 F5BW4 ··BW5 ········
3 ······F0BW0 F1BW1 F2BW2 F3BW3 F4BW4 F5BW5 ············
  0                   10                  20"""

GOLDEN_DUALPIPE = """\
F forward  B backward, input gradient  W backward, weight gradient  BW backward, both
small letters: other direction  & overlapped  · idle
0 F0 F1 F2 f4 b4 w4 f5 F3&bw5   ···f6&BW0   bw6   ···f7&BW1   bw7   B2 W2 B3 W3
1 ···F0 f4 F1 f5 F2 bw4   f6&BW0   F3&bw5   f7&BW1   bw6   BW2   ···b7 B3 w7 W3
2 ···f4 F0 f5 F1 f6 BW0   F2&bw4   f7&BW1   F3&bw5   BW2   bw6   ···B3 b7 W3 w7
3 f4 f5 f6 F0 B0 W0 F1 f7&BW1   ···F2&bw4   BW2   ···F3&bw5   BW3   b6 w6 b7 w7
  0              5              10             15             20             25"""

GOLDEN_ZB_V = """\
F forward  B backward, input gradient  W backward, weight gradient  · idle
' later chunk
0 F0  F1  F2  F0' B0' W0' F1' B1' W1' B0  W0  F2' B2' W2' B1  W1  B2  W2  ····
1 ····F0  F0' F1  F1' B0' W0' F2  B0  W0  F2' B1' W1' B1  B2' B2  W1  W2' W2
  0               2               4               6               8"""

GOLDEN_COUNTED = """\
F forward  D backward, both  · idle
chunks are not marked
one column is about 1.8 ops: shares
are right, single ops are not; -o
FILE.svg draws all
0 FFDDFDDFDFDDFDDDFDDFDFDDFDDDFDDF·DDD
1 FDFDDFDDFDDFDDFDDFDDFDDFDDFDDFDDFDD·
  0              20            40"""


def drawn(timeline: Timeline, width: int, *, colour: bool = False) -> list[str]:
    return text.timeline(timeline, width, colour=colour).plain.split("\n")


def test_golden_1f1b() -> None:
    assert [row.rstrip() for row in drawn(simulate(build("1f1b", 4, 6)), 60)] == GOLDEN_1F1B.split("\n")


def test_golden_dualpipe() -> None:
    found = drawn(simulate(build("dualpipe", 4, 8)), 90)
    assert [row.rstrip() for row in found] == GOLDEN_DUALPIPE.split("\n")


def test_golden_two_chunks() -> None:
    assert [row.rstrip() for row in drawn(simulate(build("zb-v", 2, 3)), 80)] == GOLDEN_ZB_V.split("\n")


def test_golden_ops_narrower_than_a_column() -> None:
    found = drawn(simulate(build("interleaved-1f1b", 2, 16)), 38)
    assert [row.rstrip() for row in found] == GOLDEN_COUNTED.split("\n")


CASES = {
    "1f1b": lambda: simulate(build("1f1b", 4, 8)),
    "one rank": lambda: simulate(build("gpipe", 1, 3)),
    "one op each": lambda: simulate(build("1f1b", 1, 1)),
    "dualpipe": lambda: simulate(build("dualpipe", 8, 20)),
    "chunks": lambda: simulate(build("hanayo", 4, 8), Costs(latency=0.3, unit="ms")),
    "no time for W": lambda: simulate(build("zb-h1", 4, 8), Costs(W=0)),
    "uneven": lambda: simulate(build("zb-h1", 4, 8), Costs(F=1.07, B=1.31, W=0.77)),
    "large": lambda: simulate(build("dualpipe", 64, 512)),
    "128 ranks": lambda: simulate(build("1f1b", 128, 16)),
}


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("width", [20, 41, 80, 200, 400])
@pytest.mark.parametrize("case", list(CASES))
def test_a_line_a_rank_within_the_width(case: str, width: int, colour: bool) -> None:
    timeline = CASES[case]()
    lines = drawn(timeline, width, colour=colour)
    assert max(map(len, lines)) <= width
    ranks = lines[-1 - timeline.schedule.ranks : -1]
    assert [int(row.split()[0]) for row in ranks] == list(range(timeline.schedule.ranks))
    assert len({len(row) for row in ranks}) == 1


@pytest.mark.parametrize("case", ["1f1b", "dualpipe", "one rank"])
def test_every_op_is_written_where_there_is_room(case: str) -> None:
    timeline = CASES[case]()
    schedule = timeline.schedule
    lines = drawn(timeline, 600)[-1 - schedule.ranks : -1]
    for rank, row in enumerate(lines):
        words = [f"{op.kind.name}{op.microbatch}" for op in schedule.ops(rank)]
        paths = [int(schedule.path_of[op.microbatch]) for op in schedule.ops(rank)]
        expected = [word.lower() if path else word for word, path in zip(words, paths, strict=True)]
        found = row.split(maxsplit=1)[1].replace("·", " ").replace("&", " ").split()
        assert sorted(found) == sorted(expected)


def words(timeline: Timeline, width: int) -> list[str]:
    """All that is written on ops, ranks together; a pair is one word."""
    lines = drawn(timeline, width)[-1 - timeline.schedule.ranks : -1]
    text = "·".join(row.split(maxsplit=1)[1] for row in lines)
    word = r"(?:BW|bw|[FBWDfbwd])[0-9]*'?"
    return re.findall(rf"{word}&{word}|&|{word}", text)


@pytest.mark.parametrize("width", [80, 100, 128, 160, 220])
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipev", "pipedream-2bw", "interleaved-zb", "chimera"])
def test_numbers_do_not_come_and_go(name: str, width: int) -> None:
    timeline = simulate(build(name, 4, 12))
    assert "shares are" not in " ".join(drawn(timeline, width))
    numbered: dict[str, set[bool]] = defaultdict(set)
    for word in words(timeline, width):
        kind = "&" if "&" in word else word.rstrip("'0123456789").upper()
        numbered[kind].add(any(map(str.isdigit, word)))
    assert all(len(states) == 1 for states in numbered.values())


def test_b_and_w_in_one_cell_each_do_not_look_like_a_bw() -> None:
    for name, width in (("dualpipe", 40), ("dualpipev", 60)):
        lines = drawn(simulate(build(name, 4, 8)), width)
        assert "D backward, both" in " ".join(lines)
        assert "BW backward, both" not in " ".join(lines)
        assert "D " in lines[-2]


def test_each_chunk_has_its_mark() -> None:
    # Chunk by chunk, a micro-batch passes a rank once in each direction: no two words of a line are alike.
    for name, chunks in (("zb-v", 2), ("interleaved-1f1b", 3)):
        timeline = simulate(build(name, 4, 8, **({"chunks": chunks} if chunks > 2 else {})))
        for row in drawn(timeline, 400)[-5:-1]:
            found = re.findall(r"[A-Z]+[0-9]+['a-c]?", row)
            assert len(found) == len(set(found)) == len(timeline.schedule) / 4
    assert "a-c first to last chunk" in " ".join(drawn(timeline, 400))


def shares(timeline: Timeline, rank: int) -> dict[str, float]:
    """The time of a rank by symbol."""
    schedule = timeline.schedule
    found: dict[str, float] = defaultdict(float)
    low, high = (int(offset) for offset in schedule.offsets[rank : rank + 2])
    for row in range(low, high):
        if row > low and schedule.pair[row - 1]:
            continue
        letter = "FBWD"[schedule.kind[row]]
        letter = letter.lower() if schedule.path_of[schedule.microbatch[row]] else letter
        found["&" if schedule.pair[row] else letter] += float(timeline.end[row] - timeline.start[row])
    return found | {"·": float(timeline.end.max()) - sum(found.values())}


@pytest.mark.parametrize("width", [33, 60, 120])
@pytest.mark.parametrize("costs", [Costs(), Costs(F=1.07, B=1.31, W=0.77, latency=0.21)], ids=["even", "uneven"])
@pytest.mark.parametrize("name", ["interleaved-1f1b", "zb-h1", "zb-v", "dualpipe", "dualpipev", "chimera", "naive"])
def test_narrow_ops_keep_their_shares(name: str, costs: Costs, width: int) -> None:
    timeline = simulate(build(name, 8, 64), costs)
    rows = drawn(timeline, width)[-9:-1]
    for rank, row in enumerate(rows):
        counts = Counter(row.split(maxsplit=1)[1])
        expected = shares(timeline, rank)
        cells = counts.total() / sum(expected.values())
        for symbol in expected.keys() | counts.keys():
            assert abs(counts[symbol] - expected.get(symbol, 0.0) * cells) < 1.5, symbol


def test_rich_prints_it_as_it_is() -> None:
    timeline = CASES["dualpipe"]()
    console = Console(width=100, record=True, force_terminal=True, color_system="truecolor", file=io.StringIO())
    console.print(text.timeline(timeline, 100))
    assert [row.rstrip() for row in console.export_text().rstrip("\n").split("\n")] == [
        row.rstrip() for row in drawn(timeline, 100, colour=True)
    ]


def test_too_narrow_is_refused() -> None:
    with pytest.raises(InputError, match="at least 20 columns"):
        text.timeline(CASES["1f1b"](), 19)
