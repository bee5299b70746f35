"""Weight versions of one stage under an asynchronous schedule.

The newest weights live in the module. A forward runs on its version's own leaf tensors, so that an update does not
touch what older micro-batches in flight still need; their gradients are collected there. After `update_every` backwards
the collected gradients (their mean) go into the module's `.grad`, the optimiser steps, and a new version begins.
Under data parallel the gradients are summed over the pipelines before (`shared`), by the REDUCE that comes next: all of
them update in the same places, and weights equal those of one process that trains on their micro-batches at once.
Sources: PipeDream's weight stashing (arXiv 1806.03377) and PipeDream-2BW (arXiv 2006.09503, section 3.1).
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaks unknown types)
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


class Versions:
    """The weights of one stage, by the number of updates they have seen."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        update_every: int,
        *,
        shared: bool = False,
    ) -> None:
        self.shared = shared
        self.module = module
        self.optimizer = optimizer
        self.update_every = update_every
        self.newest = 0
        self.ended_since = 0
        self.weights: dict[int, dict[str, Tensor]] = {}
        self.in_flight: dict[int, int] = {}
        self.most = 1
        self.collected: dict[str, Tensor] = {}
        self._add()

    def begin(self, uses: dict[int, int]) -> None:
        """A run starts: versions count from 0 again, and `uses[version]` micro-batches will run on each."""
        self.newest = 0
        self.weights = {}
        self._add()  # from the module, whose weights may have been loaded or changed since
        self.ended_since = 0
        self.in_flight = dict(uses)
        self.collected = {}

    def _add(self) -> None:
        self.weights[self.newest] = {
            name: parameter.detach().clone().requires_grad_(parameter.requires_grad)
            for name, parameter in self.module.named_parameters()
        }
        self.most = max(self.most, len(self.weights))

    def call(self, version: int, arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return functional_call(self.module, self.weights[version], arguments, kwargs)

    def leaves(self, version: int) -> list[Tensor]:
        return [leaf for leaf in self.weights[version].values() if leaf.requires_grad]

    def ended(self, version: int) -> None:
        """A micro-batch's backward on this version is done: collect its gradients, update when it is time."""
        for name, leaf in self.weights[version].items():
            if leaf.grad is not None:
                self.collected[name] = self.collected[name] + leaf.grad if name in self.collected else leaf.grad
                leaf.grad = None
        self.in_flight[version] -= 1
        self.ended_since += 1
        if self.ended_since == self.update_every:
            self._collect()
            if not self.shared:
                self.update()
        self._drop()

    def _collect(self) -> None:
        for name, parameter in self.module.named_parameters():
            gradient = self.collected.get(name)
            parameter.grad = None if gradient is None else gradient / self.update_every
        self.collected = {}
        self.ended_since = 0

    def update(self) -> None:
        """Update from what has been collected; the next version begins."""
        if self.optimizer is not None:  # a stage without trained parameters has none
            self.optimizer.step()
        for parameter in self.module.parameters():
            parameter.grad = None
        self.newest += 1
        self._add()
        self._drop()

    def _drop(self) -> None:
        for old in [v for v in self.weights if v != self.newest and not self.in_flight.get(v)]:
            del self.weights[old]
