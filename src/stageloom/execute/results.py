"""What a step of the pipeline gives."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch.distributed leaks unknown types)
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stageloom.execute.devices import control_device
from stageloom.execute.executor import Run
from stageloom.execute.mesh import Grid


@dataclass(frozen=True)
class StepResult:
    """What a step gave.

    `outputs`: an evaluation's, by micro-batch, on ranks with a last stage. `run`: what this rank did and when.
    """

    outputs: dict[int, Any]
    run: Run
    _total: Tensor  # (sum of losses, their number), summed over ranks once the work is done
    _work: Any

    @cached_property
    def loss(self) -> float:
        """The mean over micro-batches, on every rank; nan where there are none (an evaluation without targets).

        Ranks sum it while they go on; the first look waits for the sum.
        """
        self._work.wait()
        return float(self._total[0] / self._total[1])


def result_of(run: Run, outputs: dict[int, Any], grid: Grid) -> StepResult:
    """The result of a run; starts to sum the loss over all ranks, and so has to be called on all of them."""
    total = torch.zeros(2, dtype=torch.float64, device=control_device(grid.whole))
    if run.losses:
        total[0] = torch.stack(list(run.losses.values())).sum(dtype=torch.float64)
        total[1] = len(run.losses)
    return StepResult(outputs, run, total, dist.all_reduce(total, group=grid.whole, async_op=True))
