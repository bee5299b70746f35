"""Where a rank's tensors live and how they reach others: device, process groups of the edges, clock.

Backends differ in two ways. Gloo sends from main memory only: tensors of an accelerator go through pinned buffers.
NCCL orders all messages of a group: a receive that is posted early holds up whatever comes after it, so that every
directed edge between two ranks gets a group of its own.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaks unknown types)
from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stageloom.errors import InputError
from stageloom.execute.groups import make_groups
from stageloom.lower import Code, Program

CPU: Final = torch.device("cpu")
UNORDERED: Final = ("gloo", "mpi")
"""Backends that match the messages of a group by sender and receiver; others run them in one order."""
FROM_MEMORY: Final = ("gloo", "mpi")
"""Backends whose sends and all-to-alls read main memory alone (of MPI some builds could do more)."""


# ----------------------------------------------------------------------------------------------------------- device


def device_of(
    modules: Mapping[tuple[int, int], nn.Module], given: str | torch.device | None, group: dist.ProcessGroup
) -> torch.device:
    """The device of this rank: `given`, or that of its parameters and buffers, or one that the group can send from.

    Raises InputError where they are not all there, and for an accelerator that is not the process's current device.
    """
    held: dict[torch.device, str] = {}
    for (_, stage), module in modules.items():
        for named in (module.named_parameters(), module.named_buffers()):
            for name, tensor in named:
                held.setdefault(tensor.device, f"stage {stage}: {name}")
    if given is not None:
        device = _named(given)
    elif held:
        device = next(iter(held))
    else:
        device = control_device(group)
    for other, where in held.items():
        if other.type == "meta":
            raise InputError(f"{where} is on the meta device and has no values; give the stage some with to_empty")
        if other != device:
            raise InputError(f"{where} is on {other}, and this rank's device is {device}; move the stage with .to()")
    if device.type != "cpu":
        current = torch.get_device_module(device).current_device()
        if current != device.index:
            raise InputError(
                f"device: is {device}, but the current one is {device.type}:{current}; call "
                f"torch.{device.type}.set_device({device.index}) first"
            )
    return device


def _named(given: str | torch.device) -> torch.device:
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError):
        raise InputError(f"device: {given!r} is no device; expected such as 'cpu' or 'cuda:0'") from None
    if device.type == "meta":
        raise InputError("device: tensors of the meta device have no values")
    if device.type == "cpu":
        return CPU
    module: Any = getattr(torch, device.type, None)
    if module is None or not module.is_available():
        raise InputError(f"device: {device} is not available here (torch {torch.__version__})")
    known: Any = device.index  # None where the name has no number
    return torch.device(device.type, module.current_device() if known is None else known)


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device: itself where it is there."""
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)


# ------------------------------------------------------------------------------------------------------------ groups


