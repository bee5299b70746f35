"""Stages with an `overlapped_forward_backward` of the user's own: what they have to be, and what their forwards keep.

The contract of the function stands in `execute.pairs`; `execute.hook_call` calls it.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false, reportUnknownParameterType=false, reportMissingTypeArgument=false
# (torch leaks unknown types, and its Function is untyped)
from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from stageloom.errors import InputError
from stageloom.execute.channel import Spec, spec_of
from stageloom.execute.engine import Job
from stageloom.execute.split import Mode, Saved, run_backward, run_backward_input, run_backward_weight, run_forward
from stageloom.execute.stage import StageRunner
from stageloom.execute.tasks import Task
from stageloom.execute.tree import flatten
from stageloom.lower import Code

NAME: Final = "overlapped_forward_backward"
ARGUMENTS: Final = "module0, inputs0, criterion0, labels0, module1, loss1, outputs1, output_grads1"


def hook_of(module: nn.Module) -> Callable[..., Any] | None:
    """The module's function, if it has one. Those of two modules of a class are equal."""
    found: Any = getattr(module, NAME, None)
    if inspect.ismethod(found) and isinstance(found.__self__, nn.Module):
        raise InputError(f"{type(module).__name__}.{NAME} is a method of an instance; make it a classmethod")
    return None if isinstance(found, nn.Module) else found


def check_hook(hook: Callable[..., Any], runner: StageRunner, task: Task) -> None:
    """Refuse what the function cannot be used for, with an InputError."""
    where = f"stage {task.place.stage}: {NAME}"
    if not callable(hook):
        raise InputError(f"{where} is a {type(hook).__name__}; expected a classmethod of ({ARGUMENTS})")
    try:
        inspect.signature(hook).bind(*ARGUMENTS.split(", "))
    except TypeError as error:
        raise InputError(f"{where}: {error}; expected a classmethod or staticmethod of ({ARGUMENTS})") from None
    except ValueError:  # a builtin without a signature
        pass
    if runner.sequence:
        raise InputError(f"{where} has no place for the carry of micro-batches that are cut along their sequence")
    if runner.versions is not None:
        raise InputError(f"{where} cannot run on copies of the weights, as an asynchronous schedule needs")
    if task.code is Code.B and runner.report.mode == "graph":
        raise InputError(
            f"{where}: split mode 'graph' cannot do a B through it; use 'deferred' or 'fused' for the stage"
        )


@dataclass
class Hooked:
    """What a forward leaves: as without the function, and a stand-in for each output (None if it has no gradient)."""

    saved: Saved
    stand_ins: list[Tensor | None]
    ran: set[int] = field(default_factory=set[int])

    @property
    def inputs(self) -> list[Tensor | None]:
        return self.saved.inputs

    @property
    def outputs(self) -> list[Any]:
        return self.saved.outputs


@dataclass(frozen=True)
class _Known:
    """What the module's own forward gave last, and for what."""

    inputs: tuple[tuple[int, ...], ...]
    spec: Spec
    shape: Any


class HookEngine:
    """Runs a stage as one graph, and keeps tensors from which a user's function can start the backward."""

    def __init__(self, module: nn.Module, mode: Mode, dynamic: bool) -> None:
        self.module = module
        self.mode: Mode = mode
        self.dynamic = dynamic
        self.known: _Known | None = None
        self.assumed: Any = None  # what outputs0 was taken for before a forward of the module's own was seen

    def forward(self, job: Job) -> tuple[list[Tensor], Hooked]:
        def plain(flat: list[Tensor]) -> list[Tensor]:
            arguments, kwargs = job.enter(flat)
            output = self.module(*arguments, **kwargs)
            tensors, structure = flatten(output)
            self.known = _Known(_shapes(flat), spec_of(tensors, None), _shape(structure))
            if self.assumed not in (None, self.known.shape):
                where = f"stage {job.place.stage}, micro-batch {job.place.microbatch}: {NAME}"
                raise _unlike(where, self.assumed, self.known.shape)
            return job.leave(output)

        return self.record(job, plain)

    def record(self, job: Job, fn: Callable[[list[Tensor]], list[Tensor]]) -> tuple[list[Tensor], Hooked]:
        """Run fn, which is the stage on flat tensors, and keep what its backward needs."""
        ran: set[int] = set()
        stand_ins: list[Tensor | None] = []

        def run(flat: list[Tensor]) -> list[Tensor]:
            results = fn(flat)
            stand_ins.extend(
                _StandIn.apply(result, at, ran) if result.requires_grad else None for at, result in enumerate(results)
            )
            return results

        outputs, saved = run_forward(self.mode, run, job.given, job.parameters, wanted=job.wanted)
        return outputs, Hooked(saved, stand_ins, ran)

    def backward(self, saved: Hooked, gradients: list[Tensor | None], whole: bool) -> list[Tensor | None]:
        saved.stand_ins = []
        return (run_backward if whole else run_backward_input)(saved.saved, gradients)

    def weight(self, saved: Hooked) -> None:
        run_backward_weight(saved.saved)

    def given_by_function(self, outputs: Any, job: Job, flat: list[Tensor], where: str) -> Any:
        """`outputs0` as the module's forward gives it: a list stands for the tuple, one of one for the one."""
        value = outputs
        if isinstance(outputs, (list, tuple)) and not hasattr(outputs, "_fields"):
            value = outputs[0] if len(outputs) == 1 else tuple(outputs)
        known = self.known
        if known is None:
            self.assumed = _shape(flatten(value)[1])
            return value
        for candidate in (outputs, value, (value,)):
            tensors, structure = flatten(candidate)
            if _shape(structure) == known.shape:
                spec = spec_of(tensors, None)
                same = self.dynamic or _shapes(flat) != known.inputs or spec.shapes == known.spec.shapes
                if spec.dtypes == known.spec.dtypes and same:
                    return candidate
                raise _unlike(where, _described(spec), _described(known.spec))
        raise _unlike(where, _shape(flatten(value)[1]), known.shape)


class _StandIn(torch.autograd.Function):
    """A tensor that leads to an output's place in the graph, without its memory; a single number keeps its value."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, at: int, ran: set[int]) -> Tensor:
        ctx.at, ctx.ran = at, ran
        if output.numel() == 1:
            return output.detach().clone()
        return output.new_zeros(()).expand(output.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.ran.add(ctx.at)
        return grads[0], None, None


def _unlike(where: str, found: Any, expected: Any) -> InputError:
    return InputError(f"{where}: outputs0 is {found}; the forward of module0 gives {expected}")


def _shapes(tensors: list[Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in tensors)


def _shape(structure: Any) -> Any:
    """A structure with types in place of its values."""
    if structure[0] == "value":
        return type(structure[1]).__name__
    if structure[0] in ("tuple", "list", "named"):
        return (structure[0], *(_shape(part) for part in structure[1]))
    if structure[0] == "dict":
        return ("dict", *((key, _shape(part)) for key, part in structure[1]))
    return structure[0]


def _described(spec: Spec) -> str:
    kinds = (
        f"{str(dtype).removeprefix('torch.')}{list(shape)}"
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    )
    return ", ".join(kinds)
