"""The parts of a profile that run steps: ops are timed, what they allocate is weighed, messages are sent to and fro."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaks unknown types)
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from stageloom.execute import meters
from stageloom.execute.arguments import Make, Split, Stages
from stageloom.execute.measure import Spans
from stageloom.execute.pipeline import Pipeline
from stageloom.execute.replicas import Tied
from stageloom.op import KIND_NAMES
from stageloom.schedule import Schedule

Samples = dict[tuple[int, int, int], list[float]]
"""Seconds of ops by kind, stage and slice."""


@dataclass(frozen=True)
class Options:
    """What the stages are run with."""

    loss: Callable[[Any, Any], Tensor]
    inputs: Any
    targets: Any
    kwargs: Mapping[str, Any] | None
    split: Split | Mapping[int, Split]
    recompute: Sequence[int]
    tied: Tied | None
    optimizer: Make | None
    on_task: Callable[[str], None] | None

    def pipeline(self, schedule: Schedule, stages: Stages, group: dist.ProcessGroup) -> Pipeline:
        """This rank's part of a pipeline."""
        return Pipeline(
            schedule,
            stages,
            self.loss,
            group=group,
            split=self.split,
            recompute=self.recompute,
            tied=self.tied,
            optimizer=None if schedule.synchronous else self.optimizer,
            on_task=self.on_task,
        )

    def step(self, pipeline: Pipeline) -> Spans:
        """One step; when its ops ran."""
        dist.barrier(pipeline.group)
        return pipeline.step(self.inputs, self.targets, kwargs=self.kwargs).run.spans


class Counter:
    """Tells how many steps are done."""

    def __init__(self, tell: Callable[[int, int], None] | None, total: int) -> None:
        self.tell, self.total, self.count = tell, total, 0

    def done(self) -> None:
        """One more."""
        self.count += 1
        if self.tell is not None:
            self.tell(self.count, self.total)


class Found:
    """What a rank has measured; sent to all others at the end."""

    def __init__(self) -> None:
        self.whole: Samples = {}
        self.parted: Samples = {}
        self.gaps: list[float] = []
        self.modes: dict[int, str] = {}
        self.bytes: dict[str, dict[int, float]] = {}
        self.message: dict[int, float] = {}  # bytes that a stage receives for a micro-batch
        self.links: dict[tuple[int, int], meters.Link] = {}


def measure(
    found: Found, pipeline: Pipeline, options: Options, repeats: int, counter: Counter, *, split_up: bool
) -> None:
    """Time the ops of some steps."""
    schedule, samples = pipeline.schedule, found.parted if split_up else found.whole
    source = schedule.links.source
    same = (source < 0) | (schedule.rank[source] == pipeline.rank)  # rows that wait for no message
    for repeat in range(1 + repeats):
        spans = options.step(pipeline)
        counter.done()
        for module in pipeline.modules.values():
            module.zero_grad(set_to_none=True)
        if repeat == 0:  # buffers and threads are made
            continue
        for row, (began, ended) in spans.items():
            key = int(schedule.kind[row]), int(schedule.stage[row]), int(schedule.slice[row])
            samples.setdefault(key, []).append(ended - began)
            if same[row] and row - 1 in spans:
                found.gaps.append(max(0.0, began - spans[row - 1][1]))
    if split_up or not schedule.synchronous:
        found.modes = {stage: report.mode for (_, stage), report in pipeline.reports.items()}


def weigh(found: Found, pipeline: Pipeline, options: Options) -> None:
    """Memory: of passes, in one more step, and of parameters."""
    scale = meters.Scale(pipeline)
    dist.barrier(pipeline.group)
    pipeline.step(options.inputs, options.targets, kwargs=options.kwargs)
    kinds, found.message = scale.result()
    found.bytes = {KIND_NAMES[kind]: of_stage for kind, of_stage in kinds.items()}
    for (_, stage), module in pipeline.modules.items():
        module.zero_grad(set_to_none=True)
        parameters = list(module.parameters())
        trained = [p for p in parameters if p.requires_grad]
        found.bytes.setdefault("parameters", {})[stage] = sum(p.nbytes for p in parameters)
        found.bytes.setdefault("gradients", {})[stage] = sum(p.nbytes for p in trained)
        if options.optimizer is not None:
            found.bytes.setdefault("optimizer", {})[stage] = meters.state_bytes(options.optimizer, trained)


def talk(found: Found, pipeline: Pipeline) -> None:
    """Messages: between each two ranks that exchange any, one pair after the other."""
    schedule = pipeline.schedule
    source = schedule.links.source
    receiver = np.flatnonzero((source >= 0) & (schedule.rank[source] != schedule.rank))
    pairs = {tuple(sorted((int(schedule.rank[source[row]]), int(schedule.rank[row])))) for row in receiver}
    most = torch.tensor([max(found.message.values(), default=0.0)], dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=pipeline.group)
    for low, high in sorted(pairs):
        dist.barrier(pipeline.group)
        if pipeline.rank in (low, high):
            link = meters.measure_link(pipeline.executor.net, high if pipeline.rank == low else low, int(most))
            if pipeline.rank == low:
                found.links[low, high] = link
    dist.barrier(pipeline.group)
