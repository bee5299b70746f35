"""The verbs that run a schedule on real processes: `verify` and `run`."""

from __future__ import annotations

import time as clock
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.text import Text

from stageloom.cli.app import (
    Chunks,
    CostsFile,
    Json,
    Latency,
    OptionalMicrobatches,
    OptionalRanks,
    Options,
    Overlap,
    Source,
    TimeB,
    TimeF,
    TimeW,
    UnitOption,
    app,
    number,
    read_costs,
)
from stageloom.cli.columns import Column, print_columns
from stageloom.cli.measured import check_folder, check_place, emulated
from stageloom.cli.starting import (
    Context,
    Device,
    DeviceOption,
    Layers,
    Seed,
    Size,
    Timeout,
    Width,
    option_of_whole,
    read_run,
    start,
    work_of,
)
from stageloom.cli.trained import report, show, tell_of_interrupt
from stageloom.cli.words import console, many, print_json
from stageloom.errors import InputError

if TYPE_CHECKING:
    pass


class Precision(StrEnum):
    float32 = "float32"
    float64 = "float64"


class Backend(StrEnum):
    own = "own"
    torch = "torch"


@app.command()
def verify(
    context_: typer.Context,
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
    device: DeviceOption = Device.cpu,
    precision: Annotated[Precision, typer.Option("--precision", help="Numbers to compute in.")] = Precision.float64,
    backend: Annotated[
        Backend, typer.Option("--backend", help="Whose runtime: this one, or torch.distributed.pipelining's.")
    ] = Backend.own,
    timeout: Timeout = 120.0,
    as_json: Json = False,
) -> int:
    """One training step on real processes: are loss and every gradient those of one process? Exit status 1 if not."""
    value = read_run(schedule, ranks, microbatches, chunks, option)
    if not value.synchronous:
        raise InputError(f"{value.name} is asynchronous: its gradients are not those of one process; use `run`")
    work = work_of(value, layers, width, context, size, seed, device, dtype=precision.value, backend=backend.value)
    from stageloom.execute.torch_backend import require_runnable
    from stageloom.execute.training import verify as task

    if backend is Backend.torch:
        require_runnable(value)
        if device is Device.cuda:
            raise InputError("--backend torch is a cross-check in main memory; drop --device cuda")
    began = clock.perf_counter()
    verdicts = start(context_, task, value, work, timeout=timeout)
    if verdicts is None:
        return 0
    limit = 1e-9 if precision is Precision.float64 else 1e-3
    equal = all(v.loss_error <= limit and v.gradient_error <= limit for v in verdicts)
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
        Column("at", [v.worst or "-" for v in verdicts], left=True, spare=1),
    ]
    print_columns(columns, out)
    sizes = f"{many(value.ranks, 'process')}, {many(value.microbatches, 'micro-batch')}, {precision.value}"
    sizes += "; PyTorch's runtime" if backend is Backend.torch else ""
    word = "equal to one process" if equal else f"NOT equal to one process (limit {limit:g})"
    out.print(
        Text(f"{value.name}: {word}", style="bold green" if equal else "bold red").append(
            f" ({sizes}; {clock.perf_counter() - began:.1f} s)", style="not bold default"
        ),
        soft_wrap=True,
    )
    return 0 if equal else 1


