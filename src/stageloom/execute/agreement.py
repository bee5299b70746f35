"""What all ranks have to be told alike, compared before anything waits for another rank."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaks unknown types)
from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stageloom.errors import InputError
from stageloom.execute.devices import control_device
from stageloom.execute.mesh import Grid, local
from stageloom.schedule import Schedule


@dataclass
class Part:
    """Parameters and buffers `names` of a stage, which the same global `ranks` hold; they start as on `source`.

    `replicas` are the modules of the stage on this rank.
    """

    stage: int
    ranks: tuple[int, ...]
    source: int
    replicas: list[nn.Module]
    names: list[str]

    def described(self) -> list[tuple[str, tuple[int, ...], str, bool]]:
        """What has to be alike on all holders: name, shape, dtype and whether it is trained."""
        module = self.replicas[0]
        tensors: dict[str, Any] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        return [
            (name, tuple(local(tensors[name]).shape), str(tensors[name].dtype), bool(tensors[name].requires_grad))
            if name in tensors
            else (name, (), "missing", False)
            for name in self.names
        ]


def agree(grid: Grid, schedule: Schedule, **options: object) -> None:
    """Refuse, on every rank, ranks that were given different schedules or options: they would wait for ever."""
    columns = (schedule.offsets, schedule.kind, schedule.stage, schedule.microbatch, schedule.slice)
    order = repr((schedule.name, schedule.placement, schedule.microbatches)).encode() + b"".join(
        column.tobytes() for column in columns
    )
    said = {"schedule": order, "mesh": repr(grid.said).encode()}
    said |= {name: repr(value).encode() for name, value in options.items()}
    digests = [hashlib.sha256(each).digest()[:8] for each in said.values()]
    mine = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.int64).to(control_device(grid.whole))
    all_said = [torch.empty_like(mine) for _ in range(dist.get_world_size(grid.whole))]
    dist.all_gather(all_said, mine, group=grid.whole)
    apart = torch.stack([theirs != all_said[0] for theirs in all_said]).cpu()
    if bool(apart.any()):
        others = apart.any(1).nonzero().flatten().tolist()
        names = [name for name, differs in zip(said, apart.any(0).tolist(), strict=True) if differs]
        raise InputError(f"ranks {others} were given another {', '.join(names)} than rank 0")


def agree_on_parts(grid: Grid, parts: list[Part]) -> None:
    """Refuse, on every rank, holders of one stage that do not hold the same of it: their sums would not fit."""
    mine = {(part.stage, part.ranks): part.described() for part in parts if len(part.ranks) > 1}
    digests = {key: hashlib.sha256(repr(what).encode()).hexdigest() for key, what in mine.items()}
    told = _everyone(grid, digests)
    for rank in sorted(told):
        for key, what in sorted(told[rank].items()):
            other = next((other for other in key[1] if told.get(other, {}).get(key) != what), None)
            if other is not None:  # on all ranks alike, so that all go on to say what they have
                whole = _everyone(grid, mine.get(key))
                raise InputError(_unlike(key[0], rank, other, whole[rank], whole[other]))


def _everyone(grid: Grid, mine: Any) -> dict[int, Any]:
    """What each process says, by its global rank."""
    said: list[Any] = [None] * dist.get_world_size(grid.whole)
    dist.all_gather_object(said, (dist.get_rank(), mine), group=grid.whole)
    return dict(said)


def _unlike(stage: int, rank: int, other: int, what: list[Any], theirs: list[Any] | None) -> str:
    both = f"stage {stage}: ranks {rank} and {other} train it together"
    if theirs is None:
        return f"{both}, but share other parameters of it with other ranks; mesh= and replicated have to be alike"
    at = next((at for at, pair in enumerate(zip(what, theirs, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        return f"{both}, but hold {len(what)} and {len(theirs)} of its parameters and buffers"
    one, two = (_told(*each[at]) for each in (what, theirs))
    return f"{both}, but hold {one} and {two}"


def _told(name: str, shape: tuple[int, ...], dtype: str, trained: bool) -> str:
    return f"{name} {list(shape)} {dtype}{'' if trained else ' (not trained)'}"
