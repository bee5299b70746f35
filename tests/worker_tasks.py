"""Tasks that run in worker processes (test_execute_workers.py); a worker imports them by name."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import NoReturn

import torch
import torch.distributed as dist

from stageloom.execute.workers import Pool, Seat, doing

LONG = 600.0  # seconds; nothing here is meant to wait that long


def place(seat: Seat) -> tuple[int, int, int]:
    return seat.rank, seat.size, os.getpid()


def total(seat: Seat, factor: float) -> float:
    """The sum over the ranks of (rank + 1) * factor."""
    own = torch.tensor([(seat.rank + 1) * factor])
    dist.all_reduce(own, group=seat.group)
    return float(own)


def ring(seat: Seat) -> int:
    """Each rank's left neighbour."""
    left, right = (seat.rank - 1) % seat.size, (seat.rank + 1) % seat.size
    got = torch.zeros(1)
    sent = dist.isend(torch.tensor([float(seat.rank)]), right, group=seat.group)
    dist.recv(got, left, group=seat.group)
    assert sent is not None
    sent.wait()
    return int(got)


def leave_unread(seat: Seat) -> None:
    """A message that nobody receives."""
    if seat.rank == 0:
        dist.isend(torch.full((1,), 99.0), 1, group=seat.group)


def through_store(seat: Seat, word: str) -> str:
    if seat.rank == 0:
        seat.store.set("word", word)
    return seat.store.get("word").decode()


def settings(seat: Seat) -> tuple[int, str | None]:
    return torch.get_num_threads(), os.environ.get("GLOO_SOCKET_IFNAME")


def big(seat: Seat, tensor: torch.Tensor) -> torch.Tensor:
    return tensor + seat.rank


def speak(seat: Seat) -> None:
    print(f"rank {seat.rank} speaks")


# ---------------------------------------------------------------------- faults


def wait_for(seat: Seat, culprit: int) -> None:
    doing("F0@0")
    if seat.rank != culprit:
        doing(f"recv from {culprit}")
        dist.recv(torch.zeros(1), culprit, group=seat.group)


def raise_while_others_receive(seat: Seat, culprit: int) -> None:
    wait_for(seat, culprit)
    doing("F3@2")
    raise ValueError("no such\nshape")


def raise_while_others_reduce(seat: Seat, culprit: int) -> None:
    doing("reduce")
    if seat.rank == culprit:
        raise ValueError("too large")
    dist.all_reduce(torch.zeros(1), group=seat.group)


def break_off_and_raise(seat: Seat, culprit: int) -> None:
    """The others hear of the broken connection before the parent hears of its cause."""
    wait_for(seat, culprit)
    dist.destroy_process_group()
    time.sleep(0.5)
    doing("B1@0")
    raise KeyError("weights")


def exit_while_others_receive(seat: Seat, culprit: int, status: int) -> None:
    wait_for(seat, culprit)
    doing("B3@1")
    os._exit(status)


def die_while_others_receive(seat: Seat, culprit: int) -> None:
    wait_for(seat, culprit)
    doing("W7@1")
    os.kill(os.getpid(), signal.SIGKILL)


def leave_through_sys_exit(seat: Seat) -> NoReturn:
    sys.exit(3)


def hang_while_others_receive(seat: Seat, culprit: int) -> None:
    if seat.rank == culprit:
        time.sleep(0.5)  # the others have then been silent for longer
    wait_for(seat, culprit)
    doing("F5@1")
    time.sleep(LONG)


def stop_while_others_receive(seat: Seat, culprit: int) -> None:
    wait_for(seat, culprit)
    doing("F6@1")
    os.kill(os.getpid(), signal.SIGSTOP)


def wait_for_each_other(seat: Seat) -> None:
    doing(f"recv on {seat.rank}")
    dist.recv(torch.zeros(1), 1 - seat.rank, group=seat.group)


def work_while_others_receive(seat: Seat, worker: int, seconds: float) -> str:
    """Rank `worker` keeps giving signs; the others give none until it sends."""
    got = torch.zeros(1)
    if seat.rank != worker:
        dist.recv(got, worker, group=seat.group)
        return "received"
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        doing("a small op")
        time.sleep(0.05)
    for rank in range(seat.size):
        if rank != worker:
            dist.send(got, rank, group=seat.group)
    return "worked"


def unpicklable(seat: Seat) -> object:
    return threading.Lock()


class Unreadable:
    """Pickles in the worker, and raises where it is read."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return int, ("no number",)


def unreadable(seat: Seat) -> Unreadable:
    return Unreadable()


class Poison(Exception):
    """An error with content that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("poison", threading.Lock())


def raise_unpicklable(seat: Seat) -> NoReturn:
    raise Poison


# --------------------------------------------------------- parents of their own


def announce_and_hang(seat: Seat, stopped: int | None) -> None:
    print("worker", flush=True)
    if seat.rank == stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(LONG)


def hold(size: int, stopped: int | None = None) -> None:
    """What a test's subprocess does: a pool in the middle of a run, until something happens to this process."""
    with Pool(size) as pool:
        pool.run(announce_and_hang, stopped)
