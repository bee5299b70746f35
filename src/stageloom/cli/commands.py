"""The verbs."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from stageloom.cli import tables
from stageloom.cli.app import (
    Chunks,
    CostsFile,
    Json,
    Latency,
    Microbatches,
    OptionalMicrobatches,
    OptionalRanks,
    Options,
    Out,
    Overlap,
    Ranks,
    Source,
    TimeB,
    TimeF,
    TimeW,
    Tokens,
    UnitOption,
    WShare,
    app,
    load_schedule,
    number,
    read_costs,
    read_schedule,
    whole,
)
from stageloom.compare import Comparison
from stageloom.compare import compare as compare_all
from stageloom.costs import Costs
from stageloom.metrics import critical_path, gaps, measure, rank_memory
from stageloom.schedules import records
from stageloom.simulate import monte_carlo
from stageloom.simulate import simulate as run


@app.command("list")
def list_(as_json: Json = False) -> None:
    """The published schedules: names, options, what their papers promise."""
    if as_json:
        tables.print_json([tables.record_json(record) for record in records()])
    else:
        tables.print_list(records(), tables.console())


@app.command()
def compare(
    ranks: Ranks,
    microbatches: Microbatches,
    chunks: Chunks = None,
    f: TimeF = None,
    b: TimeB = None,
    w: TimeW = None,
    latency: Latency = None,
    overlap: Overlap = None,
    w_share: WShare = None,
    costs: CostsFile = None,
    unit: UnitOption = None,
    tokens: Tokens = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Compare just this schedule; may be repeated.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Every published schedule at these sizes and costs in one table, best first."""
    given = read_costs(
        costs, f=f, b=b, w=w, latency=latency, overlap=overlap, w_share=w_share, unit=unit, tokens=tokens
    )
    comparison = _compared(ranks, microbatches, given, chunks, only or [])
    if as_json:
        tables.print_json([asdict(row.metrics) for row in comparison.rows])
    else:
        tables.print_comparison(comparison, tables.console())


def _compared(ranks: int, microbatches: int, costs: Costs, chunks: int | None, only: list[str]) -> Comparison:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    errors = Console(stderr=True)
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("simulating", total=None)
        return compare_all(
            ranks,
            microbatches,
            costs,
            chunks=chunks,
            names=only,
            progress=lambda name: progress.update(task, description=f"simulating {name}"),
        )


@app.command()
def simulate(
    schedule: Source,
    ranks: OptionalRanks = None,
    microbatches: OptionalMicrobatches = None,
    chunks: Chunks = None,
    option: Options = None,
    f: TimeF = None,
    b: TimeB = None,
    w: TimeW = None,
    latency: Latency = None,
    overlap: Overlap = None,
    w_share: WShare = None,
    costs: CostsFile = None,
    unit: UnitOption = None,
    tokens: Tokens = None,
    jitter: Annotated[
        float | None,
        typer.Option(
            "--jitter",
            parser=number,
            metavar="NUM",
            help="Relative deviation of every op's time: Monte-Carlo makespans.",
        ),
    ] = None,
    runs: Annotated[int, typer.Option("--runs", parser=whole, metavar="INT", help="Runs of the Monte-Carlo.")] = 200,
    seed: Annotated[int, typer.Option("--seed", parser=whole, metavar="INT", help="Seed of the Monte-Carlo.")] = 0,
    detail: Annotated[
        bool, typer.Option("--detail", help="Every rank's idle time by cause, and the critical path.")
    ] = False,
    as_json: Json = False,
) -> None:
    """One schedule in time and memory: all its numbers."""
    value = read_schedule(schedule, ranks, microbatches, chunks, option)
    given = read_costs(
        costs, f=f, b=b, w=w, latency=latency, overlap=overlap, w_share=w_share, unit=unit, tokens=tokens
    )
    timeline = run(value, given)
    spread = None if jitter is None else monte_carlo(value, given, jitter=jitter, runs=runs, seed=seed)
    anatomy = None if given.anatomy is None else given.anatomy.result
    metrics = measure(timeline)
    if not as_json:
        console = tables.console()
        tables.print_metrics(metrics, rank_memory(timeline), spread, anatomy, console)
        if detail:
            tables.print_detail(gaps(timeline), critical_path(timeline), value.ranks, given.unit, console)
        return
    data = asdict(metrics)
    if anatomy is not None:
        data["anatomy"] = {key: part for key, part in asdict(anatomy).items() if key != "spans"}
    if detail:
        data["gaps"] = gaps(timeline).rows()
        data["critical_path"] = [asdict(step) for step in critical_path(timeline)]
    if spread is not None:
        data["jitter"] = {"deviation": jitter, "runs": runs, "seed": seed} | {
            f"makespan_p{percent}": spread.percentile(percent) for percent in (5, 50, 95)
        }
    tables.print_json(data)


