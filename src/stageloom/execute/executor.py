"""The interpreter: runs one rank's tasks in order, with real tensors and real messages.

Values are kept under the place they are for (path, stage, micro-batch, slice) and dropped when used. A receive is
posted when it is among the next few of its sender (`window`), so that buffers exist just in time; sends run on by
themselves and are dropped when done.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaks unknown types)
from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stageloom.errors import StageloomError
from stageloom.execute.channel import Posted, Sender, Spec, difference, differentiable, post, receive_spec, spec_of
from stageloom.execute.stage import StageRunner
from stageloom.execute.tasks import Place, Task
from stageloom.lower import Code


@dataclass
class Net:
    """How this rank reaches others: the group for messages from one rank to another, and the device of buffers.

    One group for all where the backend matches messages by pair (Gloo); one a directed pair where it orders all
    messages of a group (NCCL).
    """

    group: dist.ProcessGroup
    edges: Mapping[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict[tuple[int, int], Any])
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rank: int = 0

    def edge(self, source: int, target: int) -> dist.ProcessGroup:
        return self.edges.get((source, target), self.group)


@dataclass
class Run:
    """What one run of the tasks leaves: losses and outputs by place, and when each computing row ran (seconds)."""

    losses: dict[Place, Tensor] = field(default_factory=dict[Place, Tensor])
    outputs: dict[Place, Any] = field(default_factory=dict[Place, Any])
    spans: dict[int, tuple[float, float]] = field(default_factory=dict[int, tuple[float, float]])
    most_sends: int = 0
    most_values: int = 0


class Executor:
    """Runs tasks of one rank. State between runs: the specs of messages that have been sent and received.

    With `check_finite` an infinity or nan in what a task computes is an error that names the task, and the values it is
    in; without, it goes its way to the loss and the weights.
    """

    def __init__(
        self,
        stages: Mapping[tuple[int, int], StageRunner],
        net: Net,
        beside: Callable[[Task], None],
        *,
        window: int = 2,
        on_task: Callable[[str], None] | None = None,
        check_finite: bool = False,
    ) -> None:
        self.stages = stages
        self.net = net
        self.beside = beside
        self.window = window
        self.on_task = on_task
        self.check_finite = check_finite
        self.specs: dict[Place, Spec] = {}
        self.sent_specs: dict[Place, Spec] = {}
        self.sender = Sender()

    def run(self, tasks: list[Task], *, announce: bool, backward: bool = True) -> Run:
        """Run the tasks. `announce`: shapes are not known on the receiving side and travel with the messages.

        Those of a run with backwards hold for the runs after it that do not announce.
        """
        run = Run()
        arrived: dict[tuple[bool, Place], list[Tensor]] = {}
        structures: dict[Place, Any] = {}
        leaving: dict[tuple[bool, Place], list[Tensor]] = {}
        posted: dict[int, Posted] = {}
        sender = self.sender
        sender.most = 0
        waiting = _receives(tasks)
        for at, task in enumerate(tasks):
            if self.on_task is not None:
                self.on_task(task.name)
            if not announce:
                self._post_ahead(tasks, waiting, posted)
            if task.code is Code.RECV:
                spec, tensors = self._receive(at, task, posted, waiting, announce=announce, keep=backward)
                sender.reap(task.reaps)
                arrived[task.forward, task.place] = tensors
                if task.forward:
                    structures[task.place] = spec.structure
            elif task.code is Code.SEND:
                tensors = leaving.pop((task.forward, task.place))
                spec = spec_of(tensors, structures.pop(task.place, None))
                told = task.forward and announce
                if told and backward:
                    self.sent_specs[task.place] = spec
                elif not told:
                    self._check_sent(task, spec)
                sender.send(
                    task.row, tensors, task.peer, self.net.edge(self.net.rank, task.peer), spec if told else None
                )
            elif task.code in (Code.REDUCE, Code.GATHER):
                self.beside(task)
            else:
                began = time.perf_counter()
                self._compute(task, run, arrived, structures, leaving, backward=backward)
                run.spans[task.row] = began, time.perf_counter()
            run.most_values = max(run.most_values, len(arrived) + len(leaving) + len(sender.under_way))
        sender.finish()
        run.most_sends = sender.most
        return run

    def _compute(
        self,
        task: Task,
        run: Run,
        arrived: dict[tuple[bool, Place], list[Tensor]],
        structures: dict[Place, Any],
        leaving: dict[tuple[bool, Place], list[Tensor]],
        *,
        backward: bool,
    ) -> None:
        stage, place = self.stages[task.place.path, task.place.stage], task.place
        if task.code is Code.F:
            value = None if stage.first else (arrived.pop((True, place)), structures.pop(place))
            result = stage.forward(place, value, version=task.version, backward=backward)
            if self.check_finite:
                self._check_finite(task, "loss", [] if result.loss is None else [result.loss])
                self._check_finite(task, "activations", result.tensors)
            if stage.last:
                if result.loss is not None:
                    run.losses[place] = result.loss
                if result.output is not None:
                    run.outputs[place] = result.output
                return
            target = place.beside(1)
            structures[target] = result.structure
            (arrived if task.local else leaving)[True, target] = result.tensors
            return
        if task.code is Code.W:
            stage.backward_weight(place)
            self._check_gradients(task, stage, [])
            return
        gradients = None if stage.last else arrived.pop((False, place))
        found = stage.backward(place, gradients, whole=task.code is Code.BW)
        self._check_gradients(task, stage, found)
        if not stage.first:
            (arrived if task.local else leaving)[False, place.beside(-1)] = found

    # -------------------------------------------------------------------------------------------------- checking

    def _check_sent(self, task: Task, spec: Spec) -> None:
        """The receiver has made its buffers already: what does not fit them would end up as garbage, or nowhere."""
        if task.forward:
            expected = self.sent_specs.get(task.place)
            known = "as in the step that announced it"
        else:
            expected = self.specs.get(task.place.beside(1))
            expected = None if expected is None else differentiable(expected)
            known = "as the activations it belongs to"
        found = None if expected is None else difference(spec, expected)
        if found is not None:
            stage = task.place.stage + (-1 if task.forward else 1)
            raise StageloomError(f"{task}: stage {stage} gives {found[0]}, expected {found[1]} {known}")

    def _check_finite(self, task: Task, what: str, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if not bool(torch.isfinite(tensor).all()):
                kind = "nan" if bool(torch.isnan(tensor).any()) else "infinity"
                raise StageloomError(f"{task} on rank {self.net.rank}: {kind} in its {what}")

    def _check_gradients(self, task: Task, stage: StageRunner, found: list[Tensor]) -> None:
        if not self.check_finite:
            return
        self._check_finite(task, "gradients", found)
        own = (p.grad for p in stage.parameters) if stage.versions is None else stage.versions.collected.values()
        self._check_finite(task, "gradients of weights", (gradient for gradient in own if gradient is not None))

    # ------------------------------------------------------------------------------------------------- receiving

    def _post_ahead(self, tasks: list[Task], waiting: dict[int, deque[int]], posted: dict[int, Posted]) -> None:
        for source, queue in waiting.items():
            under_way = sum(1 for at in posted if tasks[at].peer == source)
            while queue and under_way < self.window:
                spec = self._expected(tasks[queue[0]])
                if spec is None:
                    break
                at = queue.popleft()
                posted[at] = post(spec, source, self.net.edge(source, self.net.rank), self.net.device)
                under_way += 1

    def _expected(self, task: Task) -> Spec | None:
        """What the message of a receive will hold, if that is known by now."""
        if task.forward:
            return self.specs.get(task.place)
        # a gradient has the shapes of the output it is for, which are known once its forward has run
        return self.stages[task.place.path, task.place.stage].gradient_spec(task.place)

    def _receive(
        self,
        at: int,
        task: Task,
        posted: dict[int, Posted],
        waiting: dict[int, deque[int]],
        *,
        announce: bool,
        keep: bool,
    ) -> tuple[Spec, list[Tensor]]:
        found = posted.pop(at, None)
        if found is None:
            waiting[task.peer].popleft()
            group = self.net.edge(task.peer, self.net.rank)
            spec = receive_spec(task.peer, group) if task.forward and announce else self._expected(task)
            if spec is not None and task.forward and keep:
                self.specs[task.place] = spec
            assert spec is not None, f"{task}: its shapes are not known"
            found = post(spec, task.peer, group, self.net.device)
        return found.spec, found.wait()


def _receives(tasks: list[Task]) -> dict[int, deque[int]]:
    """For each peer, where in the list its messages are received, in order."""
    waiting: dict[int, deque[int]] = {}
    for at, task in enumerate(tasks):
        if task.code is Code.RECV:
            waiting.setdefault(task.peer, deque()).append(at)
    return waiting
