"""A stage in parts, and two of them interleaved: the all-to-all of one runs while the other computes.

A stage that has `overlapped_parts()` (see `stageloom.execute.exchange`) and meets overlapped pairs runs in *segments*,
cut where its all-to-alls are, each with a graph of its own. Its backward goes through the segments from the last to
the first, with an all-to-all the other way between two. In a pair, a segment of the backward of one micro-batch and a
segment of the forward of another one take turns, the backward first: each starts its all-to-all when its segment is
done and waits for it when it is its turn again, so that in the meantime the other one computes. That is the order of
DeepSeek-V3 (arXiv 2412.19437, section 3.2.1, figure 4). Where weight gradients can be deferred, those of a BW are
computed under the backward's all-to-all too.

Every rank of an expert group runs the same pairs in the same order, and so the same all-to-alls.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaks unknown types)
from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from stageloom.errors import InputError
from stageloom.execute.channel import has_gradient
from stageloom.execute.engine import Job
from stageloom.execute.exchange import AllToAll, Crossing, Part, crossing_of, refuse_open_end, start, tensors_of
from stageloom.execute.split import Mode, Saved, run_backward, run_backward_input, run_backward_weight, run_forward
from stageloom.execute.split_hooks import caught, hooks_of
from stageloom.execute.split_queue import Queue, not_recording
from stageloom.execute.tree import flatten, unflatten

T = TypeVar("T")
U = TypeVar("U")
Turns = Generator[None, None, T]
"""Work that stops where it has started an all-to-all, and goes on with waiting for it."""

Around = Callable[[], AbstractContextManager[Any]]


@dataclass
class Segments:
    """What a forward in parts leaves for its backward: its segments in order, and the way between each two."""

    saved: list[Saved] = field(default_factory=list[Saved])
    ways: list[tuple[Crossing, list[tuple[torch.Size, torch.dtype]]]] = field(default_factory=list[Any])
    late: Queue = field(default_factory=Queue)  # gradients that hooks must see whole

    @property
    def inputs(self) -> list[Tensor | None]:
        return self.saved[0].inputs

    @property
    def outputs(self) -> list[Any]:
        return self.saved[-1].outputs


class PartsEngine:
    """Runs a stage in segments."""

    def __init__(self, module: nn.Module, mode: Mode, stage: int, device: torch.device) -> None:
        self.module: Any = module
        self.mode: Mode = mode
        self.stage = stage
        self.device = device

    def forward(self, job: Job) -> tuple[list[Tensor], Segments | None]:
        return finish(self.forwarding(job, graph=True))

    def backward(self, saved: Segments, gradients: list[Tensor | None], whole: bool) -> list[Tensor | None]:
        return finish(self.backwarding(saved, gradients, whole))

    def weight(self, saved: Segments) -> None:
        """W of all segments: each parameter's gradient is accumulated once."""
        last = saved.saved[-1]
        for each in reversed(saved.saved):
            if each.queue is not None:
                saved.late.entries += each.queue.entries
                each.queue.clear()
            if each is not last:
                last.roots = last.roots[0] + each.roots[0], last.roots[1] + each.roots[1]
                each.roots = ([], [])
        for each in saved.saved:
            run_backward_weight(each)
        saved.late.run()

    # --------------------------------------------------------------------------------------------------- in turns

    def forwarding(
        self, job: Job, *, graph: bool, around: Around = nullcontext
    ) -> Turns[tuple[list[Tensor], Segments | None]]:
        """The forward, segment by segment, each within `around()`; without `graph` nothing is left for a backward."""
        segments = Segments()
        parts = list(self.module.overlapped_parts())
        tensors, wanted = job.given, job.wanted
        at, structure = 0, None
        while True:
            segment = _Segment(job, parts, at, structure, self.stage)
            with around():
                if graph:
                    tensors, saved = run_forward(self.mode, segment.run, tensors, job.parameters, wanted=wanted)
                    segments.saved.append(saved)
                    wanted = [output.edge is not None for output in saved.outputs]
                else:
                    with torch.no_grad():
                        tensors = [t.detach() for t in segment.run(tensors)]
                way = segment.way
                if way is None:
                    return tensors, segments if graph else None
                pending = start(tensors[: segment.count], way)
            likes = [(t.shape, dtype) for t, dtype in zip(pending.arriving, pending.dtypes, strict=True)]
            segments.ways.append((way, likes))
            yield
            tensors = pending.wait() + tensors[segment.count :]
            at, structure = segment.at, segment.structure

    def backwarding(
        self, saved: Segments, gradients: list[Tensor | None], whole: bool, *, around: Around = nullcontext
    ) -> Turns[list[Tensor | None]]:
        """The backward, segment by segment from the last one, each within `around()`."""
        hooked = [p for p in saved.saved[0].parameters if hooks_of(p) != (None, None)]
        apart = whole and self.mode == "deferred"  # B, then W under the all-to-all
        # what parts before and after an all-to-all use would else get its gradient, and fire its hooks, bit by bit
        with caught(hooked, saved.late):
            for at in reversed(range(len(saved.saved))):
                segment = saved.saved[at]
                with around(), not_recording():
                    walk = run_backward if whole and not apart else run_backward_input
                    found = walk(segment, gradients)
                    pending = None
                    if at:
                        way, likes = saved.ways[at - 1]
                        pending = start(self._travelling(found, likes), way.reversed())
                    if apart and not hooked:
                        run_backward_weight(segment)
                if pending is None:
                    gradients = found
                    continue
                yield
                back = iter(pending.wait())
                travelled = [next(back) if has_gradient(dtype) else None for _, dtype in saved.ways[at - 1][1]]
                gradients = travelled + found[len(travelled) :]
        if hooked:
            with around(), not_recording():
                if apart:
                    self.weight(saved)
                elif whole or self.mode == "fused":
                    saved.late.run()
        return gradients

    def _travelling(self, found: list[Tensor | None], likes: list[tuple[torch.Size, torch.dtype]]) -> list[Tensor]:
        """The gradients that go back. Every rank sends one for every tensor, even where none has come to it."""
        return [
            torch.zeros(shape, dtype=dtype, device=self.device) if gradient is None else gradient
            for gradient, (shape, dtype) in zip(found, likes, strict=False)
            if has_gradient(dtype)
        ]


