"""The processes beside a pipeline: a device mesh of which one dimension is the pipeline and others see other data."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaks unknown types)
from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from stageloom.errors import InputError
from stageloom.execute.groups import make_whole
from stageloom.schedule import Schedule


@dataclass(frozen=True)
class Mesh:
    """What the dimensions of a device mesh are for.

    mesh
        The processes; its dimensions have names.
    pipeline
        The dimension along which the stages lie.
    data
        The dimensions along which processes train on other data: losses and gradients are means over them too. None:
        all whose names begin with "dp".
    replicated
        replicated(stage, name): the dimensions along which a parameter or buffer is one and the same in all processes;
        None: all. Its gradients are summed over those of them that are `data`. Expert parallel is a dimension of `data`
        that is left out for the experts, of which every rank holds others: what other ranks' data do to their gradients
        comes through the all-to-all.

    Other dimensions (tensor parallel) are the stages' own affair. A DTensor tells by itself how it lies along the
    dimensions that its own mesh spans; it is not summed over these.
    """

    mesh: DeviceMesh
    pipeline: str = "pp"
    data: tuple[str, ...] | None = None
    replicated: Callable[[int, str], Sequence[str]] | None = None


@dataclass(frozen=True)
class Grid:
    """This process among all that train together.

    `pipeline` is the group that its messages go through, `whole` that of all processes. `copies` pipelines train on
    other data, of which this is number `number`; `data` names the dimensions that tell them apart.
    """

    pipeline: dist.ProcessGroup
    whole: dist.ProcessGroup
    mesh: Mesh | None = None
    data: tuple[str, ...] = ()
    copies: int = 1
    number: int = 0

    @property
    def said(self) -> object:
        """What all processes have to be told alike."""
        if self.mesh is None:
            return None
        return self.mesh.mesh.mesh_dim_names, self.mesh.mesh.mesh.tolist(), self.mesh.pipeline, self.data

    def beside(self, holders: Iterable[int], dims: Iterable[str]) -> tuple[int, ...]:
        """The global ranks at these places of the pipeline and anywhere along these dimensions, else where we are."""
        if self.mesh is None:
            return tuple(sorted(dist.get_global_rank(self.pipeline, rank) for rank in holders))
        ranks, here = self.mesh.mesh.mesh, _coordinate(self.mesh.mesh)
        for at, name in enumerate(_names(self.mesh.mesh)):
            if name == self.mesh.pipeline:
                ranks = ranks.index_select(at, _index(holders))
            elif name not in dims:
                ranks = ranks.narrow(at, here[at], 1)
        return tuple(sorted(ranks.flatten().tolist()))

    def summed(self, stage: int, name: str, tensor: Tensor) -> tuple[str, ...]:
        """The dimensions over which this parameter's gradient has to be summed here."""
        equal = self._replicated(stage, name)
        return tuple(dim for dim in self.data if dim in equal and not self._spans(tensor, dim))

    def held_by(self, stage: int, name: str, tensor: Tensor) -> int:
        """How many processes beside each other hold each number of this parameter."""
        if self.mesh is None:
            return 1
        sizes = dict(zip(_names(self.mesh.mesh), self.mesh.mesh.shape, strict=True))
        everyone = prod(sizes.values()) // sizes.pop(self.mesh.pipeline)
        equal = self._replicated(stage, name)
        other = [size for dim, size in sizes.items() if dim not in equal and not self._spans(tensor, dim)]
        return everyone // (prod(other) * _shards(tensor))

    def _replicated(self, stage: int, name: str) -> tuple[str, ...]:
        if self.mesh is None:
            return ()
        beside = tuple(dim for dim in _names(self.mesh.mesh) if dim != self.mesh.pipeline)
        if self.mesh.replicated is None:
            return beside
        said = tuple(self.mesh.replicated(stage, name))
        wrong = [dim for dim in said if dim not in beside]
        if wrong:
            raise InputError(f"mesh: replicated({stage}, {name!r}) gave {wrong}; expected some of {list(beside)}")
        return said

    def _spans(self, tensor: Tensor, dim: str) -> bool:
        """Whether the tensor is a DTensor over this dimension; its own mesh may have folded it into another."""
        own: Any = getattr(tensor, "device_mesh", None) if is_dtensor(tensor) else None
        if own is None or self.mesh is None:
            return False
        line = dist.get_process_group_ranks(self.mesh.mesh.get_group(dim))
        return set(line) <= set(own.mesh.flatten().tolist())


