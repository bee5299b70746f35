"""A stage with experts on several ranks: what the parts of a mixture-of-experts layer look like to the runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stageloom.execute.exchange import AllToAll, through
from stageloom.execute.split import Experts


class MoeStage(nn.Module):
    """x + mix(mean of earlier positions), then each position through one of `experts`, spread over `group`."""

    def __init__(self, width: int, experts: int, seed: int, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.width, self.experts, self.group = width, experts, group
        size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        self.local = experts // size
        generator = torch.Generator().manual_seed(seed)
        self.mix = nn.Linear(width, width)
        self.router = nn.Linear(width, experts)
        self.up = Experts(self.local, width, 2 * width, bias=False)
        self.down = Experts(self.local, 2 * width, width, bias=False)
        own = slice(rank * self.local, (rank + 1) * self.local)
        with torch.no_grad():
            for layer in (self.mix, self.router):
                layer.weight.normal_(0, width**-0.5, generator=generator)
                layer.bias.zero_()
            for expert in (self.up, self.down):
                _, outputs, inputs = expert.weight.shape
                expert.weight.copy_(torch.randn(experts, outputs, inputs, generator=generator)[own] * inputs**-0.5)

    def overlapped_parts(self) -> list[Callable[..., Any]]:
        """Attention, experts, combine; between them rows travel to their experts and back."""
        return [self.route, self.apply_experts, self.combine]

    def forward(self, x: Tensor) -> Tensor:
        return through(self.overlapped_parts(), x)

    def route(self, x: Tensor) -> AllToAll:
        steps = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype).view(-1, 1)
        x = x + torch.tanh(self.mix(x.cumsum(1) / steps))
        rows = x.reshape(-1, self.width)
        gate, choice = self.router(rows).softmax(-1).max(-1)
        order = choice.argsort(stable=True)
        sizes = choice.bincount(minlength=self.experts).view(-1, self.local).cpu()
        theirs = sizes.clone()
        if self.group is not None:
            dist.all_to_all_single(theirs, sizes, group=self.group)
        way = sizes.sum(1).tolist(), theirs.sum(1).tolist()
        return AllToAll(rows[order], *way, self.group, (x, gate[order], order, theirs.tolist(), *way))

    def apply_experts(
        self, rows: Tensor, x: Tensor, gate: Tensor, order: Tensor, theirs: list[list[int]], *way: list[int]
    ) -> AllToAll:
        expert = torch.arange(self.local).repeat(len(theirs)).repeat_interleave(torch.tensor(theirs).flatten())
        sort = expert.argsort(stable=True).to(rows.device)
        sizes = [sum(of) for of in zip(*theirs, strict=True)]
        found = self.down(torch.tanh(self.up(rows[sort], sizes)), sizes)
        sent, received = way
        return AllToAll(
            torch.empty_like(found).index_copy(0, sort, found), received, sent, self.group, (x, gate, order)
        )

    def combine(self, rows: Tensor, x: Tensor, gate: Tensor, order: Tensor) -> Tensor:
        return x + torch.zeros_like(rows).index_add(0, order, rows * gate[:, None]).view_as(x)
