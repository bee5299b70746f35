"""Buffers of a stage that several ranks hold: each of them sees other micro-batches, and must not drift from the rest.

Statistics of batch norms become those of one process that runs path 0's micro-batches first, then path 1's, and so on,
and so for each data parallel pipeline after the other. Each running value moves by steps r <- (1 - m) r + m x, so
k steps make (1 - m)^k r + c, and what replicas have found, k and c, can be put one after the other. Other persistent
buffers become those of path 0 (of the first pipeline) after each step, since nobody knows what they stand for. Buffers
that are not in the state dict are left alone.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false
# (torch leaks unknown types)
from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # pyright: ignore[reportPrivateUsage] (their only base)

from stageloom.errors import InputError
from stageloom.execute.replicas import Copies, Shared
from stageloom.execute.sums import spread


def batch_norms(module: nn.Module) -> list[BatchNorm]:
    """The layers of a stage that keep statistics of their inputs."""
    return list(_named_norms(module).values())


def _named_norms(module: nn.Module) -> dict[str, BatchNorm]:
    found = {name: layer for name, layer in module.named_modules() if isinstance(layer, BatchNorm)}
    return {n: layer for n, layer in found.items() if layer.track_running_stats and layer.running_mean is not None}


@contextmanager
def not_counting(norms: Sequence[BatchNorm]) -> Generator[None]:
    """Within, these layers compute as ever, but their statistics stay: for a forward that is run again."""
    for norm in norms:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True


class Buffers:
    """Keeps the buffers of replicas equal; `begin` and `finish` are called around a step, by all ranks."""

    def __init__(self, shared: Shared) -> None:
        # by stage and by the ranks that hold it: two ranks have to meet in one order
        every = [copies for stage in sorted(shared.copies) for copies in shared.copies[stage]]
        self._kept = [_Kept(copies, shared) for copies in every if copies.part.replicas]

    def begin(self) -> None:
        """Remember the statistics that the replicas start with, which are the same on all."""
        for kept in self._kept:
            kept.begin()

    def finish(self) -> None:
        """Make the replicas' buffers equal."""
        for kept in self._kept:
            kept.finish()


class _Kept:
    """The buffers of a stage that the same ranks hold."""

    def __init__(self, copies: Copies, shared: Shared) -> None:
        part = copies.part
        self.stage, self.group, self.source, self.replicas = part.stage, copies.group, copies.source, part.replicas
        self.paths = len(shared.schedule.placement.paths)
        # where each replica here stands in the order in which they are put one after the other
        path_of = {id(m): path for (path, own), m in sorted(shared.modules.items(), reverse=True) if own == part.stage}
        self.turns = [shared.grid.number * self.paths + path_of[id(module)] for module in self.replicas]
        self.norms = [_norms_of(module, part.names) for module in self.replicas]
        self.shapes = _shapes(self.replicas[0], part.names)
        self.starts: list[Tensor] = []

    def begin(self) -> None:
        self.starts = [_read(norm) for norm in self.norms[0]]

    def finish(self) -> None:
        if self.starts:
            self._join_statistics()
        if self.shapes:
            self._spread_others()

    def _join_statistics(self) -> None:
        """Every rank gets the statistics of all replicas, and puts them one after the other."""
        lengths = [len(start) for start in self.starts]
        mine = torch.full((self.paths, 1 + sum(lengths)), -1.0, dtype=torch.float64, device=self.starts[0].device)
        for row, (turn, norms) in enumerate(zip(self.turns, self.norms, strict=True)):
            mine[row, 0] = turn
            mine[row, 1:] = torch.cat([_read(norm) for norm in norms])
        tables = [mine]
        if self.group is not None:
            tables = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
            dist.all_gather(tables, mine, group=self.group)
        rows = torch.cat(tables)
        rows = rows[rows[:, 0] >= 0]
        rows = rows[rows[:, 0].argsort()][:, 1:]
        for number, (start, found) in enumerate(zip(self.starts, rows.split(lengths, dim=1), strict=True)):
            joined = _joined(start, found, self.norms[0][number].momentum)
            for norms in self.norms:
                _write(norms[number], joined)

    def _spread_others(self) -> None:
        everyone = [dict(module.named_buffers()) for module in self.replicas]
        for name, shape in self.shapes.items():
            for of in everyone:
                if of[name].shape != shape:
                    raise InputError(
                        f"stage {self.stage}: its buffer {name} has changed its shape from {tuple(shape)} to "
                        f"{tuple(of[name].shape)}, but replicas' buffers are kept equal; register it with "
                        "persistent=False"
                    )
            first, *rest = (of[name] for of in everyone)
            spread(first, rest, self.source, self.group)


def _norms_of(module: nn.Module, names: Sequence[str]) -> list[BatchNorm]:
    """Those whose statistics are among these buffers."""
    return [norm for name, norm in _named_norms(module).items() if f"{name}.running_mean".lstrip(".") in names]


def _shapes(module: nn.Module, names: Sequence[str]) -> dict[str, torch.Size]:
    """Those of these buffers that are persistent, and no statistics of batch norms."""
    own = {id(buffer) for norm in batch_norms(module) for buffer in norm.buffers(recurse=False)}
    persistent: Any = module.state_dict().keys()
    named = [(name, buffer) for name, buffer in module.named_buffers() if name in names and id(buffer) not in own]
    return {name: buffer.shape for name, buffer in named if name in persistent}


def _read(norm: BatchNorm) -> Tensor:
    """The number of inputs seen, means and variances in one."""
    assert norm.num_batches_tracked is not None
    assert norm.running_mean is not None
    assert norm.running_var is not None
    parts = (norm.num_batches_tracked.view(1), norm.running_mean, norm.running_var)
    return torch.cat([part.detach().double() for part in parts])


def _write(norm: BatchNorm, values: Tensor) -> None:
    assert norm.num_batches_tracked is not None
    assert norm.running_mean is not None
    assert norm.running_var is not None
    mean, variance = values[1:].chunk(2)
    with torch.no_grad():
        norm.num_batches_tracked.copy_(values[0])
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(variance)


def _joined(start: Tensor, found: Tensor, momentum: float | None) -> Tensor:
    """What one process would have found, of what each replica (a row of `found`) has from the same start."""
    seen, value = start[0], start[1:]
    joined = value
    for row in found:
        steps, theirs = row[0] - start[0], row[1:]
        if momentum is None:  # a plain mean of all that was seen
            moved = theirs * row[0] - value * start[0]
            joined = (joined * seen + moved) / (seen + steps).clamp_min(1)
        else:
            kept = (1 - momentum) ** steps
            joined = kept * joined + (theirs - kept * value)
        seen = seen + steps
    return torch.cat((seen.view(1), joined))
