"""Messages between two ranks: lists of tensors, received in the order sent; shapes are told only when they change."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch.distributed leaks unknown types)
from __future__ import annotations

import pickle
import threading
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Spec:
    """What a message holds: the structure of the value, and shape and dtype of every tensor."""

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]


def spec_of(tensors: list[Tensor], structure: Any) -> Spec:
    return Spec(structure, tuple(tuple(t.shape) for t in tensors), tuple(t.dtype for t in tensors))


@dataclass
class Posted:
    """A receive under way: what it waits for and where it goes."""

    works: list[Any]
    buffers: list[Tensor]
    spec: Spec

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        # a bool travels as bytes
        return [buffer.view(dtype) for buffer, dtype in zip(self.buffers, self.spec.dtypes, strict=True)]


class Sender:
    """Sends under way. A thread for each peer waits for them in order, and lets go of each tensor when it has left.

    (Gloo says that a send is done only to who waits for it.)
    """

    def __init__(self) -> None:
        self.under_way = 0
        self.most = 0
        self._lock = threading.Condition()
        self._queues: dict[int, SimpleQueue[tuple[Any, Tensor] | None]] = {}
        self._failure: BaseException | None = None

    def send(self, tensors: list[Tensor], rank: int, group: dist.ProcessGroup, announce: Spec | None = None) -> None:
        """Start to send; with `announce` the spec goes first."""
        if announce is not None:
            packed = torch.frombuffer(bytearray(pickle.dumps(announce)), dtype=torch.uint8)
            self._start(torch.tensor([len(packed)]), rank, group)
            self._start(packed, rank, group)
        for tensor in tensors:
            self._start(_sendable(tensor), rank, group)

    def _start(self, tensor: Tensor, rank: int, group: dist.ProcessGroup) -> None:
        work = dist.isend(tensor, group=group, group_dst=rank)
        with self._lock:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        if rank not in self._queues:
            self._queues[rank] = SimpleQueue()
            threading.Thread(target=self._watch, args=(self._queues[rank],), daemon=True).start()
        self._queues[rank].put((work, tensor))

    def _watch(self, queue: SimpleQueue[tuple[Any, Tensor] | None]) -> None:
        while (item := queue.get()) is not None:
            try:
                item[0].wait()
            except BaseException as error:
                self._failure = self._failure or error
            del item
            with self._lock:
                self.under_way -= 1
                self._lock.notify_all()

    def finish(self) -> None:
        """Wait until all has been sent. Raises what a send failed with."""
        with self._lock:
            self._lock.wait_for(lambda: self.under_way == 0)
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End the threads."""
        for queue in self._queues.values():
            queue.put(None)
        self._queues = {}


def receive_spec(rank: int, group: dist.ProcessGroup) -> Spec:
    """The spec that a sender announces before its message."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, group=group, group_src=rank)
    packed = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(packed, group=group, group_src=rank)
    return pickle.loads(packed.numpy().tobytes())


def post(spec: Spec, rank: int, group: dist.ProcessGroup, device: torch.device) -> Posted:
    """Start to receive a message of this spec."""
    buffers = [
        torch.empty(shape, dtype=torch.uint8 if dtype is torch.bool else dtype, device=device)
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    ]
    works = [dist.irecv(buffer, group=group, group_src=rank) for buffer in buffers]
    return Posted(works, buffers, spec)


def _sendable(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().contiguous()
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor
