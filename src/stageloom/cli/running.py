"""The verbs that run a schedule on real processes: `verify` and `run`."""

from __future__ import annotations

import time as clock
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from importlib.util import find_spec
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
    read_schedule,
    whole,
)
from stageloom.cli.columns import Column, print_columns
from stageloom.cli.drawing import print_timeline, times
from stageloom.cli.words import console, many, print_json, share, time
from stageloom.costs import Costs
from stageloom.errors import InputError, MissingExtra
from stageloom.metrics import measure
from stageloom.render import gallery
from stageloom.render.files import write_whole
from stageloom.schedule import Schedule
from stageloom.simulate import Timeline, durations, simulate

if TYPE_CHECKING:
    from stageloom.execute.training import Work

MOST_RANKS = 64  # local processes


class Precision(StrEnum):
    float32 = "float32"
    float64 = "float64"


class Backend(StrEnum):
    own = "own"
    torch = "torch"


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
    _require_processes(schedule)
    from stageloom.execute.language import Config
    from stageloom.execute.training import Work, children_of_stages

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


def _require_processes(schedule: Schedule) -> None:
    """Raise where a schedule's ranks cannot be processes here."""
    if find_spec("torch") is None:
        raise MissingExtra("running a schedule", "torch", "torch")
    if schedule.ranks > MOST_RANKS:
        raise InputError(f"{schedule.ranks} ranks are more local processes than the {MOST_RANKS} that can be started")


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
    backend: Annotated[
        Backend, typer.Option("--backend", help="Whose runtime: this one, or torch.distributed.pipelining's.")
    ] = Backend.own,
    timeout: Timeout = 120.0,
    as_json: Json = False,
) -> int:
    """One training step on real processes: are loss and every gradient those of one process? Exit status 1 if not."""
    value = read_schedule(schedule, ranks, microbatches, chunks, option)
    if not value.synchronous:
        raise InputError(f"{value.name} is asynchronous: its gradients are not those of one process; use `run`")
    work = _work(value, layers, width, context, size, seed, dtype=precision.value, backend=backend.value)
    from stageloom.execute.torch_backend import require_runnable
    from stageloom.execute.training import verify as task
    from stageloom.execute.workers import launch

    if backend is Backend.torch:
        require_runnable(value)
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
    sizes += "; PyTorch's runtime" if backend is Backend.torch else ""
    word = "equal to one process" if equal else f"NOT equal to one process (limit {limit:g})"
    out.print(
        Text(f"{value.name}: {word}", style="bold green" if equal else "bold red").append(
            f" ({sizes}; {clock.perf_counter() - began:.1f} s)", style="not bold default"
        )
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
    emulated: Annotated[
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
    """Train a small byte-level language model on the Python library's sources by this schedule, on local processes.

    The last step is measured, and shown beside what the simulator predicts from the mean times of its ops. With
    --emulate nothing is trained: the schedule runs in its order with real messages, and computing is waiting.
    """
    value = read_schedule(schedule, ranks, microbatches, chunks, option)
    _check_flags(context_, emulated)
    if svg is not None:
        _check_place(svg)
    if emulated:
        given = read_costs(costs, f=f, b=b, w=w, latency=latency, overlap=overlap, w_share=None, unit=unit, tokens=None)
        _emulate(value, given, scale, svg, timeout, as_json=as_json)
        return
    for flag, amount in (("steps", steps), ("every", every)):
        if amount < 1:
            raise InputError(f"--{flag} {amount}: at least 1 is needed")
    if not rate > 0:
        raise InputError(f"--rate {rate:g}: a number above 0 is needed")
    if resume and checkpoint is None:
        raise InputError("--resume needs --checkpoint FOLDER, to go on from")
    if checkpoint is not None and not value.synchronous:
        raise InputError(f"{value.name} is asynchronous: its optimisers live in the stages and are not checkpointed")
    work = _work(value, layers, width, context, size, seed, steps=steps, rate=rate)
    from stageloom.execute.checkpoint import refuse_another_run
    from stageloom.execute.measure import measured_costs, timeline_of
    from stageloom.execute.training import train
    from stageloom.execute.workers import launch

    if checkpoint is not None and not resume:
        refuse_another_run(checkpoint)
    folder = None if checkpoint is None else str(checkpoint)
    trained = launch(train, value.ranks, work, folder, every, resume, not as_json, timeout=timeout)
    if not trained[0].losses:
        if as_json:
            print_json([_report(asdict(rank)) for rank in trained])
        else:
            console().print(f"nothing left to do: the checkpoint is of step {steps} or later")
        return
    spans = [rank.spans for rank in trained]
    found = measured_costs(value, spans)
    measured, predicted = timeline_of(value, spans, found), simulate(value, found)
    if svg is not None:
        _draw(measured, predicted, svg)
    if as_json:
        print_json([_report(asdict(rank)) for rank in trained])
        return
    first = trained[0]
    out = console()
    mean = sum(first.seconds[1:] or first.seconds) / len(first.seconds[1:] or first.seconds)
    out.print(f"loss {first.losses[0]:.4f} -> {first.losses[-1]:.4f}; {time(mean * 1e3)} ms a step after the first")
    _print_measured(measured, predicted, "the last step; predicted from the mean times of its ops", svg)


MODEL_FLAGS: Final = ("steps", "layers", "width", "context", "size", "seed", "rate", "checkpoint", "every", "resume")
EMULATION_FLAGS: Final = ("f", "b", "w", "latency", "overlap", "costs", "unit", "scale")


def _check_flags(context: typer.Context, emulated: bool) -> None:
    """Raise InputError for a flag that this kind of run does not use."""
    for flag in MODEL_FLAGS if emulated else EMULATION_FLAGS:
        source = context.get_parameter_source(flag)
        if source is not None and source.name == "COMMANDLINE":
            if emulated:
                raise InputError(f"--{flag} is of a model, and with --emulate none is run; drop one of them")
            raise InputError(f"--{flag} is for emulation: a real run takes the time it takes; add --emulate or drop it")


def _check_place(file: Path) -> None:
    """Raise InputError where a drawing cannot be written, before the run that it is of."""
    if file.is_dir():
        raise InputError(f"--svg {file}: is a folder; give the name of a file in it")
    if not file.parent.is_dir():
        raise InputError(f"--svg {file}: there is no folder {file.parent}; create it or give another path")


def _report(rank: Mapping[str, object]) -> dict[str, object]:
    return {key: part for key, part in rank.items() if key != "spans"}


def _emulate(
    schedule: Schedule, costs: Costs, scale: float | None, svg: Path | None, timeout: float, *, as_json: bool
) -> None:
    """Run with waits in place of computing, and show what was measured beside the prediction."""
    _require_processes(schedule)
    from stageloom.execute.emulate import default_scale, emulate, require_emulated
    from stageloom.execute.measure import message_times, timeline_of
    from stageloom.execute.workers import launch

    require_emulated(costs)
    if scale is not None and not (0 < scale < float("inf")):
        raise InputError(f"--scale {scale:g}: a number of seconds above 0 is needed")
    predicted = simulate(schedule, costs)
    scale = default_scale(schedule, costs) if scale is None else scale
    patience = timeout
    if timeout > 0:  # a rank gives no sign while an op or a message takes its time
        patience += 2 * scale * (float(durations(schedule, costs).max()) + float(message_times(schedule, costs).max()))
    spans = launch(emulate, schedule.ranks, schedule, costs, scale, timeout=patience)
    measured = timeline_of(schedule, spans, costs, unit_seconds=scale)
    if svg is not None:
        _draw(measured, predicted, svg)
    if as_json:
        both = {"predicted": predicted, "measured": measured}
        data = {name: asdict(measure(timeline)) | {"times": times(timeline)} for name, timeline in both.items()}
        print_json({"unit_seconds": scale, "difference": _difference(measured, predicted)} | data)
        return
    unit = costs.unit or "time unit"
    _print_measured(measured, predicted, f"emulated, a {unit} in {time(scale * 1e3)} ms", svg)


def _difference(measured: Timeline, predicted: Timeline) -> float:
    """How much longer than predicted it took, as a part of the prediction."""
    return measure(measured).makespan / measure(predicted).makespan - 1


def _print_measured(measured: Timeline, predicted: Timeline, how: str, svg: Path | None) -> None:
    """Both makespans, both utilisations of every rank, both timelines."""
    out = console()
    real, wanted = measure(measured), measure(predicted)
    unit = f" {real.unit}" if real.unit else ""
    sizes = f"{many(real.ranks, 'process')}, {many(real.microbatches, 'micro-batch')}"
    out.print(Text(real.schedule, style="bold").append(f": {sizes}; {how}", style="not bold"), soft_wrap=True)
    out.print(
        f"makespan {time(wanted.makespan)}{unit} predicted, {time(real.makespan)}{unit} measured: "
        f"{100 * _difference(measured, predicted):+.2f} %; {many(real.messages, 'message')}",
        soft_wrap=True,
    )
    pairs = list(zip(wanted.utilization_per_rank, real.utilization_per_rank, strict=True))
    columns = [
        Column("rank", [*(str(rank) for rank in range(real.ranks)), "all"]),
        Column("busy,\npredicted", [*(share(p) for p, _ in pairs), share(wanted.utilization)]),
        Column("busy,\nmeasured", [*(share(m) for _, m in pairs), share(real.utilization)]),
    ]
    print_columns(columns, out)
    for timeline in _named(measured, predicted):
        print_timeline(timeline, out)
    if svg is not None:
        out.print(f"wrote {svg}", soft_wrap=True)


def _named(measured: Timeline, predicted: Timeline) -> Sequence[Timeline]:
    """Predicted and measured timeline, under names that tell them apart."""
    both = {"predicted": predicted, "measured": measured}
    return [
        replace(timeline, schedule=replace(timeline.schedule, name=f"{timeline.schedule.name}, {name}"))
        for name, timeline in both.items()
    ]


def _draw(measured: Timeline, predicted: Timeline, file: Path) -> None:
    """Both timelines to one scale, one below the other."""
    write_whole(file, gallery.svg(_named(measured, predicted), columns=1))
