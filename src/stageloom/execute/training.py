"""The tasks that `stageloom verify` and `stageloom run` start on every rank: compare with one process, and train."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaks unknown types)
from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stageloom.errors import InputError
from stageloom.execute.checkpoint import Checkpoint, refuse_another_run
from stageloom.execute.clocks import offset
from stageloom.execute.device_choice import Device, settle
from stageloom.execute.language import Config, StageSequence, batches, bytes_of_library, language_model, next_byte_loss
from stageloom.execute.pipeline import Pipeline
from stageloom.execute.progress import Reporter
from stageloom.execute.stragglers import Load, Loads
from stageloom.execute.torch_backend import TorchPipeline
from stageloom.execute.workers import Seat, doing
from stageloom.schedule import Schedule

Dtype = Literal["float32", "float64"]
Backend = Literal["own", "torch"]


@dataclass(frozen=True)
class Work:
    """What to train, and on what: the schedule, the model's sizes, sequences of a micro-batch, optimiser steps and
    learning rate, the kind of device."""

    schedule: Schedule
    config: Config
    size: int = 2
    steps: int = 1
    rate: float = 1e-3
    seed: int = 0
    dtype: Dtype = "float32"
    data_bytes: int = 4_000_000
    device: Device = "cpu"
    backend: Backend = "own"  # of verify: whose runtime is compared with one process


def children_of_stages(schedule: Schedule, config: Config) -> list[tuple[int, int]]:
    """(first, last + 1) of the model's children on each stage: embedding, blocks and head, as evenly as they go."""
    children = config.layers + 2
    if children < schedule.stages:
        raise InputError(
            f"{schedule.stages} stages need as many modules, and the model has {children} (embedding, "
            f"{config.layers} blocks, head); at least {schedule.stages - 2} layers are needed"
        )
    cuts = [stage * children // schedule.stages for stage in range(schedule.stages + 1)]
    return list(pairwise(cuts))


def stages_of(work: Work, rank: int, model: nn.Sequential) -> dict[tuple[int, int], nn.Module]:
    """The stages that the schedule puts on this rank, taken from the whole model; a second path gets a copy."""
    spans = children_of_stages(work.schedule, work.config)
    named = list(model.named_children())
    found: dict[tuple[int, int], nn.Module] = {}
    for path, stages in enumerate(work.schedule.placement.stages_of[rank]):
        for stage in stages:
            low, high = spans[stage]
            found[path, stage] = StageSequence(named[low:high])
    return found


def data_of(work: Work, data: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step."""
    return batches(data, work.schedule.microbatches, work.size, work.config.context, step, work.seed)


def optimizer_of(work: Work) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """What makes the optimiser of a list of parameters."""
    return lambda parameters: torch.optim.AdamW(parameters, lr=work.rate)


# ------------------------------------------------------------------------------------------------------------ verify


@dataclass(frozen=True)
class Verdict:
    """How far a rank is from one process: the loss, the worst gradient and where it is, and how its stages split."""

    rank: int
    loss: float
    loss_error: float
    gradient_error: float
    worst: str
    parameters: int
    modes: dict[int, str]


def verify(seat: Seat, work: Work) -> Verdict:
    """One step by the schedule on this rank, and the same step without a pipeline, in this process alone."""
    dtype = getattr(torch, work.dtype)
    device, group = settle(seat, work.device)
    model = language_model(work.config, work.seed, dtype)
    whole = language_model(work.config, work.seed, dtype).to(device)
    inputs, targets = (part.to(device) for part in data_of(work, bytes_of_library(work.data_bytes), 0))
    stages = {key: stage.to(device) for key, stage in stages_of(work, seat.rank, model).items()}
    if work.backend == "torch":
        pipeline = TorchPipeline(work.schedule, stages, next_byte_loss, group=group)
    else:
        pipeline = Pipeline(work.schedule, stages, next_byte_loss, group=group, on_task=doing)
    result = pipeline.step(inputs, targets)
    doing("the same step in one process")
    expected = 0.0
    parts = work.schedule.microbatches
    for x, y in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
        loss = next_byte_loss(whole(x), y) / parts
        loss.backward()
        expected += float(loss.detach())
    reference = dict(whole.named_parameters())
    worst, where, count = 0.0, "", 0  # nowhere while all is equal to the last bit
    for module in stages.values():
        for name, parameter in module.named_parameters():
            wanted = reference[name].grad
            assert wanted is not None
            got = torch.zeros_like(wanted) if parameter.grad is None else parameter.grad
            error = float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
            count += parameter.numel()
            if error != error:  # nan, which compares with nothing, and which JSON does not have
                error = sys.float_info.max
            if error > worst:
                worst, where = error, name
    modes = {stage: report.mode for (_, stage), report in pipeline.reports.items()}
    off = abs(result.loss - expected)
    return Verdict(seat.rank, result.loss, off, worst, where, count, modes)


# ------------------------------------------------------------------------------------------------------------- train


@dataclass(frozen=True)
class Trained:
    """What a rank reports after training: the loss of every step, seconds a step, its share of time at work, and when
    each of its rows of the last step ran, in seconds of the first rank's clock (see `measure.timeline_of`).

    load: its work by kind of op, the mean of the last ten steps without the very first; None where no step was left."""

    rank: int
    losses: list[float]
    seconds: list[float]
    busy: float
    spans: dict[int, tuple[float, float]]
    load: Load | None = None
    began: int = 0  # the step after which it went on


def train(seat: Seat, work: Work, checkpoint: str | None, every: int, resume: bool, report: bool) -> Trained:
    """Train this rank's stages; the first rank tells of every step where `report`."""
    schedule = work.schedule
    device, group = settle(seat, work.device)
    model = language_model(work.config, work.seed, getattr(torch, work.dtype))
    stages = {key: stage.to(device) for key, stage in stages_of(work, seat.rank, model).items()}
    make = optimizer_of(work)
    pipeline = Pipeline(
        schedule,
        stages,
        next_byte_loss,
        group=group,
        optimizer=None if schedule.synchronous else make,
        on_task=doing,
    )
    optimizer = make(pipeline.parameters()) if schedule.synchronous and stages else None
    data = bytes_of_library(work.data_bytes)
    kept = None if checkpoint is None else Checkpoint(checkpoint, seat.group)
    if kept is not None and not resume:
        refuse_another_run(kept.folder)
    settings = {"seed": work.seed, "size": work.size, "rate": work.rate}
    reporter = Reporter(work.steps, show=report and seat.rank == 0)
    began = 0
    if kept is not None and resume:
        began, before = kept.load(pipeline, optimizer), kept.settings
        if seat.rank == 0:
            reporter.say(_from_where(kept.folder, began, before, settings))
    ahead = offset(seat.group)
    loads = Loads(seat.group, schedule)
    losses: list[float] = []
    seconds: list[float] = []
    spans: dict[int, tuple[float, float]] = {}
    try:
        for step in range(began, work.steps):
            inputs, targets = (part.to(device) for part in data_of(work, data, step))
            dist.barrier(seat.group)
            zero = time.perf_counter()
            result = pipeline.step(inputs, targets, seed=hash((work.seed, step)) if work.config.dropout else None)
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            taken = time.perf_counter() - zero
            losses.append(result.loss)
            seconds.append(taken)
            spans = result.run.spans
            if len(seconds) == 2:
                loads.restart()  # in the first step buffers and threads are made
            loads.add(spans, taken)
            reporter.step(step + 1, result.loss, taken, loads.mean())
            if kept is not None and ((step + 1) % every == 0 or step + 1 == work.steps):
                doing(f"checkpoint of step {step + 1}")
                kept.save(step + 1, pipeline, optimizer, settings)
    finally:
        reporter.line.end()
    busy = sum(end - start for start, end in spans.values()) / seconds[-1] if seconds else 0.0
    load = loads.mean()[seat.rank] if seconds else None
    return Trained(seat.rank, losses, seconds, busy, ahead.aligned(spans), load, began)


def _from_where(folder: Path, step: int, before: Mapping[str, float], now: Mapping[str, float]) -> str:
    """What a run that was to go on goes on from, and with what else than the one that made the checkpoint."""
    if not step:
        return f"--resume: {folder} holds no checkpoint; starting from the first step"
    others = [f"--{key} {value:g} (before: {before[key]:g})" for key, value in now.items() if before.get(key) != value]
    others = others if before else []
    return f"going on from step {step} of {folder}" + (f", with another {' and '.join(others)}" if others else "")
