"""What a step of the pipeline gives."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch.distributed leaks unknown types)
from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from stageloom.execute.devices import UNORDERED, backends, control_device
from stageloom.execute.executor import Run
from stageloom.execute.mesh import Grid
from stageloom.schedule import Schedule

STAR: Final = 16
"""Ranks up to which the one that has the losses sends their sum to all others itself."""

TAG: Final = 2
"""Of messages with sums of losses; those of ops have 0 and 1."""


class Sum:
    """(Sum of losses, their number) over all ranks, once it is there."""

    def __init__(self, total: Tensor, works: list[Any]) -> None:
        self._total, self._works = total, works

    def wait(self) -> Tensor:
        """The sum. A message must be waited for once alone: a second wait would be for the message after it."""
        works, self._works = self._works, []
        for work in works:
            work.wait()
        return self._total


class Losses:
    """Sums the losses of a run over all ranks while they go on.

    One rank has them all where there is one path and one pipeline; it then sends the sum to each of the others, which
    takes less of every rank than a reduction. A sum is kept until the one after it, whether it is asked for or not:
    a message that is dropped under way would be lost, and a receive's would be taken for the next one.
    """

    def __init__(self, grid: Grid, schedule: Schedule) -> None:
        self.group = grid.whole
        self.device = control_device(self.group)
        self.rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        by_pair = backends(self.group).get(self.device.type) in UNORDERED
        alone = grid.mesh is None and len(schedule.placement.paths) == 1 and size <= STAR
        self.source = int(schedule.placement.table[0, -1]) if alone and by_pair else None
        self.others = [rank for rank in range(size) if rank != self.rank]
        self.before: Sum | None = None

    def summed(self, run: Run) -> Sum:
        """Start to sum. To be called on all ranks."""
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        if run.losses:
            total[0] = torch.stack(list(run.losses.values())).sum(dtype=torch.float64)
            total[1] = len(run.losses)
        if self.before is not None:
            self.before.wait()
        if self.source is None:
            works = [dist.all_reduce(total, group=self.group, async_op=True)]
        elif self.source == self.rank:
            works = [self.group.send([total], other, TAG) for other in self.others]
        else:
            works = [self.group.recv([total], self.source, TAG)]
        self.before = Sum(total, works)
        return self.before


@dataclass(frozen=True)
class StepResult:
    """What a step gave.

    `outputs`: an evaluation's, by micro-batch, on ranks with a last stage. `run`: what this rank did and when.
    """

    outputs: dict[int, Any]
    run: Run
    _sum: Sum

    @cached_property
    def loss(self) -> float:
        """The mean over micro-batches, on every rank; nan where there are none (an evaluation without targets).

        Ranks sum it while they go on; the first look waits for the sum.
        """
        total, number = self._sum.wait().tolist()
        return total / number if number else math.nan
