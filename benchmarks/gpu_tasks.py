"""What the processes of `benchmarks.gpu` do, on a GPU or on the CPU."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.moe import MoeStage
from benchmarks.split import Layer
from stageloom.execute.language import Config, batches, bytes_of_library, language_model, next_byte_loss
from stageloom.execute.pipeline import Pipeline
from stageloom.execute.training import Work, stages_of
from stageloom.execute.workers import Seat, doing
from stageloom.schedule import Schedule


@dataclass(frozen=True)
class Verdict:
    """How far a rank is from one process on the same device, relative to the largest gradient of each parameter; what
    its stages and pairs run as, and seconds of the step."""

    loss: float
    gradient: float
    how: tuple[str, ...]
    seconds: float


def use(device: str) -> torch.device:
    """Make a device this process's own."""
    found = torch.device(device)
    if found.type == "cuda":
        torch.cuda.set_device(found)
    return found


def _worst(found: Iterable[tuple[Tensor | None, Tensor | None]]) -> float:
    worst = 0.0
    for got, wanted in found:
        if (got is None) != (wanted is None):
            return float("inf")
        if got is not None and wanted is not None:
            worst = max(worst, float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)))
    return worst


def correct(seat: Seat, schedule: Schedule, devices: list[str], config: Config, split: str, edges: bool) -> Verdict:
    """A small byte-level language model in float64: one step by the schedule, and the same in one process."""
    device = use(devices[seat.rank])
    group: Any = seat.group
    if edges and device.type == "cuda":
        group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    work = Work(schedule, config, dtype="float64")
    model = language_model(config, 0, torch.float64).to(device)
    whole = language_model(config, 0, torch.float64).to(device)
    stages = stages_of(work, seat.rank, model)
    inputs, targets = batches(bytes_of_library(100_000), schedule.microbatches, work.size, config.context, 0, 0)
    pipeline = Pipeline(
        schedule, stages, next_byte_loss, group=group, on_task=doing, split=split, edge_groups=True if edges else None
    )
    pipeline.step(inputs, targets)
    for parameter in pipeline.parameters():
        parameter.grad = None
    began = time.perf_counter()
    loss = pipeline.step(inputs, targets).loss
    taken = time.perf_counter() - began
    expected = 0.0
    for x, y in zip(inputs.chunk(schedule.microbatches), targets.chunk(schedule.microbatches), strict=True):
        own = next_byte_loss(whole(x.to(device)), y.to(device)) / schedule.microbatches
        own.backward()
        expected += float(own.detach())
    wanted = dict(whole.named_parameters())
    pairs = [(p.grad, wanted[n].grad) for module in stages.values() for n, p in module.named_parameters()]
    how = tuple(sorted({report.mode for report in pipeline.reports.values()}))
    return Verdict(abs(loss - expected), _worst(pairs), how, taken)


# --------------------------------------------------------------------------------------------------- overlapped pairs


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def experts(seat: Seat, schedule: Schedule, devices: list[str], width: int) -> Verdict:
    """Two pipelines that share their experts, rank by rank, with all-to-alls overlapped, against one process."""
    device = use(devices[seat.rank])
    ranks, pipelines = schedule.ranks, seat.size // schedule.ranks
    member, position = divmod(seat.rank, ranks)
    own = [dist.new_group(list(range(m * ranks, (m + 1) * ranks))) for m in range(pipelines)]
    shared = [dist.new_group(list(range(p, seat.size, ranks))) for p in range(ranks)]
    count = 2 * pipelines
    stages = {
        (path, n): MoeStage(width, count, n, shared[position]).double().to(device)
        for path, of in enumerate(schedule.placement.stages_of[position])
        for n in of
    }
    pipeline = Pipeline(schedule, stages, mean_square, group=own[member], on_task=doing)
    data = [_data(schedule, m, width) for m in range(pipelines)]
    loss = pipeline.step(*data[member]).loss
    for parameter in pipeline.parameters():
        parameter.grad = None
    began = time.perf_counter()
    pipeline.step(*data[member])
    taken = time.perf_counter() - began
    whole = [MoeStage(width, count, n).double().to(device) for n in range(schedule.stages)]
    expected = 0.0
    for m in range(pipelines):
        for x, y in zip(*(t.chunk(schedule.microbatches) for t in data[m]), strict=True):
            x = x.to(device)
            for module in whole:
                x = module(x)
            part = mean_square(x, y.to(device)) / schedule.microbatches
            part.backward()
            expected += float(part.detach()) if m == member else 0.0
    pairs: list[tuple[Tensor | None, Tensor | None]] = []
    for (_, n), module in stages.items():
        wanted = dict(whole[n].named_parameters())
        for name, parameter in module.named_parameters():
            gradient, full = parameter.grad, wanted[name].grad
            assert gradient is not None
            assert full is not None
            if name.startswith(("up", "down")):
                pairs.append((gradient, full.chunk(pipelines)[member]))
            else:  # each member has seen its own data only
                total = gradient.cpu()
                dist.all_reduce(total, group=shared[position])
                pairs.append((total.to(device), full))
    return Verdict(abs(loss - expected), _worst(pairs), tuple(sorted(set(pipeline.overlaps.values()))), taken)


