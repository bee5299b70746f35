"""PyTorch's schedule CSV (torch.distributed.pipelining, `_PipelineScheduleRuntime._load_csv`), both ways.

One row a rank, one cell an action in order: `2F0` is the forward of micro-batch 0 on stage 2. PyTorch's letters
differ from ours: its `B` is our BW, its `I` our B; `(0F1;3B0)OVERLAP_F_B` is an overlapped pair. An empty cell is a
step in which the rank does nothing. PyTorch adds sends, receives and FSDP's gathers to such an order by itself; a
file in which they stand already (its "compute_comms" form) is read without them.
"""

from __future__ import annotations

import csv
import io
import re
from typing import Final

import numpy as np

from stageloom.errors import InputError, ScheduleError
from stageloom.op import Kind
from stageloom.placement import Placement
from stageloom.schedule import Schedule

LETTERS: Final = {Kind.F: "F", Kind.B: "I", Kind.W: "W", Kind.BW: "B"}
KINDS: Final = {letter: kind for kind, letter in LETTERS.items()}
ACTION: Final = re.compile(r"([0-9]{1,9})(F|I|B|W)([0-9]{1,9})")
WITHOUT: Final = re.compile(r"[0-9]{1,9}(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)[0-9]*")
PAIR: Final = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
LARGEST: Final = 1_000_000  # stages and micro-batches a file may speak of


def refusal(schedule: Schedule) -> str | None:
    """Why the CSV cannot say this schedule, or PyTorch would run it wrong; None where it can."""
    if not schedule.synchronous:
        return "it updates weights under way, and PyTorch's runtime has one version of them"
    owners = schedule.placement.table
    if len(owners) > 1:
        return f"it has {len(owners)} replicas of the model, and in PyTorch's runtime a stage is on one rank"
    if schedule.slices > 1:
        return f"it cuts micro-batches in {schedule.slices} slices, which PyTorch's runtime does not know"
    idle = sorted(set(range(schedule.ranks)) - {int(rank) for rank in owners[0]})
    if idle:
        return f"rank {idle[0]} holds no stage, and PyTorch's runtime needs one on each rank"
    last = (schedule.kind == Kind.F) & (schedule.stage == schedule.stages - 1)
    if not np.array_equal(schedule.microbatch[last], np.arange(schedule.microbatches)):
        return "its last stage meets micro-batches out of order, and PyTorch's runtime takes the n-th loss for the n-th"
    return None


def dumps(schedule: Schedule) -> str:
    """The schedule as CSV. Raises ScheduleError with the reason where PyTorch cannot run it (see `refusal`)."""
    reason = refusal(schedule)
    if reason is not None:
        raise ScheduleError(f"{schedule.name} cannot be written as PyTorch's schedule CSV: {reason}")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for rank in range(schedule.ranks):
        writer.writerow(_cells(schedule, rank))
    return out.getvalue()


def _cells(schedule: Schedule, rank: int) -> list[str]:
    cells: list[str] = []
    row, end = int(schedule.offsets[rank]), int(schedule.offsets[rank + 1])
    while row < end:
        size = 2 if schedule.pair[row] else 1
        ops = [schedule.op(at) for at in range(row, row + size)]
        texts = [f"{op.stage}{LETTERS[op.kind]}{op.microbatch}" for op in ops]
        # PyTorch overlaps a forward with a full backward alone; the ops of another pair stand one after the other.
        overlapped = {op.kind for op in ops} == {Kind.F, Kind.BW}
        cells += [f"({';'.join(texts)})OVERLAP_F_B"] if overlapped else texts
        row += size
    return cells


def loads(text: str, name: str = "schedule", file: str = "schedule.csv") -> Schedule:
    """The schedule that a CSV says, called `name`; its form is checked here, its sense by `stageloom.problems`.

    Raises InputError naming file, rank (row) and cell.
    """
    ops: list[tuple[int, int, int]] = []
    pair: list[bool] = []
    offsets = [0]
    owner: dict[int, int] = {}
    rows = list(csv.reader(io.StringIO(text)))
    if not rows:
        raise InputError(f"{file}: is empty; a row of actions for each rank is needed, such as 0F0,0F1,0B0,0B1")
    for rank, row in enumerate(rows):
        for number, cell in enumerate(row):
            place = f"{file}: row {rank + 1}, cell {number + 1}"
            found = _read(cell.strip(), place)
            for _, stage, _ in found:
                if owner.setdefault(stage, rank) != rank:
                    raise InputError(f"{place}: {cell.strip()}: stage {stage} is on rank {owner[stage]} already")
            ops += found
            pair += [True, False] if len(found) == 2 else [False] * len(found)
        offsets.append(len(ops))
    if not ops:
        raise InputError(f"{file}: holds no action; expected such as 0F0")
    missing = next((stage for stage in range(max(owner)) if stage not in owner), None)
    if missing is not None:
        raise InputError(f"{file}: stage {missing} is on no rank, though stage {max(owner)} is there")
    placement = Placement(len(rows), (tuple(owner[stage] for stage in range(len(owner))),))
    kind, stage, microbatch = (np.array(column) for column in zip(*ops, strict=True))
    microbatches = int(microbatch.max()) + 1
    return Schedule(
        name=name,
        placement=placement,
        microbatches=microbatches,
        offsets=np.array(offsets, dtype=np.int64),
        kind=kind.astype(np.int8),
        stage=stage.astype(np.int32),
        microbatch=microbatch.astype(np.int32),
        slice=np.zeros(len(ops), dtype=np.int32),
        pair=np.array(pair, dtype=np.bool_),
        path_of=np.zeros(microbatches, dtype=np.int8),
    )


def _read(cell: str, place: str) -> list[tuple[int, int, int]]:
    """The ops of a cell as (kind, stage, micro-batch): none, one, or the two of a pair."""
    if not cell or WITHOUT.fullmatch(cell):
        return []
    both = PAIR.fullmatch(cell)
    parts = both[1].split(";") if both else [cell]
    if both and len(parts) != 2:
        raise InputError(f"{place}: {cell}: overlaps {len(parts)} actions; two are needed")
    found: list[tuple[int, int, int]] = []
    for part in parts:
        action = ACTION.fullmatch(part.strip())
        if action is None:
            raise InputError(f"{place}: {cell!r} is no action; expected stage, F, I, B or W, micro-batch, such as 2F0")
        stage, microbatch = int(action[1]), int(action[3])
        if max(stage, microbatch) >= LARGEST:
            raise InputError(f"{place}: {cell}: stages and micro-batches below {LARGEST:,} are needed")
        found.append((int(KINDS[action[2]]), stage, microbatch))
    return found
