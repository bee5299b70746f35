"""Weights that `partition.split` marked as one parameter of the whole model, found again on all ranks."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaks unknown types)
from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from stageloom.errors import InputError
from stageloom.execute.replicas import Tied
from stageloom.execute.sharded import Modules


def bare(name: str) -> str:
    """A name without what torch.compile puts in front of those of a module."""
    return name.replace("_orig_mod.", "")


def marked(modules: Modules, group: dist.ProcessGroup) -> Tied:
    """The groups of (stage, name) that are one parameter in the model that the stages were split from, on two stages or
    more; the same on all ranks. Called by all ranks of the group.

    Raises InputError, on all ranks, where what is marked so has become parameters of different shapes.
    """
    own: dict[int, list[tuple[tuple[str, ...], str, tuple[int, ...]]]] = {}
    for (_, stage), module in modules.items():
        own.setdefault(stage, _marks(module))
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    by_stage = {stage: marks for theirs in everyone for stage, marks in theirs.items()}
    members: dict[tuple[str, ...], list[tuple[int, str]]] = {}
    shapes: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    for stage in sorted(by_stage):
        for names, name, shape in by_stage[stage]:
            members.setdefault(names, []).append((stage, name))
            shapes.setdefault(names, []).append(shape)
    for names, found in shapes.items():
        if len(set(found)) > 1:
            raise InputError(
                f"stages: {members[names]} are one parameter in the model that was split, and have the shapes {found} "
                "now; give tied=() if they are to be trained apart"
            )
    return [tuple(group_) for group_ in members.values() if len(group_) > 1]


def _marks(module: nn.Module) -> list[tuple[tuple[str, ...], str, tuple[int, ...]]]:
    """Of each group of names marked on a stage, or on what it wraps: the names, the first of them here, its shape."""
    found: list[tuple[tuple[str, ...], str, tuple[int, ...]]] = []
    for prefix, part in module.named_modules():
        own = None
        for names in marks_of(part):
            if own is None:
                everything = part.named_parameters(remove_duplicate=False)
                own = {bare(name): (name, tuple(p.shape)) for name, p in everything}
            here = next((own[name] for name in names if name in own), None)
            if here is not None:
                found.append((names, f"{prefix}.{here[0]}" if prefix else here[0], here[1]))
    return found


def marks_of(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The groups of names that `partition.split` noted on a stage; () where it did not make the module."""
    return vars(module).get("ties", ())