def _data(schedule: Schedule, member: int, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(member)
    shape = (2 * schedule.microbatches, 8, width)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


class Streamed(Layer):
    """A transformer layer in a stream of its own, so that a pair's two halves run beside one another.

    Autograd runs a backward in the streams of its forward: what tells the halves apart is that the two stages of a pair
    have different streams. On a device without streams they run one after the other.
    """

    stream: Any = None

    def forward(self, x: Tensor) -> Tensor:
        with self._beside(x.device):
            y = super().forward(x)
        self._join(x.device)
        return y

    def _beside(self, device: torch.device) -> Any:
        """Within the block work goes to the own stream, after all that has been started before."""
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device) if self.stream is None else self.stream
            self.stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self.stream)  # does nothing with None

    def _join(self, device: torch.device) -> None:
        if self.stream is not None:
            torch.cuda.current_stream(device).wait_stream(self.stream)

    @classmethod
    def overlapped_forward_backward(
        cls,
        module0: Streamed,
        inputs0: list[Tensor],
        criterion0: Any,
        labels0: list[Any],
        module1: Streamed,
        loss1: Tensor | None,
        outputs1: list[Tensor],
        output_grads1: list[Tensor],
    ) -> tuple[list[Tensor], Tensor | None]:
        """Start the forward, start the backward, and let what follows wait for both."""
        device = inputs0[0].device
        with module0._beside(device):
            outputs0 = [Layer.forward(module0, *inputs0)]
            loss0 = None if criterion0 is None else criterion0(*outputs0, *labels0)
        if loss1 is not None:
            loss1.backward()
        else:
            torch.autograd.backward(outputs1, output_grads1)
        module0._join(device)
        return outputs0, loss0


def streams(seat: Seat, schedule: Schedule, device: str, shape: tuple[int, int, int], runs: int) -> dict[str, float]:
    """The same steps with pairs in two streams and one op after the other: seconds a step, difference of gradients."""
    own = use(device)
    heads = max(1, shape[2] // 64)
    dtype = torch.float32 if own.type == "cpu" else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    full = (shape[0] * schedule.microbatches, *shape[1:])
    inputs, targets = (torch.randn(full, generator=generator).to(own, dtype) for _ in range(2))
    found: dict[str, float] = {}
    gradients: dict[str, list[Tensor | None]] = {}
    for name in ("apart", "streams"):
        torch.manual_seed(1)
        stages = {n: Streamed(shape[2], heads).to(own, dtype) for n in range(schedule.stages)}
        if name == "apart":
            for module in stages.values():
                module.overlapped_forward_backward = None  # type: ignore[assignment, method-assign]
        pipeline = Pipeline(schedule, stages, mean_square, group=seat.group, on_task=doing)
        taken: list[float] = []
        for _ in range(runs + 1):
            for parameter in pipeline.parameters():
                parameter.grad = None
            began = time.perf_counter()
            found[f"loss {name}"] = pipeline.step(inputs, targets).loss
            if own.type == "cuda":
                torch.cuda.synchronize(own)
            taken.append(time.perf_counter() - began)
        found[name] = min(taken[1:])
        gradients[name] = [parameter.grad for parameter in pipeline.parameters()]
    found["difference"] = _worst(zip(gradients["apart"], gradients["streams"], strict=True))
    return found
