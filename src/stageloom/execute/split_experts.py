"""A grouped-expert layer: one linear layer an expert, in one weight, so that its weight gradient can be deferred."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaks unknown types)
from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stageloom.errors import InputError
from stageloom.execute.split_rules import ExpertsRule


class Experts(nn.Module):
    """y = x weight[e]ᵀ + bias[e] for the rows x of each expert e.

    weight: [experts, outputs, inputs]; bias: [experts, outputs] or None.
    """

    def __init__(
        self,
        experts: int,
        inputs: int,
        outputs: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("experts", experts), ("inputs", inputs), ("outputs", outputs)):
            if value < 1:
                raise InputError(f"Experts: {name} is {value}; expected at least 1")
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(experts, outputs, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within 1/sqrt(inputs), as nn.Linear does it for each expert."""
        bound = 1 / math.sqrt(self.weight.shape[2])
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor, sizes: Tensor | Sequence[int]) -> Tensor:
        """x: [rows, inputs], sorted by expert; sizes: how many rows each expert has, 0 allowed."""
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return self.rule(x, sizes).forward(x, self.weight, self.bias)[0]

    def rule(self, x: Tensor, sizes: Tensor | Sequence[int]) -> ExpertsRule:
        """This call as a rule. Raises InputError unless the sizes are one an expert and add up to the rows."""
        counts = tuple(int(n) for n in (sizes.tolist() if isinstance(sizes, Tensor) else sizes))
        if len(counts) != self.weight.shape[0] or min(counts) < 0 or x.dim() != 2 or sum(counts) != x.shape[0]:
            raise InputError(
                f"Experts: sizes {list(counts)} do not fit {self.weight.shape[0]} experts and an input of shape "
                f"{list(x.shape)}; expected one size an expert, their sum the number of rows"
            )
        return ExpertsRule(counts)

    def extra_repr(self) -> str:
        """Shown by print."""
        experts, outputs, inputs = self.weight.shape
        return f"experts={experts}, inputs={inputs}, outputs={outputs}, bias={self.bias is not None}"
