"""Tasks of test_execute_profile.py and stages with a known price; a worker imports them by name."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stageloom.costs import Costs
from stageloom.execute import emulate
from stageloom.execute.clocks import Offset, offset
from stageloom.execute.language import Config, batches, bytes_of_library, language_model, next_byte_loss
from stageloom.execute.profile import Profile, profile
from stageloom.execute.stragglers import Load, Loads
from stageloom.execute.training import Work, optimizer_of, stages_of
from stageloom.execute.workers import Seat
from stageloom.schedule import Schedule

FORWARD, BACKWARD = 0.004, 0.009  # seconds
WIDTH, HIDDEN, ROWS = 32, 128, 16


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(BACKWARD)
        return grad


class Slow(nn.Module):
    """A linear layer, and something after it that takes `times` the time given above."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        for _ in range(self.times):
            x = _Slow.apply(x)
        return x


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))


def squares(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def data(microbatches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn((2, microbatches * ROWS, WIDTH), generator=generator)
    return x, y


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)


CONFIG = Config(layers=2, width=16, heads=2, context=16)


def of_language_model(seat: Seat, schedule: Schedule, repeats: int) -> Profile:
    """The profile of the small language model's stages on this pool's ranks."""
    work = Work(schedule, CONFIG, size=2, data_bytes=50_000)
    stages = stages_of(work, seat.rank, language_model(CONFIG, 0))
    inputs, targets = batches(bytes_of_library(50_000), schedule.microbatches, 2, CONFIG.context, 0, 0)
    make = optimizer_of(work)
    return profile(
        stages, inputs, next_byte_loss, targets, schedule=schedule, group=seat.group, repeats=repeats, optimizer=make
    )


def clocks(seat: Seat, ahead: float) -> tuple[Offset, Offset]:
    """What a rank finds where its clock is `ahead` times its number before the first one's, and without asking."""
    known = offset(seat.group)
    return offset(seat.group, clock=lambda: time.perf_counter() + ahead * seat.rank, ask=True), known


def loads(seat: Seat, schedule: Schedule) -> list[list[Load]]:
    """The loads that ranks gather where an op of rank r takes r + 1 seconds, more in each step."""
    low, high = int(schedule.offsets[seat.rank]), int(schedule.offsets[seat.rank + 1])
    found = Loads(seat.group, schedule, window=2)
    means: list[list[Load]] = []
    for step in range(3):
        spans = {row: (10.0 * row, 10.0 * row + (seat.rank + 1) * (1 + step)) for row in range(low, high)}
        found.add(spans, 100.0)
        means.append(found.mean())
    dist.barrier(seat.group)
    return means


def emulated_apart(
    seat: Seat, schedule: Schedule, costs: Costs, unit_seconds: float, ahead: float
) -> dict[int, tuple[float, float]]:
    """An emulated run on ranks whose clocks are so far apart, as those of different hosts are."""

    class Clock:
        sleep = staticmethod(time.sleep)

        @staticmethod
        def perf_counter() -> float:
            return time.perf_counter() + ahead * seat.rank

    emulate.time = Clock  # type: ignore[assignment]
    emulate.offset = lambda group: offset(group, clock=Clock.perf_counter, ask=True)  # type: ignore[assignment]
    try:
        return emulate.emulate(seat, schedule, costs, unit_seconds)
    finally:
        emulate.time, emulate.offset = time, offset  # type: ignore[assignment]
