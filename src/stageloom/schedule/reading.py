"""Reading the text and JSON forms of `schedule.text`: every error names file, line and token, or file and key."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final, cast

import numpy as np

from stageloom.errors import InputError
from stageloom.files import parse_json
from stageloom.op import Kind
from stageloom.placement import Placement
from stageloom.schedule.text import FORMAT_VERSION, MAGIC
from stageloom.schedule.value import CUTS, Cut, Schedule, check_name
from stageloom.tape import ANYWHERE

OP: Final = re.compile(r"(BW|F|B|W)([0-9]{1,9})(?:\.([0-9]{1,9}))?(?:@([0-9]{1,9}))?(?:\^([0-9]{1,9}))?")
NUMBER: Final = re.compile(r"[0-9]{1,9}")
LARGEST: Final = 10_000_000  # ranks, micro-batches, stages and slices a file may ask for


@dataclass
class _Draft:
    """A file half read; `place` is where we are, for messages."""

    file: str
    place: str = ""
    name: str = ""
    ranks: int = 0
    microbatches: int = 0
    paths: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    path_runs: list[str] | None = None
    slices: int = 1
    cut: Cut = "sequence"
    update_every: int = 0
    tapes: dict[int, list[tuple[str, str]]] = field(default_factory=dict[int, list[tuple[str, str]]])

    def wrong(self, what: str) -> InputError:
        return InputError(f"{self.file}: {self.place}: {what}" if self.place else f"{self.file}: {what}")

    def whole(self, text: object, key: str, least: int = 1) -> int:
        number = int(text) if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 10 else text
        if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= LARGEST:
            raise self.wrong(f"{key} is {text!r}; a whole number from {least} to {LARGEST:,} is needed")
        return number


def loads(text: str, file: str = "schedule") -> Schedule:
    """Read the text of a `.loom` file. Raises InputError naming file, line and token."""
    draft = _Draft(file)
    seen: set[str] = set()
    rank = -1
    started = False
    for number, raw in enumerate(text.splitlines(), start=1):
        draft.place = f"line {number}"
        line = raw.split("#", 1)[0].rstrip()
        if not line:
            continue
        if not started:
            _magic(draft, line)
            started = True
            continue
        if line[0].isspace():
            if rank < 0:
                raise draft.wrong("an indented line goes on with a rank's ops, and no `rank N:` line stands before it")
            draft.tapes[rank] += [(draft.place, item) for item in line.split()]
            continue
        rank = -1
        key, colon, value = line.partition(":")
        if not colon:
            raise draft.wrong(f"{line.split()[0]!r} is no line of a schedule; expected `key: value` or `rank N: ops`")
        if key.startswith("rank ") and key != "ranks":
            rank = draft.whole(key[5:].strip(), "the rank of this line", 0)
            if rank in draft.tapes:
                raise draft.wrong(f"rank {rank} has a line already; go on with an indented line instead")
            draft.tapes[rank] = [(draft.place, item) for item in value.split()]
            continue
        if key in seen and key != "path":
            raise draft.wrong(f"{key!r} is said twice")
        seen.add(key)
        _header_line(draft, key, value.strip())
    draft.place = ""
    if not started:
        raise draft.wrong(f"is empty; a schedule starts with the line `{MAGIC} {FORMAT_VERSION}`")
    return _finish(draft)


def _magic(draft: _Draft, line: str) -> None:
    words, _, version = line.rpartition(" ")
    if words != MAGIC:
        raise draft.wrong(f"{line[:40]!r} is not the first line of a schedule; expected `{MAGIC} {FORMAT_VERSION}`")
    _check_version(draft, version)


def _check_version(draft: _Draft, version: object) -> None:
    if str(version) != str(FORMAT_VERSION):
        raise draft.wrong(f"format version {version}; this Stageloom reads version {FORMAT_VERSION}")


def _header_line(draft: _Draft, key: str, value: str) -> None:
    if key == "name":
        draft.name = value
    elif key == "ranks":
        draft.ranks = draft.whole(value, key)
    elif key == "microbatches":
        draft.microbatches = draft.whole(value, key)
    elif key == "path":
        draft.paths.append(tuple(draft.whole(word, "a rank of the path", 0) for word in value.split()))
    elif key == "paths of micro-batches":
        draft.path_runs = value.split()
    elif key == "slices":
        count, _, cut = value.partition(" ")
        draft.slices = draft.whole(count, key)
        draft.cut = _cut(draft, cut.strip())
    elif key == "asynchronous":
        draft.update_every = draft.whole(value, key)
    else:
        raise draft.wrong(
            f"unknown key {key!r}; keys are name, ranks, microbatches, path, paths of micro-batches, slices, "
            "asynchronous, rank N"
        )


def _cut(draft: _Draft, cut: object) -> Cut:
    if cut not in CUTS:
        raise draft.wrong(f"micro-batches are cut along {cut!r}; expected one of {', '.join(CUTS)}")
    return cut


def from_json(data: object, file: str = "schedule") -> Schedule:
    """Read the JSON form (parsed already, or its text); "times", where a drawing left them, are not read.

    Raises InputError naming file, key and token.
    """
    draft = _Draft(file)
    if isinstance(data, str):
        data = parse_json(data, file)
    if not isinstance(data, dict):
        raise draft.wrong("holds no JSON object; a schedule is an object with name, ranks, microbatches, paths, tapes")
    table = cast(dict[str, Any], data)
    if table.get("format") != MAGIC:
        raise draft.wrong(f"key format: is {table.get('format')!r}; expected {MAGIC!r}")
    _check_version(draft, table.get("version"))
    known = {"format", "version", "name", "ranks", "microbatches", "paths", "paths of micro-batches", "slices", "cut"}
    for key in table:
        if key not in known | {"asynchronous", "tapes", "times"}:
            raise draft.wrong(f"unknown key {key!r}")
    name: object = table.get("name", "")
    if not isinstance(name, str):
        raise draft.wrong(f"key name: is {name!r}; a text is needed")
    draft.name = name
    draft.ranks = draft.whole(table.get("ranks"), "key ranks")
    draft.microbatches = draft.whole(table.get("microbatches"), "key microbatches")
    draft.paths = [
        tuple(draft.whole(rank, "key paths: a rank", 0) for rank in path) for path in _lists(draft, table, "paths")
    ]
    if "paths of micro-batches" in table:
        runs: object = table["paths of micro-batches"]
        if not isinstance(runs, list):
            raise draft.wrong("key paths of micro-batches: is not a list of PATH*COUNT")
        draft.path_runs = [str(run) for run in cast(list[object], runs)]
    draft.slices = draft.whole(table.get("slices", 1), "key slices")
    draft.cut = _cut(draft, table.get("cut", "sequence"))
    if "asynchronous" in table:
        draft.update_every = draft.whole(table["asynchronous"], "key asynchronous")
    for rank, tape in enumerate(_lists(draft, table, "tapes")):
        draft.tapes[rank] = [(f"key tapes, rank {rank}, item {at}", str(item)) for at, item in enumerate(tape)]
    return _finish(draft)


def _lists(draft: _Draft, table: dict[str, Any], key: str) -> list[list[object]]:
    value = table.get(key)
    if not isinstance(value, list) or not all(isinstance(row, list) for row in cast(list[object], value)):
        raise draft.wrong(f"key {key}: is not a list of lists")
    return cast(list[list[object]], value)


def _finish(draft: _Draft) -> Schedule:
    """Turn what was read into a Schedule; only its form is checked here, its sense is the validator's."""
    for key in ("name", "ranks", "microbatches", "paths"):
        if not getattr(draft, key):
            raise draft.wrong(f"`{'path' if key == 'paths' else key}:` is missing")
    check_name(draft.name, draft.wrong)
    if len(draft.paths) >= ANYWHERE:
        raise draft.wrong(f"has {len(draft.paths)} paths; up to {ANYWHERE - 1} can be told apart")
    try:
        placement = Placement(draft.ranks, tuple(draft.paths))
    except InputError as error:
        raise draft.wrong(str(error)) from None
    extra = [rank for rank in draft.tapes if rank >= draft.ranks]
    if extra:
        raise draft.wrong(f"has ops for rank {extra[0]}, but ranks are 0 to {draft.ranks - 1}")
    size = draft.microbatches * draft.slices * placement.stages
    if size > LARGEST * 10:
        raise draft.wrong(
            f"{draft.microbatches} micro-batches x {draft.slices} slices x {placement.stages} stages is too large"
        )
    path_of = _path_of(draft)
    implied = [[of_path[0] if len(of_path) == 1 else -1 for of_path in of_rank] for of_rank in placement.stages_of]
    rows: list[tuple[int, int, int, int, int, bool]] = []
    offsets = [0]
    for rank in range(draft.ranks):
        for place, item in draft.tapes.get(rank, []):
            draft.place = place
            ops = item.split("&")
            if len(ops) > 2:
                raise draft.wrong(f"{item!r} overlaps {len(ops)} ops; a pair has two")
            for at, text in enumerate(ops):
                rows.append((*_op(draft, text, implied[rank], path_of), at + 1 < len(ops)))
        offsets.append(len(rows))
    kind, stage, microbatch, part, version, pair = np.array(rows, dtype=np.int64).reshape(-1, 6).T
    return Schedule(
        name=draft.name,
        placement=placement,
        microbatches=draft.microbatches,
        offsets=np.array(offsets, dtype=np.int64),
        kind=kind.astype(np.int8),
        stage=stage.astype(np.int32),
        microbatch=microbatch.astype(np.int32),
        slice=part.astype(np.int32),
        pair=pair.astype(np.bool_),
        path_of=np.array(path_of, dtype=np.int8),
        slices=draft.slices,
        cut=draft.cut,
        version=version.astype(np.int32) if draft.update_every else None,
        update_every=draft.update_every,
    )


