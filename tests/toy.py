"""A small model in stages whose gradients one process computes too, and the tasks that compare the two in workers.

A stage mixes every position with the mean of those before it, so that it needs a carry where its input is cut along the
sequence, and adds a product of two layers, so that B and W have something to do.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from stageloom.execute.pipeline import Pipeline
from stageloom.schedule import Schedule

WIDTH, LENGTH, ROWS = 6, 12, 4  # features, positions, rows of a micro-batch
WHOLE = object()


class Toy(nn.Module):
    """One stage: x + second(tanh(first(norm(x))) + memory(sum of earlier positions))."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, 2 * width)
        self.memory = nn.Linear(width, 2 * width, bias=False)
        self.second = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, carry: Any = WHOLE) -> Any:
        past = torch.zeros_like(x[:, :1]) if carry is WHOLE or carry is None else carry
        sums = torch.cumsum(torch.cat((past, x), dim=1), dim=1)[:, 1:]
        out = x + self.second(torch.tanh(self.first(self.norm(x))) + 0.1 * self.memory(sums))
        return out if carry is WHOLE else (out, sums[:, -1:])


def stage(number: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The module of a stage: the same on every rank."""
    torch.manual_seed(100 + number)
    return Toy().to(dtype)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def data(microbatches: int, step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (microbatches * ROWS, LENGTH, WIDTH)
    return torch.randn(shape, generator=generator, dtype=dtype), torch.randn(shape, generator=generator, dtype=dtype)


@cache
def reference(
    stages: int,
    microbatches: int,
    steps: int,
    dtype: torch.dtype = torch.float64,
    rate: float = 0.1,
    add_up: bool = False,
) -> tuple[list[float], list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """One process, no pipeline: losses of every step, gradients of the last step and the weights after it, by stage.

    With `add_up` the gradients of all steps are added up, and no weight changes.
    """
    modules = [stage(number, dtype) for number in range(stages)]
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=rate, momentum=0.9)
    losses: list[float] = []
    gradients: list[dict[str, Tensor]] = []
    for step in range(steps):
        if not add_up:
            optimizer.zero_grad()
        inputs, targets = data(microbatches, step, dtype)
        total = torch.zeros((), dtype=dtype)
        for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
            for module in modules:
                x = module(x)
            total = total + loss(x, y) / microbatches
        total.backward()
        losses.append(float(total.detach()))
        gradients = [{name: p.grad.clone() for name, p in m.named_parameters() if p.grad is not None} for m in modules]
        if not add_up:
            optimizer.step()
    return losses, gradients, [dict(m.state_dict()) for m in modules]


Expected = tuple[list[float], list[dict[str, Tensor]], list[dict[str, Tensor]]]


def compare(
    seat: Any, schedule: Schedule, steps: int, dtype: torch.dtype, split: str, expected: Expected, rate: float = 0.1
) -> dict[str, Any]:
    """Train on this rank by the schedule and say how far loss, gradients and weights are from `expected`."""
    from stageloom.execute.workers import doing

    own = schedule.placement.stages_of[seat.rank]
    modules = {(path, number): stage(number, dtype) for path, numbers in enumerate(own) for number in numbers}
    pipeline = Pipeline(schedule, modules, loss, group=seat.group, split=split, on_task=doing)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=rate, momentum=0.9) if modules else None
    losses, gradients, weights = expected
    worst_loss = worst_gradient = worst_weight = 0.0
    sends = 0
    for step in range(steps):
        if optimizer is not None:
            optimizer.zero_grad()
        result = pipeline.step(*data(schedule.microbatches, step, dtype))
        worst_loss = max(worst_loss, abs(result.loss - losses[step]))
        sends = max(sends, result.run.most_sends)
        if step == steps - 1:
            for (_, number), module in modules.items():
                for name, parameter in module.named_parameters():
                    assert parameter.grad is not None, f"{name} of stage {number} has no gradient"
                    difference = (parameter.grad - gradients[number][name]).abs().max()
                    worst_gradient = max(worst_gradient, float(difference))
        if optimizer is not None:
            optimizer.step()
    for (_, number), module in modules.items():
        for name, value in module.state_dict().items():
            worst_weight = max(worst_weight, float((value - weights[number][name]).abs().max()))
    return {
        "loss": worst_loss,
        "gradient": worst_gradient,
        "weight": worst_weight,
        "sends": sends,
        "modes": {str(key): report.mode for key, report in pipeline.reports.items()},
    }


def emulate(
    ranks: int, microbatches: int, update_every: int, version_of: Any, rate: float = 0.05, pipelines: int = 1
) -> list[dict[str, Tensor]]:
    """One process with the same staleness: micro-batches one by one, each on the weight version its schedule states.

    `version_of(microbatch, stage)` comes from the papers' formulas. Weights of all stages at the end. Of several
    pipelines, each with its part of the data, those with one number count as one micro-batch.
    """
    live = [stage(number) for number in range(ranks)]
    optimizers = [torch.optim.SGD(module.parameters(), lr=rate, momentum=0.9) for module in live]
    history = [[{n: p.detach().clone() for n, p in module.named_parameters()}] for module in live]
    parts = [each.chunk(pipelines * microbatches) for each in data(pipelines * microbatches, 0)]
    for m in range(microbatches):
        x, y = (torch.cat(each[m::microbatches]) for each in parts)
        leaves = [
            {n: w.clone().requires_grad_() for n, w in history[s][version_of(m, s)].items()} for s in range(ranks)
        ]
        for number, module in enumerate(live):
            x = torch.func.functional_call(module, leaves[number], (x,))
        loss(x, y).backward()
        for number, module in enumerate(live):
            for name, parameter in module.named_parameters():
                gradient = leaves[number][name].grad / update_every
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            if (m + 1) % update_every == 0:
                optimizers[number].step()
                optimizers[number].zero_grad()
                history[number].append({n: p.detach().clone() for n, p in module.named_parameters()})
    return [dict(module.state_dict()) for module in live]


def train_asynchronously(seat: Any, schedule: Schedule, rate: float = 0.05) -> dict[str, Any]:
    """This rank's weights after one run of an asynchronous schedule, and the most versions it held at once."""
    from stageloom.execute.workers import doing

    module = stage(seat.rank)
    pipeline = Pipeline(
        schedule,
        {seat.rank: module},
        loss,
        group=seat.group,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.9),
        on_task=doing,
    )
    pipeline.step(*data(schedule.microbatches, 0))
    versions = pipeline.runners[0, seat.rank].versions
    return {"weights": dict(module.state_dict()), "most": versions.most if versions else 1}
