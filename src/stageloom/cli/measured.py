"""A measured run beside its prediction, in the terminal and as a drawing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from stageloom.cli.columns import Column, print_columns
from stageloom.cli.drawing import print_timeline, times
from stageloom.cli.starting import start
from stageloom.cli.words import console, many, print_json, share, time
from stageloom.costs import Costs
from stageloom.errors import InputError
from stageloom.metrics import measure
from stageloom.render import gallery
from stageloom.render.files import write_whole
from stageloom.schedule import Schedule
from stageloom.simulate import Timeline, durations, simulate


def check_place(flag: str, file: Path) -> None:
    """Raise InputError where a file cannot be written, before the run that it is of."""
    try:
        folder, inside = file.is_dir(), file.parent.is_dir()
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        name = str(file) if len(str(file)) <= 80 else f"{str(file)[:77]}..."
        raise InputError(f"{flag} {name}: cannot be written: {error.strerror}; give another name") from None
    if folder:
        raise InputError(f"{flag} {file}: is a folder; give the name of a file in it")
    if not inside:
        raise InputError(f"{flag} {file}: there is no folder {file.parent}; create it or give another path")


def check_folder(flag: str, folder: Path) -> None:
    """Raise InputError where nothing can be written in a folder, or where it cannot be made, before the run."""
    try:
        there = folder.exists()
        if there and not folder.is_dir():
            raise InputError(f"{flag} {folder}: is a file; give a folder")
        above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:
        raise InputError(f"{flag} {folder}: cannot be written: {error.strerror}") from None
    if not above.is_dir():
        raise InputError(f"{flag} {folder}: cannot be made: {above} is a file")
    if not os.access(above, os.W_OK | os.X_OK):
        where = "it" if there else above
        raise InputError(f"{flag} {folder}: {where} may not be written to by this user; give another folder")


def emulated(
    context: typer.Context,
    schedule: Schedule,
    costs: Costs,
    scale: float | None,
    svg: Path | None,
    timeout: float,
    *,
    as_json: bool,
) -> None:
    """Run with waits in place of computing, and show what was measured beside the prediction."""
    from stageloom.execute.emulate import default_scale, emulate, require_emulated
    from stageloom.execute.measure import message_times, timeline_of

    require_emulated(costs)
    if scale is not None and not (0 < scale < float("inf")):
        raise InputError(f"--scale {scale:g}: a number of seconds above 0 is needed")
    predicted = simulate(schedule, costs)
    scale = default_scale(schedule, costs) if scale is None else scale
    patience = timeout
    if timeout > 0:  # a rank gives no sign while an op or a message takes its time
        patience += 2 * scale * (float(durations(schedule, costs).max()) + float(message_times(schedule, costs).max()))
    spans = start(context, emulate, schedule, schedule, costs, scale, timeout=patience)
    if spans is None:
        return
    measured = timeline_of(schedule, spans, costs, unit_seconds=scale)
    if svg is not None:
        draw(measured, predicted, svg)
    if as_json:
        both = {"predicted": predicted, "measured": measured}
        data = {name: asdict(measure(timeline)) | {"times": times(timeline)} for name, timeline in both.items()}
        print_json({"unit_seconds": scale, "difference": difference(measured, predicted)} | data)
        return
    unit = costs.unit or "time unit"
    print_measured(measured, predicted, f"emulated, a {unit} in {time(scale * 1e3)} ms", svg, console())


def difference(measured: Timeline, predicted: Timeline) -> float:
    """How much longer than predicted it took, as a part of the prediction."""
    return measure(measured).makespan / measure(predicted).makespan - 1


def print_measured(
    measured: Timeline,
    predicted: Timeline,
    how: str,
    svg: Path | None,
    out: Console,
    more: Sequence[Column] = (),
) -> None:
    """Both makespans, both utilisations of every rank (and `more` about it), both timelines."""
    real, wanted = measure(measured), measure(predicted)
    unit = f" {real.unit}" if real.unit else ""
    sizes = f"{many(real.ranks, 'process')}, {many(real.microbatches, 'micro-batch')}"
    out.print(Text(real.schedule, style="bold").append(f": {sizes}; {how}", style="not bold"), soft_wrap=True)
    out.print(
        f"makespan {time(wanted.makespan)}{unit} predicted, {time(real.makespan)}{unit} measured: "
        f"{100 * difference(measured, predicted):+.2f} %; {many(real.messages, 'message')}",
        soft_wrap=True,
    )
    pairs = list(zip(wanted.utilization_per_rank, real.utilization_per_rank, strict=True))
    columns = [
        Column("rank", [*(str(rank) for rank in range(real.ranks)), "all"]),
        Column("busy,\npredicted", [*(share(p) for p, _ in pairs), share(wanted.utilization)]),
        Column("busy,\nmeasured", [*(share(m) for _, m in pairs), share(real.utilization)]),
    ]
    print_columns([*columns, *more], out)
    for timeline in _named(measured, predicted):
        print_timeline(timeline, out, "--svg FILE" if svg is None else "")
    if svg is not None:
        out.print(f"wrote {svg}", soft_wrap=True)


def _named(measured: Timeline, predicted: Timeline) -> Sequence[Timeline]:
    """Predicted and measured timeline, under names that tell them apart."""
    both = {"predicted": predicted, "measured": measured}
    return [
        replace(timeline, schedule=replace(timeline.schedule, name=f"{timeline.schedule.name}, {name}"))
        for name, timeline in both.items()
    ]


def draw(measured: Timeline, predicted: Timeline, file: Path) -> None:
    """Both timelines to one scale, one below the other."""
    write_whole(file, gallery.svg(_named(measured, predicted), columns=1))
