"""What the ranks of test_execute_pairs.py do: overlapped pairs with experts on several ranks, and by a user's function.

The mixture-of-experts stage routes each position to one expert. With `spread` ranks an expert group, each rank has its
share of the experts and data of its own, so that rows really travel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import toy
from stageloom.errors import InputError, StageloomError
from stageloom.execute import parts
from stageloom.execute.exchange import AllToAll, through
from stageloom.execute.mesh import Mesh
from stageloom.execute.pipeline import Pipeline
from stageloom.execute.split import Experts
from stageloom.execute.workers import doing
from stageloom.schedule import Schedule

WIDTH, EXPERTS = toy.WIDTH, 4
LOG: list[str] = []


# ------------------------------------------------------------------------------------------------- mixture of experts


class _Mark(torch.autograd.Function):
    """Writes down when a part computes, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        LOG.append(f"F {name}")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        LOG.append(f"B {ctx.name}")
        return grads[0], None


class Moe(nn.Module):
    """`layers` times: a mean over earlier positions, then one of the experts for each position."""

    def __init__(self, number: int, layers: int = 1, rank: int = 0, group: Any = None) -> None:
        super().__init__()
        self.number, self.layers, self.group = number, layers, group
        size = 1 if group is None else dist.get_world_size(group)
        self.local = EXPERTS // size
        torch.manual_seed(300 + number)
        self.mix = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.router = nn.Linear(WIDTH, EXPERTS)  # one for all layers: parts before and after an all-to-all use it
        whole = [(Experts(EXPERTS, WIDTH, 2 * WIDTH), Experts(EXPERTS, 2 * WIDTH, WIDTH)) for _ in range(layers)]
        self.up, self.down = (
            nn.ModuleList(Experts(self.local, *sizes) for _ in range(layers))
            for sizes in ((WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH))
        )
        share = slice(rank * self.local, (rank + 1) * self.local)
        with torch.no_grad():
            for layer, pair in enumerate(whole):
                for own, full in zip((self.up[layer], self.down[layer]), pair, strict=True):
                    own.weight.copy_(full.weight[share])  # type: ignore[union-attr, operator]
                    own.bias.copy_(full.bias[share])  # type: ignore[union-attr, operator]
            if number == 1:  # all rows go to one expert: other ranks get none
                self.router.bias[0] = 50.0
        self.double()

    def overlapped_parts(self) -> list[Callable[..., Any]]:
        steps = (self.route, self.experts, self.combine)
        return [partial(step, layer) for layer in range(self.layers) for step in steps]

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return through(self.overlapped_parts(), x, factor=factor)

    def route(self, layer: int, x: Tensor, factor: float = 1.0) -> AllToAll:
        steps = torch.arange(1, x.shape[1] + 1, dtype=x.dtype).view(-1, 1)
        x = _Mark.apply(x * factor, f"attention {layer} @{self.number}")
        x = x + torch.tanh(self.mix[layer](x.cumsum(1) / steps))
        rows = x.reshape(-1, WIDTH)
        gate, choice = self.router(rows).softmax(-1).max(-1)
        order = choice.argsort(stable=True)
        sizes = choice.bincount(minlength=EXPERTS).view(-1, self.local)
        theirs = sizes
        if self.group is not None:
            theirs = torch.empty_like(sizes)
            dist.all_to_all_single(theirs, sizes, group=self.group)
        sent, received = sizes.sum(1).tolist(), theirs.sum(1).tolist()
        return AllToAll(rows[order], sent, received, self.group, (x, gate[order], order, (sent, theirs)))

    def experts(self, layer: int, rows: Tensor, x: Tensor, gate: Tensor, order: Tensor, how: Any) -> AllToAll:
        sent, theirs = how
        rows = _Mark.apply(rows, f"experts {layer} @{self.number}")
        expert = torch.arange(self.local).repeat(theirs.shape[0]).repeat_interleave(theirs.flatten())
        sort = expert.argsort(stable=True)
        sizes = theirs.sum(0)
        out = self.down[layer](torch.tanh(self.up[layer](rows[sort], sizes)), sizes)
        out = torch.empty_like(out).index_copy(0, sort, out)
        return AllToAll(out, theirs.sum(1).tolist(), sent, self.group, (x, gate, order))

    def combine(self, layer: int, rows: Tensor, x: Tensor, gate: Tensor, order: Tensor) -> Tensor:
        rows = _Mark.apply(rows, f"combine {layer} @{self.number}")
        back = torch.zeros_like(rows).index_add(0, order, rows * gate[:, None])
        return x + back.view_as(x)


