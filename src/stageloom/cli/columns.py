"""Columns of text that always show whole numbers: where they do not fit, whole columns are left out, and named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

GAP = 2  # blanks between columns


@dataclass(frozen=True)
class Column:
    """`head` in one or two lines, one cell a row. `spare` 0: always shown; else the highest is left out first."""

    head: str
    cells: Sequence[Text | str]
    left: bool = False
    spare: int = 0

    @property
    def width(self) -> int:
        return max((_length(cell) for cell in (*self.head.split("\n"), *self.cells)), default=0)


def print_columns(columns: Sequence[Column], out: Console) -> list[str]:
    """Print a table in the console's width; the heads of columns that were left out come back."""
    shown = list(columns)
    while sum(column.width + GAP for column in shown) - GAP > out.width and any(column.spare for column in shown):
        shown.remove(max(shown, key=lambda column: column.spare))
    lines = max(len(column.head.split("\n")) for column in shown)
    heads = [[""] * (lines - len(column.head.split("\n"))) + column.head.split("\n") for column in shown]
    for line in range(lines):
        _print_line(shown, [Text(head[line], style="bold") for head in heads], out)
    for row in range(len(shown[0].cells)):
        _print_line(shown, [column.cells[row] for column in shown], out)
    return [" ".join(column.head.split()) for column in columns if column not in shown and column.head]


def _print_line(columns: Sequence[Column], cells: Sequence[Text | str], out: Console) -> None:
    line = Text()
    for number, (column, cell) in enumerate(zip(columns, cells, strict=True)):
        blank = " " * (column.width - _length(cell))
        line.append(" " * GAP if number else "").append("" if column.left else blank).append(cell)
        line.append(blank if column.left else "")
    line.rstrip()
    out.print(line, soft_wrap=True)


def _length(cell: Text | str) -> int:
    return cell.cell_len if isinstance(cell, Text) else len(cell)
