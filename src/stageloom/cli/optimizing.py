"""The verb `optimize`: a better order for given costs and memory."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from stageloom.cli.app import (
    Chunks,
    CostsFile,
    Json,
    Latency,
    Microbatches,
    Out,
    Overlap,
    Ranks,
    TimeB,
    TimeF,
    TimeW,
    UnitOption,
    WShare,
    app,
    number,
    read_costs,
    whole,
)
from stageloom.cli.curve import pareto_curve
from stageloom.cli.measured import check_place
from stageloom.cli.optimized import outcome_json, print_outcome
from stageloom.cli.posing import Place, flags_named, fused_stages, placed, posed_in_words
from stageloom.cli.profiling import written
from stageloom.cli.words import console, many, print_json, time
from stageloom.costs import Costs
from stageloom.errors import InputError
from stageloom.placement import Placement
from stageloom.render.files import write_whole
from stageloom.schedule import dumps
from stageloom.search.optimize import Outcome, Progress, search
from stageloom.search.pairs import search_pairs
from stageloom.search.partition import partition
from stageloom.search.problem import Problem
from stageloom.search.settled import settled
from stageloom.search.standing import standings


class Objective(StrEnum):
    makespan = "makespan"
    cost = "cost"


@app.command()
def optimize(
    ranks: Ranks,
    microbatches: Microbatches,
    placement: Annotated[
        Place, typer.Option("--placement", help="Where the stages stand; best: line, v and loop are tried.")
    ] = Place.line,
    chunks: Chunks = None,
    f: TimeF = None,
    b: TimeB = None,
    w: TimeW = None,
    latency: Latency = None,
    overlap: Overlap = None,
    w_share: WShare = None,
    costs: CostsFile = None,
    unit: UnitOption = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="LIMIT",
            help="Activations a rank may hold: 1.3 (times 1F1B's P micro-batches), 10u (micro-batches), 40GB; "
            "or one a rank, with commas [1].",
        ),
    ] = None,
    objective: Annotated[Objective, typer.Option("--objective", help="What to make small.")] = Objective.makespan,
    seconds: Annotated[
        float, typer.Option("--seconds", parser=number, metavar="NUM", help="Effort, in seconds of a nominal core.")
    ] = 10.0,
    seed: Annotated[
        int, typer.Option("--seed", parser=whole, metavar="INT", help="The same seed, the same order.")
    ] = 0,
    fused: Annotated[
        str | None, typer.Option("--fused", metavar="STAGES", help="Stages that cannot split B and W, as 0,7; or all.")
    ] = None,
    pairs: Annotated[
        bool | None,
        typer.Option(
            "--pairs/--no-pairs",
            help="Forwards overlapped with full backwards, or not [where the costs say that it saves time].",
        ),
    ] = None,
    layers: Annotated[
        bool, typer.Option("--partition", help="The costs' lists are of layers: choose how many each stage gets.")
    ] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Show every published schedule beside it.")] = False,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="The curve of the objective against memory, from 0.35 to 2.")
    ] = False,
    out: Out = None,
    costs_out: Annotated[
        Path | None,
        typer.Option("--costs-out", help="With --partition: cost file of the stages to write, .yaml or .json."),
    ] = None,
    as_json: Json = False,
) -> None:
    """The best order for these costs within this memory, how far from optimal it can be, and what it wins."""
    given = read_costs(costs, f=f, b=b, w=w, latency=latency, overlap=overlap, w_share=w_share, unit=unit, tokens=None)
    pairs = given.overlap_factor() < 1 if pairs is None else pairs
    tried = (Place.line, Place.v, Place.loop) if placement is Place.best else (placement,)
    if chunks is not None and (Place.loop not in tried or chunks < 1):
        raise InputError("--chunks: at least 1, and for --placement loop or best; a V has two, a line one")
    places = [placed(each, ranks, chunks if each is Place.loop else None, microbatches) for each in tried]
    stages = places[0]
    if len(places) > 1 and (layers or pareto or fused not in (None, "all")):
        raise InputError("--placement best: not with --partition, --pareto or --fused STAGES; name one placement")
    if pareto and (memory is not None or compare):
        flag = "--compare" if memory is None else "--memory"
        raise InputError(f"--pareto: not with {flag}; the curve has its own limits, with the published schedules in it")
    _check_places(out, costs_out, pareto=pareto, layers=layers)

    def posed(limit: str, costs: Costs, where: Placement = stages) -> Problem:
        return posed_in_words(where, microbatches, costs, limit, fused_stages(fused, where.stages))

    limit = memory or "1"
    counts: tuple[int, ...] | None = None
    with flags_named():
        if layers:
            few = min(2.0, seconds / 20)
            chosen = partition(
                given, stages.stages, ranks, lambda each: _quick(posed(limit, each), objective.value, few, seed, pairs)
            )
            counts, given = chosen.counts, chosen.costs
        if pareto:
            pareto_curve(
                lambda limit: posed(limit, given), objective.value, seconds, seed, out, pairs=pairs, as_json=as_json
            )
            outcomes = []
        else:
            outcomes = [
                _run(posed(limit, given, each), objective.value, seconds / len(places), seed, pairs) for each in places
            ]
    if costs_out is not None:
        comment = f"by stage, of {many(sum(counts or ()), 'layer')}: {' '.join(map(str, counts or ()))}"
        write_whole(costs_out, written(given, costs_out, comment))
    if outcomes:
        _tell(outcomes, objective.value, counts, out, pairs=pairs, compare=compare, as_json=as_json)
    if as_json:
        return
    if costs_out is not None:
        print(f"wrote {costs_out}")
    elif counts is not None and out is not None and not pareto:
        print(f"{out} has the stages that were chosen; for a cost file that fits it, add --costs-out stages.yaml")


def _check_places(out: Path | None, costs_out: Path | None, *, pareto: bool, layers: bool) -> None:
    """Raise InputError for files that cannot be written, before anything is searched."""
    if out is not None and pareto and out.suffix != ".svg":
        raise InputError(f"-o {out}: the curve is written as a picture; give a name that ends in .svg")
    if out is not None and not pareto and out.suffix != ".loom":
        raise InputError(f"-o {out}: the order is written as text; give a name that ends in .loom")
    if costs_out is not None and not layers:
        raise InputError("--costs-out: without --partition the costs are those that were given")
    if costs_out is not None and costs_out.suffix not in (".yaml", ".yml", ".json"):
        raise InputError(f"--costs-out {costs_out}: give a name that ends in .yaml or .json")
    for flag, file in (("-o", out), ("--costs-out", costs_out)):
        if file is not None:
            check_place(flag, file)


def _tell(
    outcomes: list[Outcome],
    objective: str,
    counts: tuple[int, ...] | None,
    out: Path | None,
    *,
    pairs: bool,
    compare: bool,
    as_json: bool,
) -> None:
    """Show, and write, the best of one placement or more; by the simulator where the search leaves something out."""
    costs = outcomes[0].problem.costs
    if not (costs.occupancy or costs.blocking):
        outcomes = [min(outcomes, key=lambda each: each.best)]
    all_rows = [standings(each.problem, objective)[0] for each in outcomes]
    ends = [settled(each, rows, pairs=pairs) for each, rows in zip(outcomes, all_rows, strict=True)]
    at = min(range(len(ends)), key=lambda each: ends[each][0].best)
    (outcome, schedule, metrics), rows = ends[at], all_rows[at]
    if out is not None:
        write_whole(out, dumps(schedule))
    if as_json:
        print_json(outcome_json(outcome, metrics, rows if compare else None, rows, counts))
        return
    print_outcome(outcome, metrics, rows, counts, compare=compare, out=console())
    if out is not None:
        print(f"wrote {out}")


def _quick(problem: Problem, objective: str, seconds: float, seed: int, pairs: bool) -> float:
    return (search_pairs if pairs else search)(problem, objective=objective, seconds=max(seconds, 0.01), seed=seed).best


def _run(problem: Problem, objective: str, seconds: float, seed: int, pairs: bool) -> Outcome:
    searcher = search_pairs if pairs else search
    errors = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("searching", total=None)

        def show(now: Progress) -> None:
            words = f"{now.step}: best {time(now.best)}, bound {time(now.bound)}, gap {100 * now.gap:.2f} %"
            bar.update(task, description=words)

        return searcher(problem, objective=objective, seconds=seconds, seed=seed, progress=show)
