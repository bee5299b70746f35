"""One autograd function for all layers that can be deferred: in a BW it computes everything, in a B it queues W."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false, reportUnknownParameterType=false, reportMissingTypeArgument=false
# pyright: reportPrivateUsage=false
# (torch leaks unknown types, its Function is untyped, and it does not tell publicly whether hooks are on)
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stageloom.execute.casting import no_autocast
from stageloom.execute.split_queue import Entry, Queue, current, gate
from stageloom.execute.split_rules import NORMS, Gradients, Rule


def call(rule: Rule, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """Run a layer by its rule; its weight gradients wait for W if the micro-batch's backward is split."""
    of = _Call(rule, w, b, current())
    weight, bias = gate(w), gate(b)
    if not rule.keeps and _hooks(False) is not None:
        x, weight = _Keep.apply(of, x, weight)
    return _Layer.apply(of, x, weight, bias)


def _no_hooks(_: bool) -> None:
    return None


# The hooks on saved tensors, if any are on: only then this may be a checkpointed forward.
_hooks: Callable[[bool], Any] = getattr(
    getattr(torch._C, "_autograd", None), "_top_saved_tensors_default_hooks", _no_hooks
)


@dataclass(slots=True)
class _Call:
    rule: Rule
    weight: Tensor
    bias: Tensor | None
    queue: Queue | None
    keeper: Any = None  # the node that keeps x and w, where it is another one

    def __post_init__(self) -> None:
        if self.bias is not None and not self.bias.requires_grad:
            self.bias = None

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, of: _Call, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.of = of
        with no_autocast(x.device.type):
            y, kept = of.rule.forward(x, w, b)
        if of.keeper is None:
            ctx.save_for_backward(x, w, *kept)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        g = grads[0]
        if g is None:
            return (None,) * 4
        of: _Call = ctx.of
        x, w, *rest = (ctx if of.keeper is None else of.keeper).saved_tensors
        with no_autocast(x.device.type):
            if torch.is_grad_enabled():
                return None, *_differentiable(of, g, x, w, ctx.needs_input_grad[1])
            kept = tuple(rest)
            if isinstance(of.rule, NORMS) and ctx.needs_input_grad[1]:
                dx, gradients = of.rule.all_gradients(g, x, w, kept, of.bias is not None)
                if of.queue is not None and of.queue.deferring:
                    of.queue.add(Entry(of.parameters, gradients, lambda found: found))
                    gradients = (None, None)
                return None, dx, *gradients, *(None,) * (2 - len(gradients))
            dx = of.rule.input_gradient(g, x, w, kept) if ctx.needs_input_grad[1] else None
            if of.queue is not None and of.queue.deferring:
                _defer(of, of.queue, g, x, w, kept)
                return None, dx, None, None
            gradients = of.rule.weight_gradients(g, x, w, kept, of.bias is not None)
        return None, dx, *gradients, *(None,) * (2 - len(gradients))


class _Keep(torch.autograd.Function):
    """Keeps x and w before the layer computes. Recomputation under checkpointing ends with the last tensor it needs; a
    function of our own keeps its tensors after its forward, and so the last layer would be computed for nothing."""

    @staticmethod
    def forward(ctx: Any, of: _Call, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w)
        of.keeper = ctx
        same = x.detach()
        if not ctx.needs_input_grad[1]:
            ctx.mark_non_differentiable(same)
        return same, w.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, *grads


def _defer(of: _Call, queue: Queue, g: Tensor, x: Tensor, w: Tensor, kept: Gradients) -> None:
    rule, bias = of.rule, of.bias is not None

    def compute(tensors: Gradients) -> Gradients:
        g, x, w, *kept = tensors
        with no_autocast(x.device.type):
            return rule.weight_gradients(g, x, w, tuple(kept), bias)

    # Detached: a saved tensor still leads to the graph behind it, which must be free after B.
    queue.add(Entry(of.parameters, (g, *(t.detach() for t in (x, w, *kept))), compute))


def _differentiable(of: _Call, g: Tensor, x: Tensor, w: Tensor, input_too: bool) -> tuple[Tensor | None, ...]:
    """The backward where its result will be differentiated once more (create_graph), as in a gradient penalty."""
    b = None if of.bias is None else of.bias.detach().requires_grad_()
    y, _ = of.rule.forward(x, w, b)
    wanted = [t for t in (x if input_too else None, w, b) if t is not None]
    found = iter(torch.autograd.grad(y, wanted, g, create_graph=True))
    return next(found) if input_too else None, next(found), next(found) if b is not None else None