class Format(StrEnum):
    text = "text"
    svg = "svg"
    png = "png"
    trace = "trace"
    json = "json"
    loom = "loom"


@app.command()
def show(
    schedule: Source,
    ranks: OptionalRanks = None,
    microbatches: OptionalMicrobatches = None,
    chunks: Chunks = None,
    option: Options = None,
    f: TimeF = None,
    b: TimeB = None,
    w: TimeW = None,
    latency: Latency = None,
    overlap: Overlap = None,
    w_share: WShare = None,
    costs: CostsFile = None,
    unit: UnitOption = None,
    format: Annotated[
        Format | None, typer.Option("--format", help="Form of the drawing [from the file's ending, else text].")
    ] = None,
    out: Out = None,
) -> None:
    """Draw a schedule in time: terminal, SVG, PNG, Chrome/Perfetto trace; or write it as .loom or JSON."""
    from stageloom.cli import drawing

    form = drawing.form_of(None if format is None else format.value, out)
    value = read_schedule(schedule, ranks, microbatches, chunks, option)
    given = read_costs(costs, f=f, b=b, w=w, latency=latency, overlap=overlap, w_share=w_share, unit=unit, tokens=None)
    drawing.write(run(value, given), form, out)


SHOWN = 40  # problems that `validate` shows


class SendMode(StrEnum):
    buffered = "buffered"
    fifo = "fifo"
    blocking = "blocking"


@app.command()
def validate(
    file: Annotated[Path, typer.Argument(help="A .loom or .json schedule.", metavar="FILE")],
    sends: Annotated[
        SendMode,
        typer.Option(
            "--sends",
            help="How messages travel: kept until wanted; one queue a pair of ranks; or unbuffered (rendezvous).",
        ),
    ] = SendMode.buffered,
    as_json: Json = False,
) -> int:
    """Check a schedule file: every problem at once, shown at its place. Exit status 1 where there are problems."""
    from stageloom.validate import explain, problems

    schedule = load_schedule(file)
    found = problems(schedule, sends=sends.value)
    if as_json:
        tables.print_json([asdict(problem) for problem in found])
    elif found:
        tables.console().print(explain(schedule, found[:SHOWN]))
        if len(found) > SHOWN:
            tables.console().print(f"and {len(found) - SHOWN:,} more problems; --json lists all")
    else:
        parts = f"{schedule.ranks} ranks, {schedule.microbatches} micro-batches, {len(schedule):,} ops"
        tables.console().print(f"{file}: sound ({parts}; {sends.value} sends)")
    return 1 if found else 0


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the gallery.")] = Path("out"),
) -> None:
    """Compare every schedule at 8 ranks and 16 micro-batches on measured stage times, and draw them all."""
    from stageloom.cli import drawing
    from stageloom.cli.demo import MODEL, demo_costs

    drawing.make_folder(out)
    costs = demo_costs()
    comparison = _compared(8, 16, costs, None, [])
    console = tables.console()
    console.print(f"[bold]{MODEL}[/bold]")
    tables.print_comparison(comparison, console)
    best = comparison.rows[0]
    for row in (next(row for row in comparison.rows if row.record.name == "1f1b"), best):
        console.print()
        drawing.print_timeline(row.timeline, console)
    written = drawing.write_gallery([row.timeline for row in comparison.rows], out)
    console.print("\nDrawn: " + ", ".join(map(str, written)))
    console.print(
        "Next: stageloom compare -p 8 -m 64   |   stageloom show dualpipe -p 8 -m 20 -o dualpipe.svg", style="dim"
    )
