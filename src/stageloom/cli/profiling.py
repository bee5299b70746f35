"""The verb that measures what passes cost: `profile`."""

from __future__ import annotations

import json
import time as clock
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
import yaml
from rich.text import Text

from stageloom.cli.app import Chunks, Json, OptionalMicrobatches, OptionalRanks, Options, Source, app
from stageloom.cli.columns import Column, print_columns
from stageloom.cli.measured import check_place
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
from stageloom.cli.words import console, many, print_json, size, time
from stageloom.costs import Costs
from stageloom.errors import InputError
from stageloom.render.files import write_whole
from stageloom.schedule import Schedule

if TYPE_CHECKING:
    from stageloom.execute.profile import Profile

ENDINGS: Final = (".yaml", ".yml", ".json")
WIDE: Final = 0.3  # a spread of times, as a part of their median, from which on they say little

Model = Annotated[
    Path | None,
    typer.Option("--model", help="config.json of a decoder of transformers, measured with random weights instead."),
]


@app.command()
def profile(
    context_: typer.Context,
    schedule: Source,
    ranks: OptionalRanks = None,
    microbatches: OptionalMicrobatches = None,
    chunks: Chunks = None,
    option: Options = None,
    layers: Layers = None,
    width: Width = 64,
    context: Context = 64,
    size: Size = 4,
    seed: Seed = 0,
    model: Model = None,
    repeats: Annotated[int, option_of_whole("--repeats", "Steps of which ops are measured, after a first one.")] = 5,
    device: DeviceOption = Device.cpu,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Cost file to write, .yaml or .json.")] = None,
    timeout: Timeout = 120.0,
    as_json: Json = False,
) -> None:
    """Measure what passes, messages and the interpreter cost here, for simulate, compare and run --emulate.

    All ranks train the stages of `run`'s model by the schedule, once with whole backwards and once with split ones, so
    that ops are measured with as many ranks computing at once as in a run.
    """
    value = read_run(schedule, ranks, microbatches, chunks, option)
    if repeats < 1:
        raise InputError(f"--repeats {repeats}: at least 1 is needed")
    if out is not None:
        if out.suffix not in ENDINGS:
            raise InputError(f"-o {out}: costs are written as YAML or JSON; give a name that ends in .yaml or .json")
        check_place("-o", out)
    work = work_of(value, layers, width, context, size, seed, device)
    from stageloom.execute.emulate import cores
    from stageloom.execute.profiling import measure, read_decoder

    for flag in ("layers", "width"):
        source = context_.get_parameter_source(flag)
        if model is not None and source is not None and source.name == "COMMANDLINE":
            raise InputError(f"--{flag} is of run's model, and --model gives another; drop one of them")
    decoder = None if model is None else read_decoder(model, value, context)
    began = clock.perf_counter()
    profiles = start(context_, measure, value, work, decoder, repeats, True, timeout=timeout)
    if profiles is None:
        return
    found = profiles[0]
    if out is not None:
        write_whole(out, written(found.costs, out, _made_by(value, work.size, context)))
    if as_json:
        print_json(
            {
                "costs": _data(found.costs),
                "modes": found.modes,
                "spread": found.spread,
                "samples": found.samples,
                "warnings": warnings(value, found),
            }
        )
        return
    screen = console()
    sizes = f"{many(value.ranks, 'process')}, {many(value.microbatches, 'micro-batch')}"
    screen.print(
        Text(value.name, style="bold").append(
            f": {sizes}; medians of {found.samples} ops or more; {clock.perf_counter() - began:.1f} s",
            style="not bold",
        )
    )
    _print(value, found, screen.print)
    if value.ranks > cores() and device is Device.cpu:
        screen.print(f"{value.ranks} processes shared {many(cores(), 'core')}: times hold for that alone.", style="dim")
    if out is not None:
        screen.print(f"wrote {out}", soft_wrap=True)


def _print(schedule: Schedule, found: Profile, say: Any) -> None:
    """A line a stage, then what holds for all."""
    costs = found.costs
    stages = range(schedule.stages)

    def of(key: str) -> Sequence[float]:
        return costs.pieces(key, schedule.stages, schedule.ranks).tolist()

    columns = [
        Column("stage", [str(stage) for stage in stages]),
        Column("rank", [" ".join(str(path[stage]) for path in schedule.placement.paths) for stage in stages]),
    ]
    for key in ("F", "B", "W", "BW"):
        spread = found.spread.get(key)
        cells = [time(value) for value in of(key)]
        columns.append(Column(f"{key}\nms", cells))
        if spread is not None:
            columns.append(Column("+-", [f"{100 * part:.0f} %" for part in spread], spare=1))
    columns += [
        Column("kept\nby F", [size(value) for value in of("activation_bytes")]),
        Column("parameters", [size(value) for value in of("parameter_bytes")], spare=2),
        Column("optimiser", [size(value) for value in of("optimizer_bytes")], spare=3),
        Column("B/W split", [found.modes.get(stage, "-") for stage in stages], left=True),
    ]
    print_columns(columns, console())
    if costs.bandwidth is not None:
        say(
            f"message: {size(costs.message_bytes)} a micro-batch, latency {time(costs.latency)} ms, "
            f"{size(costs.bandwidth)}/s"
        )
    more = ": B allocates more than it frees" if costs.w_share > 1 else ""
    say(f"an op's start: {time(costs.overhead)} ms; W frees {100 * costs.w_share:.0f} % of what F keeps{more}")
    for warning in warnings(schedule, found):
        say(warning, soft_wrap=True)


def warnings(schedule: Schedule, found: Profile) -> list[str]:
    """What in measured times shows that the machine did other things as well."""
    told: list[str] = []
    wide = [(part, key, stage) for key, parts in found.spread.items() for stage, part in enumerate(parts)]
    part, key, stage = max(wide, default=(0.0, "", 0))
    if part > WIDE:
        told.append(f"{key} of stage {stage} varied by +-{100 * part:.0f} %")
    whole, split = (found.costs.pieces(key, schedule.stages, schedule.ranks) for key in ("BW", "B"))
    quicker = [stage for stage in range(schedule.stages) if whole[stage] < 0.9 * split[stage]]
    if quicker:
        told.append(f"BW of stage {quicker[0]} took less time than B, which is a part of it")
    return [f"warning: {what}: the machine was busy; repeat, or raise --repeats" for what in told]


def _data(costs: Costs) -> dict[str, Any]:
    return costs.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def _made_by(schedule: Schedule, size: int, context: int) -> str:
    return (
        f"measured by `stageloom profile {schedule.name}` on {many(schedule.ranks, 'process')}: "
        f"micro-batches of {size} sequences of {context}"
    )


def written(costs: Costs, file: Path, comment: str) -> str:
    """The text of a cost file. A float is written with as many digits as give it back."""
    data = _data(costs)
    if file.suffix == ".json":
        return json.dumps(data, indent=2, allow_nan=False) + "\n"
    return f"# {comment}\n" + yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=110)
