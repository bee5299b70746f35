"""Forward and backward of one micro-batch through a stage, on flat lists of tensors, in any of the modes."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false, reportUnknownParameterType=false, reportMissingTypeArgument=false
# (torch leaks unknown types, and its Function is untyped)
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from stageloom.errors import InputError, StageloomError
from stageloom.execute.split_hooks import whole_gradients
from stageloom.execute.split_prepare import Mode
from stageloom.execute.split_queue import Layers, Queue, Recording, queued_bytes, walk

_MODES = frozenset(get_args(Mode))


@dataclass(slots=True)
class _Output:
    """What the backward has to know of an output: where it stands in the graph, but not its values."""

    edge: GradientEdge | None  # None: it has no gradient
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


@dataclass(slots=True)
class Saved:
    """What the forward of one micro-batch leaves for its backward. Used once; freed step by step."""

    mode: Mode
    inputs: list[Tensor | None]  # leaves that get a gradient
    outputs: list[_Output]
    parameters: Sequence[Tensor]
    queue: Queue | None = None  # of mode "deferred"
    roots: tuple[list[Any], list[Tensor]] = ([], [])  # what W of mode "graph" walks again
    done: Literal["F", "B", "BW", "W"] = "F"

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait for W after a B in mode "deferred": inputs and output gradients of the deferred layers."""
        return 0 if self.queue is None else queued_bytes(self.queue)


def run_forward(
    mode: Mode,
    fn: Callable[[list[Tensor]], list[Tensor]],
    inputs: list[Tensor],
    parameters: Sequence[Tensor],
    *,
    wanted: Sequence[bool] | None = None,
    layers: Layers | None = None,
) -> tuple[list[Tensor], Saved]:
    """Run a stage forward: `fn` is the stage, with the loss on the last one. Returns detached outputs and the rest.

    The inputs enter as leaves of their own; every floating-point (or complex) one will get a gradient, or only those
    `wanted`. `parameters` are the stage's: mode "graph" accumulates into these alone, others into all that fn used.
    `layers` is what `prepare` reported of them, and makes mode "deferred" quicker.
    Raises InputError for another mode, and if fn does not return a list of tensors.
    """
    if mode not in _MODES:
        raise InputError(f"split mode {mode!r} is unknown; expected 'deferred', 'graph' or 'fused' (see prepare)")
    if wanted is not None and len(wanted) != len(inputs):
        raise InputError(f"{len(wanted)} values of wanted for {len(inputs)} inputs; expected one for each")
    queue = Queue() if mode == "deferred" else None
    kept: list[Tensor | None] = []
    given: list[Tensor] = []
    for at, x in enumerate(inputs):
        leaf = x.detach()
        if (leaf.is_floating_point() or leaf.is_complex()) and (wanted is None or wanted[at]):
            kept.append(leaf.requires_grad_(True))
            given.append(_Enter.apply(leaf))
        else:
            kept.append(None)
            given.append(leaf)
    results: Any
    if queue is None:
        with torch.enable_grad():
            results = fn(given)
    else:
        with torch.enable_grad(), Recording(queue, layers):
            results = fn(given)
    outputs: list[_Output] = []
    left: list[Tensor] = []
    if not isinstance(results, (list, tuple)):
        raise InputError(f"a stage returned {_described(results)}; expected a list of tensors")
    for y in results:
        if not isinstance(y, Tensor):
            raise InputError(f"a stage returned {_described(results)}; expected a list of tensors")
        outputs.append(_Output(get_gradient_edge(y) if y.requires_grad else None, y.shape, y.dtype, y.device))
        left.append(y.detach())
    return left, Saved(mode, kept, outputs, parameters, queue)


Walk = Callable[[list[GradientEdge], list[Tensor]], None]
"""Runs autograd's backward from these places in the graph, with a gradient for each."""


def run_backward(saved: Saved, grads: Sequence[Tensor | None], go: Walk = walk) -> list[Tensor | None]:
    """BW: the gradients of the inputs, None for those that have none; those of the parameters are accumulated.

    `grads` are those of the outputs, None where none arrives; those of outputs without a gradient are ignored. [None]
    means 1 if the stage has one output and that is a single number, the loss.
    Raises InputError if they do not fit the outputs, StageloomError if this micro-batch's backward has run.
    """
    _step(saved, "F", "BW")
    edges, given = _roots(saved, grads)
    queue = saved.queue
    try:
        if not edges:
            return _take_gradients(saved)
        if queue is None:
            go(edges, given)
        else:
            with whole_gradients(queue, lambda: [edge.node for edge in edges]):
                go(edges, given)
            queue.run()
        return _take_gradients(saved)
    finally:
        if queue is not None:
            queue.clear()
        _free(saved)


