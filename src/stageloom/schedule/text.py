"""The one text form of a schedule, and its JSON form. Goldens are written in it; both round-trip.

    file    = "stageloom schedule 1" NL { line NL }              "#" starts a comment; an indented line goes on
    line    = "name:" NAME | "ranks:" INT | "microbatches:" INT
            | "path:" RANK { RANK }                              one line a path, the rank of each stage
            | "paths of micro-batches:" { PATH "*" COUNT }       only with two paths or more
            | "slices:" INT ("sequence" | "batch")               only where micro-batches are cut
            | "asynchronous:" INT                                weights change after so many backwards of a stage;
                                                                 ops then carry weight versions
            | "rank" INT ":" { item }
    item    = op [ "&" op ]                                      "&": the two are overlapped
    op      = KIND INT [ "." SLICE ] [ "@" STAGE ] [ "^" VERSION ]
    KIND    = "F" | "B" | "W" | "BW"

`@stage` may be left out where the rank holds one stage of the micro-batch's path.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from stageloom.op import KIND_NAMES
from stageloom.schedule.value import Schedule

FORMAT_VERSION: Final = 1
MAGIC: Final = "stageloom schedule"


def tokens(schedule: Schedule, rank: int) -> list[str]:
    """The items of one rank, in order: `F3`, `F3@5`, `F3@5&BW1@2`."""
    items: list[str] = []
    joined = False
    implied = [of_path[0] if len(of_path) == 1 else -1 for of_path in schedule.placement.stages_of[rank]]
    version = schedule.version
    low, high = int(schedule.offsets[rank]), int(schedule.offsets[rank + 1])
    columns = zip(
        schedule.kind[low:high].tolist(),
        schedule.stage[low:high].tolist(),
        schedule.microbatch[low:high].tolist(),
        schedule.slice[low:high].tolist(),
        schedule.pair[low:high].tolist(),
        strict=True,
    )
    for row, (kind, stage, microbatch, cut, pair) in enumerate(columns, start=low):
        text = f"{KIND_NAMES[kind]}{microbatch}"
        if schedule.slices > 1:
            text += f".{cut}"
        known = 0 <= microbatch < schedule.microbatches
        if not known or implied[schedule.path_of[microbatch]] != stage:
            text += f"@{stage}"
        if version is not None:
            text += f"^{version[row]}"
        if joined:
            items[-1] += "&" + text
        else:
            items.append(text)
        joined = pair
    return items


def _head(schedule: Schedule) -> dict[str, Any]:
    """What a file says before the tapes."""
    head: dict[str, Any] = {
        "name": schedule.name,
        "ranks": schedule.ranks,
        "microbatches": schedule.microbatches,
        "paths": [list(path) for path in schedule.placement.paths],
    }
    if len(schedule.placement.paths) > 1:
        head["paths of micro-batches"] = _runs(schedule.path_of.tolist())
    if schedule.slices > 1:
        head["slices"] = schedule.slices
        head["cut"] = schedule.cut
    if not schedule.synchronous:
        head["asynchronous"] = schedule.update_every
    return head


def _runs(values: Iterable[int]) -> list[str]:
    runs: list[tuple[int, int]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1] = (value, runs[-1][1] + 1)
        else:
            runs.append((value, 1))
    return [f"{value}*{count}" for value, count in runs]


def dumps(schedule: Schedule) -> str:
    """The schedule as the text of a `.loom` file."""
    head = _head(schedule)
    lines = [f"{MAGIC} {FORMAT_VERSION}"]
    lines += [f"{key}: {head[key]}" for key in ("name", "ranks", "microbatches")]
    lines += ["path: " + " ".join(map(str, path)) for path in head["paths"]]
    if "paths of micro-batches" in head:
        lines.append("paths of micro-batches: " + " ".join(head["paths of micro-batches"]))
    if "slices" in head:
        lines.append(f"slices: {head['slices']} {head['cut']}")
    if "asynchronous" in head:
        lines.append(f"asynchronous: {head['asynchronous']}")
    lines += [f"rank {rank}: " + " ".join(tokens(schedule, rank)) for rank in range(schedule.ranks)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def to_json(schedule: Schedule) -> dict[str, Any]:
    """The schedule as a JSON object: the same items, one list a rank."""
    tapes = [tokens(schedule, rank) for rank in range(schedule.ranks)]
    return {"format": MAGIC, "version": FORMAT_VERSION, **_head(schedule), "tapes": tapes}
