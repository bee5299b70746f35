"""What the ranks of test_execute_mesh.py do: train by a schedule in a mesh of processes, and the same in one."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import feature_tasks
import toy
from stageloom.errors import InputError, ScheduleError
from stageloom.execute.mesh import Mesh
from stageloom.execute.pipeline import Pipeline
from stageloom.execute.split import Experts
from stageloom.execute.workers import doing
from stageloom.schedule import Schedule


class Choosy(nn.Module):
    """One of two layers by what it is given, and a third that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high, self.none = (nn.Linear(toy.WIDTH, toy.WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.low if float(x[0, 0, 0].detach()) < 0 else self.high)(x)


class Block(nn.Module):
    """x + second(tanh(first(norm(x)))), in which a sequence may be cut over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(toy.WIDTH)
        self.first, self.second = nn.Linear(toy.WIDTH, 2 * toy.WIDTH), nn.Linear(2 * toy.WIDTH, toy.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(self.norm(x))))


feature_tasks.MAKERS["block"] = lambda number: feature_tasks._of(Block, number)
feature_tasks.MAKERS["choosy"] = lambda number: feature_tasks._of(Choosy, number)
Layout = dict[str, int]  # size by name of a dimension
Feeds = list[tuple[list[Any], list[Any]]]


def mesh_of(layout: Layout) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(layout.values()), mesh_dim_names=tuple(layout))


def part(mesh: DeviceMesh, feed: list[Any], data: tuple[str, ...]) -> list[Any]:
    """The micro-batches of this process, of those of the whole global batch."""
    number, copies = 0, 1
    for name in data:
        size = mesh[name].size()
        number, copies = number * size + mesh.get_local_rank(name), copies * size
    count = len(feed) // copies
    return feed[number * count : (number + 1) * count]


def whole(tensor: Tensor | None) -> Tensor | None:
    """All of a tensor, wherever its shards are."""
    given: Any = tensor
    return None if given is None else (given.full_tensor() if hasattr(given, "full_tensor") else given).detach().clone()


def train(seat: Any, schedule: Schedule, layout: Layout, make: str, feeds: Feeds, options: dict[str, Any]) -> Any:
    """Steps over the feeds, gradients added up; what `feature_tasks.whole` gives, for the stages of this rank."""
    options = dict(options)
    take = {key: options.pop(key, None) for key in ("seed", "clip", "scale", "wrap", "rates", "differ", "shared")}
    mesh = mesh_of(layout)
    data = tuple(name for name in layout if name.startswith("dp"))
    own = schedule.placement.stages_of[mesh.get_local_rank("pp")]
    modules = {(path, n): feature_tasks.MAKERS[make](n) for path, numbers in enumerate(own) for n in numbers}
    if take["shared"]:
        low, high = (module for _, module in sorted(modules.items()))
        high.get_submodule("first").weight = low.get_submodule("first").weight
    if take["differ"] and mesh.get_local_rank("dp"):  # only the first pipeline has the right weights
        for module in modules.values():
            for parameter in module.parameters():
                parameter.data.add_(1.0)
    if take["wrap"]:
        for key, module in modules.items():
            modules[key] = WRAPS[take["wrap"]](module, mesh)
    pipeline = Pipeline(schedule, modules, feature_tasks.loss, mesh=mesh, on_task=doing, **options)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9) if take["rates"] and modules else None
    losses: list[float] = []
    for step, (inputs, targets) in enumerate(feeds):
        if optimizer is not None and step:
            optimizer.zero_grad()
        result = pipeline.step(
            part(mesh, inputs, data), part(mesh, targets, data), seed=take["seed"], scale=take["scale"] or 1.0
        )
        losses.append(result.loss)
        if step + 1 < len(feeds) and optimizer is not None:
            optimizer.step()
    norm = pipeline.clip_grad_norm(take["clip"]) if take["clip"] else None
    found = {
        "losses": losses,
        "gradients": [
            (n, {name: whole(p.grad) for name, p in module.named_parameters()}) for (_, n), module in modules.items()
        ],
        "norm": norm,
        "modes": {n: (report.mode, report.reason) for (_, n), report in pipeline.reports.items()},
        "tasks": [task.name for task in pipeline.tasks],
    }
    if optimizer is not None:
        optimizer.step()
    found["weights"] = [
        (n, {name: whole(value) for name, value in module.state_dict().items()}) for (_, n), module in modules.items()
    ]
    return found


def reload(seat: Any, schedule: Schedule, layout: Layout, wrap: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Load the state of a whole model into wrapped stages: what was to come to this process, and what came."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    pipeline, state = _loaded(schedule, layout, wrap)
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for key, held in pipeline.state_dict().items():
        whole_one, given = state[key], cast("Any", held)
        if hasattr(given, "to_local"):
            sizes, begins = compute_local_shape_and_global_offset(given.shape, given.device_mesh, given.placements)
            for dim, (size, begin) in enumerate(zip(sizes, begins, strict=True)):
                whole_one = whole_one.narrow(dim, begin, size)
            given = given.to_local()
        found[key] = whole_one.clone(), given.detach().clone()
    return found


def reload_whole(seat: Any, schedule: Schedule, layout: Layout, wrap: str) -> dict[str, tuple[Tensor, Tensor]]:
    """As `reload`, for shards of shards, whose place in the whole torch does not tell: all of them put together."""
    pipeline, state = _loaded(schedule, layout, wrap)
    loaded = {key: whole(held) for key, held in pipeline.state_dict().items()}
    return {key: (state[key], held) for key, held in loaded.items() if held is not None}


def _loaded(schedule: Schedule, layout: Layout, wrap: str) -> tuple[Pipeline, dict[str, Tensor]]:
    """A pipeline of wrapped stages into which this state of a whole model was loaded: no two numbers of a tensor in it
    are alike."""
    mesh = mesh_of(layout)
    numbers = schedule.placement.stages_of[mesh.get_local_rank("pp")][0]
    modules = {n: WRAPS[wrap](feature_tasks.MAKERS["toy"](n), mesh) for n in numbers}
    pipeline = Pipeline(schedule, modules, feature_tasks.loss, mesh=mesh, on_task=doing)
    state = {
        pipeline.names.of(n, name): torch.arange(1.0, 1 + tensor.numel(), dtype=tensor.dtype).view(tensor.shape) + n
        for n in range(schedule.stages)
        for name, tensor in feature_tasks.MAKERS["toy"](n).state_dict().items()
    }
    pipeline.load_state_dict(state)
    return pipeline, state


def _fsdp(module: nn.Module, mesh: DeviceMesh, *names: str, nested: bool = False) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    if nested:
        fully_shard(module.get_submodule("norm"), mesh=mesh[names])
        fully_shard(module.get_submodule("second"), mesh=mesh[names])
    fully_shard(module, mesh=mesh[names])
    return module


def _ddp(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module, process_group=mesh.get_group("dp"))


def _tensor_parallel(module: nn.Module, mesh: DeviceMesh, sharded: bool = False) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"first": ColwiseParallel(), "memory": ColwiseParallel(), "second": RowwiseParallel()}
    parallelize_module(module, mesh["tp"], plan)
    return _fsdp(module, mesh, "dp") if sharded else module


def _mixed(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    return fully_shard(module, mesh=mesh["dp"], mp_policy=policy)


def _sequence_parallel(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    plan = {
        "norm": SequenceParallel(),
        "first": ColwiseParallel(input_layouts=Shard(1)),
        "second": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(module, mesh["tp"], plan)
    inside = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),))
    outside = PrepareModuleOutput(output_layouts=(Shard(1),), desired_output_layouts=(Replicate(),))
    parallelize_module(module, mesh["tp"], inside)
    return parallelize_module(module, mesh["tp"], outside)


WRAPS: dict[str, Any] = {
    "fsdp": lambda module, mesh: _fsdp(module, mesh, "dp"),
    "nested": lambda module, mesh: _fsdp(module, mesh, "dp", nested=True),
    "hsdp": lambda module, mesh: _fsdp(module, mesh, "dp_replicate", "dp_shard"),
    "inner": lambda module, mesh: _fsdp(module, mesh, "dp_shard"),
    "along pp": lambda module, mesh: _fsdp(module, mesh, "pp"),
    "ddp": _ddp,
    "mixed": _mixed,
    "sp": _sequence_parallel,
    "tp": _tensor_parallel,
    "tp fsdp": lambda module, mesh: _tensor_parallel(module, mesh, sharded=True),
}


class _AtBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, action: Any) -> Tensor:
        ctx.action = action
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.action()
        return grads[0], None


class Acting(nn.Module):
    """A layer that does something of its own in its backward."""

    def __init__(self, action: Any) -> None:
        super().__init__()
        self.layer, self.action = nn.Linear(toy.WIDTH, toy.WIDTH), action

    def forward(self, x: Tensor) -> Tensor:
        return _AtBackward.apply(self.layer(x), self.action)


def wait_for_what_follows(seat: Any, schedule: Schedule) -> list[str]:
    """The second process begins the backward of its last stage when the first has reduced its own and gone on."""

    def nothing() -> None:
        return None

    first, last = (
        (lambda: seat.store.set("beyond", "1"), nothing)
        if seat.rank == 0
        else (nothing, lambda: seat.store.get("beyond"))
    )
    modules = {0: Acting(first), 1: Acting(last)}
    pipeline = Pipeline(schedule, modules, toy.loss, mesh=mesh_of({"pp": 1, "dp": 2}), on_task=doing)
    pipeline.step(*(each.float() for each in toy.data(1, 0)))
    return [task.name for task in pipeline.tasks]


def train_asynchronously(seat: Any, schedule: Schedule, layout: Layout, feed: Any) -> dict[str, Any]:
    """This rank's weights after one run of an asynchronous schedule; only the first pipeline starts with the right."""
    mesh = mesh_of(layout)
    number = mesh.get_local_rank("pp")
    module = toy.stage(number)
    if mesh.get_local_rank("dp"):
        for parameter in module.parameters():
            parameter.data.zero_()
    options: dict[str, Any] = {"optimizer": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9)}
    pipeline = Pipeline(schedule, {number: module}, toy.loss, mesh=mesh, on_task=doing, **options)
    loss = pipeline.step(*(part(mesh, each, ("dp",)) for each in feed)).loss
    return {"stage": number, "weights": dict(module.state_dict()), "loss": loss}


