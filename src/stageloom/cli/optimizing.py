"""The verb `optimize`: a better order for given costs and memory."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

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
from stageloom.cli.optimized import checked, outcome_json, print_outcome
from stageloom.cli.words import console, print_json, time
from stageloom.costs import Costs
from stageloom.errors import InputError
from stageloom.placement import Placement, line, loop, two_way, zigzag
from stageloom.render.files import write_whole
from stageloom.schedule import dumps
from stageloom.search.optimize import Outcome, Progress, search
from stageloom.search.pairs import search_pairs
from stageloom.search.pareto import curve
from stageloom.search.partition import partition
from stageloom.search.problem import Problem, pose
from stageloom.search.standing import Standing, standings


class Objective(StrEnum):
    makespan = "makespan"
    cost = "cost"


class Place(StrEnum):
    line = "line"
    loop = "loop"
    v = "v"
    two_way = "two-way"
    best = "best"


SIZES: Final = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


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
        str,
        typer.Option(
            "--memory",
            metavar="LIMIT",
            help="Activations a rank may hold: 1.3 (times 1F1B's P micro-batches), 10u (micro-batches), 40GB; "
            "or one a rank, with commas.",
        ),
    ] = "1",
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
    as_json: Json = False,
) -> None:
    """The best order for these costs within this memory, how far from optimal it can be, and what it wins."""
    given = read_costs(costs, f=f, b=b, w=w, latency=latency, overlap=overlap, w_share=w_share, unit=unit, tokens=None)
    pairs = given.overlap_factor() < 1 if pairs is None else pairs
    tried = (Place.line, Place.v, Place.loop) if placement is Place.best else (placement,)
    places = [_placed(each, ranks, chunks if each is Place.loop else None, microbatches) for each in tried]
    if chunks is not None and (Place.loop not in tried or chunks < 1):
        raise InputError("--chunks: at least 1, and for --placement loop or best; a V has two, a line one")
    stages = places[0]
    if len(places) > 1 and (layers or pareto or fused not in (None, "all")):
        raise InputError("--placement best: not with --partition, --pareto or --fused STAGES; name one placement")
    if out is not None and out.suffix != ".loom" and not pareto:
        raise InputError(f"-o {out}: the order is written as text; give a name that ends in .loom")
    if out is not None and out.is_dir():
        raise InputError(f"-o {out}: is a folder; give the name of a file")

    def posed(limit: str, costs: Costs, where: Placement = stages) -> Problem:
        return _posed(where, microbatches, costs, limit, _fused(fused, where.stages))

    counts: tuple[int, ...] | None = None
    if layers:
        few = min(2.0, seconds / 20)
        chosen = partition(
            given, stages.stages, ranks, lambda each: _quick(posed(memory, each), objective.value, few, seed, pairs)
        )
        counts, given = chosen.counts, chosen.costs
    if pareto:
        _pareto(lambda limit: posed(limit, given), objective.value, seconds, seed, out, pairs=pairs, as_json=as_json)
        return
    outcomes = [
        _run(posed(memory, given, each), objective.value, seconds / len(places), seed, pairs) for each in places
    ]
    outcome = min(outcomes, key=lambda each: each.best)
    schedule, metrics = checked(outcome)
    rows, _ = standings(outcome.problem, objective.value)
    if out is not None:
        write_whole(out, dumps(schedule))
    if as_json:
        print_json(outcome_json(outcome, metrics, rows if compare else None, rows, counts))
        return
    print_outcome(outcome, metrics, rows, counts, compare=compare, out=console())
    if out is not None:
        print(f"wrote {out}")


def _placed(placement: Place, ranks: int, chunks: int | None, microbatches: int) -> Placement:
    if ranks < 1 or microbatches < 1:
        raise InputError(f"--ranks {ranks} --microbatches {microbatches}: at least 1 of each is needed")
    if 3 * ranks * microbatches * (chunks or 2) > 20_000_000:
        raise InputError(f"{ranks} ranks and {microbatches} micro-batches: up to 20,000,000 ops can be handled")
    if placement is Place.two_way and (ranks % 2 or microbatches < 2):
        raise InputError("--placement two-way: two directions need an even number of ranks and 2 micro-batches")
    if placement is Place.loop:
        return loop(ranks, chunks or 2)
    return {Place.line: line(ranks), Place.v: zigzag(ranks, 2), Place.two_way: two_way(ranks)}[placement]


def _fused(text: str | None, stages: int) -> list[int]:
    if text is None:
        return []
    if text == "all":
        return list(range(stages))
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text):
        raise InputError(f"--fused {text!r}: stages are needed, as 0,7; or all")
    return [int(each) for each in text.split(",")]


def _posed(placement: Placement, microbatches: int, costs: Costs, memory: str, fused: list[int]) -> Problem:
    """The problem of a limit in words. Raises InputError for one that is none."""
    limits: list[float] = []
    kinds: set[str] = set()
    for each in memory.split(","):
        match = re.fullmatch(r"([0-9.eE+-]+)\s*(u|B|kB|MB|GB|TB)?", each.strip())
        try:
            value = float(match[1]) if match else math.nan
        except ValueError:
            value = math.nan
        if match is None or not math.isfinite(value) or value <= 0:
            raise InputError(f"--memory {memory!r}: as 1.3 (times 1F1B's), 10u (micro-batches) or 40GB, all above 0")
        kinds.add("bytes" if match[2] in SIZES else "micro-batches")
        limits.append(value * (SIZES.get(match[2] or "", 1.0) if match[2] else placement.ranks))
    if len(kinds) > 1:
        raise InputError(f"--memory {memory!r}: bytes and micro-batches cannot stand in one list")
    limit = limits[0] if len(limits) == 1 else limits
    if kinds == {"bytes"}:
        return pose(placement, microbatches, costs, limit_bytes=limit, fused=fused)
    return pose(placement, microbatches, costs, limit=limit, fused=fused)


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


# ------------------------------------------------------------------ the curve


def _pareto(
    posed: Callable[[str], Problem],
    objective: str,
    seconds: float,
    seed: int,
    out: Path | None,
    *,
    pairs: bool,
    as_json: bool,
) -> None:
    from stageloom.cli.curve import draw, write_svg

    if out is not None and out.suffix != ".svg":
        raise InputError(f"-o {out}: the curve is written as a picture; give a name that ends in .svg")
    errors = Console(stderr=True)
    multiples = [round(0.35 + 0.05 * step, 2) for step in range(34)]
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("searching", total=None)
        points = curve(
            lambda memory: posed(f"{memory}"),
            multiples,
            objective=objective,
            seconds=seconds / len(multiples),
            seed=seed,
            pairs=pairs,
            progress=lambda memory: bar.update(task, description=f"memory {memory:g}"),
        )
    rows = _free(posed("1000000u"), objective)
    if out is not None:
        write_svg(points, rows, objective, out)
    if as_json:
        print_json([{"memory": p.memory, "value": p.value, "bound": p.bound, "gap": p.outcome.gap} for p in points])
        return
    draw(points, rows, objective, console())
    if out is not None:
        print(f"wrote {out}")


def _free(problem: Problem, objective: str) -> list[Standing]:
    """The published schedules with the memory that each holds, as points."""
    rows, _ = standings(problem, objective)
    return [replace(row, peak=row.peak / problem.ranks) for row in rows if not row.name.startswith("zb-greedy")]