class _Segment:
    """The parts from `at` up to the next all-to-all, as a function of flat tensors."""

    def __init__(self, job: Job, parts: list[Part], at: int, structure: Any, stage: int) -> None:
        self.job = job
        self.parts = parts
        self.at = at
        self.first = at == 0
        self.structure = structure
        self.stage = stage
        self.way: Crossing | None = None
        self.count = 0  # of the tensors that travel, which come first

    def run(self, flat: list[Tensor]) -> list[Tensor]:
        kwargs: dict[str, Any] = {}
        if self.first:
            arguments, kwargs = self.job.enter(flat)
        else:
            x, keep = unflatten(flat, self.structure)
            arguments = (x, *keep)
        for at in range(self.at, len(self.parts)):
            value = self.parts[at](*arguments, **kwargs)
            kwargs = {}
            if at + 1 == len(self.parts):
                refuse_open_end(value, at, f"stage {self.stage}: ")
                return self.job.leave(value)
            if isinstance(value, AllToAll):
                self.way = crossing_of(value, f"stage {self.stage}, part {at}")
                self.count = len(tensors_of(value))
                self.at = at + 1
                tensors, self.structure = flatten((value.x, tuple(value.keep)))
                return tensors
            arguments = value if isinstance(value, tuple) else (value,)
        raise InputError(f"stage {self.stage}: overlapped_parts() gave no part")


# --------------------------------------------------------------------------------------------------------- the turns


def finish(work: Turns[T]) -> T:
    """Do the work without anything in between."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def interleave(one: Turns[T], other: Turns[U]) -> tuple[T, U]:
    """Do two works in turns, `one` first; when one of them is done the other goes on alone."""
    with ExitStack() as stack:
        stack.callback(one.close)
        stack.callback(other.close)
        while True:
            try:
                next(one)
            except StopIteration as end:
                return end.value, finish(other)
            try:
                next(other)
            except StopIteration as end:
                return finish(one), end.value
