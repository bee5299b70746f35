"""The typer application and the options that several verbs share."""

from __future__ import annotations

import math
import os
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from stageloom.compare import parse_options
from stageloom.costs import Costs, costs_from
from stageloom.errors import InputError
from stageloom.files import read_mapping, read_text
from stageloom.schedule import Schedule, from_json, loads
from stageloom.schedules import find

app = typer.Typer(
    name="stageloom",
    help="The workbench for pipeline parallelism: generate, check, time, compare and draw schedules.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class TimeUnit(StrEnum):
    s = "s"
    ms = "ms"
    us = "us"


def whole(text: str) -> int:
    """A whole number on the command line."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number.") from None


def number(text: str) -> float:
    """A number on the command line."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number.") from None


def _version(asked: bool) -> None:
    if asked:
        print(f"stageloom {version('stageloom')}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """The workbench for pipeline parallelism: generate, check, time, compare and draw schedules."""


Ranks = Annotated[int, typer.Option("--ranks", "-p", parser=whole, metavar="INT", help="Pipeline ranks (P).")]
Microbatches = Annotated[
    int, typer.Option("--microbatches", "-m", parser=whole, metavar="INT", help="Micro-batches of a step (M).")
]
OptionalRanks = Annotated[
    int | None, typer.Option("--ranks", "-p", parser=whole, metavar="INT", help="Pipeline ranks (P).")
]
OptionalMicrobatches = Annotated[
    int | None, typer.Option("--microbatches", "-m", parser=whole, metavar="INT", help="Micro-batches of a step (M).")
]
Chunks = Annotated[
    int | None,
    typer.Option(
        "--chunks", "-v", parser=whole, metavar="INT", help="Chunks a rank, for schedules that take them [2]."
    ),
]
TimeF = Annotated[
    float | None, typer.Option("--f", parser=number, metavar="NUM", help="Time of F on a whole rank's layers [1].")
]
TimeB = Annotated[
    float | None, typer.Option("--b", parser=number, metavar="NUM", help="Time of B (input gradient) [1].")
]
TimeW = Annotated[
    float | None,
    typer.Option(
        "--w", parser=number, metavar="NUM", help="Time of W (weight gradient) [1]; a full backward takes B + W."
    ),
]
Latency = Annotated[
    float | None,
    typer.Option("--latency", parser=number, metavar="NUM", help="Time of a message between two ranks [0]."),
]
Overlap = Annotated[
    float | None,
    typer.Option("--overlap", parser=number, metavar="NUM", help="Time of an overlapped F&B pair [F + B + W]."),
]
WShare = Annotated[
    float | None,
    typer.Option("--w-share", parser=number, metavar="NUM", help="Part of the activations that only W frees [0.5]."),
]
CostsFile = Annotated[Path | None, typer.Option("--costs", help="Costs from a YAML or JSON file; flags go over it.")]
UnitOption = Annotated[TimeUnit | None, typer.Option("--unit", help="Unit of all times.")]
Tokens = Annotated[
    float | None,
    typer.Option(
        "--tokens", parser=number, metavar="NUM", help="Tokens of a micro-batch: shows GPU-hours (needs --unit)."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Source = Annotated[
    str, typer.Argument(help="Name of a schedule (see `list`), or a .loom or .json file.", metavar="SCHEDULE")
]
Options = Annotated[
    list[str] | None, typer.Option("--option", "-O", help="An option of the schedule as NAME=VALUE; may be repeated.")
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="File to write.")]


def read_costs(
    file: Path | None,
    *,
    f: float | None,
    b: float | None,
    w: float | None,
    latency: float | None,
    overlap: float | None,
    w_share: float | None,
    unit: TimeUnit | None,
    tokens: float | None,
) -> Costs:
    """Costs from a file with flags over it. Raises InputError naming the flag, or the file and key."""
    flags = {"f": f, "b": b, "w": w, "latency": latency, "overlap": overlap, "w-share": w_share, "tokens": tokens}
    for name, value in flags.items():
        if value is not None and (not math.isfinite(value) or value < 0):
            raise InputError(f"--{name} {value:g}: a finite number of at least 0 is needed")
    if tokens == 0:
        raise InputError("--tokens 0: a micro-batch has at least one token")
    data: dict[str, Any] = {} if file is None else read_mapping(file)
    if data.get("anatomy") and any(value is not None for value in (f, b, w, overlap)):
        raise InputError(f"{file}: anatomy gives the times of F, B, W and the pair; drop --f, --b, --w and --overlap")
    costs = costs_from(
        data,
        "costs" if file is None else str(file),
        F=f,
        B=b,
        W=w,
        latency=latency,
        overlap_time=overlap,
        w_share=w_share,
        unit=None if unit is None else unit.value,
        tokens=tokens,
    )
    if costs.tokens is not None and costs.unit is None:
        raise InputError("tokens are given without a time unit; give --unit s, ms or us too, for GPU-hours")
    return costs


def read_schedule(
    source: str,
    ranks: int | None,
    microbatches: int | None,
    chunks: int | None = None,
    options: list[str] | None = None,
    costs: Costs | None = None,
) -> Schedule:
    """A schedule by name and size, or from a file; a searched one for these costs.

    Raises InputError naming what is missing or wrong.
    """
    if is_file(source):
        loaded = load_schedule(Path(source))
        if any(given is not None for given in (ranks, microbatches, chunks)) or options:
            raise InputError(
                f"{source}: a file states its own sizes; drop --ranks, --microbatches, --chunks and --option"
            )
        return loaded
    record = find(source)
    for flag, value in (("--ranks/-p", ranks), ("--microbatches/-m", microbatches)):
        if value is None:
            raise InputError(f"{record.name}: {flag} is missing; a schedule by name needs both sizes, as -p 4 -m 8")
    given = parse_options(options or [])
    if chunks is not None:
        if "chunks" in given:
            raise InputError("--chunks and --option chunks= say the same thing twice; give one of them")
        given["chunks"] = chunks
    assert ranks is not None
    assert microbatches is not None
    return record(ranks, microbatches, costs=costs, **given)


def is_file(source: str) -> bool:
    """Does this name a schedule file rather than a schedule? Its ending, a folder in it, or its being there tell."""
    path = Path(source)
    if path.suffix in (".loom", ".json") or "/" in source or os.sep in source:
        return True
    try:
        find(source.partition(":")[0])
    except InputError:
        return os.path.exists(source) or path.suffix != ""
    return False


def load_schedule(path: Path) -> Schedule:
    """A .loom or .json file. Raises InputError naming file, line and token."""
    text = read_text(path, "a .loom or .json schedule")
    return from_json(text, str(path)) if path.suffix == ".json" else loads(text, str(path))
