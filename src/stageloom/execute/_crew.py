"""The parent's side of a pool: workers from their start to their end, which the first failure of one brings to all."""

# torch.distributed re-exports its stores without saying so.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import multiprocessing
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from ctypes import c_char
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as dist

from stageloom.execute._failure import Died, Failure, first
from stageloom.execute._worker import (
    SIGN,
    At,
    Raised,
    Ready,
    Returned,
    Task,
    Where,
    last_sign,
    one_line,
    serve,
    slot_of,
)

_STARTING = 60.0  # seconds a worker may take to import torch and the script on a busy machine
_TICK = 0.2  # seconds between two looks at processes that may have died or gone silent
_SETTLE = 0.1  # seconds in which a failure before the one first heard of may still be reported
_SECOND_HAND = 2.0  # seconds in which the cause of a "closed by peer" may still be reported
_ANSWER = 2.0  # seconds a worker has to say where it is
_ENDING = 5.0  # seconds the system may take to end a killed process


@dataclass(frozen=True)
class _Gone:
    """A worker's pipe has closed."""


_Message = Ready | Returned | Raised | At | Died | _Gone


@dataclass(frozen=True)
class _Worker:
    process: BaseProcess
    pipe: Connection[Any, Any]
    sending: threading.Lock
    listener: threading.Thread
    slot: memoryview


