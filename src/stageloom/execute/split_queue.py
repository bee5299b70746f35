"""What B leaves for W: the queue of one micro-batch, filled by the layers' backward and run as one small backward.

How a weight gradient is put off. A layer that can be deferred does not read its parameter p but `p` behind a *gate*, a
tensor with the same storage whose only link to the graph is a dummy. So p's own accumulation does not run in B at all,
and none of p's hooks sees a missing or half a gradient. In a BW the gate receives the sum over all deferred uses of p
and hands it on to p; in a B it receives nothing, as the layers have put their share in the queue. W then accumulates
each parameter once, through autograd, so that hooks fire once and see the whole gradient.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false, reportUnknownParameterType=false, reportMissingTypeArgument=false
# (torch leaks unknown types, and its Function is untyped)
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stageloom.errors import StageloomError
from stageloom.execute.mesh import local


@dataclass
class Entry:
    """Gradients of `parameters` that W has to compute from `tensors`, which nobody may overwrite before."""

    parameters: tuple[Tensor, ...]
    tensors: tuple[Tensor, ...]
    compute: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
    versions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.versions = tuple(t._version for t in self.tensors)  # pyright: ignore[reportPrivateUsage] (no other way)

    def gradients(self) -> tuple[Tensor, ...]:
        """Compute. Raises StageloomError if a kept tensor was overwritten, as autograd does for its own."""
        if self.versions != tuple(t._version for t in self.tensors):  # pyright: ignore[reportPrivateUsage]
            raise StageloomError(
                "a tensor that a deferred weight gradient needs was overwritten between B and W: do not reuse the "
                "memory of stage inputs and output gradients before W"
            )
        return self.compute(self.tensors)


@dataclass
class Queue:
    """The weight gradients of one micro-batch that wait for W. Layers reach it from their own node in the graph, so
    that it does not matter in which thread autograd runs them."""

    deferring: bool = False
    entries: list[Entry] = field(default_factory=list[Entry])
    parameters: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    held: set[int] = field(default_factory=set[int])

    def accepts(self, parameter: Tensor) -> bool:
        """Whether a gradient of this parameter must wait in the queue."""
        return self.deferring or id(parameter) in self.held

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)

    def clear(self) -> None:
        self.entries = []
        self.parameters = {}
        self.held = set()

    def run(self) -> None:
        """Accumulate everything that waits, one accumulation for each parameter, and free it."""
        entries, self.entries = self.entries, []
        if not entries:
            return
        with torch.enable_grad():
            # Autograd runs the youngest node first: made in reverse, the entries run in the order of the queue.
            roots = [_Emit.apply(entry, *entry.parameters) for entry in reversed(entries)]
        del entries
        roots = [root for root in roots if root.requires_grad]  # without those of parameters frozen since
        zeros = [torch.zeros_like(root) for root in roots]
        torch.autograd.backward(roots, zeros)


def queued_bytes(queue: Queue) -> int:
    """Bytes of memory that only wait for W (storages counted once, parameters not at all)."""
    own = {local(p).untyped_storage().data_ptr() for p in queue.parameters.values()}
    storages = [local(t).untyped_storage() for entry in queue.entries for t in entry.tensors]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(size for pointer, size in sizes.items() if pointer not in own)


class _Emit(torch.autograd.Function):
    """A node whose backward is an entry of the queue: autograd sums over tied uses, accumulates and calls the hooks."""

    @staticmethod
    def forward(ctx: Any, entry: Entry, *parameters: Tensor) -> Tensor:
        ctx.entry = entry
        return torch.empty(0, dtype=parameters[0].dtype, device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        entry: Entry = ctx.entry
        ctx.entry = None  # what the entry holds is free as soon as it has run
        return None, *entry.gradients()


# ------------------------------------------------------------------------------------------------- the forward's side


@dataclass
class Recording:
    """A deferred forward in progress. Gates are kept here and not in the queue, which the graph refers to: a cycle
    through the graph is one that Python cannot collect."""

    queue: Queue
    gates: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    dummy: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))


_recording: ContextVar[Recording | None] = ContextVar("stageloom_split", default=None)


@contextmanager
def recording(queue: Queue | None) -> Generator[None]:
    """Layers called within the block belong to this queue; to none where it is None."""
    token = _recording.set(None if queue is None else Recording(queue))
    try:
        yield
    finally:
        _recording.reset(token)


def current() -> Queue | None:
    """The queue of the forward in progress. A recomputation needs none: its nodes are only read for their tensors."""
    found = _recording.get()
    return None if found is None else found.queue


def gate(parameter: Tensor | None) -> Tensor | None:
    """The parameter as a deferred layer has to read it: behind its gate, or itself if no deferred forward runs."""
    found = _recording.get()
    if found is None or parameter is None or not parameter.requires_grad:
        return parameter
    key = id(parameter)
    if key not in found.gates:
        found.queue.parameters[key] = parameter
        found.gates[key] = _Gate.apply(found.dummy, (parameter, found.queue))
    return found.gates[key]


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dummy: Tensor, behind: tuple[Tensor, Queue]) -> Tensor:
        # The parameter comes in a tuple: as an argument of its own it would be linked to the graph.
        ctx.set_materialize_grads(False)
        ctx.behind = behind
        return behind[0].detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:
        parameter, queue = ctx.behind
        gradient = grads[0]
        if gradient is not None and queue.accepts(parameter):
            # In a B only a second derivative taken within the forward comes this way.
            queue.add(Entry((parameter,), (gradient.detach().clone(),), lambda tensors: tensors))
        elif gradient is not None:
            torch.autograd.backward((parameter,), (gradient,))
        return None, None


# ---------------------------------------------------------------- parameters used both by deferred layers and otherwise


@contextmanager
def whole_gradients(queue: Queue, nodes: Sequence[Any]) -> Generator[None]:
    """Keep hooks whole during a backward over the graph that ends in `nodes`.

    A parameter that a deferred layer and some other operation use (`F.linear(x, layer.weight)`) gets one part of its
    gradient in the backward and the other from the queue. If it has hooks, they would fire twice, with half a gradient
    each. So its first part is caught here, hooks off, and queued.
    """
    hooked = {key for key, parameter in queue.parameters.items() if _hooks(parameter) != (None, None)}
    both = _reached(nodes, hooked) if hooked else []
    before = [(parameter, parameter.grad, *_hooks(parameter)) for parameter in both]
    for parameter in both:
        parameter.grad = None
        _set_hooks(parameter, None, None)
    queue.held = {id(parameter) for parameter in both}
    try:
        yield
    finally:
        queue.held = set()
        for parameter, gradient, first, last in before:
            part, parameter.grad = parameter.grad, gradient
            _set_hooks(parameter, first, last)
            if part is not None:
                queue.add(Entry((parameter,), (part,), lambda tensors: tensors))


def _hooks(parameter: Tensor) -> tuple[Any, Any]:
    # Torch has no public way to set hooks aside.
    return getattr(parameter, "_backward_hooks", None) or None, (
        getattr(parameter, "_post_accumulate_grad_hooks", None) or None
    )


def _set_hooks(parameter: Any, first: Any, last: Any) -> None:
    parameter._backward_hooks = first
    if parameter._post_accumulate_grad_hooks is not None:
        # None would leave torch with the hooks it has.
        parameter._post_accumulate_grad_hooks = OrderedDict[int, Any]() if last is None else last


@contextmanager
def quiet(parameters: Sequence[Tensor]) -> Generator[None]:
    """Within the block no hook of these parameters fires and their `.grad` starts as None; both come back after it."""
    before = [(parameter, parameter.grad, *_hooks(parameter)) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
        _set_hooks(parameter, None, None)
    try:
        yield
    finally:
        for parameter, gradient, first, last in before:
            parameter.grad = gradient
            _set_hooks(parameter, first, last)


def _reached(nodes: Sequence[Any], keys: set[int]) -> list[Tensor]:
    """The parameters among `keys` whose accumulation stands in the graph."""
    seen: set[Any] = set()
    waiting: list[Any] = list(nodes)
    found: dict[int, Tensor] = {}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad" and id(node.variable) in keys:
            found[id(node.variable)] = node.variable
        waiting.extend(edge[0] for edge in node.next_functions)
    return list(found.values())
