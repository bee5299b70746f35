"""A schedule on real processes with real messages in its real order, and computing replaced by waiting.

Every op waits for as long as `Costs` say that it takes, so that many ranks run on few cores. What is measured beside
the prediction is the interpreter itself: its order, its messages and its overhead.

A message holds one number, the time at its sender's end. Its receiver waits until the latency after that has passed.
Time is the first rank's clock (see `clocks`).

What keeps the emulation from being exact. The ranks of a pipeline tend to end their ops at the same moments, and where
they share cores they then stand in line for one. So nothing here uses a core without need, waits end on time by
themselves (`sharpen`), and by default an op takes the longer the more ranks there are for a core.
"""

# pyright: reportUnknownMemberType=false
# (torch leaks unknown types)
from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from stageloom.costs import Costs
from stageloom.errors import InputError
from stageloom.execute.channel import Spec
from stageloom.execute.clocks import Offset, offset
from stageloom.execute.executor import Executor, Net
from stageloom.execute.feeding import Feed
from stageloom.execute.measure import message_times
from stageloom.execute.stage import Result, StageRunner
from stageloom.execute.tasks import Place, Task, tasks_of
from stageloom.execute.workers import Seat, doing
from stageloom.lower import Code, lower
from stageloom.schedule import Schedule
from stageloom.simulate import durations, simulate

SHORTEST: Final = 0.015
"""Seconds that the shortest op takes by default, for each rank that a core has (at least two): where eight ranks wake
at once on two cores, the last of them is a millisecond late."""

LONGEST_RUN: Final = 60.0
"""Seconds that a run takes at most by default, where some ops are very much longer than others."""

SPIN: Final = 0.0001  # seconds before the moment from which on a wait looks at the clock instead of sleeping
PR_SET_TIMERSLACK: Final = 29
COMPUTES: Final = (Code.F, Code.B, Code.W, Code.BW)
STAMP: Final = Spec(None, ((1,),), (torch.float64,))


def emulate(seat: Seat, schedule: Schedule, costs: Costs, unit_seconds: float) -> dict[int, tuple[float, float]]:
    """The task of a worker: run its rank once; when each of its rows ran, in seconds of the first rank's clock.

    A time unit of the costs takes `unit_seconds`. Before the measured run there is one in which nothing takes time,
    for what happens only once (threads, buffers).
    """
    require_emulated(costs)
    sharpen()
    tasks = tasks_of(lower(schedule), seat.rank)
    rows = {(task.code, task.place): task.row for task in tasks if task.code in COMPUTES}
    taken, delay = durations(schedule, costs) * unit_seconds, message_times(schedule, costs) * unit_seconds
    pairs = {task.row for task in tasks if task.pair and task.code in COMPUTES}
    hand = Hand(rows, np.zeros(len(schedule)), np.zeros(len(schedule)), pairs, offset(seat.group))
    held = enumerate(schedule.placement.stages_of[seat.rank])
    stages = {(path, stage): TimedStage(hand, stage, schedule.stages) for path, of in held for stage in of}
    # what the executor uses of a StageRunner is what a TimedStage has
    runners = cast("dict[tuple[int, int], StageRunner]", stages)
    executor = Executor(runners, Net(seat.group, rank=seat.rank), _reduce, on_task=doing)
    executor.specs = {task.place: STAMP for task in tasks if task.code is Code.RECV and task.forward}
    executor.sent_specs = {task.place: STAMP for task in tasks if task.code is Code.SEND and task.forward}
    executor.run(tasks, announce=False)
    hand.taken, hand.delay, hand.spans = taken, delay, {}
    doing("waiting for the other ranks to start")
    dist.barrier(seat.group)
    executor.run(tasks, announce=False)
    return hand.ahead.aligned(hand.spans)


