"""Ranks that another launcher has started (torchrun, on any number of nodes): each process joins the others and runs
one rank of a task.

A launcher tells a process its place in the environment: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and LOCAL_RANK and
LOCAL_WORLD_SIZE on its node. A failure is told by the first rank, in one message that names rank, op and cause.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false
# (torch.distributed leaks unknown types, and re-exports its stores without saying so)
from __future__ import annotations

import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

from stageloom.errors import InputError

T = TypeVar("T")

LONGEST: Final = timedelta(days=1)  # the watcher decides that a rank hangs; a group's own limit is only a last one
START: Final = 300.0  # seconds in which all ranks have to come
GRACE: Final = 10.0  # seconds in which the first rank of a node tells of what is wrong for all of them


@dataclass(frozen=True)
class Invitation:
    """A process's place among those that a launcher has started."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def invitation(environment: Mapping[str, str] = os.environ) -> Invitation | None:
    """What a launcher has told this process; None where none has. Raises InputError where that is not enough."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in environment:
            raise InputError(f"RANK and WORLD_SIZE are set, but not {name}: start with torchrun, or unset RANK")
    rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    local_rank = _number(environment, "LOCAL_RANK", rank)
    return Invitation(rank, size, local_rank, _number(environment, "LOCAL_WORLD_SIZE", size))


def _number(environment: Mapping[str, str], name: str, otherwise: int = 0) -> int:
    text = environment.get(name, str(otherwise))
    if not (text.isascii() and text.isdigit()):
        raise InputError(f"{name} is {text!r}; a launcher sets it to a whole number, or unset RANK")
    return int(text)


def join(invited: Invitation, task: Callable[..., T], *args: object, timeout: float) -> list[T] | None:
    """Run task(seat, *args) as this rank: what all ranks returned, on the first one; None on the others.

    All processes call it with the same arguments. `timeout`: seconds a rank may go without a sign, as in
    `workers.Pool`. A failure ends this process with exit status 2; the first rank writes the message.
    """
    if not timeout > 0:
        raise InputError(f"the timeout must be above 0 seconds, not {timeout}")
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    from stageloom.execute._watch import Watch
    from stageloom.execute._worker import Seat, doing

    _prepare(invited)
    try:
        found, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=START)))
        store = dist.PrefixStore(f"stageloom {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", found)
    except Exception as error:
        raise InputError(f"rank {invited.rank} finds no other ranks at MASTER_ADDR: {_short(error)}") from None
    watch = Watch(rank, size, dist.PrefixStore("watch", store), timeout)
    watch.start()
    try:
        doing("joining the group")
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=size, timeout=LONGEST
        )
        group = dist.group.WORLD
        assert group is not None
        seat = Seat(rank, size, group, dist.PrefixStore("task", store), (invited.local_rank, invited.local_size))
        doing("")
        value = task(seat, *args)
        doing("returning the result")
        values: list[Any] | None = [None] * size if rank == 0 else None
        dist.gather_object(value, values, group=group, group_dst=0)
        dist.barrier(group)
    except KeyboardInterrupt:  # a terminal sends it to all
        raise
    except BaseException as error:
        watch.fail(error)
    watch.stop()
    dist.barrier(group)  # no watcher reads any more from a store that may go with its rank
    dist.destroy_process_group()
    return values


def leave_the_word(environment: Mapping[str, str] = os.environ) -> None:
    """To be called before a process tells of an error that the others of its node are likely to meet as well.

    The first one of the node goes on at once and tells of it; its launcher then ends the others, who wait here. One
    that is still there after a while has an error of its own to tell of.
    """
    if "RANK" in environment and environment.get("LOCAL_RANK", "0") not in ("", "0"):
        time.sleep(GRACE)


def _prepare(invited: Invitation) -> None:
    warnings.filterwarnings("ignore", module=r"torch(\.|$)")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if invited.local_size == invited.size and "GLOO_SOCKET_IFNAME" not in os.environ:
        # one node: no name has to be looked up
        for name in {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
