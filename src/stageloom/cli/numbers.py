"""What `simulate` prints."""

from __future__ import annotations

import textwrap
from typing import Final

from rich.console import Console
from rich.text import Text

from stageloom.anatomy import Anatomy
from stageloom.cli.columns import Column, print_columns
from stageloom.cli.words import count, many, share, size, time
from stageloom.metrics import CAUSES, Gaps, Metrics, RankMemory, Step
from stageloom.simulate import Spread

NARROW: Final = 24  # columns that a remark needs beside its number
PATH_END: Final = 60  # steps of the critical path shown at either end


def print_metrics(
    metrics: Metrics, memory: RankMemory, spread: Spread | None, anatomy: Anatomy | None, out: Console
) -> None:
    """One schedule's numbers, then one line a rank."""
    unit = f" {metrics.unit}" if metrics.unit else ""
    cut = f", {metrics.slices} slices a micro-batch" if metrics.slices > 1 else ""
    sizes = f"{many(metrics.ranks, 'rank')}, {many(metrics.microbatches, 'micro-batch')}"
    stages = f"{many(metrics.stages, 'stage')} ({metrics.chunks} a rank{cut})"
    late = "" if metrics.synchronous else ", asynchronous"
    out.print(Text(metrics.schedule, style="bold").append(f": {sizes}, {stages}{late}", style="not bold"))
    rows = _rows(metrics, spread, unit)
    names, values = (max(len(row[at]) for row in rows) for at in (0, 1))
    beside = out.width - names - values - 4  # columns left for the remarks, which else stand below
    for name, value, remark in rows:
        line = Text(f"{name:<{names}}  {value:>{values}}")
        parts = textwrap.wrap(remark, beside) if beside >= NARROW else []
        out.print(line.append(f"  {parts[0]}" if parts else "", style="dim"), soft_wrap=True)
        indent = " " * (names + values + 4)
        for part in parts[1:] if beside >= NARROW else textwrap.wrap(remark, max(out.width - 4, NARROW)):
            out.print(Text((indent if beside >= NARROW else "    ") + part, style="dim"), soft_wrap=True)
    if metrics.idle_by_cause["memory"]:
        out.print("memory: a forward was there to run, but would have held more than the rank's peak.", style="dim")
    if anatomy is not None:
        _print_anatomy(anatomy, unit, out)
    _print_ranks(metrics, memory, out)


def _rows(metrics: Metrics, spread: Spread | None, unit: str) -> list[tuple[str, str, str]]:
    def of(value: float) -> str:
        return time(value) + unit

    window = metrics.full_window
    rows = [
        ("makespan", of(metrics.makespan), "first start to last end"),
        ("cost", of(metrics.cost), "longest rank, own first start to own last end"),
        ("work", of(metrics.work), "mean busy time of a rank"),
        (
            "bubble",
            share(metrics.bubble_rate),
            f"cost - work = {of(metrics.bubble_time)}: schedule {time(metrics.schedule_loss)}, "
            f"imbalance {time(metrics.imbalance_loss)}",
        ),
        (
            "utilisation",
            share(metrics.utilization),
            f"worst rank {share(metrics.worst_utilization)}, steady phase {share(metrics.steady_utilization)}",
        ),
        (
            "all ranks busy",
            "never" if metrics.first_full_time is None else f"from {of(metrics.first_full_time)}",
            "" if window is None else f"longest from {time(window[0])} to {of(window[1])}",
        ),
        (
            "idle, all ranks",
            of(sum(metrics.idle_by_cause.values())),
            ", ".join(
                f"{cause} {time(metrics.idle_by_cause[cause])}" for cause in CAUSES if metrics.idle_by_cause[cause]
            ),
        ),
        ("messages", f"{metrics.messages:,}", f"waited for {of(metrics.exposed_message_time)}"),
        ("copies of parameters", str(metrics.parameter_copies), ""),
    ]
    if metrics.gpu_hours_per_million_tokens is not None:
        rows.append(("GPU-hours", f"{metrics.gpu_hours_per_million_tokens:.4g}", "per million tokens, one GPU a rank"))
    if spread is not None:
        low, middle, high = (spread.percentile(percent) for percent in (5, 50, 95))
        rows.append(("with jitter", of(middle), f"median makespan; 5 % to 95 %: {time(low)} to {of(high)}"))
    return rows


def _print_anatomy(anatomy: Anatomy, unit: str, out: Console) -> None:
    """How much all-to-all an overlapped pair hides, and where the rest sticks out."""
    alone = anatomy.forward + anatomy.backward
    pair = f"overlapped pair: {time(anatomy.pair)}{unit}, one after the other {time(alone)}{unit}"
    if anatomy.hidden is None:
        out.print(f"{pair}; no all-to-all to hide")
        return
    out.print(
        f"{pair}; all-to-all hidden {share(anatomy.hidden)} "
        f"(dispatch {share(anatomy.hidden_dispatch)}, combine {share(anatomy.hidden_combine)})"
    )
    for exposed in anatomy.exposed:
        where = f"{exposed.part} of the {exposed.direction}, layer {exposed.layer}"
        out.print(f"  sticks out: {where}: {time(exposed.time)}{unit}", style="dim")


def _print_ranks(metrics: Metrics, memory: RankMemory, out: Console) -> None:
    columns = [
        Column("rank", [str(rank) for rank in range(metrics.ranks)]),
        Column("busy", [share(busy) for busy in metrics.utilization_per_rank]),
        Column("peak\nactivations", [count(peak) for peak in metrics.peak_activations]),
    ]
    if metrics.memory_bytes is not None:
        parts = {
            "parameters": memory.parameters,
            "gradients": memory.gradients,
            "optimiser": memory.optimizer,
            "activations": memory.activations,
        }
        columns += [Column(name, [size(float(held)) for held in part], spare=1) for name, part in parts.items()]
        columns.append(Column("all", [size(held) for held in metrics.memory_bytes]))
    print_columns(columns, out)


def print_detail(found: Gaps, steps: list[Step], ranks: int, unit: str | None, out: Console) -> None:
    """Idle time of every rank by cause, and the critical path."""
    out.print("idle time by cause", style="bold")
    idle = found.by_rank(ranks)
    columns = [Column("rank", [str(rank) for rank in range(ranks)])]
    columns += [Column(cause, [time(float(value)) for value in idle[:, at]]) for at, cause in enumerate(CAUSES)]
    print_columns(columns, out)
    ops = sum(step.what == "op" for step in steps)
    words = [step.text if step.what == "op" else "->" for step in steps]
    if len(words) > 2 * PATH_END:
        words = [*words[:PATH_END], f"... {len(words) - 2 * PATH_END} more ...", *words[-PATH_END:]]
    until = f"{time(steps[-1].end)}{' ' + unit if unit else ''}" if steps else "0"
    out.print(
        Text("critical path", style="bold").append(
            f": {ops} ops and {len(steps) - ops} messages (->), until {until}", style="not bold"
        )
    )
    out.print(" ".join(words))
