"""A pair by the user's own `overlapped_forward_backward`: called, and what it leaves checked.

The contract of the function stands in `execute.pairs`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaks unknown types)
from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from stageloom.errors import InputError
from stageloom.execute.casting import Casting
from stageloom.execute.engine import Job
from stageloom.execute.hook import ARGUMENTS, NAME, Hooked, HookEngine
from stageloom.execute.split import run_backward, run_backward_input
from stageloom.execute.split_hooks import reached
from stageloom.execute.stage import Result, StageRunner
from stageloom.execute.tasks import Place, Task
from stageloom.lower import Code


def run_hook(
    hook: Callable[..., Any],
    ahead: StageRunner,
    behind: StageRunner,
    forward: Task,
    value: tuple[list[Tensor], Any] | None,
    backward: Task,
    gradients: list[Tensor] | None,
) -> tuple[Result, list[Tensor]]:
    """A pair by the user's function: the forward's result and the gradients of the backward's inputs."""
    place, whole = backward.place, backward.code is Code.BW
    casting = Casting(ahead.device.type)
    assert isinstance(ahead.engine, HookEngine)
    engine = ahead.engine
    found: list[Tensor] = []

    def run_forward(job: Job) -> tuple[list[Tensor], Hooked | None]:
        def both(flat: list[Tensor]) -> list[Tensor]:
            call = _Call(hook, job, flat, engine, ahead, forward.place)

            def run_backward(saved: Hooked, grads: list[Tensor | None]) -> list[Tensor | None]:
                return _backward(call, casting, behind, place, saved, grads, whole)

            found.extend(behind.backward(place, gradients, whole=whole, run=run_backward))
            with casting.on():
                # a backward with nothing to do has not called the function
                return call.alone() if call.results is None else call.results

        outputs, saved = engine.record(job, both)
        return outputs, None if ahead.recompute else saved

    result = ahead.forward(
        forward.place, value, version=forward.version, backward=True, whole=forward.whole, run=run_forward
    )
    return result, found


def _backward(
    call: _Call,
    casting: Casting,
    behind: StageRunner,
    place: Place,
    hooked: Hooked,
    grads: list[Tensor | None],
    whole: bool,
) -> list[Tensor | None]:
    where = f"stage {place.stage}, micro-batch {place.microbatch}: {NAME}"
    saved, stand_ins = hooked.saved, hooked.stand_ins
    hooked.stand_ins = []
    used = [at for at, output in enumerate(saved.outputs) if output.edge is not None and grads[at] is not None]
    leaves = list(saved.inputs)
    nodes: list[Any] = []

    def walk(edges: list[GradientEdge], given: list[Tensor]) -> None:
        nodes.extend(edge.node for edge in edges)
        outputs = [stand_ins[at] for at in used]
        loss = outputs[0] if behind.last else None
        with casting.on():
            call.run(behind.module, loss, [] if behind.last else outputs, [] if behind.last else given)
        lacking = [at for at in used if at not in hooked.ran]
        if lacking:
            what = "loss1" if behind.last else f"outputs1[{used.index(lacking[0])}]"
            raise InputError(f"{where}: no backward has been run from {what}")

    found = (run_backward if whole else run_backward_input)(saved, grads, walk)
    missing = [at for at, leaf in enumerate(leaves) if leaf is not None and found[at] is None] if nodes else []
    if missing:
        in_graph = reached(nodes, {id(leaves[at]) for at in missing})
        wanted = sum(leaf is not None for leaf in leaves)
        if in_graph or len(missing) == wanted:
            first = next((at for at in missing if any(leaves[at] is leaf for leaf in in_graph)), missing[0])
            raise InputError(
                f"{where}: the backward gave no gradient for tensor {first} of module1's inputs; run it to its end"
            )
    return found


@dataclass
class _Call:
    """One call of the user's function: module0's side of it."""

    hook: Callable[..., Any]
    job: Job
    flat: list[Tensor]
    engine: HookEngine
    ahead: StageRunner
    place: Place
    results: list[Tensor] | None = None

    def alone(self) -> list[Tensor]:
        """The forward without the function."""
        arguments, kwargs = self.job.enter(self.flat)
        return self.job.leave(self.ahead.module(*arguments, **kwargs))

    def run(self, module: nn.Module, loss: Tensor | None, outputs: list[Any], gradients: list[Tensor]) -> None:
        where = f"stage {self.place.stage}, micro-batch {self.place.microbatch}: {NAME}"
        arguments, kwargs = self.job.enter(self.flat)
        extra = {"kwargs0": kwargs} if kwargs else {}
        if extra:
            try:
                inspect.signature(self.hook).bind(*ARGUMENTS.split(", "), **extra)
            except TypeError:
                raise InputError(f"{where} takes no kwargs0, and the step was given kwargs") from None
        made: list[list[Tensor]] = []
        labels = [self.job.target] if self.ahead.last else []

        def criterion(*values: Any) -> Tensor:
            given, rest = values[: len(values) - 1], values[len(values) - 1 :]
            if not given or len(rest) != 1 or rest[0] is not self.job.target:
                raise InputError(f"{where}: criterion0 has to be called as criterion0(*outputs0, *labels0)")
            made.append(self.job.leave(self.engine.given_by_function(list(given), self.job, self.flat, where)))
            return made[-1][0]

        returned: Any = self.hook(
            self.ahead.module,
            list(arguments),
            criterion if self.ahead.last else None,
            labels,
            module,
            loss,
            outputs,
            gradients,
            **extra,
        )
        if not isinstance(returned, (tuple, list)) or len(returned) != 2:
            kind = type(returned).__name__
            raise InputError(f"{where} returned a {kind}; expected the pair (outputs0, loss0)")
        given, loss0 = returned
        value = self.engine.given_by_function(given, self.job, self.flat, where)
        if not self.ahead.last:
            if loss0 is not None:
                raise InputError(f"{where}: loss0 is a {type(loss0).__name__}; expected None before the last stage")
            self.results = self.job.leave(value)
            return
        if len(made) != 1 or loss0 is not made[0][0]:
            raise InputError(
                f"{where}: loss0 has to be what criterion0 returned, called once (it was {len(made)} times)"
            )
        self.results = made[0]
