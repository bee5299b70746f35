"""Problems shown on the schedule: the rank's order around each place, a caret under it, the message beneath."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Final

from stageloom.schedule import Schedule, tokens
from stageloom.validate.problem import Problem

WIDTH: Final = 100


def explain(schedule: Schedule, problems: Sequence[Problem], *, width: int = WIDTH) -> str:
    """A text of a paragraph a problem, ranks in order; "no problems" where there are none."""
    if not problems:
        return f"{schedule.name}: no problems"
    count = f"{len(problems)} problem" + ("s" if len(problems) > 1 else "")
    blocks = [f"{schedule.name}: {count}"]
    lines = _Lines(schedule, width)
    ordered = sorted(problems, key=lambda p: (-1 if p.rank is None else p.rank, -1 if p.row is None else p.row))
    for problem in ordered:
        if problem.row is None or problem.rank is None:
            blocks.append(_wrap(str(problem), "", width))
            continue
        # The place itself first; then, rank by rank, the others that the problem is about.
        places: dict[int, list[int]] = {problem.rank: [problem.row]}
        for row in problem.rows:
            places.setdefault(int(schedule.rank[row]), []).append(row)
        block = [lines.around(problem.rank, problem.row, places.pop(problem.rank))]
        block += [lines.around(rank, rows[0], rows) for rank, rows in places.items()]
        block.append(_wrap(f"position {problem.position} ({problem.op}): {problem.message}", "    ", width))
        blocks.append("\n".join(block))
    return "\n\n".join(blocks)


class _Lines:
    """The ranks' lines of tokens, made once each, and where in them every row's token stands."""

    def __init__(self, schedule: Schedule, width: int) -> None:
        self.schedule = schedule
        self.width = width
        self.known: dict[int, tuple[str, list[tuple[int, int]]]] = {}

    def of(self, rank: int) -> tuple[str, list[tuple[int, int]]]:
        if rank not in self.known:
            line, spans = "", list[tuple[int, int]]()
            for item in tokens(self.schedule, rank):
                for number, text in enumerate(item.split("&")):
                    line += ("&" if number else " ") if line else ""
                    spans.append((len(line), len(line) + len(text)))
                    line += text
            self.known[rank] = line, spans
        return self.known[rank]

    def around(self, rank: int, focus: int, rows: Iterable[int]) -> str:
        """The part of a rank's line around the row `focus`, and carets under those of `rows` that it shows."""
        line, spans = self.of(rank)
        first = int(self.schedule.offsets[rank])
        label = f"rank {rank}: "
        room = max(self.width - len(label) - 6, 20)
        low, high = spans[focus - first]
        low, high = max(0, (low + high - room) // 2), max((low + high + room) // 2, room)
        # whole tokens only
        shown = [span for span in spans if low <= span[0] and span[1] <= high] or [spans[focus - first]]
        low, high = shown[0][0], shown[-1][1]
        before, after = (".. " if low else ""), (" .." if high < len(line) else "")
        carets = [" "] * (high - low)
        for row in rows:
            start, end = spans[row - first]
            if low <= start and end <= high:
                carets[start - low : end - low] = "^" * (end - start)
        indent = " " * (len(label) + len(before))
        return f"{label}{before}{line[low:high]}{after}\n{indent}{''.join(carets).rstrip()}"


def _wrap(text: str, indent: str, width: int) -> str:
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False)