def run_backward_input(saved: Saved, grads: Sequence[Tensor | None], go: Walk = walk) -> list[Tensor | None]:
    """B: as `run_backward`, but the weight gradients wait for `run_backward_weight` as far as the mode allows it.

    Mode "graph" asks for the inputs' gradients alone, and has no use for `go`.
    """
    if saved.mode == "fused":
        found = run_backward(saved, grads, go)
        saved.done = "B"
        return found
    _step(saved, "F", "B")
    edges, given = _roots(saved, grads)
    queue = saved.queue
    if queue is None:  # mode "graph"
        found = _differentiate(saved, edges, given)
        saved.roots = list(edges), given
        _free(saved)
        return found
    try:
        if edges:
            queue.deferring = True
            with whole_gradients(queue, lambda: [edge.node for edge in edges]):
                go(edges, given)
        return _take_gradients(saved)
    except BaseException:
        queue.clear()
        raise
    finally:
        queue.deferring = False
        _free(saved)


def run_backward_weight(saved: Saved) -> None:
    """W: accumulate the weight gradients that wait since B, and free all that is left.

    Raises StageloomError before B, and if a tensor it needs was overwritten since.
    """
    _step(saved, "B", "W")
    queue = saved.queue
    try:
        if queue is not None:
            queue.run()
        edges, given = saved.roots
        trained = [p for p in saved.parameters if p.requires_grad] if edges else []
        if trained:
            torch.autograd.backward(edges, given, inputs=trained)
    finally:
        saved.roots = ([], [])
        saved.parameters = ()
        if queue is not None:
            queue.clear()


def _step(saved: Saved, before: str, step: Literal["B", "BW", "W"]) -> None:
    if saved.done != before:
        expected = "a forward" if before == "F" else "B"
        raise StageloomError(f"{step} of a micro-batch must come right after {expected}, but {saved.done} came last")
    saved.done = step


def _roots(saved: Saved, grads: Sequence[Tensor | None]) -> tuple[list[GradientEdge], list[Tensor]]:
    """The places in the graph where the backward starts, and the gradient for each."""
    outputs = saved.outputs
    if len(grads) != len(outputs):
        raise InputError(f"{len(grads)} gradients for {len(outputs)} outputs; expected one for each, None where none")
    only = outputs[0] if len(outputs) == 1 else None
    if only is not None and only.shape.numel() == 1 and grads[0] is None:
        grads = [torch.ones(only.shape, dtype=only.dtype, device=only.device)]
    edges: list[GradientEdge] = []
    given: list[Tensor] = []
    for at, (output, grad) in enumerate(zip(outputs, grads, strict=True)):
        if output.edge is None or grad is None:
            continue
        if grad.shape != output.shape:
            raise InputError(
                f"the gradient of output {at} has shape {list(grad.shape)}; expected the output's, {list(output.shape)}"
            )
        edges.append(output.edge)
        given.append(grad.detach())
    return edges, given


def _differentiate(saved: Saved, edges: list[GradientEdge], given: list[Tensor]) -> list[Tensor | None]:
    leaves = [leaf for leaf in saved.inputs if leaf is not None]
    if not edges or not leaves:
        return [None] * len(saved.inputs)
    found = iter(torch.autograd.grad(edges, leaves, given, retain_graph=True, allow_unused=True))
    return [None if leaf is None else next(found) for leaf in saved.inputs]


def _take_gradients(saved: Saved) -> list[Tensor | None]:
    return [None if leaf is None else leaf.grad for leaf in saved.inputs]


def _free(saved: Saved) -> None:
    saved.inputs = []
    saved.outputs = []


def _described(results: Any) -> str:
    if not isinstance(results, (list, tuple)):
        return f"a {type(results).__name__}"
    return f"a list with a {next(type(y).__name__ for y in results if not isinstance(y, Tensor))}"


class _Enter(torch.autograd.Function):
    """An input of the stage as no leaf any more, so that the stage may change it in place, as any module may.

    It shares the input's version, so that a change that breaks a backward is noticed (torch's native ops that are no
    views do not).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]