# -------------------------------------------------------------------------------------------------------- evaluation


def train_in_a_part(seat: Any, schedule: Schedule) -> Any:
    """A mesh of two processes, of which one has made more groups before; the others are not in it."""
    mesh = DeviceMesh("cpu", torch.tensor([[0], [1]]), mesh_dim_names=("pp", "dp"))
    if seat.rank == 1:
        dist.new_group([1], use_local_synchronization=True)
    modules = {n: toy.stage(n) for n in schedule.placement.stages_of[seat.rank % 2][0]}
    try:
        return Pipeline(schedule, modules, toy.loss, mesh=mesh).step(*toy.data(schedule.microbatches, 0)).loss
    except InputError as error:
        return str(error)


def refused_training(seat: Any, *given: Any) -> str:
    try:
        train(seat, *given)
    except InputError as error:
        return str(error)
    return "went through"


def evaluate(seat: Any, schedule: Schedule, layout: Layout, feed: Any, wrap: str | None) -> dict[str, Any]:
    """Evaluate before and after a step: mean losses over all processes, the step's loss, and this one's outputs."""
    mesh = mesh_of(layout)
    own = schedule.placement.stages_of[mesh.get_local_rank("pp")]
    modules = {(path, n): toy.stage(n) for path, numbers in enumerate(own) for n in numbers}
    if wrap:
        modules = {key: WRAPS[wrap](module, mesh) for key, module in modules.items()}
    pipeline = Pipeline(schedule, modules, toy.loss, mesh=mesh, on_task=doing)
    inputs, targets = (part(mesh, each, ("dp",)) for each in feed)
    first = pipeline.evaluate(inputs, targets)
    clean = all(p.grad is None for module in modules.values() for p in module.parameters())
    step = pipeline.step(inputs, targets).loss
    again = pipeline.evaluate(inputs, targets)
    return {
        "losses": [first.loss, step, again.loss],
        "outputs": {mesh.get_local_rank("dp") * schedule.microbatches + m: y for m, y in first.outputs.items()},
        "clean": clean,
        "sharded": all(hasattr(p, "full_tensor") for module in modules.values() for p in module.parameters()),
    }


