"""Who is slow: the work of every rank by kind of op, gathered after a step, and the rank that the others wait for."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaks unknown types)
from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from stageloom.op import KIND_NAMES
from stageloom.schedule import Schedule

KINDS: Final = len(KIND_NAMES)


@dataclass(frozen=True)
class Load:
    """A rank's work in a step: `taken` seconds from its start to its end, `seconds` and `ops` by kind (`op.Kind`)."""

    rank: int
    taken: float
    seconds: tuple[float, ...]
    ops: tuple[int, ...]

    @property
    def work(self) -> float:
        return sum(self.seconds)

    @property
    def busy(self) -> float:
        """The part of the step in which the rank computed."""
        return self.work / self.taken if self.taken > 0 else 0.0

    def each(self, kind: int) -> float | None:
        """Mean seconds of an op of this kind; None where the rank has none."""
        return self.seconds[kind] / self.ops[kind] if self.ops[kind] else None


@dataclass(frozen=True)
class Straggler:
    """The rank with the most work: `excess` is by how much that exceeds the median of the other ranks, as a part of it.

    `kind` is the op that costs most of the excess: one takes `own` seconds there, `others` is the median elsewhere.
    None where no kind of op takes longer than elsewhere (the rank has more ops).
    """

    rank: int
    excess: float
    kind: str | None = None
    own: float = 0.0
    others: float = 0.0

    def __str__(self) -> str:
        where = ""
        if self.kind is not None:
            where = f", {self.kind} takes {1e3 * self.own:.3g} ms, elsewhere {1e3 * self.others:.3g}"
        return f"rank {self.rank} has {100 * self.excess:.0f} % more work than the others{where}"


class Loads:
    """Gathers the loads of all ranks and keeps those of the last steps (`window`) for a mean; the same on all ranks."""

    def __init__(self, group: dist.ProcessGroup, schedule: Schedule, window: int = 10) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.kinds: list[int] = schedule.kind.tolist()
        self.kept: deque[Tensor] = deque(maxlen=window)

    def add(self, spans: Mapping[int, tuple[float, float]], taken: float) -> None:
        """A step has ended. One small collective; all ranks call it."""
        own = torch.zeros(1 + 2 * KINDS, dtype=torch.float64)
        own[0] = taken
        table = own[1:].view(2, KINDS).numpy()
        for row, (began, ended) in spans.items():
            table[0, self.kinds[row]] += ended - began
            table[1, self.kinds[row]] += 1
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own, group=self.group)
        self.kept.append(torch.stack(found))

    def restart(self) -> None:
        """Forget the steps so far."""
        self.kept.clear()

    def mean(self) -> list[Load]:
        """The mean load of each rank in the steps kept."""
        if not self.kept:
            return []
        rows: list[list[float]] = torch.stack(list(self.kept)).mean(0).tolist()
        return [
            Load(rank, row[0], tuple(row[1 : 1 + KINDS]), tuple(round(count) for count in row[1 + KINDS :]))
            for rank, row in enumerate(rows)
        ]


def straggler(loads: Sequence[Load]) -> Straggler | None:
    """The rank with the most work; None where there is but one rank or no work."""
    if len(loads) < 2:
        return None
    slowest = max(loads, key=lambda load: load.work)
    others = [load for load in loads if load is not slowest]
    usual = median(load.work for load in others)
    if not usual > 0:
        return None
    excess = slowest.work / usual - 1
    lost: dict[int, tuple[float, float, float]] = {}  # by kind: seconds a step lost, an op's time here and elsewhere
    for kind in range(KINDS):
        own, elsewhere = slowest.each(kind), [t for load in others if (t := load.each(kind)) is not None]
        if own is not None and elsewhere:
            middle = median(elsewhere)
            lost[kind] = ((own - middle) * slowest.ops[kind], own, middle)
    worst = max(lost, key=lambda kind: lost[kind][0], default=None)
    if worst is None or lost[worst][0] <= 0:
        return Straggler(slowest.rank, excess)
    return Straggler(slowest.rank, excess, KIND_NAMES[worst], *lost[worst][1:])
