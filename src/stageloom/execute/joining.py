"""Ranks that another launcher has started (torchrun, on any number of nodes): each process joins the others and runs
one rank of a task.

A launcher tells a process its place in the environment: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and LOCAL_RANK and
LOCAL_WORLD_SIZE on its node. A failure is told by the first rank, in one message that names rank, op and cause.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false
# (torch.distributed leaks unknown types, and re-exports its stores without saying so)
from __future__ import annotations

import hashlib
import inspect
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from stageloom.errors import InputError, RankError

if TYPE_CHECKING:
    from stageloom.execute._worker import Seat

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
    local_size = _number(environment, "LOCAL_WORLD_SIZE", size)
    for name, number, of in (("RANK", rank, "WORLD_SIZE"), ("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE")):
        count = size if of == "WORLD_SIZE" else local_size
        if number >= count:  # nobody else would come, and the others would be waited for
            raise InputError(f"{name} is {number} and {of} {count}: ranks go from 0 to {of} - 1; or unset RANK")
    return Invitation(rank, size, local_rank, local_size)


def _number(environment: Mapping[str, str], name: str, otherwise: int = 0) -> int:
    text = environment.get(name, str(otherwise))
    if not (text.isascii() and text.isdigit()):
        raise InputError(f"{name} is {text!r}; a launcher sets it to a whole number, or unset RANK")
    return int(text)


def join(
    invited: Invitation,
    task: Callable[..., T],
    *args: object,
    timeout: float,
    flags: Mapping[str, object] | None = None,
) -> list[T] | None:
    """Run task(seat, *args) as this rank: what all ranks returned, on the first one; None on the others.

    All processes call it with the same arguments, and with the same `flags` (what a command line has made them of, by
    name): a rank with others ends the run on all, before the task. `timeout`: seconds a rank may go without a sign, as
    in `workers.Pool`. A failure ends this process with exit status 2; the first rank writes the message.
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
        doing("comparing what the ranks were given")
        _agree(seat, told(task, args, flags or {}))
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


def told(task: Callable[..., object], args: tuple[object, ...], flags: Mapping[str, object]) -> dict[str, str]:
    """All that a rank was given, as text by name: flags first, then arguments of the task and what these hold."""
    found = {name: _text(value) for name, value in flags.items()}
    names = list(inspect.signature(task).parameters)[1:]
    for at, value in enumerate(args):
        _tell(names[at] if at < len(names) else f"argument {at + 1}", value, found)
    return found


def _tell(name: str, value: Any, found: dict[str, str]) -> None:
    if is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            _tell(f"{name}.{each.name}", getattr(value, each.name), found)
    elif isinstance(value, np.ndarray):
        found[name] = f"an array ({hashlib.sha256(value.tobytes()).hexdigest()[:8]})"
    else:
        found[name] = _text(value)


def _text(value: object) -> str:
    """A value on one line; of a long one both its ends, and a digest that tells it apart."""
    text = " ".join(str(value).split())
    if len(text) <= 120:
        return text
    return f"{text[:40]}...{text[-40:]} ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


def _agree(seat: Seat, mine: dict[str, str]) -> None:
    """Raise RankError, on all ranks, where one was given something else than the first."""
    import torch.distributed as dist

    everyone: list[Any] = [None] * seat.size
    dist.all_gather_object(everyone, mine, group=seat.group)
    for name in dict.fromkeys(name for theirs in everyone for name in theirs):
        first = everyone[0].get(name, "nothing")
        other = next((rank for rank in range(seat.size) if everyone[rank].get(name, "nothing") != first), None)
        if other is not None:
            raise RankError(
                f"{name} is {everyone[other].get(name, 'nothing')} on rank {other} and {first} on rank 0; start all "
                "ranks with the same arguments and files",
                other,
                seat.rank == other,
            )


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
        from stageloom.execute.groups import use_loopback

        use_loopback()


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