def require_emulated(costs: Costs) -> None:
    """Raise InputError for costs whose messages hold up one another or their sender, which messages here do not."""
    for name in ("occupancy", "blocking"):
        if getattr(costs, name):
            raise InputError(
                f"{costs.place}: {name} cannot be emulated: messages between local processes do not queue; drop the "
                f"key {name} for an emulated run"
            )


def default_scale(schedule: Schedule, costs: Costs) -> float:
    """Seconds for one time unit of the costs, so that the shortest op takes `SHORTEST`, the run up to `LONGEST_RUN`."""
    timeline = simulate(schedule, costs)
    taken = durations(schedule, costs)
    makespan = float(timeline.end.max() - timeline.start.min())
    shortest = SHORTEST * max(2.0, schedule.ranks / cores())
    return min(shortest / float(taken[taken > 0].min()), LONGEST_RUN / makespan)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def sharpen() -> None:
    """Have this thread's sleeps end within microseconds of their time; Linux else takes 50 more, to save wake-ups."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)


class Hand:
    """Does a rank's ops by waiting. `rows`: the row of every op; `taken`: seconds it takes; `delay`: seconds that its
    message is under way; `pairs`: rows overlapped with the next one; `ahead`: this rank's clock. `spans`: when each row
    ran, by that clock."""

    def __init__(
        self,
        rows: Mapping[tuple[Code, Place], int],
        taken: NDArray[np.float64],
        delay: NDArray[np.float64],
        pairs: set[int],
        ahead: Offset,
    ) -> None:
        self.rows = rows
        self.taken = taken
        self.delay = delay
        self.pairs = pairs
        self.ahead = ahead
        self.spans: dict[int, tuple[float, float]] = {}
        self.held: tuple[int, float, Tensor] | None = None  # the first op of a pair: row, earliest start, result

    def do(self, code: Code, place: Place, message: Tensor | None) -> Tensor:
        """One op, from when its message has arrived; its result is the time of its end."""
        row = self.rows[code, place]
        ready = time.perf_counter()
        if message is not None:
            ready = max(ready, float(message) + self.ahead.seconds + float(self.delay[row]))
        result = torch.empty(1, dtype=torch.float64)
        if row in self.pairs:  # starts and ends with its second op; results leave after both
            self.held = row, ready, result
            return result
        held, self.held = self.held, None
        wait_until(ready if held is None else max(ready, held[1]))
        start = time.perf_counter()
        wait_until(start + float(self.taken[row if held is None else held[0]]))
        end = time.perf_counter()
        self.spans[row] = start, end
        result[0] = end - self.ahead.seconds
        if held is not None:
            self.spans[held[0]] = start, end
            held[2][0] = end - self.ahead.seconds
        return result


class TimedStage:
    """Stands where a `StageRunner` stands."""

    def __init__(self, hand: Hand, stage: int, stages: int) -> None:
        self.hand = hand
        self.first = stage == 0
        self.last = stage == stages - 1
        self.feed = Feed()

    def forward(
        self, place: Place, value: tuple[list[Tensor], None] | None, *, version: int, backward: bool, whole: bool
    ) -> Result:
        """Wait for as long as a forward takes."""
        del version, backward, whole
        result = self.hand.do(Code.F, place, None if value is None else value[0][0])
        return Result([] if self.last else [result], None)

    def backward(self, place: Place, gradients: list[Tensor] | None, *, whole: bool) -> list[Tensor]:
        """Wait for as long as B takes, or BW where `whole`."""
        result = self.hand.do(Code.BW if whole else Code.B, place, None if gradients is None else gradients[0])
        return [] if self.first else [result]

    def backward_weight(self, place: Place) -> None:
        """Wait for as long as W takes."""
        self.hand.do(Code.W, place, None)


def wait_until(moment: float) -> None:
    """Sleep until shortly before a moment of `time.perf_counter`, and look at the clock from there on."""
    while (left := moment - time.perf_counter()) > 0:
        if left > SPIN:
            time.sleep(left - SPIN)


def _reduce(task: Task) -> None:
    """Costs say nothing of reductions."""
    del task
