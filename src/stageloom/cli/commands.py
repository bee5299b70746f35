"""The verbs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

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
    is_file,
    load_schedule,
    number,
    read_costs,
    read_schedule,
    whole,
)
from stageloom.cli.comparison import print_comparison, print_list, record_json
from stageloom.cli.numbers import print_detail, print_metrics
from stageloom.cli.words import console, many, print_json
from stageloom.compare import Comparison
from stageloom.compare import compare as compare_all
from stageloom.costs import Costs
from stageloom.errors import InputError
from stageloom.metrics import critical_path, gaps, measure, rank_memory
from stageloom.schedule import Schedule
from stageloom.schedules import records
from stageloom.simulate import Spread, monte_carlo
from stageloom.simulate import simulate as run


@app.command("list")
def list_(as_json: Json = False) -> None:
    """The published schedules: names, options, what their papers promise."""
    if as_json:
        print_json([record_json(record) for record in records()])
    else:
        print_list(records(), console())


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
        list[str] | None,
        typer.Option(
            "--only", help="Compare just this: NAME, NAME:OPTION=VALUE,.. or a .loom or .json file; may be repeated."
        ),
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(
            "--memory", parser=number, metavar="BYTES", help="What a rank can hold, as 80e9: marks what does not fit."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Every published schedule at these sizes and costs in one table, best first."""
    given = read_costs(
        costs, f=f, b=b, w=w, latency=latency, overlap=overlap, w_share=w_share, unit=unit, tokens=tokens
    )
    if memory is not None and not memory > 0:
        raise InputError(f"--memory {memory:g}: a number of bytes above 0 is needed, as 80e9")
    comparison = _compared(ranks, microbatches, given, chunks, only or [], memory)
    if as_json:
        print_json([asdict(row.metrics) for row in comparison.rows])
        for refused in comparison.refused:
            print(f"note: {refused.name} does not apply: {refused.reason}; {refused.remedy}", file=sys.stderr)
    else:
        print_comparison(comparison, chunks, console())


def _compared(
    ranks: int,
    microbatches: int,
    costs: Costs,
    chunks: int | None = None,
    only: Sequence[str] = (),
    memory: float | None = None,
) -> Comparison:
    entries = [load_schedule(Path(entry)) if is_file(entry) else entry for entry in only]
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    errors = Console(stderr=True)
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("simulating", total=None)
        return compare_all(
            ranks,
            microbatches,
            costs,
            chunks=chunks,
            only=entries,
            memory=memory,
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
    given = read_costs(
        costs, f=f, b=b, w=w, latency=latency, overlap=overlap, w_share=w_share, unit=unit, tokens=tokens
    )
    value = read_schedule(schedule, ranks, microbatches, chunks, option, given)
    timeline = run(value, given)
    spread = None if jitter is None else _jittered(value, given, jitter, runs, seed)
    anatomy = None if given.anatomy is None else given.anatomy.result
    metrics = measure(timeline)
    if not as_json:
        out = console()
        print_metrics(metrics, rank_memory(timeline), spread, anatomy, out)
        if detail:
            print_detail(gaps(timeline), critical_path(timeline), value.ranks, given.unit, out)
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
    print_json(data)


def _jittered(schedule: Schedule, costs: Costs, jitter: float, runs: int, seed: int) -> Spread:
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("runs with jitter", total=runs)
        return monte_carlo(
            schedule,
            costs,
            jitter=jitter,
            runs=runs,
            seed=seed,
            progress=lambda done: progress.update(task, completed=done),
        )


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
    given = read_costs(costs, f=f, b=b, w=w, latency=latency, overlap=overlap, w_share=w_share, unit=unit, tokens=None)
    value = read_schedule(schedule, ranks, microbatches, chunks, option, given)
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
        print_json([asdict(problem) for problem in found])
    elif found:
        print(explain(schedule, found[:SHOWN]))
        if len(found) > SHOWN:
            print(f"and {len(found) - SHOWN:,} more problems; --json lists all")
    else:
        sizes = [many(schedule.ranks, "rank"), many(schedule.microbatches, "micro-batch"), many(len(schedule), "op")]
        print(f"{file}: sound ({', '.join(sizes)}; {sends.value} sends)")
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
    comparison = _compared(8, 16, costs)
    screen = console()
    screen.print(MODEL, style="bold")
    print_comparison(comparison, None, screen)
    for row in (next(row for row in comparison.rows if row.label == "1f1b"), comparison.rows[0]):
        screen.print()
        drawing.print_timeline(row.timeline, screen)
    written = drawing.write_gallery([row.timeline for row in comparison.rows], out)
    screen.print("\nDrawn: " + ", ".join(map(str, written)))
    screen.print(
        "Next: stageloom compare -p 8 -m 64 and stageloom show dualpipe -p 8 -m 20 -o dualpipe.svg", style="dim"
    )
