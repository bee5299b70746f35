"""What the ranks of test_execute_devices.py do."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

import toy
from stageloom.errors import InputError
from stageloom.execute.pipeline import Pipeline
from stageloom.execute.workers import doing
from stageloom.schedule import Schedule


def _stages(schedule: Schedule, rank: int) -> dict[tuple[int, int], nn.Module]:
    own = schedule.placement.stages_of[rank]
    return {(path, number): toy.stage(number) for path, numbers in enumerate(own) for number in numbers}


def train(seat: Any, schedule: Schedule, device: str | None, options: dict[str, Any], extra: list[int]) -> Any:
    """Two steps; how many groups reach others, how many groups there are, and each row's span.

    `extra`: how many groups of their own the ranks have made before.
    """
    for _ in range(extra[seat.rank] if extra else 0):
        dist.new_group([seat.rank], use_local_synchronization=True)
    modules = _stages(schedule, seat.rank)
    for module in modules.values():
        module.to(device or "cpu")
    pipeline = Pipeline(schedule, modules, toy.loss, group=seat.group, device=device, on_task=doing, **options)
    inputs, targets = toy.data(schedule.microbatches, 0)
    losses = [pipeline.step(inputs, targets, kwargs={}).loss for _ in range(2)]
    run = pipeline.step(inputs, targets).run
    net = pipeline.executor.net
    return {
        "losses": losses,
        "gradients": {key: {n: p.grad.cpu() for n, p in m.named_parameters()} for key, m in modules.items()},  # type: ignore[union-attr]
        "to": sorted(net.outgoing),
        "from": sorted(net.incoming),
        "device": (str(pipeline.device), str(net.wire), str(net.control)),
        "spans": run.spans,
        "clipped": pipeline.clip_grad_norm(1e9),
        "evaluated": pipeline.evaluate(inputs, targets).loss,
    }


def refused(seat: Any, schedule: Schedule, case: str) -> str:
    modules = _stages(schedule, seat.rank)
    device: Any = {"nowhere": "nowhere", "kind": "cuda:99", "meta": "meta", "number": 3.5}.get(case)
    if case == "meta stage":
        next(iter(modules.values())).to("meta")
    if case == "cuda asked":
        device = "xpu"
    try:
        Pipeline(schedule, modules, toy.loss, group=seat.group, device=device)
    except InputError as error:
        return str(error)
    return "went through"
