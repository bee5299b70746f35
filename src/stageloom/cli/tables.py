"""Tables of the command line: what `compare`, `simulate` and `list` print. Nothing is computed here."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stageloom.anatomy import Anatomy
from stageloom.compare import Comparison
from stageloom.metrics import CAUSES, Gaps, Metrics, RankMemory, Step
from stageloom.schedules import Record
from stageloom.simulate import Spread

BAR = 10  # cells of the bubble bar
PATH_END = 60  # steps of the critical path shown at either end


def console() -> Console:
    """Standard output; at least 120 columns wide where it is no terminal."""
    out = Console(highlight=False, soft_wrap=False)
    return out if out.is_terminal else Console(highlight=False, width=max(120, _columns()))


def _columns() -> int:
    import os

    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isdigit() else 0


def print_json(data: Any) -> None:
    """JSON on standard output. Floats are written with all their digits."""
    json.dump(data, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def time(value: float) -> str:
    """A time with six significant digits and no trailing zeros, thousands apart."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-4:
        return f"{value:.6g}"
    digits = max(0, 5 - len(str(int(abs(value)))) + (abs(value) < 1))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def count(value: float) -> str:
    """Micro-batches of activations: whole where it is whole."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def size(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.2f} TB"


def _bar(rate: float) -> Text:
    """The bubble as a bar: full cells are idle."""
    eighths = round(max(0.0, min(1.0, rate)) * BAR * 8)
    whole, part = divmod(eighths, 8)
    tip = " ▏▎▍▌▋▊▉"[part] if part else ""
    filled = "█" * whole + tip
    return Text(filled, style="yellow").append("·" * (BAR - len(filled)), style="dim")


def print_comparison(comparison: Comparison, out: Console) -> None:
    """The comparison as a table, best first, and below it why the other schedules do not apply."""
    unit = comparison.costs.unit
    hours = any(row.metrics.gpu_hours_per_million_tokens is not None for row in comparison.rows)
    table = Table(
        title=f"{comparison.ranks} ranks, {comparison.microbatches} micro-batches, "
        f"F {_given(comparison, 'F')}  B {_given(comparison, 'B')}  W {_given(comparison, 'W')}"
        + (f"  latency {time(comparison.costs.latency)}" if comparison.costs.latency else "")
        + (f"  ({unit})" if unit else ""),
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    table.add_column("schedule", no_wrap=True)
    table.add_column("makespan" + (f"\n{unit}" if unit else ""), justify="right", no_wrap=True)
    table.add_column("to 1F1B", justify="right", no_wrap=True)
    table.add_column("bubble", justify="right", no_wrap=True)
    bars = out.width >= (104 if hours else 84)  # a narrow terminal does without the picture
    if bars:
        table.add_column("", no_wrap=True)
    table.add_column("worst\nrank busy", justify="right", no_wrap=True)
    table.add_column("peak\nactiv.", justify="right", no_wrap=True)
    table.add_column("param.\ncopies", justify="right", no_wrap=True)
    if hours:
        table.add_column("GPU-hours\n/ Mtoken", justify="right", no_wrap=True)
        table.add_column("to 1F1B", justify="right", no_wrap=True)
    reference = next((row for row in comparison.rows if row.record.name == "1f1b"), None)
    for row in comparison.rows:
        metrics = row.metrics
        difference = row.makespan_difference / (metrics.makespan - row.makespan_difference)
        cells = [
            Text(row.label + ("" if metrics.synchronous else " *"), style="bold" if row is reference else ""),
            time(metrics.makespan),
            Text("-" if row is reference else f"{100 * difference:+.1f} %", style="green" if difference < 0 else ""),
            share(metrics.bubble_rate),
            *([_bar(metrics.bubble_rate)] if bars else []),
            share(metrics.worst_utilization),
            count(max(metrics.peak_activations)),
            str(metrics.parameter_copies),
        ]
        if hours and metrics.gpu_hours_per_million_tokens is not None and row.gpu_hours_difference is not None:
            cells += [f"{metrics.gpu_hours_per_million_tokens:.4g}", f"{row.gpu_hours_difference:+.3g}"]
        table.add_row(*cells)
    out.print(table)
    out.print(
        "makespan: first start to last end. bubble: (cost - work)/cost, cost the longest rank, own first start\n"
        "to own last end, as the papers count it. peak activations: of the fullest rank, in micro-batches.",
        style="dim",
        soft_wrap=True,
    )
    if any(not row.metrics.synchronous for row in comparison.rows):
        out.print("* asynchronous: gradients of older weights, not those of synchronous training.", style="dim")
    if comparison.refused:
        out.print("\nDo not apply at these sizes:", style="bold")
        for refused in comparison.refused:
            out.print(f"  {refused.name}: {refused.reason}; {refused.remedy}")


def _given(comparison: Comparison, key: str) -> str:
    value = getattr(comparison.costs, key)
    return time(value) if isinstance(value, float) else f"{len(value)} values"


def print_metrics(
    metrics: Metrics, memory: RankMemory, spread: Spread | None, anatomy: Anatomy | None, out: Console
) -> None:
    """One schedule's numbers, then one line a rank."""
    unit = f" {metrics.unit}" if metrics.unit else ""
    cut = f", {metrics.slices} slices a micro-batch" if metrics.slices > 1 else ""
    out.print(
        f"[bold]{metrics.schedule}[/bold]: {metrics.ranks} ranks, {metrics.microbatches} micro-batches, "
        f"{metrics.stages} stages ({metrics.chunks} a rank{cut})" + ("" if metrics.synchronous else ", asynchronous")
    )
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(style="dim")
    rows = [
        ("makespan", time(metrics.makespan) + unit, "first start to last end"),
        ("cost", time(metrics.cost) + unit, "longest rank, own first start to last end"),
        ("work", time(metrics.work) + unit, "mean busy time of a rank"),
        ("bubble", share(metrics.bubble_rate), f"cost - work = {time(metrics.bubble_time)}{unit}: schedule "
         f"{time(metrics.schedule_loss)}, imbalance {time(metrics.imbalance_loss)}"),
        ("utilisation", share(metrics.utilization), f"worst rank {share(metrics.worst_utilization)}, "
         f"steady phase {share(metrics.steady_utilization)}"),
        ("all ranks busy", _since(metrics.first_full_time, unit),
         "" if metrics.full_window is None else "longest from " + " to ".join(map(time, metrics.full_window)) + unit),
        ("idle, all ranks", time(sum(metrics.idle_by_cause.values())) + unit,
         _causes(metrics)),
        ("messages", f"{metrics.messages:,}", f"waited for {time(metrics.exposed_message_time)}{unit}"),
        ("copies of parameters", str(metrics.parameter_copies), ""),
    ]  # fmt: skip
    if metrics.gpu_hours_per_million_tokens is not None:
        rows.append(("GPU-hours", f"{metrics.gpu_hours_per_million_tokens:.4g}", "per million tokens, one GPU a rank"))
    if spread is not None:
        low, middle, high = (time(spread.percentile(percent)) for percent in (5, 50, 95))
        rows.append(("with jitter", middle + unit, f"median makespan; 5 % to 95 %: {low} to {high}{unit}"))
    for row in rows:
        table.add_row(*row)
    out.print(table)
    if anatomy is not None:
        _print_anatomy(anatomy, unit, out)
    _print_ranks(metrics, memory, out)


