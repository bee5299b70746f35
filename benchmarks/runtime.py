"""The runtime beside PyTorch's, in one run: the same stages, data, order and processes.

Small stages, so that what is measured is what the runtimes add: wall and CPU time a step, CPU time a computing op, and
how many boundary tensors are alive at once.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import stageloom as sl
from benchmarks.report import Table
from stageloom.execute.pipeline import Pipeline
from stageloom.execute.workers import Pool, Seat
from stageloom.op import Kind
from stageloom.schedule import Schedule

RANKS, WIDTH, ROWS, HIDDEN = 4, 64, 8, 48
SHAPE = (ROWS, WIDTH)
MOST_ALIVE = 0
BEFORE: set[int] = set()  # alive when counting began


class Block(nn.Module):
    """A small stage. In a counting run it looks, at every forward, how many boundary tensors are alive."""

    def __init__(self, count: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.second = nn.Linear(HIDDEN, WIDTH)
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        if self.count:
            _count()
        return x + self.second(torch.tanh(self.first(x)))


def _count() -> None:
    global MOST_ALIVE
    MOST_ALIVE = max(MOST_ALIVE, len(_boundaries() - BEFORE))


def _boundaries() -> set[int]:
    """Tensors of a boundary's shape with storage of their own; parameters and whole mini-batches have other shapes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            thing.untyped_storage().data_ptr()
            for thing in gc.get_objects()
            if type(thing) is Tensor and tuple(thing.shape) == SHAPE
        }


def _start_counting() -> None:
    """From here on, without what earlier runs in this process have left."""
    global MOST_ALIVE, BEFORE
    gc.collect()
    MOST_ALIVE, BEFORE = 0, _boundaries()


@dataclass(frozen=True)
class Measured:
    """Of one rank: seconds and CPU seconds of every step, computing ops a step, boundary tensors alive at most."""

    wall: list[float]
    cpu: list[float]
    ops: int
    alive: int


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def _data(microbatches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (microbatches * ROWS, WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def ours(seat: Seat, schedule: Schedule, steps: int, count: bool) -> Measured:
    """This rank's share of training steps by Stageloom's runtime."""
    _start_counting()
    torch.manual_seed(seat.rank)
    stages = {stage: Block(count) for stage in schedule.placement.stages_of[seat.rank][0]}
    pipeline = Pipeline(schedule, stages, _loss, group=seat.group, static=True)  # as PyTorch takes it
    inputs, targets = _data(schedule.microbatches)
    ops = int(schedule.offsets[seat.rank + 1] - schedule.offsets[seat.rank])
    return _timed(lambda: pipeline.step(inputs, targets), steps, ops, pipeline.parameters())


def theirs(seat: Seat, name: str, microbatches: int, steps: int, count: bool, ops: int) -> Measured:
    """The same by PyTorch's runtime."""
    from torch.distributed import pipelining

    _start_counting()
    torch.manual_seed(seat.rank)
    make = getattr(pipelining, name)
    per_rank = 2 if name in ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble") else 1
    numbers = [seat.rank + chunk * seat.size for chunk in range(per_rank)]
    if name == "ScheduleZBVZeroBubble":
        numbers = [seat.rank, 2 * seat.size - 1 - seat.rank]
    modules = [Block(count) for _ in numbers]
    total = per_rank * seat.size
    stages = [
        pipelining.PipelineStage(module, number, total, torch.device("cpu"), group=seat.group)
        for module, number in zip(modules, numbers, strict=True)
    ]
    single = name in ("ScheduleGPipe", "Schedule1F1B")
    schedule = make(stages[0] if single else stages, microbatches, loss_fn=_loss)
    inputs, targets = _data(microbatches)
    first, last = 0 in numbers, total - 1 in numbers

    def step() -> None:
        arguments = (inputs,) if first else ()
        if last:
            schedule.step(*arguments, target=targets, losses=[])
        else:
            schedule.step(*arguments)

    return _timed(step, steps, ops, [p for module in modules for p in module.parameters()])


def _timed(step: Any, steps: int, ops: int, parameters: list[nn.Parameter]) -> Measured:
    for _ in range(2):
        step()
    wall: list[float] = []
    cpu: list[float] = []
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = None
        began, used = time.perf_counter(), time.process_time()
        step()
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - used)
    return Measured(wall, cpu, ops, MOST_ALIVE)


def most_in_flight(schedule: Schedule) -> int:
    """Most micro-batches, over all ranks, that have been forwarded through a stage and not ended by BW or W."""
    step = np.select([schedule.kind == Kind.F, schedule.kind == Kind.B], [1, 0], -1)
    return max(int(np.cumsum(step[low:high]).max()) for low, high in pairwise(schedule.offsets.tolist()))


ROUNDS = 5  # of either runtime, taken in turns: a machine's speed drifts by more than the two differ
CASES = (
    ("gpipe", {"order": "in-order"}, "ScheduleGPipe"),
    ("1f1b", {}, "Schedule1F1B"),
    ("interleaved-1f1b", {}, "ScheduleInterleaved1F1B"),
    ("interleaved-zb", {}, "ScheduleInterleavedZeroBubble"),
    ("zb-v", {}, "ScheduleZBVZeroBubble"),
)


def tables(runs: int) -> Iterator[Table]:
    """One table: each schedule at 8 and 32 micro-batches, Stageloom beside PyTorch."""
    rows: list[tuple[str | int | float | None, ...]] = []
    with Pool(RANKS, timeout=120) as pool:
        for name, options, peer in CASES:
            for microbatches in (8, 32):
                schedule = sl.build(name, RANKS, microbatches, **options)
                ops = int(schedule.offsets[1])
                turns: tuple[list[list[Measured]], list[list[Measured]]] = ([], [])
                for _ in range(ROUNDS):
                    turns[0].append(pool.run(ours, schedule, runs, False))
                    turns[1].append(pool.run(theirs, peer, microbatches, runs, False, ops))
                alive = [max(r.alive for r in pool.run(ours, schedule, 1, True))]
                alive.append(max(r.alive for r in pool.run(theirs, peer, microbatches, 1, True, ops)))
                figures: list[tuple[float, float, float]] = []
                for rounds in turns:
                    walls = [max(rank.wall[step] for rank in ranks) for ranks in rounds for step in range(runs)]
                    cpu = statistics.median(sum(rank.cpu) / runs / rank.ops for ranks in rounds for rank in ranks)
                    figures.append((min(walls), statistics.median(walls), cpu))
                (wall, middle, cpu), (wall_there, middle_there, cpu_there) = figures
                rows.append(
                    (
                        name,
                        microbatches,
                        wall * 1e3,
                        wall_there * 1e3,
                        wall_there / wall,
                        middle_there / middle,
                        cpu * 1e6,
                        cpu_there * 1e6,
                        cpu_there / cpu,
                        most_in_flight(schedule),
                        alive[0],
                        alive[1],
                    )
                )
    columns = ("schedule", "micro-batches", "ms a step", "PyTorch", "ratio", "of medians", "CPU us an op", "PyTorch",
               "ratio", "in flight", "boundary tensors", "PyTorch")  # fmt: skip
    yield Table(
        f"One training step on {RANKS} Gloo processes, small stages",
        f"Wall time: the best step of the slowest rank in {ROUNDS} rounds of {runs} steps, taken in turns; ratios of "
        "the best and of the median steps. CPU time: median over ranks and rounds of the mean a computing op. "
        "Boundary tensors: alive on a rank at most, seen from within forwards, in a run of its own; in flight: how "
        "many the schedule itself needs.",
        columns,
        tuple(rows),
    )
