"""A worker's side of a pool: take a task from the pipe, run it in a process group, say how it went.

Two threads. The main one runs the tasks. The other reads the pipe at all times, so that a worker whose task hangs still
says where, and a worker whose parent is gone ends at once.
"""

# torch leaves many of its parameters without a type, and re-exports its stores without saying so.
# pyright: reportUnknownMemberType=false, reportPrivateImportUsage=false

from __future__ import annotations

import ctypes
import linecache
import os
import pickle
import re
import signal
import struct
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from stageloom.errors import RankError
from stageloom.execute.groups import use_loopback

if sys.platform == "linux":
    import fcntl

# A rank's last sign of life, in memory that the parent reads even after the worker is gone: when (monotonic seconds,
# one clock for all processes of a machine) and the op in hand.
SIGN = struct.Struct("=d120p")
_LONGEST_OP = 119

# The parent alone decides that a rank hangs. The group's own limit is only there so that no wait lasts for ever.
_PATIENCE = timedelta(days=1)

# What Gloo and the store say on a rank whose peer is gone: the consequence of a failure elsewhere, not its cause.
_SECOND_HAND = re.compile(r"(closed|reset) by peer|broken pipe|socket (closed|timeout)|connection was closed", re.I)
_WAITS = re.compile(r"\.wait\(|\bstore\.get\(")


@dataclass(frozen=True)
class Seat:
    """A task's place in the group it runs in: rank `rank` of `size`. The group is new in each run, and is also torch's
    default group; `store` is shared by the ranks of this run alone. `local`: the number of this rank among those of its
    host, and how many these are; None where one host has all."""

    rank: int
    size: int
    group: dist.ProcessGroup
    store: dist.Store
    local: tuple[int, int] | None = None

    @property
    def local_rank(self) -> int:
        return self.rank if self.local is None else self.local[0]

    @property
    def local_size(self) -> int:
        return self.size if self.local is None else self.local[1]


# ----------------------------------------------------------- parent to worker


@dataclass(frozen=True)
class Task:
    run: int
    size: int
    body: bytes  # (task, args), pickled


@dataclass(frozen=True)
class Where:
    """Asks a worker what it does just now."""


# ----------------------------------------------------------- worker to parent


@dataclass(frozen=True)
class Ready:
    pass


@dataclass(frozen=True)
class Returned:
    value: bytes  # pickled


@dataclass(frozen=True)
class Raised:
    time: float
    where: str
    cause: str
    second_hand: bool
    trace: str
    says_all: bool = False  # which rank failed and at what is in the cause already


@dataclass(frozen=True)
class At:
    """The line at which a worker is, and whether it waits there for other ranks."""

    waits: bool
    line: str


# ------------------------------------------------------------------- the signs

_slot: memoryview | None = None


def doing(what: str) -> None:
    """Say which op is in hand (a sign of life, too): a failure names it. Outside of a worker it does nothing."""
    if _slot is not None:
        SIGN.pack_into(_slot, 0, time.monotonic(), what.encode(errors="replace")[:_LONGEST_OP])


def keep_signs() -> memoryview:
    """Have `doing` write into memory of this process, which no parent gave it."""
    global _slot
    _slot = memoryview(bytearray(SIGN.size))
    return _slot


def last_sign(slot: memoryview) -> tuple[float, str]:
    when, what = SIGN.unpack_from(slot)
    return when, what.decode(errors="replace")


def slot_of(signs: ctypes.Array[ctypes.c_char], rank: int) -> memoryview:
    return memoryview(signs).cast("B")[rank * SIGN.size : (rank + 1) * SIGN.size]


# -------------------------------------------------------------------- the work


def serve(rank: int, port: int, threads: int, pipe: Connection[Any, Any], signs: ctypes.Array[ctypes.c_char]) -> None:
    """A worker's life."""
    global _slot
    _slot = slot_of(signs, rank)
    _die_with_parent()
    orders: SimpleQueue[Task] = SimpleQueue()
    sending = threading.Lock()
    watcher = threading.Thread(target=_watch, args=(pipe, sending, orders, threading.get_ident()), daemon=True)
    watcher.start()

    _settle(threads)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_PATIENCE, wait_for_workers=False)
    _say(pipe, sending, Ready())
    while True:  # until the parent kills it
        report = _perform(orders.get(), rank, store)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        _say(pipe, sending, report)