# --------------------------------------------------------------------------------------------------- expert parallel


class _Exchange(torch.autograd.Function):
    """Rows to other ranks and rows from them; gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.way = received, sent, group
        found = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Exchange.apply(grads[0], *ctx.way), None, None, None


class MoE(nn.Module):
    """x + the sum of each position's two best experts; `group`'s ranks hold equal parts of the experts each."""

    EXPERTS = 4

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.group = group
        ranks = 1 if group is None else dist.get_world_size(group)
        self.norm = nn.LayerNorm(toy.WIDTH)
        self.router = nn.Linear(toy.WIDTH, self.EXPERTS)
        self.up = Experts(self.EXPERTS // ranks, toy.WIDTH, 2 * toy.WIDTH)
        self.down = Experts(self.EXPERTS // ranks, 2 * toy.WIDTH, toy.WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.EXPERTS)
        rows = self._through(tokens.repeat_interleave(2, dim=0)[order], counts)
        found = torch.empty_like(rows).index_copy(0, order, rows)
        return x + (found.view(-1, 2, toy.WIDTH) * weights.unsqueeze(-1)).sum(1).view_as(x)

    def _through(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows sorted by expert, through these."""
        if self.group is None:
            return self._experts(rows, counts)
        ranks = dist.get_world_size(self.group)
        theirs = torch.empty_like(counts)  # by rank that they come from, then by expert of ours
        dist.all_to_all_single(theirs, counts, group=self.group)
        sent = counts.view(ranks, -1).sum(1).tolist()
        received = theirs.view(ranks, -1).sum(1).tolist()
        arrived = _Exchange.apply(rows, sent, received, self.group)
        expert = torch.arange(len(counts) // ranks).repeat(ranks).repeat_interleave(theirs)
        order = expert.argsort(stable=True)
        done = self._experts(arrived[order], theirs.view(ranks, -1).sum(0))
        return _Exchange.apply(torch.empty_like(done).index_copy(0, order, done), received, sent, self.group)

    def _experts(self, rows: Tensor, sizes: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.up(rows, sizes)), sizes)


