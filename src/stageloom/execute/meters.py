"""The instruments of a profile: scales around the passes of a pipeline's stages, and messages' times."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaks unknown types)
from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from stageloom.execute.arguments import Make
from stageloom.execute.channel import Sender, Spec, post
from stageloom.execute.executor import Net
from stageloom.execute.pipeline import Pipeline
from stageloom.execute.stage import Result, StageRunner
from stageloom.execute.tasks import Place
from stageloom.op import Kind

WEIGHED: Final = 4  # micro-batches of a path whose memory is measured
ROUNDS: Final = 36  # messages there and back
WARM: Final = 6  # of which so many first ones do not count
LARGE: Final = 1 << 20  # bytes of the message that shows the bandwidth, at least

Around = Callable[[Kind, Place, "list[Tensor] | None", Callable[["list[Tensor] | None"], Any]], Any]


class Metered:
    """A `StageRunner` with an instrument around its passes: `around(kind, place, given, call)` does call(given), given
    being the tensors that have come from another stage, and returns what it returns."""

    def __init__(self, runner: StageRunner, around: Around) -> None:
        self.runner = runner
        self.around = around

    def forward(self, place: Place, value: tuple[list[Tensor], Any] | None, **more: Any) -> Result:
        """F."""

        def call(given: list[Tensor] | None) -> Result:
            return self.runner.forward(place, None if given is None or value is None else (given, value[1]), **more)

        return self.around(Kind.F, place, None if value is None else value[0], call)

    def backward(self, place: Place, gradients: list[Tensor] | None, *, whole: bool, **more: Any) -> list[Tensor]:
        """B, or BW where `whole`."""

        def call(given: list[Tensor] | None) -> list[Tensor]:
            return self.runner.backward(place, given, whole=whole, **more)

        return self.around(Kind.BW if whole else Kind.B, place, gradients, call)

    def backward_weight(self, place: Place) -> None:
        """W."""
        self.around(Kind.W, place, None, lambda _: self.runner.backward_weight(place))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)


def _put_around(pipeline: Pipeline, around: Around) -> None:
    runners: dict[tuple[int, int], Any] = pipeline.executor.stages  # type: ignore[assignment]
    for key, runner in runners.items():
        runners[key] = Metered(runner.runner if isinstance(runner, Metered) else runner, around)


def on_cuda(pipeline: Pipeline) -> bool:
    """Do this rank's stages compute on a CUDA device?"""
    return any(p.is_cuda for module in pipeline.modules.values() for p in module.parameters())


class Scale:
    """By how many bytes each pass of one step changes what is allocated, messages aside.

    What comes from another stage is copied into a pass, and what goes there is copied out of it: so a pass is charged
    with its input if it keeps it, and not with its output if it does not. On CPU the allocator's own records are read
    (torch's profiler), on CUDA the allocator's counter.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        schedule = pipeline.schedule
        firsts = {m for path in range(len(schedule.placement.paths)) for m in _first(schedule.path_of, path)}
        self.chosen = firsts
        self.cuda = on_cuda(pipeline)
        self.net: dict[tuple[Kind, int, int], int] = {}
        self.message: dict[tuple[int, int], int] = {}
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it speaks of each use on standard error
        _put_around(pipeline, self._around)

    def _around(self, kind: Kind, place: Place, given: list[Tensor] | None, call: Callable[..., Any]) -> Any:
        if place.microbatch not in self.chosen:
            return call(given)
        if kind is Kind.F and given is not None:
            at = place.stage, place.microbatch
            self.message[at] = self.message.get(at, 0) + sum(tensor.nbytes for tensor in given)

        def run() -> Any:
            result = call(None if given is None else [tensor.clone() for tensor in given])
            if isinstance(result, Result):
                result.tensors = [tensor.clone() for tensor in result.tensors]
                return result
            return None if result is None else [tensor.clone() for tensor in result]

        with _no_collector():  # what it finds is not this pass's
            result, changed = (_allocated_on_cuda if self.cuda else _allocated)(run)
        out = result.tensors if isinstance(result, Result) else result or []
        key = kind, place.stage, place.microbatch
        self.net[key] = self.net.get(key, 0) + changed - sum(tensor.nbytes for tensor in out)
        return result

    def result(self) -> tuple[dict[Kind, dict[int, float]], dict[int, float]]:
        """Bytes of a micro-batch by kind and stage, and those that a stage receives for one from the stage before."""
        by_kind: dict[Kind, dict[int, list[int]]] = {}
        for (kind, stage, _), size in self.net.items():
            by_kind.setdefault(kind, {}).setdefault(stage, []).append(size)
        received: dict[int, list[int]] = {}
        for (stage, _), size in self.message.items():
            received.setdefault(stage, []).append(size)
        medians = {kind: {s: float(median(sizes)) for s, sizes in of.items()} for kind, of in by_kind.items()}
        return medians, {stage: float(median(sizes)) for stage, sizes in received.items()}


def _first(path_of: Any, path: int) -> list[int]:
    """Some micro-batches of a path, without the very first, at which gradients are made, if there are others."""
    own = [microbatch for microbatch, of in enumerate(path_of.tolist()) if of == path]
    return own[1 : 1 + WEIGHED] or own


@contextmanager
def _no_collector() -> Generator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _allocated(run: Callable[[], Any]) -> tuple[Any, int]:
    """What `run` returns, and by how many bytes it changed what is allocated on the CPU."""
    with torch.autograd.profiler.profile(profile_memory=True) as profiled:
        result = run()
    records: Any = profiled
    events: list[Any] = records.kineto_results.events()
    return result, sum(event.nbytes() for event in events if event.name() == "[memory]")


def _allocated_on_cuda(run: Callable[[], Any]) -> tuple[Any, int]:
    before = torch.cuda.memory_allocated()
    result = run()
    return result, torch.cuda.memory_allocated() - before


def state_bytes(make: Make, parameters: Sequence[Tensor]) -> float:
    """Bytes that an optimiser keeps for such parameters."""
    if not parameters:
        return 0.0
    copies = [nn.Parameter(torch.zeros_like(p)) for p in parameters]
    for copy in copies:
        copy.grad = torch.zeros_like(copy)
    optimizer = make(copies)
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return float(sum(value.nbytes for value in kept))


class Link(NamedTuple):
    """A message's seconds: latency + bytes / bandwidth."""

    latency: float
    bandwidth: float


def measure_link(net: Net, peer: int, size: int) -> Link:
    """Send messages to and fro between this rank and a peer, which calls it at the same time: half of the time that one
    takes there and back. A small one gives the latency, one of `size` bytes (or a large one) the bandwidth."""
    small = torch.zeros(1, device=net.device)
    large = torch.zeros(max(size, LARGE) // 4, device=net.device)
    quick, slow = (_one_way(net, peer, message) for message in (small, large))
    # Where other work disturbs it most, a small message can take as long as a large one: then this is a lower bound.
    return Link(quick, large.nbytes / max(slow - quick, slow / 10))


def _one_way(net: Net, peer: int, message: Tensor) -> float:
    first = net.rank < peer
    spec = Spec(None, (tuple(message.shape),), (message.dtype,))
    sender = Sender(net)
    there, back = net.to(peer), net.source(peer)

    def send() -> None:
        sender.send(0, [message], there)

    def receive() -> None:
        post(spec, back, net).wait()
        if message.is_cuda:
            torch.cuda.synchronize()

    taken: list[float] = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        if first:
            send()
            receive()
        else:
            receive()
            send()
        taken.append(time.perf_counter() - began)
        sender.reap((0,))
    return median(taken[WARM:]) / 2
