"""What the verbs that start processes share: their flags, the work they give, and where the ranks come from."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer
from rich.console import Console

from stageloom.cli.app import is_file, number, read_schedule, whole
from stageloom.cli.words import many
from stageloom.errors import InputError, MissingExtra, ScheduleError
from stageloom.execute.joining import invitation, join
from stageloom.schedule import Schedule
from stageloom.validate import problems

if TYPE_CHECKING:
    from stageloom.execute.training import Work

T = TypeVar("T")

MOST_RANKS: Final = 64  # local processes
LARGEST_SEED: Final = 2**63 - 1
MOST_LAYERS: Final = 10_000
MOST_NUMBERS: Final = 2**31  # of a model: 8 GB in float32
MOST_TOKENS: Final = 2**28  # of a step


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
    if is_file(source):
        found = problems(schedule)
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise ScheduleError(
                f"{source}: cannot run: {found[0]}{more}; `stageloom validate {source}` shows where",
                list(map(str, found)),
            )
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
    _refuse_too_large(schedule, blocks, width, context, size, seed)
    config = Config(layers=blocks, width=width, heads=2 if width % 2 == 0 else 1, context=context)
    children_of_stages(schedule, config)
    return Work(schedule, config, size=size, seed=seed, device=device.value, **more)  # type: ignore[arg-type]


def _refuse_too_large(schedule: Schedule, layers: int, width: int, context: int, size: int, seed: int) -> None:
    """Raise InputError, naming flags, for what no machine would hold, before anything of it is made."""
    if seed > LARGEST_SEED:
        raise InputError(f"--seed {seed}: too large; at most 2**63 - 1 = {LARGEST_SEED}")
    if layers > MOST_LAYERS:
        raise InputError(f"--layers {layers}: too many; at most {MOST_LAYERS}")
    numbers = 12 * layers * width**2 + (512 + context) * width
    if numbers > MOST_NUMBERS:
        raise InputError(
            f"--layers {layers}, --width {width} and --context {context}: a model of {numbers:,} parameters; at most "
            f"{MOST_NUMBERS:,} for each process, which starts with the whole model"
        )
    tokens = schedule.microbatches * size * context
    if tokens > MOST_TOKENS:
        raise InputError(
            f"--size {size} and --context {context}: {many(schedule.microbatches, 'micro-batch')} of "
            f"{size * context:,} bytes are {tokens:,} a step; at most {MOST_TOKENS:,}"
        )


def start(
    context: typer.Context, task: Callable[..., T], schedule: Schedule, *args: object, timeout: float
) -> list[T] | None:
    """task(seat, *args) on every rank of the schedule: what they returned, by rank.

    Ranks are local processes, or those that torchrun has started: then None comes back on all but the first rank, which
    alone has something to print. Those have to agree on all that the command line says.
    """
    invited = invitation()
    if invited is not None:
        return join(invited, task, *args, timeout=timeout, flags=_flags(context))
    from stageloom.execute.progress import READER_GONE
    from stageloom.execute.workers import Failure, launch

    try:
        return launch(task, schedule.ranks, *args, timeout=timeout)
    except Failure as failure:
        if failure.cause == READER_GONE:
            raise BrokenPipeError from None
        raise
    finally:
        screen = Console(stderr=True)
        if screen.is_terminal:  # a rank that was killed while it drew may have left it hidden
            screen.show_cursor(True)


def _flags(context: typer.Context) -> dict[str, object]:
    """What the command line says, by flag."""
    names = {each.name: each for each in context.command.params}
    return {
        next((name for name in names[key].opts if name.startswith("--")), key.upper()): value
        for key, value in context.params.items()
        if key in names
    }
