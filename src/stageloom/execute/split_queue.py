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

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

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
        uses = Counter(id(parameter) for entry in entries for parameter in entry.parameters)
        ready = _Ready()
        sums: dict[int, Tensor] = {}
        entries.reverse()
        while entries:
            entry = entries.pop()  # what the entry holds is free as soon as it has run
            for parameter, gradient in zip(entry.parameters, entry.gradients(), strict=True):
                key = id(parameter)
                uses[key] -= 1
                if key in sums:
                    gradient = sums.pop(key) + gradient
                if uses[key]:  # tied: hooks see the whole gradient
                    sums[key] = gradient
                elif parameter.requires_grad:  # it may have been frozen since
                    ready.add(parameter, gradient)
        ready.accumulate()


class _Ready:
    """Whole gradients on their way to their parameters. Small ones go together, which takes autograd less time; large
    ones do not wait, so that they do not add up."""

    MOST: Final = 1 << 20  # bytes

    def __init__(self) -> None:
        self.parameters: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.bytes = 0

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        self.parameters.append(parameter)
        self.gradients.append(gradient)
        self.bytes += gradient.nbytes
        if self.bytes > self.MOST:
            self.accumulate()

    def accumulate(self) -> None:
        """Through autograd, so that hooks fire, those of data parallel wrappers too."""
        if self.parameters:
            walk(self.parameters, self.gradients)
        self.parameters, self.gradients, self.bytes = [], [], 0


def queued_bytes(queue: Queue) -> int:
    """Bytes of memory that only wait for W (storages counted once, parameters not at all)."""
    own = {local(p).untyped_storage().data_ptr() for p in queue.parameters.values()}
    storages = [local(t).untyped_storage() for entry in queue.entries for t in entry.tensors]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(size for pointer, size in sizes.items() if pointer not in own)


_engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)


def walk(roots: Sequence[Tensor] | Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
    """torch.autograd.backward, which for small stages spends a third of its time on looking at its arguments.

    Callers give gradients of the roots' shapes. On other devices than the CPU torch's own also hands its context to
    their threads.
    """
    if _engine is None or any(gradient.device.type != "cpu" for gradient in gradients):
        torch.autograd.backward(roots, gradients)
    else:
        _engine.run_backward(
            tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
        )


# ------------------------------------------------------------------------------------------------- the forward's side


@dataclass
class Layers:
    """What the prepared layers of one stage share.

    `plain`: they compute as torch defines them, for a forward whose backward is one BW. It is no context variable, as
    autograd recomputes checkpointed forwards in threads of its own. `gated`: the parameters that the last deferred
    forward read.
    """

    plain: bool = False
    gated: list[Tensor] = field(default_factory=list[Tensor])


class Recording:
    """A deferred forward in progress: within the block, layers that are called belong to `queue`.

    Gates are kept here and not in the queue, which the graph refers to: a cycle through the graph is one that Python
    cannot collect.
    """

    def __init__(self, queue: Queue, layers: Layers | None = None) -> None:
        self.queue = queue
        self.layers = layers
        self.gates: dict[int, Tensor] = {}
        self.read: list[Tensor] = []
        self.token: Token[Recording | None] | None = None

    def __enter__(self) -> None:
        if self.layers is not None:  # one node for all that will be read, as far as that is known
            self._open([parameter for parameter in self.layers.gated if parameter.requires_grad])
        self.token = _recording.set(self)

    def __exit__(self, *_: object) -> None:
        assert self.token is not None
        _recording.reset(self.token)
        if self.layers is not None:
            self.layers.gated = self.read

    def gate(self, parameter: Tensor) -> Tensor:
        """A parameter behind its gate."""
        key = id(parameter)
        if key not in self.queue.parameters:
            self.queue.parameters[key] = parameter
            self.read.append(parameter)
            if key not in self.gates:
                self._open([parameter])
        return self.gates[key]

    def _open(self, parameters: list[Tensor]) -> None:
        if parameters:
            opened = _Gate.apply(torch.zeros((), requires_grad=True), (parameters, self.queue))
            self.gates.update(zip(map(id, parameters), opened, strict=True))


_recording: ContextVar[Recording | None] = ContextVar("stageloom_split", default=None)


def current() -> Queue | None:
    """The queue of the forward in progress. A recomputation needs none: its nodes are only read for their tensors."""
    found = _recording.get()
    return None if found is None else found.queue


@contextmanager
def not_recording() -> Generator[None]:
    """Within the block no layer belongs to the forward in progress: a backward that interrupts it has its own."""
    token = _recording.set(None)
    try:
        yield
    finally:
        _recording.reset(token)


def gate(parameter: Tensor | None) -> Tensor | None:
    """The parameter as a deferred layer has to read it: behind its gate, or itself if no deferred forward runs."""
    found = _recording.get()
    if found is None or parameter is None or not parameter.requires_grad:
        return parameter
    return found.gate(parameter)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dummy: Tensor, behind: tuple[list[Tensor], Queue]) -> tuple[Tensor, ...]:
        # The parameters come in a tuple: as arguments of their own they would be linked to the graph.
        ctx.set_materialize_grads(False)
        ctx.behind = behind
        return tuple(parameter.detach() for parameter in behind[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:
        parameters, queue = ctx.behind
        ready = _Ready()
        for parameter, gradient in zip(parameters, grads, strict=True):
            if gradient is not None and queue.accepts(parameter):
                # In a B only a second derivative taken within the forward comes this way.
                queue.add(Entry((parameter,), (gradient.detach().clone(),), lambda tensors: tensors))
            elif gradient is not None:
                ready.add(parameter, gradient)
        ready.accumulate()
        return None, None
