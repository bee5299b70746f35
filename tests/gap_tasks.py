"""Stages that PyTorch's runtime trips over, and training them: by ours, by theirs, and in one process."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.utils.checkpoint import checkpoint

import toy
from stageloom.execute.pipeline import Pipeline
from stageloom.execute.torch_backend import orders
from stageloom.execute.workers import doing
from stageloom.schedule import Schedule

WIDTH = toy.WIDTH
Gradients = dict[int, dict[str, Tensor]]
torch_schedules: Any = schedules  # private names from here on
logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)  # it logs what it raises

# -------------------------------------------------------------------------------------------------------------- stages


class Stage(nn.Module):
    """Two layers; counts how often it is called."""

    def __init__(self, number: int, last: bool) -> None:
        super().__init__()
        torch.manual_seed(500 + number)
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)
        self.number, self.last, self.calls = number, last, 0

    def body(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.second(torch.tanh(self.first(x)))

    def forward(self, x: Tensor) -> Any:
        return self.body(x)


class Transposed(Stage):
    """Its output is a view of what it has computed."""

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).transpose(0, 1).flip(0).transpose(0, 1)[:, :-1]


class Passing(Stage):
    """Its output is a view of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) if self.number != 1 else x.view(-1, WIDTH).view_as(x)


class Chunked(Stage):
    """All but the last give two views of one tensor, all but the first take two."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        out = self.body(x if y is None else torch.cat((x, y), dim=1))
        return out if self.last else out.chunk(2, dim=1)


class Split(Stage):
    """Three parts of different sizes, one of which nobody needs."""

    def forward(self, x: Tensor, y: Tensor | None = None, z: Tensor | None = None) -> Any:
        assert (y is None) == (z is None)
        out = self.body(x if y is None else torch.cat((x, y), dim=1))
        return out if self.last else out.split((2, out.shape[1] - 3, 1), dim=1)


class InPlace(Stage):
    """All but the first write into their input, which is a view that the stage before gave."""

    def forward(self, x: Tensor) -> Tensor:
        if self.number:
            x.mul_(1.5)[:, 0].add_(1.0)
        return self.body(x)[:, 1:]


class Checkpointed(Stage):
    """Keeps no activations: torch.utils.checkpoint runs the body again in the backward."""

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.body, x, use_reentrant=False)


class _Scaled(torch.autograd.Function):
    """x * weight * factor, whose backward can run once only, as of a function that frees what it has used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, log: list[str]) -> Tensor:
        ctx.kept, ctx.log = [x, weight], log
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.log.append("backward")
        weight, x = ctx.kept.pop(), ctx.kept.pop()
        return grads[0] * weight, (grads[0] * x).flatten(0, -2).sum(0), None


class Custom(Stage):
    def __init__(self, number: int, last: bool) -> None:
        super().__init__(number, last)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.log: list[str] = []

    def forward(self, x: Tensor) -> Any:
        return _Scaled.apply(self.body(x), self.scale, self.log)


class Normed(Stage):
    """Its batch norm counts the micro-batches that it has seen."""

    def __init__(self, number: int, last: bool) -> None:
        super().__init__(number, last)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.body(x).transpose(1, 2)).transpose(1, 2)


class Tied(Stage):
    """The first layer's weight is one parameter in all stages."""

    def __init__(self, number: int, last: bool) -> None:
        super().__init__(number, last)
        torch.manual_seed(499)
        self.first.weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / WIDTH)


CASES: dict[str, type[Stage]] = {
    "plain": Stage, "transposed": Transposed, "passing": Passing, "chunked": Chunked, "split": Split,
    "in place": InPlace, "checkpointed": Checkpointed, "custom": Custom, "normed": Normed, "tied": Tied,
}  # fmt: skip


def stage(case: str, number: int, stages: int) -> Stage:
    return CASES[case](number, number == stages - 1).double()


def loss(output: Tensor, target: Tensor) -> Tensor:
    return toy.loss(output, target[:, : output.shape[1]])


def seen(modules: Mapping[int, nn.Module]) -> list[int]:
    """How many micro-batches the batch norms have counted."""
    return [int(m.num_batches_tracked) for part in modules.values() for m in part.modules() if hasattr(m, "momentum")]


