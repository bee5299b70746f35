"""What `compare` and `list` print."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from stageloom.cli.columns import Column, print_columns
from stageloom.cli.words import count, many, share, size, time
from stageloom.compare import Comparison, Row
from stageloom.schedules import Record

BAR: Final = 10  # cells of the bubble bar


def _bar(rate: float) -> Text:
    """The bubble as a bar: full cells are idle."""
    eighths = round(max(0.0, min(1.0, rate)) * BAR * 8)
    whole, part = divmod(eighths, 8)
    tip = " ▏▎▍▌▋▊▉"[part] if part else ""
    filled = "█" * whole + tip
    return Text(filled, style="yellow").append("·" * (BAR - len(filled)), style="dim")


def print_comparison(comparison: Comparison, chunks: int | None, out: Console) -> None:
    """The comparison as a table, best first, and below it why the other schedules do not apply."""
    sizes = f"{many(comparison.ranks, 'rank')}, {many(comparison.microbatches, 'micro-batch')}"
    out.print(Text(f"{sizes}  {_costs(comparison)}", style="italic"))
    if comparison.rows:
        left_out = print_columns(_columns(comparison), out)
        if left_out:
            out.print(f"Left out in {out.width} columns: {', '.join(left_out)}.", style="dim")
        for note in _notes(comparison, chunks):
            out.print(note, style="dim")
    if comparison.refused:
        out.print("Do not apply at these sizes:", style="bold")
        for refused in comparison.refused:
            out.print(f"  {refused.name}: {refused.reason}; {refused.remedy}")


def _costs(comparison: Comparison) -> str:
    costs = comparison.costs
    parts = [f"{key} {_given(getattr(costs, key))}" for key in ("F", "B", "W")]
    if costs.latency:
        parts.append(f"latency {time(costs.latency)}")
    return "  ".join(parts) + (f"  ({costs.unit})" if costs.unit else "")


def _given(value: object) -> str:
    return time(value) if isinstance(value, float) else "by stage"


def _columns(comparison: Comparison) -> list[Column]:
    rows, unit = comparison.rows, comparison.costs.unit
    metrics = [row.metrics for row in rows]
    columns = [
        Column("schedule", [_name(row) for row in rows], left=True),
        Column(f"makespan\n{unit}" if unit else "makespan", [time(m.makespan) for m in metrics]),
        Column("to 1F1B", [_to_baseline(row) for row in rows]),
        Column("bubble", [share(m.bubble_rate) for m in metrics]),
        Column("", [_bar(m.bubble_rate) for m in metrics], left=True, spare=6),
        Column("worst\nrank busy", [share(m.worst_utilization) for m in metrics], spare=2),
        Column("peak\nactiv.", [count(max(m.peak_activations)) for m in metrics]),
        Column("param.\ncopies", [str(m.parameter_copies) for m in metrics], spare=3),
    ]
    if any(m.memory_bytes is not None for m in metrics):
        columns.append(Column("fullest\nrank", [_memory(row) for row in rows], spare=1))
    if any(m.gpu_hours_per_million_tokens is not None for m in metrics):
        columns.append(
            Column("GPU-hours\n/ Mtoken", [f"{m.gpu_hours_per_million_tokens:.4g}" for m in metrics], spare=4)
        )
        columns.append(Column("GPU-hours\nto 1F1B", [f"{row.gpu_hours_difference:+.3g}" for row in rows], spare=5))
    return columns


def _name(row: Row) -> Text:
    return Text(row.label + ("" if row.metrics.synchronous else " *"), style="bold" if row.label == "1f1b" else "")


def _to_baseline(row: Row) -> Text:
    if row.label == "1f1b" or row.metrics.makespan == row.makespan_difference:
        return Text("-")  # 1F1B itself, or a 1F1B that takes no time
    part = row.makespan_difference / (row.metrics.makespan - row.makespan_difference)
    return Text(f"{100 * part:+.1f} %", style="green" if part < 0 else "")


def _memory(row: Row) -> Text:
    held = size(max(row.metrics.memory_bytes or [0.0]))
    return Text(held + " !", style="red") if row.fits is False else Text(held + ("  " if row.fits else ""))


def _notes(comparison: Comparison, chunks: int | None) -> list[str]:
    costs = comparison.costs
    pair = "F + B + W"
    if costs.overlap_time is not None:
        pair = time(costs.overlap_time)
    elif costs.overlap_fraction is not None:
        pair = f"{costs.overlap_fraction:g} of F + B + W"
    notes = [
        "makespan: first start to last end. bubble: (cost - work)/cost, as the papers count it, with cost the longest "
        "rank's own first start to own last end: 0 % means no bubble only where consecutive steps overlap.",
        "peak activ.: of the fullest rank, in micro-batches. Chunked schedules hold "
        f"{chunks or 2} chunks a rank, seq1f1b cuts in 4 equal slices, overlapped pairs (DualPipe) take {pair}.",
    ]
    if any(not row.metrics.synchronous for row in comparison.rows):
        notes.append("* asynchronous: gradients of older weights, not those of synchronous training.")
    if any(row.fits is False for row in comparison.rows):
        notes.append("! does not fit the memory given.")
    return notes


def print_list(records: tuple[Record, ...], out: Console) -> None:
    """Every schedule: what it is, what its paper promises and when that is exact, options, source."""
    for record in records:
        aliases = f"  also {', '.join(record.aliases)}" if record.aliases else ""
        out.print(Text(record.name, style="bold").append(aliases, style="dim"))
        lines = [record.summary]
        lines.append(f"bubble {record.bubble.text}  (exact: {record.bubble.exact})")
        lines.append(f"peak activations {record.activations.text}  (exact: {record.activations.exact})")
        for option in record.options:
            choices = f", one of {', '.join(option.choices)}" if option.choices else ""
            lines.append(f"-O {option.name}={option.default}: {option.help}{choices}")
        lines.append(record.citation)
        for line in lines:
            out.print(Text("  " + line))


def record_json(record: Record) -> dict[str, Any]:
    """A record without its functions."""
    return {
        "name": record.name,
        "title": record.title,
        "aliases": list(record.aliases),
        "citation": record.citation,
        "summary": record.summary,
        "synchronous": record.synchronous,
        "options": [asdict(option) for option in record.options],
        "promises": {
            "bubble": {"text": record.bubble.text, "exact": record.bubble.exact},
            "activations": {"text": record.activations.text, "exact": record.activations.exact},
        },
    }