def moe_data(schedule: Schedule, member: int) -> tuple[Tensor, Tensor]:
    return toy.data(schedule.microbatches, 50 + member)


def moe_stage(number: int, layers: int | list[int], rank: int = 0, group: Any = None) -> nn.Module:
    count = layers if isinstance(layers, int) else layers[number]
    return Moe(number, count, rank, group) if count else toy.stage(number)


def whole_moe(
    schedule: Schedule, spread: int, layers: int | list[int], steps: int
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """One process with all experts: the loss of each member's data, and gradients added up over members and steps."""
    modules = [moe_stage(number, layers) for number in range(schedule.stages)]
    losses: list[float] = []
    for member in range(spread):
        total = torch.zeros((), dtype=torch.float64)
        for x, y in zip(*(t.chunk(schedule.microbatches) for t in moe_data(schedule, member)), strict=True):
            for module in modules:
                x = module(x)
            total = total + toy.loss(x, y) / schedule.microbatches
        (total * steps).backward()
        losses.append(float(total.detach()))
    return losses, [{name: p.grad for name, p in m.named_parameters() if p.grad is not None} for m in modules]


class _Watched:
    """Writes down when an all-to-all starts and when it is waited for."""

    def __init__(self, work: Any, number: int) -> None:
        self.work, self.number = work, number

    def wait(self) -> None:
        LOG.append(f"wait {self.number}")
        self.work.wait()


def _replicated(stage: int, name: str) -> tuple[str, ...]:
    return () if name.startswith(("up", "down")) else ("ep",)


def train_moe(
    seat: Any, schedule: Schedule, spread: int, layers: int | list[int], options: dict[str, Any]
) -> dict[str, Any]:
    """Member `seat.rank // ranks` of `spread` pipelines that share their experts position by position."""
    options = dict(options)
    hooks, steps, seed = options.pop("hooks", False), options.pop("steps", 1), options.pop("seed", None)
    ranks = schedule.ranks
    member, position = divmod(seat.rank, ranks)
    pipelines = [dist.new_group(list(range(m * ranks, (m + 1) * ranks))) for m in range(spread)]
    expert = [dist.new_group(list(range(p, ranks * spread, ranks))) for p in range(ranks)]
    group = expert[position] if spread > 1 else None
    if options.pop("mesh", False):
        lines = torch.arange(seat.size).view(spread, ranks).T
        mesh = DeviceMesh("cpu", lines, mesh_dim_names=("pp", "ep"))
        group = mesh.get_group("ep")
        where: dict[str, Any] = {"mesh": Mesh(mesh, data=("ep",), replicated=_replicated)}
    else:
        where = {"group": pipelines[member]}
    own = schedule.placement.stages_of[position]
    modules = {(path, n): moe_stage(n, layers, member, group) for path, of in enumerate(own) for n in of}
    fired: dict[str, int] = {}
    if hooks:
        for (path, n), module in modules.items():
            for name, p in module.named_parameters():
                key = f"{path} {n} {name}"
                p.register_hook(lambda _, key=key: fired.update({key: fired.get(key, 0) + 1}))

    def told(name: str) -> None:
        doing(name)
        LOG.append(f"op {name}")

    pipeline = Pipeline(schedule, modules, toy.loss, on_task=told, **where, **options)
    LOG.clear()
    plain: Any = dist.all_to_all_single
    started: list[int] = []

    def watched(into: Tensor, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("async_op"):
            return plain(into, given, *args, **kwargs)
        started.append(len(started))
        LOG.append(f"start {started[-1]}")
        return _Watched(plain(into, given, *args, **kwargs), started[-1])

    weights: Any = parts.run_backward_weight

    def weighed(saved: Any) -> None:
        LOG.append("weights")
        weights(saved)

    dist.all_to_all_single, parts.run_backward_weight = watched, weighed
    try:
        results = [pipeline.step(*moe_data(schedule, member), seed=seed) for _ in range(steps)]
    finally:
        dist.all_to_all_single, parts.run_backward_weight = plain, weights
    return {
        "losses": [result.loss for result in results],
        "evaluated": pipeline.evaluate(*moe_data(schedule, member)).loss,
        "gradients": {key: {n: p.grad for n, p in m.named_parameters()} for key, m in modules.items()},
        "member": member,
        "log": list(LOG),
        "overlaps": pipeline.overlaps,
        "modes": {report.mode for report in pipeline.reports.values()},
        "fired": fired,
        "spans": sorted(results[-1].run.spans),
    }


# ---------------------------------------------------------------------------------------------- a function of their own


class Own(nn.Module):
    """A stage with the function that users of DualPipe write, which runs one after the other and counts its calls."""

    calls = 0

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(400 + number)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.5)
        self.drops = False
        self.double()

    def forward(self, x: Tensor, factor: float = 1.0) -> Any:
        y = self.second(checkpoint(self.hidden, x * factor, use_reentrant=False))  # type: ignore[operator]
        return x + (self.drop(y) if self.drops else y)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))

    @classmethod
    def overlapped_forward_backward(
        cls, module0: Any, inputs0: Any, criterion0: Any, labels0: Any, module1: Any, loss1: Any, outputs1: Any,
        output_grads1: Any, kwargs0: Any = None,
    ) -> tuple[Any, Any]:  # fmt: skip
        Own.calls += 1
        outputs0 = module0(*inputs0, **(kwargs0 or {}))
        outputs0 = [outputs0] if isinstance(outputs0, Tensor) else outputs0
        loss0 = criterion0(*outputs0, *labels0) if criterion0 is not None else None
        if loss1 is not None:
            loss1.backward()
            loss1.detach_()
        else:
            torch.autograd.backward(outputs1, output_grads1)
        return outputs0, loss0


