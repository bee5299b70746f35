"""The state of a pipeline's stages under names that no two stages share.

Stages that were split from one model have its names, which say nothing of the split: a checkpoint can be read under
another one. Stages that a user wrote by himself may each call their weights alike; then all names of all stages get the
stage's number in front, `stages.2.linear.weight`. Every rank decides alike, since all see the names of all ranks.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaks unknown types)
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from stageloom.errors import InputError
from stageloom.execute.mesh import placed_as
from stageloom.execute.replicas import Modules, Tied
from stageloom.execute.ties import bare


@dataclass(frozen=True)
class Names:
    """How the state of the stages is named: `qualified` by their numbers or not, and every name that a stage has."""

    qualified: bool
    known: frozenset[str]

    def of(self, stage: int, name: str) -> str:
        """The public name of an entry of a stage's own state."""
        name = bare(name)
        return f"stages.{stage}.{name}" if self.qualified else name

    def state(self, modules: Modules) -> dict[str, Tensor]:
        """The state of these stages by public name; of replicas, the first path's."""
        found: dict[str, Tensor] = {}
        for (_, stage), module in modules.items():
            for own, tensor in module.state_dict().items():
                found.setdefault(self.of(stage, own), tensor)
        return found

    def load(self, modules: Modules, state: Mapping[str, Tensor]) -> None:
        """Copy into these stages what they have of `state`, which may hold other ranks' stages too; of a whole tensor,
        a stage in shards takes its own.

        Raises InputError, and changes nothing, for a name that no stage has, one that is missing, or another shape.
        """
        taken = [(module, self._taken(stage, module, state)) for (_, stage), module in modules.items()]
        ties = {name for module in modules.values() for group in _ties(module) for name in group}
        unknown = sorted(set(state) - self.known - ties)
        if unknown:
            more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
            why = (
                "; two stages use one name, so that all names begin with stages.N., N the stage (`partition.split` "
                "keeps the names of the whole model)"
            )
            raise InputError(
                f"{unknown[0]}: no stage has such a name{more}; expected names as of state_dict()"
                f"{why if self.qualified else ''}"
            )
        for module, own in taken:
            module.load_state_dict(own)

    def _taken(self, stage: int, module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Any]:
        taken: dict[str, Any] = {}
        for own, current in module.state_dict().items():
            name = self.of(stage, own)
            # files often have a tied parameter under one of its names only
            aliases = [name, *(alias for group in _ties(module) if name in group for alias in group)]
            found = next((alias for alias in aliases if alias in state), None)
            if found is None:
                why = f", where the name stands for {own}, which another stage has too" if self.qualified else ""
                raise InputError(f"{name}: is missing; expected all names of state_dict(), of stage {stage} here{why}")
            given: Any = state[found]
            shape = getattr(current, "shape", None)
            if shape is not None and getattr(given, "shape", None) != shape:
                raise InputError(f"{name}: has shape {_shape(given)}; stage {stage} needs {tuple(shape)}")
            taken[own] = placed_as(given, current)
        return taken


def _ties(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The groups of names that the unsplit model had for one parameter (`partition.split` notes them)."""
    return getattr(module, "ties", ())


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else f"none, as a {type(value).__name__}"


def names_of(group: dist.ProcessGroup, modules: Modules, tied: Tied) -> Names:
    """Look at the names of all stages, on all ranks. Called by all ranks of the group."""
    own: dict[int, list[tuple[str, bool]]] = {}
    seen: set[tuple[str, int]] = set()
    for (_, stage), module in modules.items():
        entries = [(bare(name), tensor) for name, tensor in module.state_dict(keep_vars=True).items()]
        # one tensor that two stages of a rank share is one entry
        own.setdefault(stage, [(name, (name, id(tensor)) not in seen) for name, tensor in entries])
        seen.update((name, id(tensor)) for name, tensor in entries)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    by_stage = {stage: names for theirs in everyone for stage, names in theirs.items()}
    # members of a tie are one parameter
    one = {(stage, bare(name)): group[0] for group in tied for stage, name in group}
    owners: dict[str, set[tuple[int, str]]] = {}
    for stage, names in by_stage.items():
        for name in (name for name, counts in names if counts):
            owners.setdefault(name, set()).add(one.get((stage, name), (stage, name)))
    qualified = any(len(stages) > 1 for stages in owners.values())
    of = Names(qualified, frozenset()).of
    return Names(qualified, frozenset(of(stage, name) for stage, names in by_stage.items() for name, _ in names))
