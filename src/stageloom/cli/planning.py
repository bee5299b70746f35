"""The verb `plan`: from a model and a cluster to a plan."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from stageloom.cli.app import Json, app, number, whole
from stageloom.cli.words import console, print_json
from stageloom.costs import Costs, load_costs
from stageloom.errors import InputError
from stageloom.render.files import check_target, write_whole


class Framework(StrEnum):
    megatron = "megatron"
    torchtitan = "torchtitan"
    torch_csv = "torch-csv"


class Recomputed(StrEnum):
    none = "none"
    selective = "selective"
    full = "full"


def _size(flag: str, text: str) -> Any:
    return typer.Option(flag, parser=whole, metavar="INT", help=text)


@app.command()
def plan(
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="A preset, a Hugging Face config.json, or a YAML file.")
    ],
    cluster: Annotated[
        str, typer.Option("--cluster", metavar="CLUSTER", help="A preset with its GPUs, as h800x2048, or a YAML file.")
    ],
    training: Annotated[
        Path | None, typer.Option("--training", metavar="FILE", help="A YAML file of the job; flags go over it.")
    ] = None,
    seq: Annotated[int | None, _size("--seq", "Tokens of a sequence.")] = None,
    global_batch: Annotated[int | None, _size("--global-batch", "Sequences (not tokens) of a step.")] = None,
    microbatch: Annotated[int | None, _size("--microbatch", "Sequences of a micro-batch [searched].")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="bf16, fp16 or fp8 [bf16].")] = None,
    optimizer: Annotated[str | None, typer.Option("--optimizer", help="adam, adam-bf16 or sgd [adam].")] = None,
    zero: Annotated[int | None, _size("--zero", "Stage of ZeRO, 0 to 3 [1].")] = None,
    recompute: Annotated[
        Recomputed | None, typer.Option("--recompute", help="What the backward computes again [searched].")
    ] = None,
    communication: Annotated[
        float | None,
        typer.Option("--communication-share", parser=number, metavar="NUM", help="Of the GPU, for all-to-alls [0]."),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar="AMOUNT", help="Tokens to train on, as 15T, for GPU-hours [1T].")
    ] = None,
    tp: Annotated[int | None, _size("--tp", "Tensor parallel GPUs [searched].")] = None,
    pp: Annotated[int | None, _size("--pp", "Pipeline ranks [searched].")] = None,
    dp: Annotated[int | None, _size("--dp", "Pipelines side by side [searched].")] = None,
    ep: Annotated[int | None, _size("--ep", "GPUs that share the experts [searched].")] = None,
    chunks: Annotated[int | None, _size("--chunks", "Chunks a rank, for schedules that take them [searched].")] = None,
    schedule: Annotated[
        list[str] | None, typer.Option("--schedule", help="Only this schedule; may be repeated [all synchronous].")
    ] = None,
    asynchronous: Annotated[bool, typer.Option("--asynchronous", help="Schedules with stale weights too.")] = False,
    optimised: Annotated[
        float,
        typer.Option(
            "--optimised", parser=number, metavar="SECONDS", help="Search orders for the best layouts, this long [0]."
        ),
    ] = 0.0,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", help="Measured costs (`stageloom profile -o`); fix --tp, --pp and --microbatch."),
    ] = None,
    launch: Annotated[Framework | None, typer.Option("--launch", help="Write launch files, beside -o or here.")] = None,
    workers: Annotated[int | None, _size("--workers", "Processes that simulate [one a core, 8 at most].")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The page as a file: .md, .html or .json.")] = None,
    as_json: Json = False,
) -> None:
    """The fastest way to train this model on this cluster that fits, why the others lost, and when to give it up."""
    from stageloom.cli.planned import print_plan
    from stageloom.plan import load_cluster, load_model
    from stageloom.plan.answer import plan as answer
    from stageloom.plan.launching import launches
    from stageloom.plan.space import Space
    from stageloom.plan.written import ENDINGS, data, written

    if out is not None and (out.suffix not in ENDINGS or os.path.isdir(out)):
        raise InputError(f"-o {out}: a plan is written as {', '.join(ENDINGS)}; give a file's name with one of them")
    if out is not None:
        check_target(out)  # now, not when the search is done
    if not 0 <= optimised <= 3600:
        raise InputError(f"--optimised {optimised:g}: seconds from 0 to 3600 are needed")
    if workers is not None and workers < 1:
        raise InputError(f"--workers {workers}: at least 1 is needed")
    flags = {
        "sequence": seq, "global_batch": global_batch, "microbatch": microbatch, "dtype": dtype,
        "optimizer": optimizer, "zero": zero, "recompute": None if recompute is None else recompute.value,
        "communication_share": communication, "tokens": tokens,
    }  # fmt: skip
    job, words = _job(training, flags)
    space = Space(
        tensor=tp, pipeline=pp, data=dp, expert=ep, chunks=chunks, recompute=words,
        schedules=None if not schedule else tuple(schedule), asynchronous=asynchronous, optimised=optimised,
    )  # fmt: skip
    measured = None if profile is None else _profile(profile)
    what, where = load_model(model), load_cluster(cluster)
    with _bar() as show:
        found = answer(what, where, job, space, measured=measured, workers=workers or _cores(), progress=show)
    files = () if launch is None else launches(found, launch.value)
    folder = out.parent if out is not None else Path()
    texts = {} if out is None else {out: written(found, out)}
    texts |= {folder / each.file: each.text for each in files}
    for path in texts:
        check_target(path)  # all of them before the first is written
    for path, text in texts.items():
        write_whole(path, text)
    if as_json:
        print_json(data(found))
        return
    screen = console()
    print_plan(found, screen)
    for each in files:
        for note in each.notes:
            screen.print(f"{each.file}: {note}", style="dim")
    for path in texts:
        screen.print(f"wrote {path}", soft_wrap=True)


def _job(file: Path | None, flags: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """The training job, and the recomputations to choose from. Raises InputError naming the flag, or file and key."""
    from stageloom.files import read_mapping
    from stageloom.plan.load_training import training_from
    from stageloom.plan.training import RECOMPUTES

    names = {
        "sequence": "--seq", "global_batch": "--global-batch", "communication_share": "--communication-share",
    }  # fmt: skip
    if file is None:
        for key in ("sequence", "global_batch"):
            if flags[key] is None:
                raise InputError(f"{names[key]} is missing; give it, or a file of the job with --training")
    said = {} if file is None else read_mapping(file, "sequence: 4096")
    job = training_from(said, "job" if file is None else str(file), **flags)
    chosen = flags["recompute"] is not None or "recompute" in said
    return job, (job.recompute,) if chosen else RECOMPUTES


def _profile(path: Path) -> Costs:
    costs = load_costs(path)
    if costs.unit is None:
        raise InputError(f"{path}: states no unit of time; add `unit: ms` (or s, us)")
    return costs


def _cores() -> int:
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


class _bar:
    """A progress bar on standard error where that is a terminal; a context whose value is told the progress."""

    def __init__(self) -> None:
        errors = Console(stderr=True)
        columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self.bar = Bar(*columns, console=errors, transient=True, disable=not errors.is_terminal)
        self.task = self.bar.add_task("searching", total=None)

    def __enter__(self) -> Any:
        self.bar.start()
        return self.show

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def show(self, now: Any) -> None:
        best = "none fits yet" if now.best is None else f"best {now.best:.4g} s, next not below {now.floor:.4g} s"
        words = f"{now.opened:,} of {now.cuts:,} layouts opened, {now.simulated:,} simulated, {best}"
        self.bar.update(self.task, description=words, completed=now.opened, total=now.cuts)
