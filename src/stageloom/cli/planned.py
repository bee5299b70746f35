"""What `plan` prints."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from stageloom.cli.columns import Column, print_columns
from stageloom.plan.answer import Plan
from stageloom.plan.page import Section, Table, page, title

BAR = 24
"""Cells of a bar."""

MOST_RANKS = 32
"""Of a timeline that is drawn."""


def print_plan(plan: Plan, out: Console) -> None:
    """The page: sections with their tables, bars beside memory and parts, and the timeline."""
    out.print(Text(title(plan), style="bold"))
    for section in page(plan):
        out.print()
        out.print(Text(section.title, style="bold"))
        _print_section(section, out)
    if plan.best.layout.pipeline > MOST_RANKS:
        return
    from stageloom.plan.written import MOST_OPS
    from stageloom.render.text import NARROWEST, timeline

    out.print()
    out.print(Text("Timeline", style="bold"))
    colour = out.color_system is not None and not out.no_color
    drawn = plan.prediction.timeline
    draws = "-o FILE.html" if len(drawn.schedule) <= MOST_OPS else ""
    out.print(timeline(drawn, max(out.width, NARROWEST), colour=colour, draws=draws), soft_wrap=True)


def _print_section(section: Section, out: Console) -> None:
    for line in section.lines:
        out.print(line)
    table = section.table
    if table is None:
        return
    if table.left == tuple(range(len(table.heads))) and not any(table.heads):
        width = max(len(row[0]) for row in table.rows)
        for name, *rest in table.rows:
            out.print(f"{name:<{width}}  {'  '.join(rest)}")
        return
    print_columns(_columns(table), out)


def _columns(table: Table) -> list[Column]:
    spare = {"memory": 1, "working": 2, "unseen": 3}
    columns = [
        Column(head, [row[at] for row in table.rows], left=at in table.left, spare=spare.get(head, 0))
        for at, head in enumerate(table.heads)
    ]
    if table.bars:
        cells = [Text("█" * round(BAR * min(1.0, share)), style="blue") for share in table.bars]
        columns.append(Column("", cells, left=True, spare=4))
    return columns