def _settle(threads: int) -> None:
    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore", module=r"torch(\.|$)")
    # Whole lines, at once: a killed worker must not take what it has printed with it.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    use_loopback()


def _perform(order: Task, rank: int, store: dist.Store) -> Returned | Raised:
    try:
        doing("loading the task")
        task, args = pickle.loads(order.body)
        doing("joining the group")
        seat = _join_group(order, rank, store)
        doing("")
        value = task(seat, *args)
        doing("returning the result")
        return Returned(pickle.dumps(value))
    except BaseException as error:  # SystemExit too: whatever ends a task is reported
        return report_of(error)


def _join_group(order: Task, rank: int, store: dist.Store) -> Seat:
    """A new group for each run: no message that an earlier run left unread can be taken for one of this run."""
    _leave_group()
    own = dist.PrefixStore(f"run {order.run}", store)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("group", own), rank=rank, world_size=order.size, timeout=_PATIENCE
    )
    group = dist.group.WORLD
    assert group is not None
    return Seat(rank, order.size, group, dist.PrefixStore("task", own))


def _leave_group() -> None:
    # Not at the end of a run: a rank that leaves would break off what the others still do.
    if dist.is_initialized():
        dist.destroy_process_group()


def report_of(error: BaseException) -> Raised:
    """What a rank says of its failure."""
    now = time.monotonic()
    assert _slot is not None
    _, where = last_sign(_slot)
    trace = "".join(traceback.format_exception(error))
    says_all = isinstance(error, RankError)
    cause = " ".join(str(error).split())[:500] if says_all else one_line(error)
    return Raised(now, where, cause, _is_second_hand(error), trace, says_all)


def one_line(error: BaseException) -> str:
    """An error as one line of text, without the C++ frames that torch appends."""
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be made)"
    text = " ".join(text.split("Exception raised from", 1)[0].split())
    return f"{type(error).__name__}: {text}"[:500]


def _is_second_hand(error: BaseException | None) -> bool:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        elsewhere = isinstance(error, RankError) and not error.here
        if elsewhere or _SECOND_HAND.search(one_line(error)):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


# ------------------------------------------------------- the end of the parent


def _die_with_parent() -> None:
    """On Linux the system itself kills this process when the parent is gone, even one that is stopped or whose task
    lets no other thread run. Elsewhere it is left to the watcher."""
    parent = parent_process()
    if sys.platform != "linux" or parent is None:
        return
    pipe = parent.sentinel  # the parent holds the other end until it ends
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


# ----------------------------------------------------------------- the watcher


def _watch(pipe: Connection[Any, Any], sending: threading.Lock, orders: SimpleQueue[Task], main_thread: int) -> None:
    while True:
        try:
            order = pipe.recv()
        except (EOFError, OSError):
            os._exit(1)  # the parent is gone, and the main thread may hang: no tidy way out
        if isinstance(order, Where):
            _say(pipe, sending, place_of(sys._current_frames()[main_thread]))  # pyright: ignore[reportPrivateUsage]
        else:
            orders.put(order)


def _say(pipe: Connection[Any, Any], sending: threading.Lock, message: object) -> None:
    with sending:
        try:
            pipe.send(message)
        except OSError:
            os._exit(1)


def place_of(frame: FrameType) -> At:
    """The line at which a thread is."""
    in_torch = "torch/distributed" in Path(frame.f_code.co_filename).as_posix()
    # The line of the task says more than the line of torch below it.
    while frame.f_back is not None and "/torch/" in Path(frame.f_code.co_filename).as_posix():
        frame = frame.f_back
    number: int | None = frame.f_lineno  # None between two lines
    source = linecache.getline(frame.f_code.co_filename, number or 0).strip()
    line = f"{Path(frame.f_code.co_filename).name}:{number or '?'}: {source}"
    return At(in_torch or _WAITS.search(source) is not None, line)
