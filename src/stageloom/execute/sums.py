"""Sums of gradients over ranks, and values spread over them, wherever a tensor lies."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaks unknown types)
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stageloom.execute.mesh import give_gradient, gradient_of, local


@dataclass
class Sum:
    """A sum over ranks under way: gradients of parameters of one dtype, and how many ranks have one."""

    work: Any
    parameters: list[nn.Parameter]
    flat: Tensor

    def finish(self) -> None:
        """A parameter that has a gradient nowhere keeps none, as in one process."""
        self.work.wait()
        *parts, present = self.flat.split([*(local(p).numel() for p in self.parameters), len(self.parameters)])
        for parameter, part, count in zip(self.parameters, parts, present.tolist(), strict=True):
            give_gradient(parameter, part.view_as(local(parameter)).clone() if count else None)


def spread(first: Tensor, others: Iterable[Tensor], source: int, group: Any) -> None:
    """Give `first`, and its copies on this rank, the value that the global rank `source` of the group has."""
    value = local(first)
    if group is not None:
        sent = value.contiguous()
        dist.broadcast(sent.view(torch.uint8) if sent.dtype is torch.bool else sent, group=group, src=source)
        value.copy_(sent)
    for other in others:
        local(other).copy_(value)


def sums(parameters: list[nn.Parameter], group: Any) -> list[Sum]:
    """Sums of these parameters' gradients over a group, started; none where there is no group."""
    found: list[Sum] = []
    trained = [p for p in parameters if p.requires_grad] if group is not None else []
    for dtype in dict.fromkeys(p.dtype for p in trained):
        own = [p for p in trained if p.dtype is dtype]
        gradients = [gradient_of(p) for p in own]
        given = [
            (torch.zeros_like(local(p)) if g is None else g).flatten() for p, g in zip(own, gradients, strict=True)
        ]
        present = torch.tensor([g is not None for g in gradients]).to(given[0])
        flat = torch.cat([*given, present])
        found.append(Sum(dist.all_reduce(flat, group=group, async_op=True), own, flat))
    return found


def add_up(to: Sequence[nn.Parameter], parts: Sequence[nn.Parameter]) -> None:
    """Give `to` the sum of the gradients of `parts`."""
    gradients = [g for g in map(gradient_of, {id(p): p for p in parts}.values()) if g is not None]
    total = None if not gradients else torch.stack(gradients).sum(0) if len(gradients) > 1 else gradients[0]
    for parameter in to:
        give_gradient(parameter, None if total is None else total.clone())