def backends(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend of a group for each type of device."""
    said = dist.get_backend_config(group)
    return dict(part.split(":", 1) for part in said.split(",") if ":" in part)


def control_device(group: dist.ProcessGroup) -> torch.device:
    """Where the few numbers live that ranks tell each other: main memory, if the group can send from there."""
    known = backends(group)
    if "cpu" in known:
        return CPU
    kind = next(iter(known))
    return torch.device(kind, torch.get_device_module(kind).current_device())


def wire_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where tensors of `device` are sent from and received to. Raises InputError where the group can do neither."""
    known = backends(group)
    backend = known.get(device.type)
    if backend is not None and (device.type == "cpu" or backend not in FROM_MEMORY):
        return device
    if "cpu" in known:
        return CPU
    raise InputError(f"group: its backends are {known}, none of which sends tensors of {device}")


Link = tuple[dist.ProcessGroup, int, int]
"""The group in which to reach another rank, its number there, and the tag of the messages."""


@dataclass
class Net:
    """How this rank reaches others. `device` is where its stages live, `wire` where messages start and end.

    One group for all where the backend matches messages by pair (Gloo); one a directed edge where it orders all
    messages of a group (NCCL). In a group for all, messages up the ranks have another tag than those down: a Gloo group
    of two interfaces (`groups.use_loopback`) gives each tag connections and a thread of its own. That thread cannot
    read a connection on which a send has just begun and meanwhile spins, on a core that a busy machine has no other of.
    """

    group: dist.ProcessGroup
    device: torch.device = CPU
    rank: int = 0
    wire: torch.device = CPU
    control: torch.device = CPU
    outgoing: Mapping[int, Link] = field(default_factory=dict[int, Link])
    incoming: Mapping[int, Link] = field(default_factory=dict[int, Link])

    def __post_init__(self) -> None:
        self.staged = self.device.type != self.wire.type  # messages go through main memory on the way

    def to(self, peer: int) -> Link:
        return self.outgoing.get(peer, (self.group, peer, int(self.rank < peer)))

    def source(self, peer: int) -> Link:
        return self.incoming.get(peer, (self.group, peer, int(peer < self.rank)))


def net_of(group: dist.ProcessGroup, program: Program, device: torch.device, edge_groups: bool | None) -> Net:
    """The net of this rank for a program. `edge_groups` None: where the backend needs them. All ranks call it."""
    rank, wire = dist.get_rank(group), wire_device(group, device)
    net = Net(group, device, rank, wire, control_device(group))
    if edge_groups is None:
        edge_groups = backends(group)[wire.type] not in UNORDERED
    if edge_groups:
        net.outgoing, net.incoming = _edges(group, program, rank, wire)
    return net


def _edges(
    group: dist.ProcessGroup, program: Program, rank: int, wire: torch.device
) -> tuple[dict[int, Link], dict[int, Link]]:
    """A group for every directed edge of this rank, made and used once in one order, so that nobody waits in a circle.

    Used once: NCCL makes a connection at the first message and waits for the other side, which a receive that is
    posted early must not.
    """
    sends = program.code == Code.SEND
    edges = sorted(set(zip(program.rank[sends].tolist(), program.peer[sends].tolist(), strict=True)))
    outgoing: dict[int, Link] = {}
    incoming: dict[int, Link] = {}
    token = torch.zeros(1, device=wire)
    world = {edge: tuple(dist.get_global_rank(group, end) for end in edge) for edge in edges if rank in edge}
    groups = make_groups(world.values(), group)
    for edge, ends in world.items():
        source, target = edge
        own = groups[ends]
        other = dist.get_group_rank(own, ends[1] if rank == source else ends[0])
        if rank == source:
            outgoing[target] = own, other, 0
            own.send([token], other, 0).wait()
        else:
            incoming[source] = own, other, 0
            own.recv([token], other, 0).wait()
    return outgoing, incoming


# ---------------------------------------------------------------------------------------------- through main memory


def to_wire(tensor: Tensor, wire: torch.device) -> Tensor:
    """The tensor where it can be sent from, whole when this returns."""
    if tensor.device == wire:
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=wire, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    torch.get_device_module(tensor.device).current_stream(tensor.device).synchronize()
    return copy


# ------------------------------------------------------------------------------------------------------------- clock


class Clock:
    """When ops began and ended: the machine's clock, or on an accelerator events of its stream, read after the run."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self.events: list[Any] = []
        self.used = 0
        self.zero = 0.0
        self.now: Callable[[], Any] = time.perf_counter if self.module is None else self._event
        """A mark of this moment in the order of work; `seconds` says when it was."""

    def begin(self) -> None:
        """A run starts."""
        if self.module is None:
            return
        self.used = 0
        self.module.synchronize(self.device)
        self.zero = time.perf_counter()
        self.now()

    def _event(self) -> Any:
        if self.used == len(self.events):
            self.events.append(self.module.Event(enable_timing=True))
        event = self.events[self.used]
        self.used += 1
        event.record()
        return event

    def seconds(self, spans: dict[int, tuple[Any, Any]]) -> dict[int, tuple[float, float]]:
        """Marks in seconds of the machine's clock (`time.perf_counter`). Waits for the accelerator."""
        if self.module is None or not spans:
            return spans
        self.module.synchronize(self.device)
        first = self.events[0]

        def at(event: Any) -> float:
            return self.zero + first.elapsed_time(event) / 1e3

        return {row: (at(began), at(ended)) for row, (began, ended) in spans.items()}
