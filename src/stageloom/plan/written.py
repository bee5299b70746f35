"""A plan as a file: Markdown, a self-contained HTML page, or JSON. All say what `page` says, or what it is made of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any, Final

from stageloom.errors import InputError
from stageloom.plan.answer import Plan
from stageloom.plan.page import Section, Table, page, parts, title
from stageloom.plan.score import Scored

ENDINGS: Final = (".md", ".html", ".json")
MOST_OPS: Final = 4000
"""Of a schedule that is drawn into the page."""


def written(plan: Plan, path: Path) -> str:
    """The text of the file, by its ending. Raises InputError for another ending."""
    if path.suffix == ".md":
        return markdown(plan)
    if path.suffix == ".html":
        return html(plan)
    if path.suffix == ".json":
        return json.dumps(data(plan), indent=2, allow_nan=False) + "\n"
    raise InputError(f"{path}: a plan is written as {', '.join(ENDINGS)}; give a name that ends in one of them")


def markdown(plan: Plan) -> str:
    """The page in Markdown."""
    lines = [f"# {_plain(title(plan))}", ""]
    for section in page(plan):
        lines += [f"## {section.title}", ""]
        for line in section.lines:
            lines += [_plain(line), ""]
        if section.table is not None:
            lines += [*_markdown_table(section.table), ""]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_table(table: Table) -> list[str]:
    rule = ["---" if column in table.left else "---:" for column in range(len(table.heads))]
    rows = [table.heads, rule, *table.rows]
    return ["| " + " | ".join(_plain(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]


def _plain(text: str) -> str:
    """Text in which Markdown finds no HTML."""
    return text.replace("<", "&lt;")


STYLE: Final = """
:root { color-scheme: light dark; --ink: light-dark(#1b1f24, #e6e6e6); --dim: light-dark(#667, #99a);
  --line: light-dark(#d8dde3, #333a44); --bar: light-dark(#4878a8, #6fa0d0); }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: light-dark(#fff, #14171c);
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 1.8rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .15rem .7rem .15rem 0; border-bottom: 1px solid var(--line); text-align: right; font-weight: normal; }
th { color: var(--dim); } .words { text-align: left; }
.bar { display: inline-block; width: 10rem; background: var(--line); }
.bar i { display: block; height: .7rem; background: var(--bar); }
.wide { overflow-x: auto; }
"""


def html(plan: Plan) -> str:
    """The page in HTML, with the timeline as a picture; nothing is loaded from elsewhere."""
    name = escape(title(plan))
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{name}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{name}</h1>",
    ]
    for section in page(plan):
        parts += _html_section(section)
    parts += _picture(plan)
    return "\n".join([*parts, "</body>\n</html>\n"])


def _html_section(section: Section) -> list[str]:
    parts = [f"<h2>{escape(section.title)}</h2>"]
    parts += [f"<p>{escape(line)}</p>" for line in section.lines]
    table = section.table
    if table is None:
        return parts
    bars: Sequence[float | None] = table.bars or [None] * len(table.rows)
    parts.append('<div class="wide"><table>')
    if any(table.heads):
        parts.append(_html_row(table, table.heads, "th", None, spare=bool(table.bars)))
    parts += [_html_row(table, row, "td", bar, spare=False) for row, bar in zip(table.rows, bars, strict=True)]
    return [*parts, "</table></div>"]


WORDS: Final = ' class="words"'


def _html_row(table: Table, cells: Sequence[str], tag: str, bar: float | None, *, spare: bool) -> str:
    made = [
        f"<{tag}{WORDS if column in table.left else ''}>{escape(cell)}</{tag}>" for column, cell in enumerate(cells)
    ]
    if bar is not None:
        made.append(f'<td><span class="bar"><i style="width:{100 * min(1.0, bar):.1f}%"></i></span></td>')
    elif spare:
        made.append(f"<{tag}></{tag}>")
    return f"<tr>{''.join(made)}</tr>"


def _picture(plan: Plan) -> list[str]:
    timeline = plan.prediction.timeline
    if len(timeline.schedule) > MOST_OPS:
        from stageloom.render.text import timeline as drawn

        return [
            "<h2>Timeline</h2>",
            f'<div class="wide"><pre>{escape(drawn(timeline, 120, colour=False, draws="").plain)}</pre></div>',
        ]
    from stageloom.render import svg

    return ["<h2>Timeline</h2>", f'<div class="wide">{svg.timeline(timeline)}</div>']


def data(plan: Plan) -> dict[str, Any]:
    """The plan as JSON holds it: seconds, bytes, shares from 0 to 1."""
    rollback = plan.rollback
    return {
        "model": plan.model.name,
        "cluster": plan.cluster.name,
        "gpus": plan.cluster.gpus,
        "training": _training(plan),
        "plan": _scored(plan.best),
        "memory_limit": plan.limit,
        "memory_by_rank": [parts(rank) | {"total": rank.total} for rank in plan.prediction.memory],
        "tokens": plan.tokens,
        "gpu_hours": plan.gpu_hours,
        "gpu_hours_saved": plan.saved,
        "baseline": None if plan.baseline is None else _scored(plan.baseline),
        "baseline_best": None if plan.baseline_best is None else _scored(plan.baseline_best),
        "same_layout": [_scored(one) for one in plan.same_layout],
        "alternatives": [_scored(one.plan) | {"slower": one.slower, "why": one.why} for one in plan.alternatives],
        "too_large": None if plan.too_large is None else _scored(plan.too_large),
        "disagreements": [asdict(one) for one in plan.disagreements],
        "replication": None
        if plan.replication is None
        else asdict(plan.replication) | {"extra": plan.replication.extra},
        "rollback": None
        if rollback is None
        else {
            "to": _scored(rollback.to),
            "rank": rollback.worst,
            "expected_utilization": list(rollback.expected),
            "trigger_utilization": list(rollback.trigger),
            "trigger_seconds": rollback.seconds,
            "unpaired_seconds": rollback.unpaired,
            "equal": None if rollback.equal is None else _scored(rollback.equal),
        },
        "mesh": plan.mesh,
        "mixed": plan.mixed,
        "all_to_all": plan.all_to_all,
        "front": [_scored(one) for one in plan.found.front],
        "search": {
            "layouts": plan.found.cuts,
            "simulated": len(plan.found.scored),
            "dropped": plan.found.dropped,
            "slack": plan.found.slack,
            "by_layout": {one.what: one.reason for one in plan.found.by_layout},
            "by_schedule": {one.what: one.reason for one in plan.found.by_schedule},
        },
    }


def _training(plan: Plan) -> dict[str, Any]:
    """The job, null for what the search chose."""
    chosen = {} if len(plan.space.recompute) == 1 else {"recompute": None}
    return asdict(plan.training) | chosen


def _scored(one: Scored) -> dict[str, Any]:
    at = one.layout
    return {
        "schedule": one.schedule,
        "microbatches": one.microbatches,
        "layout": asdict(at),
        "seconds": one.seconds,
        "tokens_per_second": one.tokens_per_second,
        "mfu": one.mfu,
        "bubble": one.bubble,
        "exposed_seconds": one.exposed,
        "parts": one.parts,
        "memory": one.memory,
        "fits": one.fits,
    }