def gradients(modules: Mapping[int, nn.Module]) -> Gradients:
    return {
        number: {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
        for number, module in modules.items()
    }


# ------------------------------------------------------------------------------------------------------------ training


def whole(
    case: str, stages: int, microbatches: int, steps: int = 1
) -> tuple[list[float], dict[int, dict[str, Tensor]]]:
    """One process: the loss of every step, and the gradients added up over them."""
    modules = {number: stage(case, number, stages) for number in range(stages)}
    if case == "tied":
        for module in modules.values():
            module.first.weight = modules[0].first.weight
    losses: list[float] = []
    for step in range(steps):
        inputs, targets = toy.data(microbatches, step)
        total = 0.0
        for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
            for module in modules.values():
                x = module(*(x if isinstance(x, tuple) else (x.clone(),)))
            value = loss(x, y) / microbatches
            value.backward()
            total += float(value.detach())
        losses.append(total)
    return losses, gradients(modules)


def ours(seat: Any, schedule: Schedule, case: str, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    own = schedule.placement.stages_of[seat.rank]
    modules = {(path, n): stage(case, n, schedule.stages) for path, of in enumerate(own) for n in of}
    ties = [[(n, "first.weight") for n in range(schedule.stages)]] if case == "tied" else ()
    pipeline = Pipeline(schedule, modules, loss, group=seat.group, tied=ties, on_task=doing, **options)
    losses = [pipeline.step(*toy.data(schedule.microbatches, step)).loss for step in range(steps)]
    return {
        "losses": losses,
        "gradients": gradients({n: module for (_, n), module in modules.items()}),
        "calls": {n: module.calls for (_, n), module in modules.items()},
        "modes": {report.mode for report in pipeline.reports.values()},
        "seen": seen({n: module for (_, n), module in modules.items()}),
    }


Lowered = dict[int, list[str]]  # PyTorch's actions of every rank, as it writes them


def without_reductions(actions: Lowered) -> Lowered:
    return {rank: [each for each in row if "REDUCE_GRAD" not in each] for rank, row in actions.items()}


def first_receives_swapped(actions: Lowered) -> Lowered:
    """Rank 1 expects the second activations before the first."""
    first, second = [at for at, each in enumerate(actions[1]) if "RECV_F" in each][:2]
    actions[1].insert(first, actions[1].pop(second))
    return actions


def theirs(
    seat: Any, schedule: Schedule, case: str, steps: int, change: Callable[[Lowered], Lowered] | None = None
) -> dict[str, Any]:
    """The same by PyTorch's runtime as it comes, or the error it ends with.

    With `change` the order, with the sends and receives that PyTorch has put in, is changed before it is run.
    """
    own = schedule.placement.stages_of[seat.rank][0]
    modules = {n: stage(case, n, schedule.stages) for n in own}
    runtime = runtime_of(seat, schedule, modules)
    if change is not None:
        lowered = {rank: [str(action) for action in row] for rank, row in runtime.pipeline_order_with_comms.items()}
        actions = {rank: list(map(torch_schedules._Action.from_str, row)) for rank, row in change(lowered).items()}
        runtime._prepare_schedule_with_comms(actions, format="compute_comms")
    try:
        for step in range(steps):
            inputs, targets = toy.data(schedule.microbatches, step)
            given = (inputs,) if 0 in own else ()
            runtime.step(*given, target=targets if schedule.stages - 1 in own else None)
    except Exception as error:
        return {"error": innermost(error)}
    calls = {n: module.calls for n, module in modules.items()}
    return {"gradients": gradients(modules), "calls": calls, "seen": seen(modules), "error": None}


def refused_by_class(seat: Any, name: str, microbatches: int) -> str:
    """What a schedule class of PyTorch says to so few micro-batches."""
    module = stage("plain", seat.rank, seat.size)
    made: Any = PipelineStage(module, seat.rank, seat.size, torch.device("cpu"), group=seat.group)
    multi = name not in ("ScheduleGPipe", "Schedule1F1B")
    try:
        getattr(torch_schedules, name)([made] if multi else made, microbatches, loss_fn=loss)
    except ValueError as error:
        return str(error)
    return ""


def runtime_of(seat: Any, schedule: Schedule, modules: Mapping[int, nn.Module]) -> Any:
    device = torch.device("cpu")
    made = [PipelineStage(m, n, schedule.stages, device, group=seat.group) for n, m in modules.items()]
    runtime = torch_schedules._PipelineScheduleRuntime(made, schedule.microbatches, loss_fn=loss)
    actions = {rank: list(map(torch_schedules._Action.from_str, row)) for rank, row in orders(schedule).items()}
    runtime._prepare_schedule_with_comms(actions)
    return runtime


def innermost(error: BaseException) -> str:
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    return re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")
