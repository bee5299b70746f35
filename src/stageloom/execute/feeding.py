"""What a step is given: a mini-batch, cut in micro-batches and slices, each part at its place."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaks unknown types, and what a user nests has no static type)
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stageloom.errors import InputError
from stageloom.execute.devices import move
from stageloom.execute.tasks import Place
from stageloom.execute.tree import ONE, cut, flatten, leaves, unflatten
from stageloom.schedule import Schedule


@dataclass
class Feed:
    """What one step gives a stage: inputs by place (first stage), targets by place (last stage), keyword arguments.

    `scale` multiplies every loss before its backward, `seed` makes random numbers of a place the same wherever it runs;
    of the global batch, `microbatches_before` come before those of this pipeline.
    """

    inputs: dict[Place, Any] = field(default_factory=dict[Place, Any])
    targets: dict[Place, Any] = field(default_factory=dict[Place, Any])
    kwargs: dict[Place, dict[str, Any]] = field(default_factory=dict[Place, dict[str, Any]])
    scale: float = 1.0
    seed: int | None = None
    microbatches_before: int = 0
    keep_outputs: bool = False


def along(schedule: Schedule) -> int:
    """The dimension of a micro-batch along which slices are cut."""
    return 1 if schedule.cut == "sequence" else 0


def fill(
    feed: Feed,
    schedule: Schedule,
    keys: Iterable[tuple[int, int]],
    inputs: Any,
    targets: Any,
    kwargs: Mapping[str, Any] | None,
    device: torch.device,
) -> Feed:
    """The feed with what the stages `keys`, (path, stage), need of inputs, targets and kwargs, moved to `device`."""
    inputs, targets = (_moved(value, device) for value in (inputs, targets))
    kwargs = None if kwargs is None else _moved(dict(kwargs), device)
    for path, stage in keys:
        mine = [m for m in range(schedule.microbatches) if schedule.path_of[m] == path]
        if stage == 0:
            if inputs is None:
                raise InputError("inputs: this rank holds the first stage and needs them")
            feed.inputs.update(_places(schedule, inputs, path, stage, mine, "inputs"))
        if stage == schedule.stages - 1 and targets is not None:
            feed.targets.update(_places(schedule, targets, path, stage, mine, "targets"))
        if kwargs is not None:
            feed.kwargs.update({Place(path, stage, m, s): dict(kwargs) for m in mine for s in range(schedule.slices)})
    return feed


def _moved(value: Any, device: torch.device) -> Any:
    """The value with all its tensors on the device."""
    tensors, structure = flatten(value)
    if all(tensor.device == device for tensor in tensors):
        return value
    return unflatten([move(tensor, device) for tensor in tensors], structure)


def _places(schedule: Schedule, value: Any, path: int, stage: int, mine: list[int], what: str) -> dict[Place, Any]:
    parts = value if isinstance(value, list) else cut(value, schedule.microbatches, 0, what)
    if len(parts) != schedule.microbatches:
        raise InputError(f"{what}: a list of {len(parts)} for {schedule.microbatches} micro-batches")
    found: dict[Place, Any] = {}
    for microbatch in mine:
        whole = parts[microbatch]
        slices = [whole] if schedule.slices == 1 else cut(whole, schedule.slices, along(schedule), what)
        for number, part in enumerate(slices):
            found[Place(path, stage, microbatch, number)] = part
    return found


def signature(feed: Feed, modules: Iterable[nn.Module], device: torch.device) -> Any:
    """All that shapes between stages may depend on: shapes and structures given, autocast, training or not."""
    given = [
        (name, place, structure, [(tuple(t.shape), t.dtype) for t in tensors])
        for name, values in (("inputs", feed.inputs), ("kwargs", feed.kwargs))
        for place, value in values.items()
        for tensors, structure in (flatten(value),)
    ]
    autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    return given, autocast, [module.training for module in modules]


def same(one: Any, other: Any) -> bool:
    """Whether two signatures are equal; what cannot be compared (an array among the values) is taken as changed."""
    try:
        return bool(one == other)
    except Exception:
        return False


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def check_output(stage: int, tensors: list[Tensor], structure: Any) -> None:
    """Refuse what cannot go to the next stage.

    Raises InputError naming the stage.
    """
    if structure == ONE:
        return
    if not tensors:
        raise InputError(f"stage {stage} returned no tensor; the next stage would have nothing to compute on")
    for leaf in leaves(structure):
        if leaf is not None and not isinstance(leaf, _PLAIN):
            raise InputError(
                f"stage {stage} returned a {type(leaf).__name__}; between stages go tensors, numbers, texts and "
                "None, in tuples, lists and dicts"
            )
