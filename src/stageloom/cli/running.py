"""The verbs that run a schedule on real processes: `verify` and `run`."""

from __future__ import annotations

import time as clock
from dataclasses import asdict
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from stageloom.cli.app import (
    Chunks,
    Json,
    OptionalMicrobatches,
    OptionalRanks,
    Options,
    Source,
    app,
    number,
    read_schedule,
    whole,
)
from stageloom.cli.columns import Column, print_columns
from stageloom.cli.words import console, many, print_json, share, time
from stageloom.errors import InputError, MissingExtra
from stageloom.schedule import Schedule

if TYPE_CHECKING:
    from stageloom.execute.training import Work

MOST_RANKS = 64  # local processes


class Precision(StrEnum):
    float32 = "float32"
    float64 = "float64"


def _whole(flag: str, text: str) -> typer.models.OptionInfo:
    return typer.Option(flag, parser=whole, metavar="INT", help=text)


Layers = Annotated[int | None, _whole("--layers", "Blocks of the model [as many as stages, at least 2].")]
Width = Annotated[int, _whole("--width", "Width of the model.")]
Context = Annotated[int, _whole("--context", "Bytes of a sequence.")]
Size = Annotated[int, _whole("--size", "Sequences of a micro-batch.")]
Seed = Annotated[int, _whole("--seed", "Seed of weights and data.")]
Timeout = Annotated[
    float, typer.Option("--timeout", parser=number, metavar="SECONDS", help="Without a sign for so long, a rank fails.")
]


def _work(
    schedule: Schedule, layers: int | None, width: int, context: int, size: int, seed: int, **more: object
) -> Work:
    if find_spec("torch") is None:
        raise MissingExtra("running a schedule", "torch", "torch")
    from stageloom.execute.language import Config
    from stageloom.execute.training import Work, children_of_stages

    if schedule.ranks > MOST_RANKS:
        raise InputError(f"{schedule.ranks} ranks are more local processes than the {MOST_RANKS} that can be started")
    if schedule.slices > 1 and schedule.cut == "sequence" and context % schedule.slices:
        raise InputError(f"--context {context} is no multiple of the schedule's {schedule.slices} slices")
    if schedule.slices > 1 and schedule.cut == "batch" and size % schedule.slices:
        raise InputError(f"--size {size} is no multiple of the schedule's {schedule.slices} slices")
    for flag, value, least in (("size", size, 1), ("seed", seed, 0)):
        if value < least:
            raise InputError(f"--{flag} {value}: too small; at least {least} is needed")
    blocks = max(2, schedule.stages - 2) if layers is None else layers
    config = Config(layers=blocks, width=width, heads=2 if width % 2 == 0 else 1, context=context)
    children_of_stages(schedule, config)
    return Work(schedule, config, size=size, seed=seed, **more)  # type: ignore[arg-type]


