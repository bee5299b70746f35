"""The curve of `optimize --pareto`: in the terminal, and as SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from stageloom.cli.columns import Column, print_columns
from stageloom.cli.words import console, print_json, time
from stageloom.render.files import write_whole
from stageloom.search.pareto import Point, curve
from stageloom.search.problem import Problem
from stageloom.search.standing import Standing, standings

ROWS: Final = 16
WIDE: Final = 3  # cells a point
MOST: Final = 1.6  # published points above this multiple of the curve's least value are not drawn


def _shown(points: Sequence[Point], rows: Sequence[Standing], objective: str) -> list[tuple[str, Standing]]:
    """The published points within the picture, each with a letter."""
    low, high = points[0].memory, points[-1].memory
    least = min(point.value for point in points)
    inside = [row for row in rows if low - 1e-9 <= row.peak <= high + 1e-9 and row.of(objective) <= MOST * least]
    letters = "abcdefghijklmnopqrstuvwxyz"
    return list(zip(letters, sorted(inside, key=lambda row: (row.peak, row.of(objective))), strict=False))


def draw(points: Sequence[Point], rows: Sequence[Standing], objective: str, out: Console) -> None:
    """Memory to the right, the objective upwards: * the best found, . the bound, letters the published schedules."""
    named = _shown(points, rows, objective)
    values = [p.value for p in points] + [p.bound for p in points] + [row.of(objective) for _, row in named]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    cells = [[" "] * (WIDE * len(points) + 2) for _ in range(ROWS + 1)]

    def put(column: int, value: float, mark: str) -> None:
        line = cells[round((high - value) / span * ROWS)]
        if line[column] in (" ", "."):
            line[column] = mark

    for at, point in enumerate(points):
        put(WIDE * at + 1, point.value, "*")
        put(WIDE * at + 1, point.bound, ".")
    first, last = points[0].memory, points[-1].memory
    for letter, row in named:
        part = (row.peak - first) / ((last - first) or 1.0)
        column = round(1 + WIDE * (len(points) - 1) * part)
        put(column + 1 if cells[round((high - row.of(objective)) / span * ROWS)][column] == "*" else column,
            row.of(objective), letter)  # fmt: skip
    for number, line in enumerate(cells):
        label = time(high - span * number / ROWS) if number % 4 == 0 else ""
        out.print(Text(f"{label:>10} |{''.join(line).rstrip()}"), soft_wrap=True)
    ruler = "".join(f"{point.memory:<{4 * WIDE}g}" for point in points[::4])
    out.print(Text(f"{'':>10} +{'-' * (WIDE * len(points))}"), soft_wrap=True)
    out.print(Text(f"{'memory':>10}  {ruler}"), soft_wrap=True)
    out.print(f"* best found, . bound ({objective}); memory as a multiple of 1F1B's P micro-batches", style="dim")
    if named:
        words = ", ".join(f"{letter} {row.name} ({row.peak:.3g}, {time(row.of(objective))})" for letter, row in named)
        out.print(f"published: {words}", style="dim")
    out.print()
    points, memory = _told_apart(points)
    print_columns(
        [
            Column("memory", memory),
            Column(objective, [time(point.value) for point in points]),
            Column("bound", [time(point.bound) for point in points]),
            Column("gap", [f"{100 * point.outcome.gap:.2f} %" for point in points]),
        ],
        out,
    )


def _told_apart(points: Sequence[Point]) -> tuple[Sequence[Point], list[str]]:
    """The points and their memory in words, with those at the end that say the same as one."""
    same = len(points) - 1
    while same and (points[same - 1].value, points[same - 1].bound) == (points[-1].value, points[-1].bound):
        same -= 1
    words = [f"{point.memory:g}" for point in points[: same + 1]]
    if same < len(points) - 1:
        words[-1] += f" to {points[-1].memory:g}"
    return points[: same + 1], words


def write_svg(points: Sequence[Point], rows: Sequence[Standing], objective: str, path: Path) -> None:
    """The same as a picture, 720 by 440."""
    named = _shown(points, rows, objective)
    values = [p.value for p in points] + [p.bound for p in points] + [row.of(objective) for _, row in named]
    low, high = min(values), max(values)
    first, last = points[0].memory, points[-1].memory

    def x(memory: float) -> float:
        return 70 + 620 * (memory - first) / ((last - first) or 1.0)

    def y(value: float) -> float:
        return 390 - 350 * (value - low) / ((high - low) or 1.0)

    def path_of(kind: str) -> str:
        return " ".join(f"{x(p.memory):.1f},{y(getattr(p, kind)):.1f}" for p in points)

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="720" height="440" font-family="sans-serif" font-size="11">',
        '<rect width="720" height="440" fill="white"/>',
        f'<text x="10" y="20">{escape(objective)} against memory (times 1F1B\'s P micro-batches); dashed: bound</text>',
        f'<polyline points="{path_of("bound")}" fill="none" stroke="#999" stroke-dasharray="4 3"/>',
        f'<polyline points="{path_of("value")}" fill="none" stroke="#0a6" stroke-width="2"/>',
    ]
    for part in range(5):
        value, memory = low + (high - low) * part / 4, first + (last - first) * part / 4
        parts.append(f'<text x="62" y="{y(value) + 4:.1f}" text-anchor="end">{time(value)}</text>')
        parts.append(f'<text x="{x(memory):.1f}" y="415" text-anchor="middle">{memory:.2f}</text>')
    for _, row in named:
        at = f'cx="{x(row.peak):.1f}" cy="{y(row.of(objective)):.1f}"'
        parts.append(f'<circle {at} r="3.5" fill="#c40"/>')
        parts.append(f'<text x="{x(row.peak) + 5:.1f}" y="{y(row.of(objective)) - 5:.1f}">{escape(row.name)}</text>')
    write_whole(path, "\n".join([*parts, "</svg>\n"]))


def pareto_curve(
    posed: Callable[[str], Problem],
    objective: str,
    seconds: float,
    seed: int,
    out: Path | None,
    *,
    pairs: bool,
    as_json: bool,
) -> None:
    """Search the curve; show it, and write it as a picture."""
    errors = Console(stderr=True)
    multiples = [round(0.35 + 0.05 * step, 2) for step in range(34)]
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("searching", total=None)
        points = curve(
            lambda memory: posed(f"{memory}"),
            multiples,
            objective=objective,
            seconds=seconds / len(multiples),
            seed=seed,
            pairs=pairs,
            progress=lambda memory: bar.update(task, description=f"memory {memory:g}"),
        )
    rows = _free(posed("1000000u"), objective)
    if out is not None:
        write_svg(points, rows, objective, out)
    if as_json:
        print_json([{"memory": p.memory, "value": p.value, "bound": p.bound, "gap": p.outcome.gap} for p in points])
        return
    draw(points, rows, objective, console())
    if out is not None:
        print(f"wrote {out}")


def _free(problem: Problem, objective: str) -> list[Standing]:
    """The published schedules with the memory that each holds, as points."""
    rows, _ = standings(problem, objective)
    return [replace(row, peak=row.peak / problem.ranks) for row in rows if not row.name.startswith("zb-greedy")]
