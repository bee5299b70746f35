"""Which device a rank computes on, and the process group that takes its tensors to other ranks."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaks unknown types)
from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist

from stageloom.errors import InputError
from stageloom.execute.workers import Seat

Device = Literal["cpu", "cuda"]


def require_device(kind: Device) -> None:
    """Raise InputError where there is no such device here."""
    if kind == "cuda" and not torch.cuda.is_available():
        built = torch.version.cuda is not None or torch.version.hip is not None
        why = "no CUDA device is found" if built else "this build of PyTorch knows no CUDA"
        raise InputError(f"--device cuda: {why} (torch {torch.__version__}); use --device cpu")


def settle(seat: Seat, kind: Device) -> tuple[torch.device, dist.ProcessGroup]:
    """This rank's device, and the group that its pipeline is to use. All ranks call it.

    On CUDA, ranks of a host take its devices in turn. NCCL wants a device for each rank: where ranks share one, on any
    host, all messages go through Gloo, and thus through main memory.
    """
    if kind == "cpu":
        return torch.device("cpu"), seat.group
    count = torch.cuda.device_count()
    device = torch.device("cuda", seat.local_rank % count)
    torch.cuda.set_device(device)
    own = torch.tensor([int(seat.local_size <= count and dist.is_nccl_available())])
    dist.all_reduce(own, op=dist.ReduceOp.MIN, group=seat.group)
    if not int(own):
        return device, seat.group
    group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    assert isinstance(group, dist.ProcessGroup)
    return device, group
