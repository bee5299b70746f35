"""Overlapped pairs (F&BW, F&B): the forward of one micro-batch and the backward of another one, run together.

There are two ways for a stage module to say how; where the two stages of a pair share neither, its ops run one after
the other, which `Pipeline.overlaps` tells with the reason.

**Parts.** `overlapped_parts()`, see `stageloom.execute.exchange` and `.parts`: the all-to-alls of each run under the
other's compute. Both stages have to have it.

**A function of the user's own**, under the name and with the arguments that users of DeepSeek's DualPipe
(github.com/deepseek-ai/DualPipe) know, as a classmethod or staticmethod that both stages share, or the same function
set on both instances:

    overlapped_forward_backward(module0, inputs0, criterion0, labels0, module1, loss1, outputs1, output_grads1)
        -> (outputs0, loss0)

    module0, inputs0
        Run module0 on the list inputs0, as `module0(*inputs0)` would. Where `step` was given kwargs, they come as the
        keyword argument kwargs0, which the function then must take.
    criterion0, labels0
        On the last stage: loss0 is criterion0(*outputs0, *labels0), called once, and returned as it is (it is weighed
        and scaled already). Elsewhere None and [].
    module1, loss1, outputs1, output_grads1
        Run the backward of module1: loss1.backward() where loss1 is not None (its last stage), else autograd's from
        the tensors outputs1 with output_grads1. It has to start from these; outputs1 have the shapes of the
        outputs, but no values. Gradients of inputs and weights go where autograd puts them. In an F&B the layers whose
        weight gradients can wait put them off by themselves.
    outputs0
        What module0 returned: itself, or a list for the tuple (a list of one for the one).
    loss0
        From criterion0, else None.

What the function may rely on: random numbers are those of module0's micro-batch (with `seed` the same as without a
pair), autocast is as it was around `step` for both halves, recomputation of module1 has been done. Gradients, losses
and outputs are handed on as for a pair that is not overlapped, and checked before: see `Checked errors` below.

Refused with an InputError when the pipeline is made: a function that does not take these arguments; micro-batches cut
along their sequence (a carry has no place here); asynchronous schedules (they run on copies of the weights); an F&B
with split mode "graph", which asks autograd for the inputs' gradients alone.

Checked errors, each naming stage and micro-batch: a return that is no pair; outputs0 unlike what module0's forward
gives (structure, number, dtypes; shapes for inputs of the same shapes); a loss0 that criterion0 did not give; a
backward that did not start from all of outputs1, or ended before the inputs.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false
# (torch leaks unknown types, and has no public name for a tensor's version)
from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, Final

from torch import Tensor, nn

from stageloom.errors import InputError
from stageloom.execute.casting import Casting
from stageloom.execute.chance import undisturbed
from stageloom.execute.engine import Job
from stageloom.execute.executor import Joint
from stageloom.execute.hook import HookEngine, check_hook, hook_of
from stageloom.execute.hook_call import run_hook
from stageloom.execute.parts import PartsEngine, Segments, interleave
from stageloom.execute.stage import Result, StageRunner
from stageloom.execute.tasks import Task
from stageloom.lower import Code

Key = tuple[int, int]
PARTS: Final = "overlapped_parts"


def join_pairs(
    tasks: list[Task], runners: Mapping[Key, StageRunner], *, dynamic: bool
) -> tuple[dict[int, Joint], dict[Key, str]]:
    """(what runs each pair, by the row of its first op; how the pairs of each stage run, in words).

    The stages of such pairs get the engine that they need. Raises InputError for what is refused (above).
    """
    pairs = [
        (one, one, other) if one.code is Code.F else (one, other, one)
        for one, other in pairwise(tasks)
        if one.pair and {one.code, other.code} in ({Code.F, Code.B}, {Code.F, Code.BW})
    ]
    joints: dict[int, Joint] = {}
    told: dict[Key, dict[str, None]] = {}
    for first, forward, backward in pairs:
        to, back = _key(forward), _key(backward)
        ahead, behind = runners[to], runners[back]
        hook, kept = hook_of(ahead.module), hook_of(behind.module)
        if hook is not None and hook == kept:
            for runner, task in ((ahead, forward), (behind, backward)):
                check_hook(hook, runner, task)
                if not isinstance(runner.engine, HookEngine):
                    runner.engine = HookEngine(runner.module, runner.report.mode, dynamic)
            joints[first.row] = _by_hook(ahead, behind, hook)
            how = "run by its overlapped_forward_backward"
        else:
            reasons = {key: _no_parts(runners[key], key) for key in (to, back)}
            why = next((said for said in reasons.values() if said is not None), None)
            if why is None:
                for runner, key in ((ahead, to), (behind, back)):
                    if not isinstance(runner.engine, PartsEngine):
                        runner.engine = PartsEngine(runner.module, runner.report.mode, key[1], runner.device)
                joints[first.row] = _by_parts(ahead, behind)
                how = "interleaved at its all-to-alls"
            else:
                for key, own in reasons.items():
                    told.setdefault(key, {})[f"one op after the other: {own or why}"] = None
                continue
        for key in (to, back):
            told.setdefault(key, {})[how] = None
    return joints, {key: "; ".join(ways) for key, ways in told.items()}


def _key(task: Task) -> Key:
    return task.place.path, task.place.stage


def has_parts(module: nn.Module) -> bool:
    """Whether a stage says where its all-to-alls are."""
    found = getattr(module, PARTS, None)
    return found is not None and not isinstance(found, nn.Module)


def _no_parts(runner: StageRunner, key: Key) -> str | None:
    """Why a stage cannot run in parts; None if it can."""
    module: Any = runner.module
    where = f"stage {key[1]}"
    if hook_of(module) is not None:
        return f"{where} has an overlapped_forward_backward that the other stage of the pair does not share"
    if not has_parts(module):
        return f"{where} has neither overlapped_forward_backward nor {PARTS}"
    method: Any = getattr(module, PARTS)
    if not callable(method):
        raise InputError(f"{where}: {PARTS} is a {type(method).__name__}; expected a method that gives functions")
    if runner.sequence:
        return f"{where} is called with a carry, as micro-batches are cut along their sequence"
    if runner.versions is not None:
        return f"{where} runs on copies of its weights"
    if module._forward_pre_hooks or module._forward_hooks or module._backward_hooks or module._backward_pre_hooks:
        return f"{where} has hooks on its module, which parts would pass by"
    given: Any = method()
    if not isinstance(given, (list, tuple)) or not given or not all(callable(part) for part in given):
        raise InputError(f"{where}: {PARTS}() gave {given!r:.60}; expected a list of one or more functions")
    return None


def _by_parts(ahead: StageRunner, behind: StageRunner) -> Joint:
    device = ahead.device

    def apart() -> AbstractContextManager[None]:
        return undisturbed(device)  # what a backward draws is no business of the forward's random numbers

    def joint(
        forward: Task, value: tuple[list[Tensor], Any] | None, backward: Task, gradients: list[Tensor] | None
    ) -> tuple[Result, list[Tensor]]:
        casting, whole = Casting(device.type), backward.code is Code.BW
        assert isinstance(ahead.engine, PartsEngine)
        assert isinstance(behind.engine, PartsEngine)
        turning, returning = ahead.engine, behind.engine
        found: list[Tensor] = []

        def run_forward(job: Job) -> tuple[list[Tensor], Segments | None]:
            outcome: list[tuple[list[Tensor], Segments | None]] = []

            def run_backward(saved: Segments, grads: list[Tensor | None]) -> list[Tensor | None]:
                back = returning.backwarding(saved, grads, whole, around=apart)
                on = turning.forwarding(job, graph=not ahead.recompute, around=casting.on)
                before = [tensor._version for tensor in job.given]
                inputs, result = interleave(back, on)
                if ahead.recompute and before != [tensor._version for tensor in job.given]:
                    raise InputError("recompute: a stage changes its input in place, so it cannot be run on it again")
                outcome.append(result)
                return inputs

            found.extend(behind.backward(backward.place, gradients, whole=whole, run=run_backward))
            return outcome[0]

        result = ahead.forward(
            forward.place, value, version=forward.version, backward=True, whole=forward.whole, run=run_forward
        )
        return result, found

    return joint


def _by_hook(ahead: StageRunner, behind: StageRunner, hook: Callable[..., Any]) -> Joint:
    def joint(
        forward: Task, value: tuple[list[Tensor], Any] | None, backward: Task, gradients: list[Tensor] | None
    ) -> tuple[Result, list[Tensor]]:
        return run_hook(hook, ahead, behind, forward, value, backward, gradients)

    return joint