def experts_of(number: int) -> MoE:
    """The whole stage, with all experts."""
    torch.manual_seed(300 + number)
    return MoE().double()


def is_expert(name: str) -> bool:
    return name.startswith(("up.", "down."))


def whole_experts(stages: int, feed: tuple[list[Tensor], list[Tensor]], clip: float) -> dict[str, Any]:
    modules = [experts_of(number) for number in range(stages)]
    losses = 0.0
    for x, y in zip(*feed, strict=True):
        for module in modules:
            x = module(x)
        loss = toy.loss(x, y) / len(feed[0])
        loss.backward()
        losses += float(loss.detach())
    norm = nn.utils.clip_grad_norm_([p for m in modules for p in m.parameters()], clip, foreach=False)
    return {
        "loss": losses,
        "norm": float(norm),
        "gradients": [{name: p.grad for name, p in m.named_parameters()} for m in modules],
    }


def train_experts(
    seat: Any, schedule: Schedule, layout: Layout, feed: Any, split: str, clip: float, recompute: bool
) -> dict[str, Any]:
    """This rank's stages with its own part of the experts; "ep" and dimensions named "dp" see other data."""
    mesh = mesh_of(layout)
    group, number, ranks = mesh.get_group("ep"), mesh.get_local_rank("ep"), mesh["ep"].size()
    own = schedule.placement.stages_of[mesh.get_local_rank("pp")]
    modules: dict[tuple[int, int], Any] = {}
    for path, numbers in enumerate(own):
        for n in numbers:
            module = MoE(group).double()
            state = experts_of(n).state_dict()
            module.load_state_dict({k: v.chunk(ranks)[number] if is_expert(k) else v for k, v in state.items()})
            modules[path, n] = module
    data = tuple(name for name in layout if name != "pp")
    dense = tuple(name for name in data if name != "ep")
    said = Mesh(mesh, data=data, replicated=lambda stage, name: dense if is_expert(name) else data)
    stages = range(schedule.stages) if recompute else ()
    options: dict[str, Any] = {"split": split, "recompute": stages, "on_task": doing}
    pipeline = Pipeline(schedule, modules, toy.loss, mesh=said, **options)
    loss = pipeline.step(*(part(mesh, each, data) for each in feed)).loss
    return {
        "loss": loss,
        "norm": pipeline.clip_grad_norm(clip),
        "part": number,
        "gradients": [(n, {name: p.grad for name, p in m.named_parameters()}) for (_, n), m in modules.items()],
        "deferred": {n: report.deferred for (_, n), report in pipeline.reports.items()},
    }