class Twice(Own):
    """Two tensors between stages, one of them a truth value beside."""

    def forward(self, x: Tensor, y: Tensor | None = None, mask: Tensor | None = None) -> Any:
        y = x if y is None else y
        mask = x > 0 if mask is None else mask
        return x + self.second(y) * mask, torch.tanh(self.layer(y)), mask.flip(0)


class Dropping(Own):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.drops = True


class Single(Own):
    """In float32, for autocast."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.float()


def _shared(module0: Any, inputs0: Any, criterion0: Any, labels0: Any, module1: Any, *rest: Any) -> Any:
    return Own.overlapped_forward_backward(module0, inputs0, criterion0, labels0, module1, *rest)


def on_instances(number: int) -> nn.Module:
    """The same function set on every instance of a class that has none."""
    module: Any = toy.stage(number)
    module.overlapped_forward_backward = _shared
    return module


OWN: dict[str, Callable[[int], nn.Module]] = {
    "own": Own,
    "twice": Twice,
    "dropping": Dropping,
    "single": Single,
    "instances": on_instances,
}


def own_loss(output: Any, target: Tensor) -> Tensor:
    if isinstance(output, tuple):
        output = output[0] + output[1]
    return ((output.to(target.dtype) - target) ** 2).mean()


def own_data(schedule: Schedule, make: str) -> tuple[Tensor, Tensor]:
    dtype = torch.float32 if make == "single" else torch.float64
    return toy.data(schedule.microbatches, 70, dtype)


def whole_own(schedule: Schedule, make: str, bf16: bool = False, **kwargs: Any) -> tuple[float, Any]:
    modules = [OWN[make](number) for number in range(schedule.stages)]
    losses = 0.0
    for x, y in zip(*(t.chunk(schedule.microbatches) for t in own_data(schedule, make)), strict=True):
        value: Any = x
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            for module in modules:
                value = module(*(value if isinstance(value, tuple) else (value,)), **kwargs)
            loss = own_loss(value, y) / schedule.microbatches
        loss.backward()
        losses += float(loss.detach())
    return losses, [{name: p.grad for name, p in m.named_parameters()} for m in modules]


def train_own(seat: Any, schedule: Schedule, make: str, options: dict[str, Any]) -> dict[str, Any]:
    options = dict(options)
    take = {key: options.pop(key, None) for key in ("seed", "kwargs", "bf16", "plain")}
    own = schedule.placement.stages_of[seat.rank]
    modules = {(path, n): OWN[make](n) for path, of in enumerate(own) for n in of}
    if take["plain"]:
        for module in modules.values():
            module.overlapped_forward_backward = None  # type: ignore[assignment]
    pipeline = Pipeline(schedule, modules, own_loss, group=seat.group, on_task=doing, **options)
    Own.calls = 0
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bool(take["bf16"])):
        result = pipeline.step(*own_data(schedule, make), seed=take["seed"], kwargs=take["kwargs"])
    return {
        "loss": result.loss,
        "gradients": {key: {n: p.grad for n, p in m.named_parameters()} for key, m in modules.items()},
        "calls": Own.calls,
        "overlaps": pipeline.overlaps,
        "modes": {report.mode for report in pipeline.reports.values()},
        "evaluated": pipeline.evaluate(*own_data(schedule, make), kwargs=take["kwargs"]).loss,
    }


# ---------------------------------------------------------------------------------------------------------- wrong ones


def _wrong(case: str) -> Any:
    """A function that does one thing wrong."""

    def function(module0: Any, inputs0: Any, criterion0: Any, labels0: Any, module1: Any, *rest: Any) -> Any:
        loss1, outputs1, output_grads1 = rest
        if case == "raises":
            raise ZeroDivisionError("in the pair")
        criterion: Any = criterion0
        if criterion0 is not None and case == "other labels":
            criterion = lambda output, label: criterion0(output, label.clone())  # noqa: E731
        if criterion0 is not None and case == "criterion twice":
            criterion0(module0(*inputs0), *labels0)
        outputs0 = [module0(*inputs0)]
        loss0 = criterion(*outputs0, *labels0) if criterion is not None else None
        if case == "no backward" and loss1 is not None:
            return outputs0, loss0
        if case == "no backward of outputs" and loss1 is None:
            return outputs0, loss0
        if case == "dtype":
            outputs0 = [output.float() for output in outputs0]
        if case == "shape":
            outputs0 = [output[:1] for output in outputs0]
        if case == "structure":
            outputs0 = outputs0 * 2
        if case == "loss before the end" and loss0 is None:
            loss0 = outputs0[0].sum()
        if case == "other loss" and loss0 is not None:
            loss0 = loss0 * 1.0
        if loss1 is not None:
            loss1.backward()
        else:
            torch.autograd.backward(outputs1, output_grads1)
        if case == "no pair":
            return outputs0[0]
        return outputs0, loss0

    return function


class Taking(nn.Module):
    """Cuts its graph in the middle, so that a backward has to be run in two parts; its function runs one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        middle = self.layer(x).detach().requires_grad_()
        return torch.tanh(middle)


