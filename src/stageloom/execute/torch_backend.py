"""The same schedule and stages on PyTorch's own runtime (torch.distributed.pipelining), to check ours against.

It runs schedules whose stages have one owner each. `refusal` says why it cannot run another one, or would run it wrong.
Our kinds in PyTorch's letters: F is F, BW is B, B is I, W is W; an overlapped pair of F and BW is OVERLAP_F_B.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaks unknown types, and its schedules are private)
from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stageloom.errors import InputError, ScheduleError, StageloomError
from stageloom.execute.arguments import Stages, require_sound
from stageloom.execute.mesh import grid_of
from stageloom.execute.split import Report
from stageloom.execute.ties import marked
from stageloom.op import Kind
from stageloom.schedule import Schedule

LETTERS: Final = {Kind.F: "F", Kind.B: "I", Kind.W: "W", Kind.BW: "B"}


def refusal(schedule: Schedule) -> str | None:
    """Why PyTorch's runtime cannot run this schedule as it is meant; None if it can."""
    if not schedule.synchronous:
        return "it updates weights under way, and PyTorch's runtime has one version of them"
    owners = schedule.placement.table
    if len(owners) > 1:
        ranks = sorted({int(rank) for rank in owners[:, 0]})
        return (
            f"it has {len(owners)} paths (stage 0 is on ranks {ranks}), and PyTorch's runtime knows one owner a stage"
        )
    if schedule.slices > 1:
        return f"it cuts micro-batches in {schedule.slices} slices, which PyTorch's runtime does not know"
    idle = sorted(set(range(schedule.ranks)) - {int(rank) for rank in owners[0]})
    if idle:
        return f"ranks {idle} hold no stage, and PyTorch's runtime needs one on each"
    last = (schedule.kind == Kind.F) & (schedule.stage == schedule.stages - 1)
    order = schedule.microbatch[last]
    if not np.array_equal(order, np.arange(schedule.microbatches)):
        return (
            f"its last stage runs micro-batches in the order {', '.join(map(str, order[:8].tolist()))}, and PyTorch's "
            "runtime takes the n-th loss for that of micro-batch n"
        )
    return None


def orders(schedule: Schedule) -> dict[int, list[str]]:
    """Every rank's actions as PyTorch writes them in its CSV files: 2F0, 2I0, 2W0, 2B0, (0F1;3B0)OVERLAP_F_B."""
    found: dict[int, list[str]] = {}
    for rank in range(schedule.ranks):
        row = int(schedule.offsets[rank])
        found[rank] = []
        while row < schedule.offsets[rank + 1]:
            size = 2 if schedule.pair[row] else 1
            ops = [schedule.op(at) for at in range(row, row + size)]
            texts = [f"{op.stage}{LETTERS[op.kind]}{op.microbatch}" for op in ops]
            overlapped = {op.kind for op in ops} == {Kind.F, Kind.BW}
            # other pairs PyTorch has none of; one after the other they wait for nothing else
            found[rank] += [f"({';'.join(texts)})OVERLAP_F_B"] if overlapped else texts
            row += size
    return found


def require_runnable(schedule: Schedule) -> None:
    """Raise ScheduleError for a schedule that PyTorch's runtime cannot run, with the reason."""
    reason = refusal(schedule)
    if reason is not None:
        raise ScheduleError(f"{schedule.name} cannot run on PyTorch's runtime: {reason}")


@dataclass(frozen=True)
class Mean:
    """What a step gave: the mean loss over micro-batches, on every rank."""

    loss: float


class TorchPipeline:
    """What `pipeline.Pipeline` does, done by PyTorch: `step`, and gradients in `.grad`.

    The loss's mean over micro-batches is taken before its backward, so that gradients add up over steps as ours do.
    Raises ScheduleError for a schedule that PyTorch's runtime cannot run, InputError for stages that are not this
    rank's.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Stages,
        loss: Callable[[Any, Any], Tensor],
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        require_sound(schedule)
        require_runnable(schedule)
        self.schedule = schedule
        self.group = grid_of(None, group, schedule).pipeline
        own = schedule.placement.stages_of[dist.get_rank(self.group)][0]
        given = {(key[1] if isinstance(key, tuple) else key): module for key, module in stages.items()}
        if sorted(given) != list(own):
            raise InputError(f"stages: are given for {sorted(given)}; {schedule.name} puts {list(own)} on this rank")
        ties = marked({(0, number): module for number, module in given.items()}, self.group)
        if ties:
            raise InputError(
                f"stages: {list(ties[0])} are one parameter in the model that was split, and PyTorch's runtime does "
                "not add up their gradients; use Pipeline"
            )
        self.runtime = _runtime(schedule, {number: given[number] for number in own}, loss, self.group)
        split = {int(stage) for stage in schedule.stage[schedule.kind == Kind.W]}
        self.reports = {
            (0, number): Report("graph" if number in split else "fused", "as PyTorch's runtime does it", {}, ())
            for number in own
        }
        self.first, self.last = 0 in own, schedule.stages - 1 in own

    def step(self, inputs: Tensor | None = None, targets: Tensor | None = None) -> Mean:
        """Forward and backward of one mini-batch, cut along its first dimension."""
        for name, value, wanted in (("inputs", inputs, self.first), ("targets", targets, self.last)):
            if wanted and (value is None or len(value) % self.schedule.microbatches):
                got = "nothing" if value is None else f"{len(value)} rows"
                raise InputError(f"{name}: {got}; expected equal parts for {self.schedule.microbatches} micro-batches")
        losses: list[Tensor] = []
        given = (inputs,) if self.first else ()
        self.runtime.step(*given, target=targets if self.last else None, losses=losses, return_outputs=False)
        total = torch.zeros((), dtype=torch.float64)
        for loss in losses:
            total += loss.detach().double().cpu()
        dist.all_reduce(total, group=self.group)
        return Mean(float(total))


def _runtime(
    schedule: Schedule,
    stages: Mapping[int, nn.Module],
    loss: Callable[[Any, Any], Tensor],
    group: dist.ProcessGroup,
) -> Any:
    try:
        from torch.distributed.pipelining import PipelineStage, schedules
    except ImportError as error:
        raise StageloomError(f"PyTorch {torch.__version__} has no pipelining runtime: {error}") from None
    theirs: Any = schedules
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)  # it logs what it raises
    device = torch.device("cpu")

    def mean(output: Any, target: Any) -> Tensor:
        return loss(output, target) / schedule.microbatches

    made = [PipelineStage(module, number, schedule.stages, device, group=group) for number, module in stages.items()]
    runtime = theirs._PipelineScheduleRuntime(made, schedule.microbatches, loss_fn=mean, scale_grads=False)
    actions = {rank: [theirs._Action.from_str(text) for text in row] for rank, row in orders(schedule).items()}
    runtime._prepare_schedule_with_comms(actions)
    return runtime