# ---------------------------------------------------------------------------------------------------------- refusals


def refused(seat: Any, schedule: Schedule, case: str) -> str:
    """The message with which this rank refuses a mesh, or what else came of it."""
    dims: Layout = {"pp": 2, "dp": 2}
    if case == "no pp":
        dims = {"pipe": 2, "dp": 2}
    elif case == "size":
        dims = {"pp": 4, "dp": 1}
    elif case in ("fsdp without mesh", "no data"):
        dims = {"pp": 2, "other": 2}
    mesh = mesh_of(dims)
    given: Any = mesh
    if case == "descending":
        given = DeviceMesh("cpu", torch.tensor([[3, 2], [1, 0]]), mesh_dim_names=("pp", "dp"))
    elif case == "data":
        given = Mesh(mesh, data=("dp", "ep"))
    elif case == "replicated":
        given = Mesh(mesh, replicated=lambda stage, name: ("tp",))
    elif case == "differing data":
        given = Mesh(mesh, data=("dp",) if seat.rank else ())
    elif case == "differing replicated":
        given = Mesh(mesh, replicated=lambda stage, name: ("dp",) if seat.rank != 2 or "norm" in name else ())
    elif case == "kind":
        given = [[0, 1], [2, 3]]
    place = min(mesh.get_coordinate()[0], schedule.ranks - 1)  # type: ignore[index]
    modules: dict[tuple[int, int], Any] = {
        (path, n): toy.stage(n) for path, ns in enumerate(schedule.placement.stages_of[place]) for n in ns
    }
    if case == "frozen on one" and seat.rank == 3:
        next(module for module in modules.values()).norm.weight.requires_grad_(False)
    elif case == "unlike" and seat.rank == 1:
        modules = {key: toy.Toy(toy.WIDTH + 1).double() for key in modules}
    elif case in ("ddp", "along pp", "async"):
        wrap = WRAPS["fsdp" if case == "async" else case]
        modules = {key: wrap(module, mesh) for key, module in modules.items()}
    elif case in ("fsdp without mesh", "no data"):
        modules = {key: _fsdp(module, mesh, "other") for key, module in modules.items()}
        given = None if case == "fsdp without mesh" else mesh
    options: dict[str, Any] = {}
    if case == "async":
        options["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    if case == "group":
        options["group"] = mesh.get_group("pp")
    if case == "fsdp without mesh":
        options["group"] = mesh.get_group("pp")
    try:
        Pipeline(schedule, modules, toy.loss, mesh=given, on_task=doing, **options)
    except (InputError, ScheduleError) as error:
        return str(error)
    return "went through"