class Crew:
    """`size` workers; `end` is to be called, whatever happens."""

    def __init__(self, size: int, timeout: float, threads: int) -> None:
        self._timeout = timeout
        self._context = multiprocessing.get_context("spawn")
        # The parent holds the store: no worker's end takes it away from the others.
        self._store: dist.Store | None
        self._store, self._port = _open_store()
        self._signs = self._context.RawArray(c_char, SIGN.size * size)
        self._inbox: SimpleQueue[tuple[int, _Message]] = SimpleQueue()
        self._workers: list[_Worker] = []
        self._ready: set[int] = set()
        self._dead: dict[int, Died] = {}
        self._runs = 0
        self._since = 0.0  # silence counts from here at the earliest
        self._ask_after = 0.0
        try:
            with _interrupts_held_back():
                for rank in range(size):
                    self._start(rank, threads)
        except BaseException:
            self.end()
            raise

    def _start(self, rank: int, threads: int) -> None:
        ours, theirs = self._context.Pipe()
        args = (rank, self._port, threads, theirs, self._signs)
        # A daemon, so that multiprocessing ends it at the latest when the parent exits.
        process = self._context.Process(target=serve, args=args, name=f"stageloom rank {rank}", daemon=True)
        process.start()
        theirs.close()
        listener = threading.Thread(target=_listen, args=(rank, ours, self._inbox), daemon=True)
        listener.start()
        self._workers.append(_Worker(process, ours, threading.Lock(), listener, slot_of(self._signs, rank)))

    def alive(self) -> bool:
        return all(worker.process.is_alive() for worker in self._workers)

    def run(self, body: bytes, size: int) -> list[Any]:
        """What the task in `body` returns on ranks 0..size-1, or its first failure."""
        self._runs += 1
        self._since = time.monotonic()
        for rank in range(size):
            SIGN.pack_into(self._workers[rank].slot, 0, 0.0, b"" if rank in self._ready else b"its start")
            self._send(rank, Task(self._runs, size, body))
        values: dict[int, bytes] = {}
        while len(values) < size:
            rank, message = self._next(size, _TICK)
            if isinstance(message, Returned):
                values[rank] = message.value
            elif isinstance(message, Raised | Died):
                raise first(self._failures(size, rank, message))
            else:
                self._check_silence([rank for rank in range(size) if rank not in values])
        return [_read(rank, values[rank]) for rank in range(size)]

    def end(self) -> None:
        self._store = None
        for worker in self._workers:
            worker.process.kill()
        until = time.monotonic() + _ENDING
        for worker in self._workers:
            worker.process.join(max(0.0, until - time.monotonic()))
            worker.listener.join(1.0)
            if worker.process.exitcode is not None:
                worker.process.close()
            if not worker.listener.is_alive():  # closed while it is read, its number could be given to another file
                worker.pipe.close()

    # -------------------------------------------------------------- messages

    def _send(self, rank: int, order: Task | Where) -> None:
        # In a thread, since a stopped worker reads nothing, and a full pipe would hold up the parent.
        threading.Thread(target=_send, args=(self._workers[rank], order), daemon=True).start()

    def _next(self, size: int, seconds: float) -> tuple[int, _Message | None]:
        """The next message from ranks 0..size-1, or (-1, None) after a tick, those seconds, or word from another."""
        try:
            rank, message = self._inbox.get(timeout=max(0.0, min(seconds, _TICK)))
        except Empty:
            # A pipe stays open while children of the worker hold it: look at the processes, too.
            for rank in range(size):
                if rank not in self._dead and not self._workers[rank].process.is_alive():
                    return rank, self._bury(rank)
            return -1, None
        if isinstance(message, Ready):
            self._ready.add(rank)
            self._since = time.monotonic()
        if isinstance(message, _Gone) and rank not in self._dead:
            message = self._bury(rank)
        return (rank, message) if rank < size else (-1, None)

    def _bury(self, rank: int) -> Died:
        now = time.monotonic()
        worker = self._workers[rank]
        worker.process.join(1.0)  # its pipe closes a moment before its exit status is known
        _, where = last_sign(worker.slot)
        self._dead[rank] = Died(now, where, worker.process.exitcode)
        return self._dead[rank]

    # -------------------------------------------------------------- failures

    def _failures(self, size: int, rank: int, report: Raised | Died) -> list[tuple[int, Raised | Died]]:
        """This failure and those that come with it: what one rank does wrong soon makes others fail as well."""
        heard = [(rank, report)]
        until = time.monotonic() + (_SECOND_HAND if report.second_hand else _SETTLE)
        while (left := until - time.monotonic()) > 0:
            rank, message = self._next(size, left)
            if isinstance(message, Raised | Died):
                heard.append((rank, message))
                if not message.second_hand:
                    until = min(until, time.monotonic() + _SETTLE)
        return heard

    def _check_silence(self, running: list[int]) -> None:
        """Raise a Failure if a rank hangs. One that waits for others is not to blame as long as one of them works."""
        now = time.monotonic()
        signs = {rank: last_sign(self._workers[rank].slot) for rank in running}
        silent = {rank: now - max(when, self._since) for rank, (when, _) in signs.items()}
        overdue = [rank for rank in running if silent[rank] > self._limit(rank)]
        if not overdue or now < self._ask_after:
            return
        places = self._ask(running)
        if places is None:
            return
        self._ask_after = now + _ANSWER
        mute = [rank for rank in overdue if rank not in places]
        busy = [rank for rank in overdue if rank in places and not places[rank].waits]
        if not mute and not busy and len(overdue) < len(running):
            return
        rank = max(mute or busy or overdue, key=lambda rank: silent[rank])
        detail = places[rank].line if rank in places else "it does not answer"
        raise Failure(rank, signs[rank][1], f"gave no sign for {self._limit(rank):g} s", "silent", detail)

    def _limit(self, rank: int) -> float:
        return self._timeout if rank in self._ready else max(self._timeout, _STARTING)

    def _ask(self, running: list[int]) -> dict[int, At] | None:
        """Where the ranks are, of those that answer; None if one has ended meanwhile, which changes the picture."""
        for rank in running:
            self._send(rank, Where())
        places: dict[int, At] = {}
        until = time.monotonic() + _ANSWER
        while len(places) < len(running) and (left := until - time.monotonic()) > 0:
            rank, message = self._next(max(running) + 1, left)
            if isinstance(message, At):
                places[rank] = message
            elif isinstance(message, Returned | Raised | Died):
                self._inbox.put((rank, message))
                return None
        return places


# ------------------------------------------------------------ small functions


def _open_store() -> tuple[dist.TCPStore, int]:
    """A store on a free port of the loopback interface alone; torch by itself listens on all of them."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        timeout=timedelta(seconds=_STARTING),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


@contextmanager
def _interrupts_held_back() -> Generator[None]:
    """Processes started in here never see Ctrl-C, which a terminal sends to them as well: their parent ends them."""
    if sys.platform == "win32":
        yield
        return
    resource_tracker.ensure_running()  # multiprocessing would start it below, and let interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _listen(rank: int, pipe: Connection[Any, Any], inbox: SimpleQueue[tuple[int, _Message]]) -> None:
    while True:
        try:
            inbox.put((rank, pipe.recv()))
        except (EOFError, OSError):
            inbox.put((rank, _Gone()))
            return


def _send(worker: _Worker, order: Task | Where) -> None:
    with worker.sending, suppress(OSError):  # the worker is gone; its listener says so
        worker.pipe.send(order)


def _read(rank: int, value: bytes) -> Any:
    try:
        return pickle.loads(value)
    except Exception as error:
        raise Failure(rank, "reading its result", one_line(error)) from error
