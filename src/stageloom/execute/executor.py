"""The interpreter: runs one rank's tasks in order, with real tensors and real messages.

Values are kept under the place they are for (path, stage, micro-batch, slice) and dropped when used. A receive is
posted when it is among the next few of its sender (`window`), so that buffers exist just in time; sends run on by
themselves and are dropped when done.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaks unknown types)
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from stageloom.errors import StageloomError
from stageloom.execute.channel import (
    WINDOW,
    Posted,
    Posts,
    Sender,
    Spec,
    difference,
    differentiable,
    fits,
    post,
    receive_spec,
    spec_of,
)
from stageloom.execute.devices import Clock, Net
from stageloom.execute.stage import Result, StageRunner
from stageloom.execute.tasks import Place, Task
from stageloom.lower import Code


@dataclass
class Run:
    """What one run of the tasks leaves: losses and outputs by place, and when each computing row ran (seconds)."""

    losses: dict[Place, Tensor] = field(default_factory=dict[Place, Tensor])
    outputs: dict[Place, Any] = field(default_factory=dict[Place, Any])
    spans: dict[int, tuple[float, float]] = field(default_factory=dict[int, tuple[float, float]])
    most_sends: int = 0
    most_values: int = 0


class Joint(Protocol):
    """Runs the forward and the backward of an overlapped pair together; the stages are its own."""

    def __call__(
        self, forward: Task, value: tuple[list[Tensor], Any] | None, backward: Task, gradients: list[Tensor] | None
    ) -> tuple[Result, list[Tensor]]: ...


class Executor:
    """Runs tasks of one rank. State between runs: the specs of messages that have been sent and received.

    `joints`, by the row of its first op, has the overlapped pairs that are run together; others run one op after the
    other.

    With `check_finite` an infinity or nan in what a task computes is an error that names the task, and the values it is
    in; without, it goes its way to the loss and the weights.
    """

    def __init__(
        self,
        stages: Mapping[tuple[int, int], StageRunner],
        net: Net,
        beside: Callable[[Task], None],
        *,
        window: int = WINDOW,
        on_task: Callable[[str], None] | None = None,
        check_finite: bool = False,
        joints: Mapping[int, Joint] | None = None,
    ) -> None:
        self.joints = {} if joints is None else joints
        self.stages = stages
        self.net = net
        self.beside = beside
        self.window = window
        self.on_task = on_task
        self.check_finite = check_finite
        self.specs: dict[Place, Spec] = {}
        self.sent_specs: dict[Place, Spec] = {}
        self.gradient_specs: dict[tuple[bool, Place], Spec] = {}
        self.sender = Sender(net)
        self.clock = Clock(net.device)

    def run(self, tasks: list[Task], *, announce: bool, backward: bool = True) -> Run:
        """Run the tasks. `announce`: shapes are not known on the receiving side and travel with the messages.

        Those of a run with backwards hold for the runs after it that do not announce.
        """
        run = Run()
        arrived: dict[tuple[bool, Place], list[Tensor]] = {}
        structures: dict[Place, Any] = {}
        leaving: dict[tuple[bool, Place], list[Tensor]] = {}
        sender, on_task = self.sender, self.on_task
        sender.most = most_values = 0
        self.clock.begin()
        if announce:
            self.gradient_specs = {}
        posts = None if announce else Posts(tasks, self.window, self._post)
        held: Task | None = None  # the first op of a pair that is run together
        for task in tasks:
            if on_task is not None:
                on_task(task.name if held is None else f"{held.name}&{task.name}")
            if task.code is Code.RECV:
                if posts is not None:
                    posted = posts.take(task.peer)
                else:
                    posted = self._announced(task, keep=backward) if task.forward and announce else self._post(task)
                arrived[task.forward, task.place] = posted.wait()
                if posts is not None:
                    posts.ahead(task.peer)
                sender.reap(task.reaps)
                if task.forward:
                    structures[task.place] = posted.spec.structure
            elif task.code is Code.SEND:
                self._send(task, leaving.pop((task.forward, task.place)), structures, announce=announce, keep=backward)
                most_values = max(most_values, len(arrived) + len(leaving) + len(sender.under_way))
            elif task.code is Code.REDUCE or task.code is Code.GATHER:
                self.beside(task)
            elif self.joints and held is None and backward and task.row in self.joints:
                held = task
            else:
                began = self.clock.now()
                if held is None:
                    self._compute(task, run, arrived, structures, leaving, backward=backward)
                    run.spans[task.row] = began, self.clock.now()
                else:
                    self._compute_pair(held, task, run, arrived, structures, leaving)
                    run.spans[held.row] = run.spans[task.row] = began, self.clock.now()
                    held = None
                most_values = max(most_values, len(arrived) + len(leaving) + len(sender.under_way))
        sender.finish()
        run.spans = self.clock.seconds(run.spans)
        run.most_sends, run.most_values = sender.most, most_values
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
            result = stage.forward(place, value, version=task.version, backward=backward, whole=task.whole)
            self._forwarded(task, stage, result, run, arrived, structures, leaving)
            return
        if task.code is Code.W:
            stage.backward_weight(place)
            self._check_gradients(task, stage, [])
            return
        gradients = None if stage.last else arrived.pop((False, place))
        found = stage.backward(place, gradients, whole=task.code is Code.BW)
        self._backwarded(task, stage, found, arrived, leaving)

    def _compute_pair(
        self,
        one: Task,
        other: Task,
        run: Run,
        arrived: dict[tuple[bool, Place], list[Tensor]],
        structures: dict[Place, Any],
        leaving: dict[tuple[bool, Place], list[Tensor]],
    ) -> None:
        forward, backward = (one, other) if one.code is Code.F else (other, one)
        to, back = forward.place, backward.place
        ahead, behind = self.stages[to.path, to.stage], self.stages[back.path, back.stage]
        value = None if ahead.first else (arrived.pop((True, to)), structures.pop(to))
        gradients = None if behind.last else arrived.pop((False, back))
        result, found = self.joints[one.row](forward, value, backward, gradients)
        self._forwarded(forward, ahead, result, run, arrived, structures, leaving)
        self._backwarded(backward, behind, found, arrived, leaving)

    def _forwarded(
        self,
        task: Task,
        stage: StageRunner,
        result: Result,
        run: Run,
        arrived: dict[tuple[bool, Place], list[Tensor]],
        structures: dict[Place, Any],
        leaving: dict[tuple[bool, Place], list[Tensor]],
    ) -> None:
        """Hand on what a forward gave."""
        if self.check_finite:
            self._check_finite(task, "loss", [] if result.loss is None else [result.loss])
            self._check_finite(task, "activations", result.tensors)
        if stage.last:
            if result.loss is not None:
                run.losses[task.place] = result.loss
            if result.output is not None:
                run.outputs[task.place] = result.output
            return
        structures[task.target] = result.structure
        (arrived if task.local else leaving)[True, task.target] = result.tensors

    def _backwarded(
        self,
        task: Task,
        stage: StageRunner,
        found: list[Tensor],
        arrived: dict[tuple[bool, Place], list[Tensor]],
        leaving: dict[tuple[bool, Place], list[Tensor]],
    ) -> None:
        """Hand on what a backward gave."""
        self._check_gradients(task, stage, found)
        if not stage.first:
            (arrived if task.local else leaving)[False, task.target] = found

    # -------------------------------------------------------------------------------------------------- checking

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

    # --------------------------------------------------------------------------------------------------- messages

    def _send(
        self, task: Task, tensors: list[Tensor], structures: dict[Place, Any], *, announce: bool, keep: bool
    ) -> None:
        """Start to send what an op left.

        Where the receiver has made its buffers already, what does not fit them would end up as garbage, or nowhere.
        """
        structure = structures.pop(task.place, None)
        told = None
        if task.forward and announce:
            told = spec_of(tensors, structure)
            if keep:
                self.sent_specs[task.place] = told
        else:
            expected = self._expected(task, self.sent_specs, self.specs)
            found = None if fits(tensors, structure, expected) else difference(spec_of(tensors, structure), expected)
            if found is not None:
                stage = task.place.stage + (-1 if task.forward else 1)
                known = "as in the step that announced it" if task.forward else "as the activations it belongs to"
                remedy = " (for stages whose outputs change: Pipeline(..., dynamic=True))" if task.forward else ""
                raise StageloomError(f"{task}: stage {stage} gives {found[0]}, expected {found[1]} {known}{remedy}")
        self.sender.send(task.row, tensors, self.net.to(task.peer), told)

    def _expected(self, task: Task, forward: Mapping[Place, Spec], backward: Mapping[Place, Spec]) -> Spec:
        """What a message holds: what was announced of it, or for a gradient, of the activations that it is for."""
        if task.forward:
            return forward[task.place]
        key = task.code is Code.SEND, task.place
        if key not in self.gradient_specs:
            self.gradient_specs[key] = differentiable(backward[task.place.beside(1)])
        return self.gradient_specs[key]

    def _post(self, task: Task) -> Posted:
        spec = self._expected(task, self.specs, self.sent_specs)
        return post(spec, self.net.source(task.peer), self.net)

    def _announced(self, task: Task, *, keep: bool) -> Posted:
        """A receive whose sender tells first what it sends."""
        link = self.net.source(task.peer)
        spec = receive_spec(link, self.net)
        if keep:
            self.specs[task.place] = spec
        return post(spec, link, self.net)
