"""All-to-alls between the parts of a stage: what experts on other ranks need of a micro-batch, and send back.

A stage that exchanges rows with other ranks while it computes (a mixture-of-experts layer with its experts spread over
a group) can say where, by `overlapped_parts()`: a list of functions that make up its forward. Each gets what the one
before returned, a tuple as its arguments; one that returns an `AllToAll` ends where its rows travel. `through` runs the
parts one after another and is all that the stage's forward has to do. What runs under whose all-to-all in an overlapped
pair is told in `stageloom.execute.parts`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false, reportUnknownParameterType=false, reportMissingTypeArgument=false
# (torch leaks unknown types, and its Function is untyped)
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stageloom.errors import InputError
from stageloom.execute.channel import has_gradient
from stageloom.execute.devices import move, to_wire, wire_device

Part = Callable[..., Any]


@dataclass(frozen=True)
class AllToAll:
    """What a part returns to have rows exchanged before the next one runs.

    x
        A tensor, or a tuple of tensors with as many rows: first the rows for the group's first rank, and so on.
    sent, received
        How many rows go to each rank of the group, and come from each. Every rank has to know both beforehand.
    group
        The ranks that exchange; None where this rank has everything itself, and x goes on as it is.
    keep
        What the next part gets beside x as it arrived: it is called as part(x, *keep).
    """

    x: Tensor | tuple[Tensor, ...]
    sent: Sequence[int]
    received: Sequence[int]
    group: dist.ProcessGroup | None
    keep: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Crossing:
    """The way of an all-to-all; its backward goes the other way."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    group: dist.ProcessGroup | None

    def reversed(self) -> Crossing:
        return Crossing(self.received, self.sent, self.group)


@dataclass
class Pending:
    """An all-to-all under way."""

    works: list[Any]
    leaving: list[Tensor]  # alive until all has arrived
    arriving: list[Tensor]
    dtypes: list[torch.dtype]
    device: torch.device

    def wait(self) -> list[Tensor]:
        """What arrived."""
        for work in self.works:
            work.wait()
        self.leaving = []
        # a bool travels as bytes
        return [move(got.view(dtype), self.device) for got, dtype in zip(self.arriving, self.dtypes, strict=True)]


def crossing_of(value: AllToAll, where: str) -> Crossing:
    """The way that an AllToAll asks for. Raises InputError if its numbers do not fit; `where` says whose it is."""
    tensors = tensors_of(value)
    size = 1 if value.group is None else dist.get_world_size(value.group)
    sent, received = (tuple(int(rows) for rows in of) for of in (value.sent, value.received))
    for name, rows in (("sent", sent), ("received", received)):
        if len(rows) != size or min(rows) < 0:
            raise InputError(f"{where}: AllToAll: {name} is {list(rows)}; expected a number of rows for {size} ranks")
    for tensor in tensors:
        if tensor.dim() == 0 or tensor.shape[0] != sum(sent):
            raise InputError(
                f"{where}: AllToAll: x has shape {list(tensor.shape)}; expected {sum(sent)} rows, the sum of sent"
            )
    if value.group is None and sent != received:
        raise InputError(f"{where}: AllToAll: without a group as many rows arrive as are sent, not {list(received)}")
    return Crossing(sent, received, value.group)


def tensors_of(value: AllToAll) -> tuple[Tensor, ...]:
    return value.x if isinstance(value.x, tuple) else (value.x,)


def start(tensors: Sequence[Tensor], crossing: Crossing) -> Pending:
    """Start an all-to-all; what the caller computes before it waits for it runs at the same time."""
    works: list[Any] = []
    leaving: list[Tensor] = []
    arriving: list[Tensor] = []
    dtypes = [tensor.dtype for tensor in tensors]
    device = tensors[0].device if tensors else torch.device("cpu")
    for tensor in tensors:
        given = tensor.detach().contiguous()
        given = given.view(torch.uint8) if given.dtype is torch.bool else given
        if crossing.group is None or len(crossing.sent) == 1:
            arriving.append(given)
            continue
        wire = wire_device(crossing.group, device)
        given = to_wire(given, wire)
        shape = (sum(crossing.received), *given.shape[1:])
        into = torch.empty(shape, dtype=given.dtype, device=wire, pin_memory=wire.type != device.type)
        received, sent = list(crossing.received), list(crossing.sent)
        works.append(dist.all_to_all_single(into, given, received, sent, group=crossing.group, async_op=True))
        leaving.append(given)
        arriving.append(into)
    return Pending(works, leaving, arriving, dtypes, device)


def through(parts: Sequence[Part], *arguments: Any, **kwargs: Any) -> Any:
    """Run the parts one after another, each all-to-all waited for: the plain forward of a stage that has them.

    `arguments` and `kwargs` go to the first part. May be differentiated as any forward.
    """
    value: Any = arguments
    for number, part in enumerate(parts):
        value = part(*arguments, **kwargs)
        kwargs = {}
        if isinstance(value, AllToAll):
            crossing = crossing_of(value, f"part {number}")
            arrived = _Exchange.apply(crossing, *tensors_of(value))
            arguments = (arrived if isinstance(value.x, tuple) else arrived[0], *value.keep)
        else:
            arguments = value if isinstance(value, tuple) else (value,)
    refuse_open_end(value, len(parts) - 1, "")
    return value


def refuse_open_end(value: Any, number: int, where: str) -> None:
    """Raise InputError where the last part returns an AllToAll."""
    if isinstance(value, AllToAll):
        raise InputError(f"{where}part {number} is the last and returned an AllToAll; a part must take what arrives")


class _Exchange(torch.autograd.Function):
    """An all-to-all that is waited for; in the backward another one, the other way."""

    @staticmethod
    def forward(ctx: Any, crossing: Crossing, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.crossing = crossing
        ctx.set_materialize_grads(False)
        ctx.likes = [(t.shape, t.dtype, t.device) for t in tensors]
        arrived = start(tensors, crossing).wait()
        # nothing was exchanged with nobody: a function must not return what it was given
        arrived = [got.clone() if crossing.group is None or len(crossing.sent) == 1 else got for got in arrived]
        ctx.mark_non_differentiable(*(got for got in arrived if not has_gradient(got.dtype)))
        ctx.arrived = [got.shape for got in arrived]
        return tuple(arrived)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        # every rank takes part for every tensor, whether a gradient has come here or not
        given = [
            torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
            for grad, shape, (_, dtype, device) in zip(grads, ctx.arrived, ctx.likes, strict=True)
            if has_gradient(dtype)
        ]
        back = iter(start(given, ctx.crossing.reversed()).wait())
        return None, *(next(back) if has_gradient(dtype) else None for _, dtype, _ in ctx.likes)