def refused_pair(seat: Any, schedule: Schedule, case: str, options: dict[str, Any]) -> str:
    modules: dict[int, Any] = {n: toy.stage(n) for n in range(schedule.stages)}
    if case == "cut graph":
        modules = {n: Taking() for n in modules}
    if case == "kwargs":
        modules = {n: Own(n) for n in modules}
    function: Any = _wrong(case)
    if case == "arguments":
        function = lambda module0, inputs0: None  # noqa: E731
    if case == "no function":
        function = 3
    for module in modules.values():
        if case.startswith("parts"):
            module.overlapped_parts = {
                "parts no method": [module.forward],
                "parts no list": lambda: 3,
                "parts none": list,
                "parts open": lambda: [lambda x: AllToAll(x, [len(x)], [len(x)], None)],
                "parts rows": lambda: [lambda x: AllToAll(x, [1], [1], None), lambda x: x],
                "parts ranks": lambda: [lambda x: AllToAll(x, [2, 2], [2, 2], None), lambda x: x],
                "parts arrive": lambda: [lambda x: AllToAll(x, [len(x)], [1], None), lambda x: x],
            }[case]
        elif case == "instance method":
            module.__class__ = type("Mine", (toy.Toy,), {"overlapped_forward_backward": lambda self, *rest: None})
        else:
            module.overlapped_forward_backward = function
    try:
        pipeline = Pipeline(schedule, modules, toy.loss, group=seat.group, on_task=doing, **options)
        inputs, targets = toy.data(schedule.microbatches, 0)
        pipeline.step(inputs, targets, kwargs={"factor": 2.0} if case == "kwargs" else None)
    except (InputError, StageloomError) as error:
        return str(error)
    return "went through"
