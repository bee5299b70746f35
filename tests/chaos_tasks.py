"""Faults that happen in the middle of training, and the tasks that train with one (test_execute_chaos.py)."""

from __future__ import annotations

import errno
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

import toy
from stageloom.execute.pipeline import Pipeline
from stageloom.execute.workers import Seat, doing
from stageloom.op import KIND_NAMES
from stageloom.schedule import Schedule

if TYPE_CHECKING:
    from stageloom.execute.training import Trained, Work

Kind = Literal["kill", "exit", "raise", "hang", "delay", "shape", "dtype", "nan", "gradient shape", "gradient nan"]
STATUS = 3  # of a rank that exits
LONG = 600.0  # seconds; nothing is meant to wait that long
RATE = 0.1


@dataclass(frozen=True)
class Fault:
    """What goes wrong on a rank: at the task of this name, in this step.

    The last five kinds spoil what a computing task gives: the stage's output, or the gradient that it sends.
    """

    kind: Kind
    rank: int
    step: int
    task: str
    seconds: float = 0.0  # of a delay

    def happen(self) -> None:
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "exit":
            os._exit(STATUS)
        elif self.kind == "raise":
            raise ArithmeticError(f"raised at {self.task}")
        elif self.kind in ("hang", "delay"):
            time.sleep(LONG if self.kind == "hang" else self.seconds)


class Fragile(toy.Toy):
    """A stage whose next output, or the gradient that it hands back, can be spoiled."""

    spoil: Kind | None = None

    def forward(self, x: Tensor, carry: Any = toy.WHOLE) -> Any:
        result = super().forward(x, carry)
        kind, self.spoil = self.spoil, None
        if kind is None:
            return result
        out = result if carry is toy.WHOLE else result[0]
        spoilt = {"shape": lambda: out[..., :-1], "dtype": out.float, "nan": lambda: out * torch.nan}[kind]()
        return spoilt if carry is toy.WHOLE else (spoilt, result[1])


def fragile(number: int) -> Fragile:
    module = Fragile().to(torch.float64)
    module.load_state_dict(toy.stage(number).state_dict())
    return module


def spoil_gradient(pipeline: Pipeline, key: tuple[int, int], kind: Kind) -> None:
    """The next backward of a stage gives this rank something wrong to send on or to add to its weights."""
    runner = pipeline.runners[key]
    backward = runner.backward

    def spoilt(place: Any, gradients: list[Tensor] | None, *, whole: bool) -> list[Tensor]:
        runner.backward = backward  # type: ignore[method-assign]
        if kind == "gradient nan" and gradients is not None:
            gradients = [gradient * torch.nan for gradient in gradients]
        found = backward(place, gradients, whole=whole)
        if kind == "gradient nan":
            return [gradient * torch.nan for gradient in found]
        return [gradient[..., :-1] for gradient in found]

    runner.backward = spoilt  # type: ignore[method-assign]