def _path_of(draft: _Draft) -> list[int]:
    if draft.path_runs is None:
        if len(draft.paths) > 1:
            raise draft.wrong(
                "`paths of micro-batches:` is missing (which micro-batches take which path, as `0*4 1*4`)"
            )
        return [0] * draft.microbatches
    path_of: list[int] = []
    for run in draft.path_runs:
        path, star, count = run.partition("*")
        if not star or not NUMBER.fullmatch(path) or not NUMBER.fullmatch(count) or int(path) >= len(draft.paths):
            raise draft.wrong(
                f"paths of micro-batches: {run!r}; expected PATH*COUNT with a path from 0 to {len(draft.paths) - 1}"
            )
        if len(path_of) + int(count) > draft.microbatches:
            raise draft.wrong(f"paths of micro-batches: {run!r} goes beyond {draft.microbatches} micro-batches")
        path_of += [int(path)] * int(count)
    if len(path_of) != draft.microbatches:
        raise draft.wrong(f"paths of micro-batches: names {len(path_of)} of {draft.microbatches} micro-batches")
    return path_of


def _op(draft: _Draft, text: str, implied: list[int], path_of: list[int]) -> tuple[int, int, int, int, int]:
    found = OP.fullmatch(text)
    if found is None:
        raise draft.wrong(f"{text!r} is no op; expected KIND MICROBATCH [.SLICE] [@STAGE], as F3, BW0@5 or F3.1@5")
    name, number, part, stage, version = found.groups()
    microbatch = int(number)
    if stage is not None:
        where = int(stage)
    else:
        path = path_of[microbatch] if microbatch < len(path_of) else 0
        where = implied[path]
        if where < 0:
            raise draft.wrong(f"{text!r} needs its stage (as {text}@0): this rank holds several stages or none")
    if version is not None and not draft.update_every:
        raise draft.wrong(f"{text!r} names a weight version, but the schedule has no `asynchronous:` line")
    return Kind[name], where, microbatch, int(part or 0), int(version or 0)
