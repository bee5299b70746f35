"""What ranks do in test_execute_torch_backend.py: train by PyTorch's runtime and by ours, on the same stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

import toy
from stageloom.errors import StageloomError
from stageloom.execute.partition import split
from stageloom.execute.pipeline import Pipeline
from stageloom.execute.torch_backend import TorchPipeline
from stageloom.execute.workers import doing
from stageloom.schedule import Schedule


def gradients(modules: Mapping[int, nn.Module]) -> dict[int, dict[str, Any]]:
    return {number: {name: p.grad for name, p in module.named_parameters()} for number, module in modules.items()}


def both(seat: Any, schedule: Schedule, steps: int) -> list[tuple[list[float], dict[int, dict[str, Any]]]]:
    """Losses, and gradients added up over the steps: PyTorch's, then ours."""
    own = schedule.placement.stages_of[seat.rank][0]
    found: list[tuple[list[float], dict[int, dict[str, Any]]]] = []
    for runtime in (TorchPipeline, Pipeline):
        doing(runtime.__name__)
        modules = {number: toy.stage(number) for number in own}
        pipeline: Any = runtime(schedule, modules, toy.loss, group=seat.group)
        losses = [pipeline.step(*toy.data(schedule.microbatches, step)).loss for step in range(steps)]
        found.append((losses, gradients(modules)))
    return found


def refused(seat: Any, schedule: Schedule, case: str) -> str:
    """The error that each rank is refused with."""
    own = {number: toy.stage(number) for number in schedule.placement.stages_of[seat.rank][0]}
    inputs, targets = toy.data(schedule.microbatches, 0)
    if case == "tied":
        shared = nn.Linear(toy.WIDTH, toy.WIDTH).double()
        own = {number: split(nn.Sequential(shared, shared), 1)[number] for number in own}
    if case == "stages":
        own = {number + 1: module for number, module in own.items()}
    try:
        pipeline = TorchPipeline(schedule, own, toy.loss, group=seat.group)
        pipeline.step(None if case == "inputs" else inputs[1:], None if case == "targets" else targets)
    except StageloomError as error:
        return f"{type(error).__name__}: {error}"
    return "went through"