@app.command()
def run(
    context_: typer.Context,
    schedule: Source,
    ranks: OptionalRanks = None,
    microbatches: OptionalMicrobatches = None,
    chunks: Chunks = None,
    option: Options = None,
    steps: Annotated[int, option_of_whole("--steps", "Optimiser steps.")] = 10,
    layers: Layers = None,
    width: Width = 64,
    context: Context = 64,
    size: Size = 4,
    seed: Seed = 0,
    device: DeviceOption = Device.cpu,
    rate: Annotated[float, typer.Option("--rate", parser=number, metavar="NUM", help="Learning rate.")] = 1e-3,
    checkpoint: Annotated[Path | None, typer.Option("--checkpoint", help="Folder for checkpoints.")] = None,
    every: Annotated[int, option_of_whole("--every", "Steps between checkpoints.")] = 10,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in the folder.")] = False,
    emulation: Annotated[
        bool, typer.Option("--emulate", help="No model: every op waits for as long as the costs below say it takes.")
    ] = False,
    f: TimeF = None,
    b: TimeB = None,
    w: TimeW = None,
    latency: Latency = None,
    overlap: Overlap = None,
    costs: CostsFile = None,
    unit: UnitOption = None,
    scale: Annotated[
        float | None,
        typer.Option(
            "--scale",
            parser=number,
            metavar="SECONDS",
            help="Seconds that a time unit of the costs takes in emulation [so that the shortest op takes 0.02].",
        ),
    ] = None,
    svg: Annotated[
        Path | None, typer.Option("--svg", help="Draw the measured and the predicted timeline in this file.")
    ] = None,
    timeout: Timeout = 120.0,
    as_json: Json = False,
) -> None:
    """Train a small byte-level language model on the Python library's sources by this schedule, on local processes
    or on those that torchrun has started.

    The last step is measured, and shown beside what the simulator predicts from the mean times of its ops. With
    --emulate nothing is trained: the schedule runs in its order with real messages, and computing is waiting.
    """
    value = read_run(schedule, ranks, microbatches, chunks, option)
    _check_flags(context_, emulation)
    if svg is not None:
        check_place("--svg", svg)
    if emulation:
        given = read_costs(costs, f=f, b=b, w=w, latency=latency, overlap=overlap, w_share=None, unit=unit, tokens=None)
        emulated(context_, value, given, scale, svg, timeout, as_json=as_json)
        return
    for flag, amount in (("steps", steps), ("every", every)):
        if amount < 1:
            raise InputError(f"--{flag} {amount}: at least 1 is needed")
    if not 0 < rate < float("inf"):
        raise InputError(f"--rate {rate:g}: a finite number above 0 is needed")
    if resume and checkpoint is None:
        raise InputError("--resume needs --checkpoint FOLDER, to go on from")
    if checkpoint is not None and not value.synchronous:
        raise InputError(f"{value.name} is asynchronous: its optimisers live in the stages and are not checkpointed")
    work = work_of(value, layers, width, context, size, seed, device, steps=steps, rate=rate)
    from stageloom.execute.checkpoint import refuse_another_run
    from stageloom.execute.training import train

    if checkpoint is not None:
        check_folder("--checkpoint", checkpoint)
    if checkpoint is not None and not resume:
        refuse_another_run(checkpoint)
    folder = None if checkpoint is None else str(checkpoint)
    try:
        trained = start(context_, train, value, work, folder, every, resume, not as_json, timeout=timeout)
    except KeyboardInterrupt:
        tell_of_interrupt(checkpoint)
        raise
    if trained is None:
        return
    if not trained[0].losses and not as_json:
        console().print(f"nothing left to do: the checkpoint is of step {steps} or later")
    makespan = show(value, trained, svg, as_json=as_json) if trained[0].losses else None
    if as_json:
        first = trained[0]
        losses = {first.began + at + 1: loss for at, loss in enumerate(first.losses)}
        ranks_ = [report(rank) for rank in trained]
        print_json({"schedule": value.name, "makespan_seconds": makespan, "losses": losses, "ranks": ranks_})


MODEL_FLAGS: Final = (
    "steps",
    "layers",
    "width",
    "context",
    "size",
    "seed",
    "device",
    "rate",
    "checkpoint",
    "every",
    "resume",
)
EMULATION_FLAGS: Final = ("f", "b", "w", "latency", "overlap", "costs", "unit", "scale")


def _check_flags(context: typer.Context, emulation: bool) -> None:
    """Raise InputError for a flag that this kind of run does not use."""
    for flag in MODEL_FLAGS if emulation else EMULATION_FLAGS:
        source = context.get_parameter_source(flag)
        if source is not None and source.name == "COMMANDLINE":
            if emulation and flag == "steps":
                raise InputError("--steps: an emulation runs one step, as every step takes the same; drop --steps")
            if emulation:
                raise InputError(f"--{flag} is of a model, and with --emulate none is run; drop one of them")
            raise InputError(f"--{flag} is for emulation: a real run takes the time it takes; add --emulate or drop it")
