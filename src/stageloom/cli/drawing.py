"""Where drawings go: forms, file endings, standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

from stageloom.cli.words import console, many
from stageloom.errors import InputError
from stageloom.render import gallery, png, svg, text, trace
from stageloom.render.files import write_whole
from stageloom.schedule import dumps, to_json
from stageloom.simulate import Timeline

ENDINGS: Final = {
    ".txt": "text",
    ".svg": "svg",
    ".png": "png",
    ".trace": "trace",
    ".json": "json",
    ".loom": "loom",
}


GALLERY: Final = ("gallery.svg", "gallery.png")


def form_of(form: str | None, out: Path | None) -> str:
    """The form asked for, or the one that the file's ending names; in the terminal where neither is given."""
    if form is not None:
        if form == "png" and out is None:
            raise InputError("--format png: a picture needs a file; give -o FILE.png")
        return form
    if out is None:
        return "text"
    if out.name.endswith(".trace.json"):
        return "trace"
    ending = Path(f"x{out.name}").suffix.lower()
    if ending not in ENDINGS:
        endings = ", ".join(ENDINGS)
        raise InputError(f"-o {out}: the ending {ending!r} names no form; give --format, or one of {endings}")
    return ENDINGS[ending]


def write(timeline: Timeline, form: str, out: Path | None) -> None:
    """Write one drawing to a file, whole or not at all, or to standard output."""
    if form == "png":
        assert out is not None
        png.timeline(timeline, out)
        print(f"wrote {out}")
        return
    if form == "text":
        if out is None:
            print_timeline(timeline, console())
            return
        plain = Console(width=120, no_color=True, force_terminal=False, file=None)
        with plain.capture() as capture:
            plain.print(text.timeline(timeline, 120, colour=False))
        content = capture.get()
    elif form == "svg":
        content = svg.timeline(timeline)
    elif form == "trace":
        content = json.dumps(trace.chrome(timeline), allow_nan=False)
    elif form == "loom":
        content = dumps(timeline.schedule)
    else:
        content = json.dumps(to_json(timeline.schedule) | {"times": times(timeline)}, allow_nan=False) + "\n"
    if out is None:
        sys.stdout.write(content)
    else:
        write_whole(out, content)
        print(f"wrote {out}")


def times(timeline: Timeline) -> dict[str, object]:
    """When every op runs, one list a rank, in the order of the tapes."""
    offsets = timeline.schedule.offsets.tolist()
    cuts = list(pairwise(offsets))
    return {
        "unit": timeline.costs.unit,
        "start": [timeline.start[low:high].tolist() for low, high in cuts],
        "end": [timeline.end[low:high].tolist() for low, high in cuts],
    }


def print_timeline(timeline: Timeline, out: Console, draws: str = "-o FILE.svg") -> None:
    """The timeline in the terminal, as wide as it is, below a line that names it. `draws`: the option that draws it."""
    schedule = timeline.schedule
    sizes = f"{many(schedule.ranks, 'rank')}, {many(schedule.microbatches, 'micro-batch')}"
    out.print(Text(schedule.name, style="bold").append(f": {sizes}", style="not bold"))
    coloured = out.color_system is not None and not out.no_color
    drawn = text.timeline(timeline, max(out.width, text.NARROWEST), colour=coloured, draws=draws)
    out.print(drawn, soft_wrap=True)


def make_folder(folder: Path) -> None:
    """Make a folder for drawings where it is missing. Raises InputError where that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {folder}: cannot be made: {error.strerror}") from None
    for name in GALLERY:
        if (folder / name).is_dir():
            raise InputError(f"--out {folder}: {name} is a folder there; give another folder")


def write_gallery(timelines: Sequence[Timeline], folder: Path) -> list[Path]:
    """All timelines to one time scale, as SVG and PNG, in `folder` (made where it is missing)."""
    make_folder(folder)
    drawn = [folder / name for name in GALLERY]
    write_whole(drawn[0], gallery.svg(timelines))
    gallery.png(timelines, drawn[1])
    return drawn