def _print_anatomy(anatomy: Anatomy, unit: str, out: Console) -> None:
    """How much all-to-all an overlapped pair hides, and where the rest sticks out."""
    alone = anatomy.forward + anatomy.backward
    out.print(f"overlapped pair: {time(anatomy.pair)}{unit}, one after the other {time(alone)}{unit}; ", end="")
    if anatomy.hidden is None:
        out.print("no all-to-all to hide")
        return
    out.print(
        f"all-to-all hidden {share(anatomy.hidden)} "
        f"(dispatch {share(anatomy.hidden_dispatch)}, combine {share(anatomy.hidden_combine)})"
    )
    for exposed in anatomy.exposed:
        where = f"{exposed.part} of the {exposed.direction}, layer {exposed.layer}"
        out.print(f"  sticks out: {where}: {time(exposed.time)}{unit}", style="dim")


def _since(instant: float | None, unit: str) -> str:
    return "never" if instant is None else f"from {time(instant)}{unit}"


def _causes(metrics: Metrics) -> str:
    return ", ".join(
        f"{cause} {time(metrics.idle_by_cause[cause])}" for cause in CAUSES if metrics.idle_by_cause[cause]
    )


def _print_ranks(metrics: Metrics, memory: RankMemory, out: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("rank", justify="right")
    table.add_column("busy", justify="right")
    table.add_column("peak activations", justify="right")
    in_bytes = bool(memory.peak.any())
    if in_bytes:
        for name in ("parameters", "gradients", "optimiser", "activations", "all"):
            table.add_column(name, justify="right")
    for rank, (busy, peak) in enumerate(zip(metrics.utilization_per_rank, metrics.peak_activations, strict=True)):
        parts = (memory.parameters, memory.gradients, memory.optimizer, memory.activations, memory.peak)
        table.add_row(str(rank), share(busy), count(peak), *([size(float(p[rank])) for p in parts] if in_bytes else []))
    out.print(table)


def print_detail(found: Gaps, steps: list[Step], ranks: int, unit: str | None, out: Console) -> None:
    """Idle time of every rank by cause, and the critical path."""
    table = Table(box=None, pad_edge=False, header_style="bold", title="idle time by cause", title_justify="left")
    table.add_column("rank", justify="right")
    for cause in CAUSES:
        table.add_column(cause, justify="right")
    for rank, row in enumerate(found.by_rank(ranks)):
        table.add_row(str(rank), *(time(float(value)) for value in row))
    out.print(table)
    ops = sum(step.what == "op" for step in steps)
    words = [step.text if step.what == "op" else "->" for step in steps]
    if len(words) > 2 * PATH_END:
        words = [*words[:PATH_END], f"... {len(words) - 2 * PATH_END} more ...", *words[-PATH_END:]]
    until = f"{time(steps[-1].end)}{' ' + unit if unit else ''}" if steps else "0"
    out.print(f"[bold]critical path[/bold]: {ops} ops and {len(steps) - ops} messages (->), until {until}")
    out.print(" ".join(words))


def print_list(records: tuple[Record, ...], out: Console) -> None:
    """Every schedule: names, options, what its paper promises, where it is from."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("schedule", "bubble promised", "peak activations", "options", "source"):
        table.add_column(heading, overflow="fold")
    for record in records:
        names = Text(record.name, style="bold")
        if record.aliases:
            names.append("\n" + "\n".join(record.aliases), style="dim")
        table.add_row(
            names,
            record.bubble.text if record.bubble else "-",
            record.activations.text if record.activations else "-",
            "\n".join(f"{option.name}={option.default}" for option in record.options) or "-",
            record.citation,
        )
    out.print(table)


def record_json(record: Record) -> dict[str, Any]:
    """A record without its functions."""
    promise = {
        name: None if value is None else {"text": value.text, "exact": value.exact}
        for name, value in (("bubble", record.bubble), ("activations", record.activations))
    }
    return {
        "name": record.name,
        "title": record.title,
        "aliases": list(record.aliases),
        "citation": record.citation,
        "summary": record.summary,
        "synchronous": record.synchronous,
        "options": [asdict(option) for option in record.options],
        "promises": promise,
    }
