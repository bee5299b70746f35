"""Messages between two ranks: lists of tensors, received in the order sent; shapes are told only when they change."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch.distributed leaks unknown types)
from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from stageloom.execute.devices import Link, Net, move, to_wire
from stageloom.execute.tasks import Task
from stageloom.lower import Code

WINDOW: Final = 3
"""Receives posted ahead of a sender at most, unless told otherwise."""


@dataclass(frozen=True)
class Spec:
    """What a message holds: the structure of the value, and shape and dtype of every tensor."""

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]


def spec_of(tensors: list[Tensor], structure: Any) -> Spec:
    return Spec(structure, tuple(tuple(t.shape) for t in tensors), tuple(t.dtype for t in tensors))


def has_gradient(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def differentiable(spec: Spec) -> Spec:
    """What the gradient of such a message holds."""
    kept = [at for at, dtype in enumerate(spec.dtypes) if has_gradient(dtype)]
    return Spec(None, tuple(spec.shapes[at] for at in kept), tuple(spec.dtypes[at] for at in kept))


def fits(tensors: list[Tensor], structure: Any, spec: Spec) -> bool:
    """Is a message as expected? Quick, and False where structures do not compare; `difference` knows better then."""
    for tensor, shape, dtype in zip(tensors, spec.shapes, spec.dtypes, strict=False):
        if tensor.shape != shape or tensor.dtype is not dtype:
            return False
    try:
        return len(tensors) == len(spec.dtypes) and bool(structure == spec.structure)
    except Exception:  # leaves such as arrays, which do not compare to one truth
        return False


def difference(found: Spec, expected: Spec) -> tuple[str, str] | None:
    """The first thing in which a message is not as expected, and what was expected; None if there is none."""
    if len(found.shapes) != len(expected.shapes):
        return f"{len(found.shapes)} tensors", str(len(expected.shapes))
    both = zip(found.shapes, found.dtypes, expected.shapes, expected.dtypes, strict=True)
    for at, (shape, dtype, wanted_shape, wanted_dtype) in enumerate(both):
        which = f"tensor {at} of " if len(found.shapes) > 1 else "a tensor of "
        if shape != wanted_shape:
            return f"{which}shape {shape}", str(wanted_shape)
        if dtype != wanted_dtype:
            return f"{which}dtype {dtype}", str(wanted_dtype)
    if not _same(found.structure, expected.structure):
        # numbers and text between the tensors do not travel again
        return f"the structure {found.structure}", str(expected.structure)
    return None


def _same(one: Any, other: Any) -> bool:
    try:
        if one == other:
            return True
    except Exception:  # leaves such as arrays, which do not compare to one truth
        pass
    return pickle.dumps(one) == pickle.dumps(other)


class Posted(NamedTuple):
    """A receive under way: what it waits for and where it goes."""

    works: list[Any]
    buffers: list[Tensor]
    spec: Spec
    net: Net

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        got = self.buffers
        if torch.bool in self.spec.dtypes:  # a bool travels as bytes
            got = [each.view(dtype) for each, dtype in zip(got, self.spec.dtypes, strict=True)]
        return [move(tensor, self.net.device) for tensor in got] if self.net.staged else got


class Sender:
    """Sends under way, by the row whose result they carry. Each is let go of when it is known to have arrived."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self.under_way: dict[int, list[tuple[Any, Tensor]]] = {}
        self.most = 0

    def send(self, row: int, tensors: list[Tensor], link: Link, announce: Spec | None = None) -> None:
        """Start to send; with `announce` the spec goes first."""
        group, rank, tag = link
        leaving = [_sendable(tensor) for tensor in tensors]
        if self.net.staged:
            leaving = [to_wire(tensor, self.net.wire) for tensor in leaving]
        if announce is not None:
            packed = torch.frombuffer(bytearray(pickle.dumps(announce)), dtype=torch.uint8)
            told = (torch.tensor([len(packed)]), packed)
            leaving = [*(move(tensor, self.net.control) for tensor in told), *leaving]
        # the group's own send and receive: dist.isend and irecv look the group up again for every tensor
        self.under_way[row] = [(group.send([tensor], rank, tag), tensor) for tensor in leaving]
        self.most = max(self.most, len(self.under_way))

    def reap(self, rows: tuple[int, ...]) -> None:
        """Let go of sends that have arrived."""
        for row in rows:
            for work, _ in self.under_way.pop(row, ()):
                work.wait()

    def finish(self) -> None:
        """Wait until all has been sent. Raises what a send failed with."""
        self.reap(tuple(self.under_way))


def receive_spec(link: Link, net: Net) -> Spec:
    """The spec that a sender announces before its message."""
    group, rank, tag = link
    size = torch.zeros(1, dtype=torch.int64, device=net.control)
    group.recv([size], rank, tag).wait()
    packed = torch.empty(int(size), dtype=torch.uint8, device=net.control)
    group.recv([packed], rank, tag).wait()
    return pickle.loads(packed.cpu().numpy().tobytes())


def post(spec: Spec, link: Link, net: Net) -> Posted:
    """Start to receive a message of this spec."""
    group, rank, tag = link
    buffers = [
        torch.empty(shape, dtype=torch.uint8 if dtype is torch.bool else dtype, device=net.wire, pin_memory=net.staged)
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    ]
    return Posted([group.recv([each], rank, tag) for each in buffers], buffers, spec, net)


class Posts:
    """Receives posted ahead: of every sender the next few, in the order sent.

    At most `window`, and more are posted when no more than half of them are left: Gloo tells the sender of each one by
    a message, and to read two together costs its reader little more than to read one.
    """

    def __init__(self, tasks: list[Task], window: int, make: Callable[[Task], Posted]) -> None:
        self.make = make
        self.window = window
        self.waiting: dict[int, deque[Task]] = {}
        for task in tasks:
            if task.code is Code.RECV:
                self.waiting.setdefault(task.peer, deque()).append(task)
        self.posted: dict[int, deque[Posted]] = {peer: deque() for peer in self.waiting}
        for peer in self.waiting:
            self.ahead(peer)

    def ahead(self, peer: int) -> None:
        """Post more receives from a sender, if it is time to."""
        waiting, posted = self.waiting[peer], self.posted[peer]
        if len(posted) > self.window // 2:
            return
        while waiting and len(posted) < self.window:
            posted.append(self.make(waiting.popleft()))

    def take(self, peer: int) -> Posted:
        """The receive that was posted first."""
        return self.posted[peer].popleft()


def _sendable(tensor: Tensor) -> Tensor:
    if tensor.requires_grad or not tensor.is_contiguous():
        tensor = tensor.detach().contiguous()
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor
