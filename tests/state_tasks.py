"""What ranks do in test_execute_state.py: stages with names and buffers of all kinds, trained and told of."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import toy
from stageloom.errors import InputError, StageloomError
from stageloom.execute.language import Config, language_model
from stageloom.execute.partition import split, tied
from stageloom.execute.pipeline import Pipeline
from stageloom.execute.workers import doing
from stageloom.schedule import Schedule

# --------------------------------------------------------------------------------------------------------------- names


def whole_model() -> nn.Sequential:
    return language_model(Config(layers=2, width=8, heads=2, context=8), seed=0, dtype=torch.float64)


class Embedded(nn.Module):
    """A first or last stage around an embedding that both use under one name."""

    def __init__(self, embed: nn.Embedding, *, last: bool) -> None:
        super().__init__()
        self.embed, self.last = embed, last

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.embed.weight.T if self.last else self.embed(x)


def stages_of(kind: str, count: int) -> tuple[list[nn.Module], Any]:
    """The stages of a model, the same on all ranks, and their ties."""
    if kind == "split":
        return split(whole_model(), [1] * count), ()
    if kind == "compiled":
        stages = split(whole_model(), [1] * count)
        return [torch.compile(stage, backend="eager") for stage in stages], ()  # type: ignore[misc]
    torch.manual_seed(3)
    if kind == "tied":
        model = nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float64) for _ in range(count)))
        model[-1].weight = model[0].weight
        stages = split(model, [1] * count)
        return stages, tied(stages)
    first, last = (Embedded(nn.Embedding(5, 4, dtype=torch.float64), last=last) for last in (False, True))
    between = [nn.Sequential(nn.Linear(4, 4, dtype=torch.float64)) for _ in range(count - 2)]
    ties = [((0, "embed.weight"), (count - 1, "embed.weight"))] if kind == "one name" else ()
    if kind == "shared":
        last.embed = first.embed
    stages = [first, *between, last] if kind != "alike" else [toy.stage(number) for number in range(count)]
    return stages, ties


def names(seat: Any, schedule: Schedule, kind: str) -> dict[str, Any]:
    """State before and after loading: of all ranks together, and what loading refuses."""
    modules, ties = stages_of(kind, schedule.stages)
    own = {(p, n): modules[n] for p, of in enumerate(schedule.placement.stages_of[seat.rank]) for n in of}
    pipeline = Pipeline(schedule, own, toy.loss, group=seat.group, tied=ties, on_task=doing)
    mine = {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}
    everyone: list[Any] = [None] * seat.size
    dist.all_gather_object(everyone, mine, group=seat.group)
    whole: dict[str, Tensor] = {}
    for theirs in everyone:
        whole |= theirs
    for parameter in pipeline.parameters():
        parameter.data.zero_()
    pipeline.load_state_dict(whole)
    loaded = pipeline.state_dict()
    equal = all(torch.equal(loaded[name], tensor) for name, tensor in mine.items())
    pipeline.load_state_dict(mine)  # what state_dict gives is enough
    for parameter in pipeline.parameters():
        parameter.data.fill_(7.0)
    first = next(iter(mine))
    refused: list[str] = []
    for wrong in (
        {name: tensor for name, tensor in whole.items() if name != first},
        whole | {"stages.9.weight": torch.ones(1)},
        whole | {first: torch.ones(3, 3, 3)},
        whole | {first: 3},
    ):
        try:
            pipeline.load_state_dict(wrong)
            refused.append("went through")
        except InputError as error:
            refused.append(str(error))
    untouched = all(bool((p == 7.0).all()) for p in pipeline.parameters())
    return {"whole": whole, "first": first, "equal": equal, "refused": refused, "untouched": untouched}


# ------------------------------------------------------------------------------------------------------------- buffers


class Normed(nn.Module):
    """A stage with two batch norms, one of which keeps a plain mean, and buffers that are none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(toy.WIDTH, toy.WIDTH)
        self.moving = nn.BatchNorm1d(toy.WIDTH, momentum=0.3)
        self.mean = nn.BatchNorm1d(toy.WIDTH, momentum=None)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("largest", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.grows = False

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.largest.copy_(torch.maximum(self.largest, x.detach().abs().max()))
        self.scratch = torch.zeros(int(self.seen[0]))
        if self.grows:
            self.largest = torch.zeros(int(self.seen[0]))
        y = self.moving(torch.tanh(self.layer(x)).transpose(1, 2))
        return x + self.mean(y).transpose(1, 2)


def normed(number: int) -> Normed:
    torch.manual_seed(300 + number)
    return Normed().double()


def order_of(schedule: Schedule) -> list[int]:
    """Micro-batches, those of path 0 first."""
    return sorted(range(schedule.microbatches), key=lambda m: (int(schedule.path_of[m]), m))


def whole_statistics(
    schedule: Schedule, steps: int, copies: int = 1
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """One process: gradients, and the buffers of all stages after so many steps and an evaluation in training mode.

    It runs the micro-batches of one data parallel copy of the pipeline after those of another.
    """
    modules = [normed(number) for number in range(schedule.stages)]
    count = schedule.microbatches * copies
    for step in range(steps + 1):
        inputs, targets = (part.chunk(count) for part in toy.data(count, step))
        for m in (copy * schedule.microbatches + m for copy in range(copies) for m in order_of(schedule)):
            x = inputs[m]
            for module in modules:
                x = module(x)
            if step < steps:
                (toy.loss(x, targets[m]) / count).backward()
    gradients = [{name: p.grad for name, p in module.named_parameters() if p.grad is not None} for module in modules]
    return gradients, [dict(module.named_buffers()) for module in modules]


def statistics(seat: Any, schedule: Schedule, steps: int, options: dict[str, Any], copies: int = 1) -> Any:
    """The same on this rank: (path, stage), gradients and buffers of each of its stages."""
    rank, number = seat.rank, 0
    if copies > 1:
        mesh = init_device_mesh("cpu", (copies, schedule.ranks), mesh_dim_names=("dp", "pp"))
        rank, number = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
        options = options | {"mesh": mesh}
    else:
        options = options | {"group": seat.group}
    own = schedule.placement.stages_of[rank]
    modules = {(path, n): normed(n) for path, of in enumerate(own) for n in of}
    pipeline = Pipeline(schedule, modules, toy.loss, on_task=doing, **options)
    for step in range(steps + 1):
        inputs, targets = (part.chunk(copies)[number] for part in toy.data(schedule.microbatches * copies, step))
        (pipeline.step if step < steps else pipeline.evaluate)(inputs, targets)
    return [
        (key, {name: p.grad for name, p in module.named_parameters()}, dict(module.named_buffers()))
        for key, module in modules.items()
    ]


def growing(seat: Any, schedule: Schedule) -> str:
    own = schedule.placement.stages_of[seat.rank]
    modules = {(path, n): normed(n) for path, of in enumerate(own) for n in of}
    for (_, number), module in modules.items():
        module.grows = number == 0
    pipeline = Pipeline(schedule, modules, toy.loss, group=seat.group, on_task=doing)
    try:
        pipeline.step(*toy.data(schedule.microbatches, 0))
    except StageloomError as error:
        return str(error)
    return "went through"