@app.command()
def verify(
    schedule: Source,
    ranks: OptionalRanks = None,
    microbatches: OptionalMicrobatches = None,
    chunks: Chunks = None,
    option: Options = None,
    layers: Layers = None,
    width: Width = 32,
    context: Context = 32,
    size: Size = 2,
    seed: Seed = 0,
    precision: Annotated[Precision, typer.Option("--precision", help="Numbers to compute in.")] = Precision.float64,
    timeout: Timeout = 120.0,
    as_json: Json = False,
) -> int:
    """One training step on real processes: are loss and every gradient those of one process? Exit status 1 if not."""
    value = read_schedule(schedule, ranks, microbatches, chunks, option)
    if not value.synchronous:
        raise InputError(f"{value.name} is asynchronous: its gradients are not those of one process; use `run`")
    work = _work(value, layers, width, context, size, seed, dtype=precision.value)
    from stageloom.execute.training import verify as task
    from stageloom.execute.workers import launch

    began = clock.perf_counter()
    verdicts = launch(task, value.ranks, work, timeout=timeout)
    limit = 1e-9 if precision is Precision.float64 else 1e-3
    equal = all(max(v.loss_error, v.gradient_error) <= limit for v in verdicts)
    if as_json:
        print_json({"equal": equal, "limit": limit, "ranks": [asdict(verdict) for verdict in verdicts]})
        return 0 if equal else 1
    out = console()
    columns = [
        Column("rank", [str(v.rank) for v in verdicts]),
        Column("loss", [f"{v.loss:.6f}" for v in verdicts]),
        Column("off by", [f"{v.loss_error:.1e}" for v in verdicts]),
        Column("worst\ngradient", [f"{v.gradient_error:.1e}" for v in verdicts]),
        Column("parameters", [f"{v.parameters:,}" for v in verdicts]),
        Column("B/W split", [", ".join(sorted(set(v.modes.values()))) for v in verdicts], left=True),
        Column("at", [v.worst for v in verdicts], left=True, spare=1),
    ]
    print_columns(columns, out)
    sizes = f"{many(value.ranks, 'process')}, {many(value.microbatches, 'micro-batch')}, {precision.value}"
    word = "equal to one process" if equal else f"NOT equal to one process (limit {limit:g})"
    out.print(
        Text(f"{value.name}: {word}", style="bold green" if equal else "bold red").append(
            f" ({sizes}; {clock.perf_counter() - began:.1f} s)", style="not bold default"
        )
    )
    return 0 if equal else 1


@app.command()
def run(
    schedule: Source,
    ranks: OptionalRanks = None,
    microbatches: OptionalMicrobatches = None,
    chunks: Chunks = None,
    option: Options = None,
    steps: Annotated[int, _whole("--steps", "Optimiser steps.")] = 10,
    layers: Layers = None,
    width: Width = 64,
    context: Context = 64,
    size: Size = 4,
    seed: Seed = 0,
    rate: Annotated[float, typer.Option("--rate", parser=number, metavar="NUM", help="Learning rate.")] = 1e-3,
    checkpoint: Annotated[Path | None, typer.Option("--checkpoint", help="Folder for checkpoints.")] = None,
    every: Annotated[int, _whole("--every", "Steps between checkpoints.")] = 10,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in the folder.")] = False,
    timeout: Timeout = 120.0,
    as_json: Json = False,
) -> None:
    """Train a small byte-level language model on the Python library's sources by this schedule, on local processes."""
    value = read_schedule(schedule, ranks, microbatches, chunks, option)
    for flag, given in (("steps", steps), ("every", every)):
        if given < 1:
            raise InputError(f"--{flag} {given}: at least 1 is needed")
    if not rate > 0:
        raise InputError(f"--rate {rate:g}: a number above 0 is needed")
    if resume and checkpoint is None:
        raise InputError("--resume needs --checkpoint FOLDER, to go on from")
    if checkpoint is not None and not value.synchronous:
        raise InputError(f"{value.name} is asynchronous: its optimisers live in the stages and are not checkpointed")
    work = _work(value, layers, width, context, size, seed, steps=steps, rate=rate)
    from stageloom.execute.training import train
    from stageloom.execute.workers import launch

    folder = None if checkpoint is None else str(checkpoint)
    trained = launch(train, value.ranks, work, folder, every, resume, not as_json, timeout=timeout)
    if as_json:
        print_json([{key: part for key, part in asdict(rank).items() if key != "spans"} for rank in trained])
        return
    first = trained[0]
    out = console()
    if not first.losses:
        out.print(f"nothing left to do: the checkpoint is of step {steps} or later")
        return
    mean = sum(first.seconds[1:] or first.seconds) / len(first.seconds[1:] or first.seconds)
    out.print(f"loss {first.losses[0]:.4f} -> {first.losses[-1]:.4f}; {time(mean * 1e3)} ms a step after the first")
    print_columns(
        [
            Column("rank", [str(r.rank) for r in trained]),
            Column("busy in the\nlast step", [share(r.busy) for r in trained]),
        ],
        out,
    )