def grid_of(mesh: Mesh | DeviceMesh | None, group: dist.ProcessGroup | None, schedule: Schedule) -> Grid:
    """Where this process stands. Raises InputError for a mesh or group that the schedule cannot run on."""
    if mesh is None:
        found = _group_of(group, schedule)
        return Grid(found, found)
    if group is not None:
        raise InputError("group: is the mesh's dimension for the pipeline; give mesh= or group=, not both")
    given = Mesh(mesh) if isinstance(mesh, DeviceMesh) else mesh
    if not isinstance(given, Mesh):  # pyright: ignore[reportUnnecessaryIsInstance] (from a user)
        raise InputError(f"mesh: is a {type(mesh).__name__}; expected a DeviceMesh or a stageloom.execute.mesh.Mesh")
    device, names = given.mesh, given.mesh.mesh_dim_names or ()
    if given.pipeline not in names:
        raise InputError(
            f"mesh: no dimension is called {given.pipeline!r} but {list(names)}; name one so, or give "
            "Mesh(mesh, pipeline=NAME)"
        )
    data = tuple(name for name in names if name.startswith("dp")) if given.data is None else tuple(given.data)
    wrong = [name for name in data if name not in names or name == given.pipeline]
    if wrong:
        raise InputError(f"mesh: data names {wrong}; expected dimensions of {list(names)} beside the pipeline")
    here = device.get_coordinate()
    if here is None:
        raise InputError("mesh: this process is not in it")
    pipeline = device.get_group(given.pipeline)
    place, size = here[names.index(given.pipeline)], device.shape[names.index(given.pipeline)]
    if size != schedule.ranks:
        raise InputError(f"{schedule.name} has {schedule.ranks} ranks and the mesh {size} along {given.pipeline!r}")
    if dist.get_rank(pipeline) != place:
        raise InputError(f"mesh: ranks do not ascend along {given.pipeline!r}, but a process group orders them so")
    where = [(here[names.index(name)], device.shape[names.index(name)]) for name in data]
    number = 0
    for at, extent in where:
        number = number * extent + at
    return Grid(pipeline, _whole(device), given, data, prod(extent for _, extent in where), number)


def _group_of(group: dist.ProcessGroup | None, schedule: Schedule) -> dist.ProcessGroup:
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    if group is None:
        raise InputError("group: there is no process group; call torch.distributed.init_process_group first, or launch")
    if dist.get_rank(group) < 0:
        raise InputError("group: this process is not in it")
    size = dist.get_world_size(group)
    if size != schedule.ranks:
        raise InputError(f"{schedule.name} has {schedule.ranks} ranks and the process group {size}")
    return group


def _whole(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of all processes of the mesh."""
    ranks = sorted(mesh.mesh.flatten().tolist())
    world = dist.group.WORLD
    if world is not None and ranks == dist.get_process_group_ranks(world):
        return world
    return make_whole(tuple(ranks), [mesh.get_group(name) for name in _names(mesh)])


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or ()


def _coordinate(mesh: DeviceMesh) -> Sequence[int]:
    return mesh.get_coordinate() or ()


def _index(places: Iterable[int]) -> Tensor:
    import torch

    return torch.tensor(sorted(places), dtype=torch.int64)


# ------------------------------------------------------------------------------------- tensors that lie in shards


def is_dtensor(tensor: object) -> bool:
    """Whether it is a DTensor. (Importing them takes half a second, and none exists before somebody has.)"""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """What lies in this process of a tensor: its shard, or all of one that is no DTensor. Shares its memory."""
    given: Any = tensor.detach()
    return given.to_local() if is_dtensor(given) else given


def placed_as(whole: Tensor, like: Any) -> Tensor:
    """A whole tensor, the same in all processes, as `like` lies in them; what lies so already stays as it is."""
    if not is_dtensor(like) or is_dtensor(whole):
        return whole
    distribute: Any = sys.modules["torch.distributed.tensor"].distribute_tensor
    whole = whole.detach().to(like.device)
    return distribute(whole, like.device_mesh, like.placements, src_data_rank=None)  # nobody has to send it


def gradient_of(parameter: Tensor) -> Tensor | None:
    """What lies in this process of a parameter's gradient, placed as the parameter is."""
    gradient, like = parameter.grad, parameter
    if gradient is not None and is_dtensor(gradient):
        found: Any = gradient
        own: Any = like
        if found.placements != own.placements:  # sums over tensor parallel ranks that are still to be made
            parameter.grad = found.redistribute(own.device_mesh, own.placements)
            return gradient_of(parameter)
    return None if gradient is None else local(gradient)


def give_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    """Make this the gradient of a parameter, of which it is what lies in this process."""
    own: Any = parameter
    if gradient is not None and is_dtensor(parameter):
        of_local: Any = sys.modules["torch.distributed.tensor"].DTensor.from_local
        gradient = of_local(
            gradient, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
        )
    parameter.grad = gradient


def _shards(tensor: Tensor) -> int:
    """In how many different parts a tensor lies in the processes of its own mesh."""
    if not is_dtensor(tensor):
        return 1
    given: Any = tensor
    return prod(
        size
        for size, placed in zip(given.device_mesh.shape, given.placements, strict=True)
        if not placed.is_replicate()
    )


def shards_of(tensors: Iterable[Tensor]) -> bool:
    """Whether any of them lies in several parts."""
    return any(_shards(tensor) > 1 for tensor in tensors)
