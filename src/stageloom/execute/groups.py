"""Process groups of some of the ranks, made by all of them without waiting in a circle.

`new_group(..., use_local_synchronization=True)` asks only the members, so that pipelines beside one another can make
groups of their own. But torch calls such a group after its ranks *and the number of groups that the process has*: where
two members have made a different number before, they look for each other under two names, for ever. So groups are made
in rounds. In each round a process makes one group, of itself alone if it has none to make.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaks unknown types)
from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

Ranks = tuple[int, ...]


def use_loopback() -> None:
    """Have the Gloo groups that this process makes stay on this machine, so that no name has to be looked up.

    The interface is named twice: a group then has two connections between any two ranks, and a thread for each of both
    (see `devices.Net`).
    """
    for name in {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}:
        os.environ["GLOO_SOCKET_IFNAME"] = f"{name},{name}"


def make_groups(wanted: Iterable[Ranks], everyone: dist.ProcessGroup) -> dict[Ranks, Any]:
    """The process group of each of these sets of global ranks; None where it is not this process's, or a single rank.

    Called by all of `everyone`; each names at least the groups that it is in.
    """
    asked = list(dict.fromkeys(wanted))
    said: list[Any] = [None] * dist.get_world_size(everyone)
    dist.all_gather_object(said, (asked, _count()), group=everyone)
    rank, backend = dist.get_rank(), dist.get_backend_config(everyone)
    found: dict[Ranks, Any] = dict.fromkeys(asked)
    for _ in range(max(count for _, count in said) - _count()):
        _new((rank,), backend)
    for ranks in _turns({ranks for theirs, _ in said for ranks in theirs if len(ranks) > 1}, rank):
        found[ranks] = _new(ranks, backend)
    return {ranks: made for ranks, made in found.items() if len(ranks) > 1}


def make_whole(ranks: Ranks, lines: Iterable[dist.ProcessGroup]) -> dist.ProcessGroup:
    """The group of all processes of a mesh, called by them alone; they have groups along each of its dimensions."""
    lines, most = list(lines), _count()
    backend = dist.get_backend_config(lines[0])
    for line in lines:  # after the last one, all know of all
        said: list[Any] = [None] * dist.get_world_size(line)
        dist.all_gather_object(said, most, group=line)
        most = max(said)
    for _ in range(most - _count()):
        _new((dist.get_rank(),), backend)
    return _new(ranks, backend)


def _turns(groups: set[Ranks], rank: int) -> list[Ranks]:
    """What a process makes in each round; a group is made in the first round in which all its members are free.

    All processes make as many: NCCL may split communicators, which all of them have to do together.
    """
    taken: dict[int, int] = {}
    mine: dict[int, Ranks] = {}
    for ranks in sorted(groups):
        turn = 1 + max(taken.get(each, 0) for each in ranks)
        taken.update(dict.fromkeys(ranks, turn))
        if rank in ranks:
            mine[turn] = ranks
    return [mine.get(turn, (rank,)) for turn in range(1, max(taken.values(), default=0) + 1)]


def _new(ranks: Ranks, backend: str) -> Any:
    return dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)


def _count() -> int:
    """How many groups this process has, as torch counts them."""
    world: Any = getattr(dist.distributed_c10d, "_world", None)
    return 0 if world is None else len(world.pg_names)