def train(
    seat: Seat, schedule: Schedule, steps: int, fault: Fault | None, check_finite: bool
) -> tuple[list[float], dict[str, Tensor]]:
    """Train the toy model: the loss of every step, and this rank's weights at the end."""
    own = schedule.placement.stages_of[seat.rank]
    modules = {(path, number): fragile(number) for path, numbers in enumerate(own) for number in numbers}
    step = 0

    def on_task(name: str) -> None:
        doing(name)
        if fault is not None and (fault.rank, fault.step, fault.task) == (seat.rank, step, name):
            spoil(pipeline, modules, fault)
            fault.happen()

    def optimizer_of(parameters: list[Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)

    pipeline = Pipeline(
        schedule,
        modules,
        toy.loss,
        group=seat.group,
        optimizer=None if schedule.synchronous else optimizer_of,
        on_task=on_task,
    )
    pipeline.executor.check_finite = check_finite
    velocities: dict[Tensor, Tensor] = {}
    losses: list[float] = []
    for step in range(steps):  # on_task reads it
        losses.append(pipeline.step(*toy.data(schedule.microbatches, step)).loss)
        if schedule.synchronous:
            descend(pipeline.parameters(), velocities)
    weights = {f"{key} {name}": value for key, m in modules.items() for name, value in m.state_dict().items()}
    return losses, weights


def descend(parameters: list[Any], velocities: dict[Tensor, Tensor]) -> None:
    """Gradient descent with momentum. (torch.optim takes a second to import, in each worker that follows a fault.)"""
    for parameter in parameters:
        if parameter.grad is not None:
            velocity = velocities.setdefault(parameter, torch.zeros_like(parameter))
            velocity.mul_(0.9).add_(parameter.grad)
            parameter.data.sub_(velocity, alpha=RATE)
            parameter.grad = None


def spoil(pipeline: Pipeline, modules: dict[tuple[int, int], Fragile], fault: Fault) -> None:
    """Arm the stage that runs the task in hand."""
    if fault.kind not in ("shape", "dtype", "nan", "gradient shape", "gradient nan"):
        return
    task = next(task for task in pipeline.tasks if str(task) == fault.task and task.code < len(KIND_NAMES))
    key = task.place.path, task.place.stage
    if fault.kind.startswith("gradient"):
        spoil_gradient(pipeline, key, fault.kind)
    else:
        modules[key].spoil = fault.kind


def ready(seat: Seat) -> int:
    """Workers that have come this far have started."""
    return os.getpid()


# --------------------------------------------------------------------------------------------- within and between steps


def slow(seat: Seat, schedule: Schedule, rank: int, task: str, seconds: float) -> float:
    """The loss of a step in which a rank is long at a task, and gives signs all the time."""

    def on_task(name: str) -> None:
        doing(name)
        until = time.monotonic() + seconds
        while (seat.rank, name) == (rank, task) and time.monotonic() < until:
            time.sleep(0.1)
            doing(name)

    pipeline = Pipeline(schedule, {seat.rank: fragile(seat.rank)}, toy.loss, group=seat.group, on_task=on_task)
    return pipeline.step(*toy.data(schedule.microbatches, 0)).loss


def evaluate_between(seat: Seat, schedule: Schedule, rows: int) -> list[float]:
    """Losses of two steps, with an evaluation between them whose micro-batches have another number of rows."""
    pipeline = Pipeline(schedule, {seat.rank: fragile(seat.rank)}, toy.loss, group=seat.group, on_task=doing)
    first = pipeline.step(*toy.data(schedule.microbatches, 0)).loss
    inputs, targets = toy.data(schedule.microbatches, 1)
    pipeline.evaluate(inputs[:rows], targets[:rows])
    return [first, pipeline.step(*toy.data(schedule.microbatches, 1)).loss]


class Counting(toy.Toy):
    """A first stage that hands on how often it has been called, as a number."""

    calls = 0

    def forward(self, x: Tensor, carry: Any = toy.WHOLE) -> Any:
        self.calls += 1
        return super().forward(x), self.calls


class Taking(toy.Toy):
    def forward(self, x: Tensor, calls: Any = 0) -> Any:
        return super().forward(x)


def change_a_number(seat: Seat, schedule: Schedule) -> None:
    module = (Counting if seat.rank == 0 else Taking)().to(torch.float64)
    pipeline = Pipeline(schedule, {seat.rank: module}, toy.loss, group=seat.group, on_task=doing)
    for step in range(2):
        pipeline.step(*toy.data(schedule.microbatches, step))


# ---------------------------------------------------------------------------------------------------------- checkpoints


# What they need is imported late: workers start anew after each fault, and most have no use for it.


def watched(seat: Seat, work: Work, folder: str, every: int, resume: bool, see: Callable[[str], None]) -> Trained:
    """`training.train` with `see` told of every op that it has in hand."""
    from stageloom.execute import training

    def both(what: str) -> None:
        doing(what)
        see(what)

    training.doing = both
    try:
        return training.train(seat, work, folder, every, resume, False)
    finally:
        training.doing = doing


def train_and_die(
    seat: Seat, work: Work, folder: str, every: int, victim: int, after: int, seconds: float | None
) -> Trained:
    """Killed at the `after`-th op, or, where `seconds` are given, so long after the `after`-th checkpoint's start."""
    seen = 0
    killers: list[threading.Timer] = []

    def see(what: str) -> None:
        nonlocal seen
        if seat.rank != victim or (seconds is not None and not what.startswith("checkpoint")):
            return
        seen += 1
        if seen == after and seconds is None:
            os.kill(os.getpid(), signal.SIGKILL)
        elif seen == after:
            killers.append(threading.Timer(seconds or 0.0, os.kill, (os.getpid(), signal.SIGKILL)))
            killers[0].start()

    trained = watched(seat, work, folder, every, False, see)
    for killer in killers:  # the last checkpoint was done sooner: the kill must not hit the next run
        killer.join()
    return trained


def train_on_a_full_disk(
    seat: Seat, work: Work, folder: str, every: int, victim: int, how: Literal["limit", "error"]
) -> Trained:
    """From the second checkpoint on rank `victim` can write only the first bytes of a file, or none."""
    seen = 0

    def see(what: str) -> None:
        nonlocal seen
        seen += what.startswith("checkpoint")
        if seat.rank == victim and seen == 2:
            if how == "limit":
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
            else:
                os.fsync = no_space

    return watched(seat, work, folder, every, False, see)


def no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
