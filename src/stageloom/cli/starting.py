"""What the verbs that start processes share: their flags, the work they give, and where the ranks come from."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer
from rich.console import Console

from stageloom.cli.app import is_file, number, read_schedule, whole
from stageloom.errors import InputError, MissingExtra
from stageloom.execute.joining import invitation, join
from stageloom.schedule import Schedule

if TYPE_CHECKING:
    from stageloom.execute.training import Work

T = TypeVar("T")

MOST_RANKS: Final = 64  # local processes


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


def option_of_whole(flag: str, text: str) -> typer.models.OptionInfo:
    """A flag that takes a whole number."""
    return typer.Option(flag, parser=whole, metavar="INT", help=text)


Layers = Annotated[int | None, option_of_whole("--layers", "Blocks of the model [as many as stages, at least 2].")]
Width = Annotated[int, option_of_whole("--width", "Width of the model.")]
Context = Annotated[int, option_of_whole("--context", "Bytes of a sequence.")]
Size = Annotated[int, option_of_whole("--size", "Sequences of a micro-batch.")]
Seed = Annotated[int, option_of_whole("--seed", "Seed of weights and data.")]
Timeout = Annotated[
    float, typer.Option("--timeout", parser=number, metavar="SECONDS", help="Without a sign for so long, a rank fails.")
]
DeviceOption = Annotated[
    Device, typer.Option("--device", help="What to compute on; a host's ranks take its CUDA devices in turn.")
]


def read_run(
    source: str, ranks: int | None, microbatches: int | None, chunks: int | None, options: list[str] | None
) -> Schedule:
    """The schedule to run; under torchrun it has as many ranks as there are processes, unless told otherwise."""
    invited = invitation()
    if ranks is None and invited is not None and not is_file(source):
        ranks = invited.size
    schedule = read_schedule(source, ranks, microbatches, chunks, options)
    if find_spec("torch") is None:
        raise MissingExtra("running a schedule", "torch", "torch")
    if invited is not None and invited.size != schedule.ranks:
        raise InputError(
            f"{schedule.name} has {schedule.ranks} ranks, and the launcher has started {invited.size} processes "
            f"(WORLD_SIZE): start {schedule.ranks}, or use a schedule for {invited.size}"
        )
    if invited is None and schedule.ranks > MOST_RANKS:
        raise InputError(f"{schedule.ranks} ranks are more local processes than the {MOST_RANKS} that can be started")
    return schedule


def work_of(
    schedule: Schedule,
    layers: int | None,
    width: int,
    context: int,
    size: int,
    seed: int,
    device: Device,
    **more: object,
) -> Work:
    """The work that flags describe. Raises InputError naming the flag that does not fit."""
    from stageloom.execute.device_choice import require_device
    from stageloom.execute.language import Config
    from stageloom.execute.training import Work, children_of_stages

    require_device(device.value)
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
    return Work(schedule, config, size=size, seed=seed, device=device.value, **more)  # type: ignore[arg-type]


def start(task: Callable[..., T], schedule: Schedule, *args: object, timeout: float) -> list[T] | None:
    """task(seat, *args) on every rank of the schedule: what they returned, by rank.

    Ranks are local processes, or those that torchrun has started: then None comes back on all but the first rank, which
    alone has something to print.
    """
    invited = invitation()
    if invited is not None:
        return join(invited, task, *args, timeout=timeout)
    from stageloom.execute.workers import launch

    try:
        return launch(task, schedule.ranks, *args, timeout=timeout)
    finally:
        screen = Console(stderr=True)
        if screen.is_terminal:  # a rank that was killed while it drew may have left it hidden
            screen.show_cursor(True)
