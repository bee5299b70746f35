"""A table that can be printed, written as Markdown and kept as JSON."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table as RichTable

Value = str | int | float | None


@dataclass(frozen=True)
class Table:
    """`rows` of plain values under `columns`; numbers get `digits` decimals when shown."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    digits: int = 2

    def shown(self) -> list[list[str]]:
        return [[self._text(value) for value in row] for row in self.rows]

    def _text(self, value: Value) -> str:
        if value is None:
            return "–"
        if isinstance(value, float):
            return f"{value:,.{self.digits}f}"
        return f"{value:,}" if isinstance(value, int) else value

    def print(self, console: Console) -> None:
        table = RichTable(title=self.title, caption=self.note, title_justify="left", caption_justify="left")
        for column, right in zip(self.columns, self._numeric(), strict=True):
            table.add_column(column, justify="right" if right else "left")
        for row in self.shown():
            table.add_row(*row)
        console.print(table)

    def markdown(self) -> str:
        lines = [f"### {self.title}", ""]
        lines.append("| " + " | ".join(self.columns) + " |")
        lines.append("| " + " | ".join("---:" if right else "---" for right in self._numeric()) + " |")
        lines += ["| " + " | ".join(row) + " |" for row in self.shown()]
        if self.note:
            lines += ["", self.note]
        return "\n".join(lines) + "\n"

    def _numeric(self) -> list[bool]:
        """Which columns hold numbers (or gaps) only."""
        columns = zip(*self.rows, strict=True)
        return [not any(isinstance(value, str) for value in column) for column in columns]
