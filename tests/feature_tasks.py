"""What the ranks of test_execute_features.py do: train or evaluate by a schedule, and the same in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import toy
from stageloom.errors import InputError
from stageloom.execute.chance import seed_of
from stageloom.execute.partition import split as split_model
from stageloom.execute.partition import tied
from stageloom.execute.pipeline import Pipeline
from stageloom.execute.workers import doing
from stageloom.schedule import Schedule

WIDTH = toy.WIDTH
Gradients = list[dict[str, Tensor | None]]


# ------------------------------------------------------------------------------------------------------------- stages


class Nested(nn.Module):
    """Passes dicts, tuples, views, whole and truth numbers and None along; the last one gives a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, value: Any, *rest: Any, factor: float = 1.0) -> Any:
        if isinstance(value, Tensor) and not rest:
            value, rest = {"x": value, "none": None, "mask": value > 0}, (torch.arange(value.shape[0]),)
        order = rest[0]
        left, right = self.layer(value["x"] * factor).chunk(2, dim=-1)
        x = left * value["mask"] + right.transpose(0, 1).transpose(0, 1) * order.view(-1, 1, 1)
        assert value["none"] is None
        return {"x": x, "none": None, "mask": value["mask"].flip(0)}, order + 1


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.drop(torch.tanh(self.layer(x)))


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 3 * ctx.saved_tensors[0] ** 2


class Cubed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return _Cube.apply(self.layer(x))


class InPlace(nn.Module):
    in_place = False

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mul_(2.0) if self.in_place else x)


class Pair(NamedTuple):
    x: Tensor
    rows: int


class Growing(nn.Module):
    """Its output gets longer with every second call, and says so in a named tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, given: Any, rows: int = 0) -> Any:
        self.calls += 1
        x = self.layer(given)
        if rows:
            assert rows == x.shape[0]
            return x[:4]
        grown = torch.cat([x] + [x.detach()[:1]] * ((self.calls + 1) // 2))
        return Pair(grown, grown.shape[0])


def frozen(number: int) -> nn.Module:
    module = toy.stage(number)
    for parameter in module.parameters() if number == 1 else list(module.parameters())[:2]:
        parameter.requires_grad_(False)
    return module


def sparse(number: int) -> nn.Module:
    """Stage 0 has weights, 1 passes on, 2 has none, the last only leaves the loss to do."""
    return toy.stage(0) if number == 0 else (nn.Identity(), nn.Tanh(), nn.Identity())[number - 1]


def _of(kind: type[nn.Module], number: int) -> nn.Module:
    torch.manual_seed(200 + number)
    return kind().double()


def in_place(number: int) -> nn.Module:
    module: Any = _of(InPlace, number)
    module.in_place = number > 0
    return module


def compiled(number: int) -> nn.Module:
    module: Any = torch.compile(toy.stage(number), backend="aot_eager")
    return module


MAKERS: dict[str, Callable[[int], nn.Module]] = {
    "toy": toy.stage,
    "toy32": lambda number: toy.stage(number, torch.float32),
    "nested": lambda number: _of(Nested, number),
    "dropping": lambda number: _of(Dropping, number),
    "cubed": lambda number: _of(Cubed, number),
    "in place": in_place,
    "growing": lambda number: _of(Growing, number),
    "frozen": frozen,
    "sparse": sparse,
    "compiled": compiled,
}


def loss(output: Any, target: Any) -> Tensor:
    if isinstance(output, Tensor):
        return toy.loss(output, target)
    value, order = output
    return toy.loss(value["x"], target["y"]) + (order.sum() * target["weight"]).sum() * 0


# ----------------------------------------------------------------------------------------- training, here and there


def whole(make: str, stages: int, feeds: list[tuple[list[Any], list[Any]]], **options: Any) -> dict[str, Any]:
    """One process: gradients added up over the feeds, (inputs, targets) by micro-batch; losses and outputs."""
    modules = [MAKERS["toy" if make == "compiled" else make](number) for number in range(stages)]
    losses: list[float] = []
    outputs: list[list[Any]] = []
    seed, bf16, kwargs = options.get("seed"), options.get("bf16", False), options.get("kwargs", {})
    for inputs, targets in feeds:
        total, outputs = 0.0, []
        for m, (x, y) in enumerate(zip(inputs, targets, strict=True)):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
                for number, module in enumerate(modules):
                    if seed is not None:
                        torch.manual_seed(seed_of(seed, number, m))
                    x = module(*(x if isinstance(x, tuple) else (x,)), **kwargs)
                value = loss(x, y) / len(inputs)
            value.backward()
            total += float(value.detach())
            outputs.append(x)
        losses.append(total)
    norm = None
    if "clip" in options:
        norm = float(
            nn.utils.clip_grad_norm_([p for m in modules for p in m.parameters()], options["clip"], foreach=False)
        )
    return {"losses": losses, "gradients": _gradients(enumerate(modules)), "norm": norm, "outputs": outputs}


def _gradients(modules: Any) -> dict[int, dict[str, Any]]:
    return {
        number: {
            name.removeprefix("_orig_mod."): None if p.grad is None else p.grad.clone()
            for name, p in module.named_parameters()
        }
        for number, module in modules
    }


def train(seat: Any, schedule: Schedule, make: str, feeds: list[tuple[Any, Any]], options: dict[str, Any]) -> Any:
    """This rank by the schedule: the same as `whole`, for its own stages, and what the runtime reports."""
    options = dict(options)
    take = {
        key: options.pop(key) for key in ("seed", "bf16", "kwargs", "clip", "scale", "hooks", "start") if key in options
    }
    own = schedule.placement.stages_of[seat.rank]
    modules = {(path, n): MAKERS[make](n) for path, numbers in enumerate(own) for n in numbers}
    pipeline = Pipeline(schedule, modules, loss, group=seat.group, on_task=doing, **options)
    fired: dict[str, int] = {}
    if take.get("hooks"):
        for (path, n), module in modules.items():
            for name, p in module.named_parameters():
                key = f"{path} {n} {name}"
                p.register_hook(lambda _, key=key: fired.update({key: fired.get(key, 0) + 1}))
    losses: list[float] = []
    run = None
    if "start" in take:
        torch.manual_seed(take["start"])
    for inputs, targets in feeds:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=take.get("bf16", False)):
            result = pipeline.step(
                inputs, targets, kwargs=take.get("kwargs"), seed=take.get("seed"), scale=take.get("scale", 1.0)
            )
        losses.append(result.loss)
        run = result.run
    norm = pipeline.clip_grad_norm(take["clip"]) if "clip" in take else None
    calls = {n: getattr(module, "calls", 0) for (_, n), module in modules.items()}
    return {
        "losses": losses,
        "gradients": [(n, _gradients([(n, m)])[n]) for (_, n), m in modules.items()],
        "norm": norm,
        "modes": {n: report.mode for (_, n), report in pipeline.reports.items()},
        "fired": fired,
        "calls": calls,
        "values": run.most_values if run else 0,
        "sends": run.most_sends if run else 0,
    }


def refused_training(seat: Any, schedule: Schedule, make: str, feeds: Any, options: dict[str, Any]) -> str:
    try:
        train(seat, schedule, make, feeds, options)
    except InputError as error:
        return str(error)
    return "went through"


def evaluate(seat: Any, schedule: Schedule, inputs: Any, targets: Any) -> Any:
    """Evaluate between two training steps; the targets are on the ranks of last stages alone."""
    own = schedule.placement.stages_of[seat.rank]
    modules = {(path, n): toy.stage(n) for path, numbers in enumerate(own) for n in numbers}
    for module in modules.values():
        module.train(seat.rank == 0)
    pipeline = Pipeline(schedule, modules, loss, group=seat.group, on_task=doing)
    last = any(n == schedule.stages - 1 for _, n in modules)
    first = pipeline.evaluate(inputs, targets if last else None)
    clean = all(p.grad is None for m in modules.values() for p in m.parameters())
    # another size, then back: a step must not rely on the shapes of the evaluation
    before = pipeline.step(inputs, targets).loss
    small = pipeline.evaluate([x[:1] for x in inputs] if isinstance(inputs, list) else inputs[: len(inputs) // 2])
    after = pipeline.step(inputs, targets).loss
    modes = all(m.training == (seat.rank == 0) for m in modules.values())
    return {
        "loss": first.loss,
        "outputs": first.outputs,
        "clean": clean,
        "steps": (before, after),
        "none": small.loss,
        "modes": modes,
    }


def losses_read(seat: Any, schedule: Schedule, data: Tensor, how: str) -> list[float]:
    """Losses of six steps on other data each, two steps of a second pipeline of the same group among them; looked at by
    some ranks alone, or last first, or twice."""
    own = schedule.placement.stages_of[seat.rank]
    made = [
        Pipeline(
            schedule, {(path, n): toy.stage(n) for path, numbers in enumerate(own) for n in numbers}, loss,
            group=seat.group, on_task=doing,
        )
        for _ in range(2)
    ]  # fmt: skip
    results = [made[step % 3 == 2].step(data * (step + 1), data) for step in range(6)]
    if how == "one rank" and seat.rank:
        return []
    if how == "backwards":
        return [result.loss for result in reversed(results)][::-1]
    return [(result.loss, result.loss)[1] for result in results if how != "the last" or result is results[-1]]


def restart(seat: Any, schedule: Schedule) -> dict[str, float]:
    """Losses of an asynchronous pipeline: fresh, further on, with the first weights loaded again; of an evaluation."""
    module = nn.Tanh() if seat.rank == 1 else toy.stage(seat.rank)
    first = {name: value.clone() for name, value in module.state_dict().items()}
    pipeline = Pipeline(
        schedule, {seat.rank: module}, loss, group=seat.group, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.05)
    )
    inputs, targets = toy.data(schedule.microbatches, 0)
    fresh, further = (pipeline.step(inputs, targets).loss for _ in range(2))
    evaluated = pipeline.evaluate(inputs, targets).loss
    everything: list[Any] = [None] * seat.size
    dist.all_gather_object(everything, module.state_dict(), group=seat.group)
    x = inputs
    for number, state in enumerate(everything):
        other = nn.Tanh() if number == 1 else toy.stage(number)
        other.load_state_dict(state)
        x = other(x)
    module.load_state_dict(first)
    loaded = pipeline.step(inputs, targets).loss
    direct = float(loss(x, targets).detach())
    return {"fresh": fresh, "further": further, "evaluated": evaluated, "direct": direct, "loaded": loaded}


# ------------------------------------------------------------------------------------------------------- transformers


def decoder(name: str, tie: bool = True) -> nn.Module:
    torch.manual_seed(0)
    if name == "gpt2":
        config: Any = transformers.GPT2Config(
            vocab_size=32, n_positions=16, n_embd=16, n_layer=4, n_head=2, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=tie,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config).double()
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, pad_token_id=None, tie_word_embeddings=tie,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


def words(microbatches: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randint(0, 32, (2 * microbatches, 8), generator=generator),
        torch.randint(0, 32, (2 * microbatches, 8), generator=generator),
    )


def next_word(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def train_whole_decoder(name: str, microbatches: int, clip: float) -> dict[str, Any]:
    model: Any = decoder(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    norms: list[float] = []
    for step in range(2):
        x, y = words(microbatches, step)
        for a, b in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
            (next_word(model(a).logits, b) / microbatches).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": norms, "weights": {name: value.detach() for name, value in model.state_dict().items()}}


class Wrapped(nn.Module):
    """A stage of `split` within a module of the user's own."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.inner = stage

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def train_decoder(seat: Any, schedule: Schedule, name: str, clip: float, how: str) -> dict[str, Any]:
    """`how` the runtime knows of ties: they are "given", "marked" by `split`, or "moved", marked too while the copies
    of tied weights start wrong and have to be made equal; "wrapped": marked on what a stage of the user's holds."""
    stages = split_model(decoder(name), 4 // schedule.stages)
    groups = tied(stages)
    if how == "moved":
        for group in groups:
            for stage, parameter in group[1:]:
                stages[stage].get_parameter(parameter).data.zero_()
    own = {(p, n): stages[n] for p, ns in enumerate(schedule.placement.stages_of[seat.rank]) for n in ns}
    if how == "wrapped":
        own = {key: Wrapped(stage) for key, stage in own.items()}
    ties = {"given": groups, "apart": ()}.get(how)
    pipeline = Pipeline(schedule, own, next_word, group=seat.group, tied=ties, on_task=doing)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.5, momentum=0.9)
    norms: list[float] = []
    for step in range(2):
        pipeline.step(*words(schedule.microbatches, step))
        norms.append(pipeline.clip_grad_norm(clip))
        optimizer.step()
        optimizer.zero_grad()
    weights = {k.removeprefix("inner."): v.detach() for m in own.values() for k, v in m.state_dict().items()}
    return {"norms": norms, "weights": weights}


def refused_ties(seat: Any, schedule: Schedule, case: str) -> str:
    """The message with which this rank refuses what `split` marked as tied."""
    own = {(0, seat.rank): split_model(decoder("gpt2"), 2)[seat.rank]}
    if case == "shape" and seat.rank == 1:
        own[0, 1].lm_head = nn.Linear(16, 3, bias=False).double()  # a head of the user's own
    optimizer = None if schedule.synchronous else lambda ps: torch.optim.SGD(ps, lr=0.1)
    try:
        Pipeline(schedule, own, next_word, group=seat.group, optimizer=optimizer)
    except InputError as error:
        return str(error)
    return "went through"


# ------------------------------------------------------------------------------------------------------------- scaling


def scaled(seat: Any, schedule: Schedule) -> dict[str, Any]:
    """Three steps with the GradScaler of docs/running.md; in the second one a gradient of rank 1 overflows."""
    module = toy.stage(seat.rank, torch.float32)
    pipeline = Pipeline(schedule, {seat.rank: module}, toy.loss, group=seat.group, on_task=doing)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=1024.0, process_group=pipeline.grid.whole)
    scaler.scale(torch.zeros(1))
    inputs, targets = toy.data(schedule.microbatches, 0, torch.float32)
    weights = [next(module.parameters()).detach().clone()]
    scales: list[float] = []
    for step in range(3):
        pipeline.step(inputs, targets, scale=scaler.get_scale())
        if (step, seat.rank) == (1, 1):
            gradient = next(module.parameters()).grad
            assert gradient is not None
            gradient[0] = float("inf")
        scaler.unscale_(optimizer)
        pipeline.clip_grad_norm(1e3)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        weights.append(next(module.parameters()).detach().clone())
        scales.append(scaler.get_scale())
    plain = toy.stage(seat.rank, torch.float32)
    unscaled = Pipeline(schedule, {seat.rank: plain}, toy.loss, group=seat.group, on_task=doing)
    unscaled.step(inputs, targets)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    return {"weights": weights, "scales": scales, "plain": next(plain.parameters()).detach()}


# ------------------------------------------------------------------------------------------------------------ refusals


def _wrong_optimizer(_: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)


class Silent(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return None


def refused(seat: Any, schedule: Schedule, case: str) -> str:
    """The message with which this rank refuses, or what else came of it. (Cases that every rank refuses alike.)"""
    own = {(p, n): toy.stage(n) for p, ns in enumerate(schedule.placement.stages_of[seat.rank]) for n in ns}
    sgd = torch.optim.SGD
    options: dict[str, Any] = {
        "split mode": {"split": "half"},
        "split stage": {"split": {9: "fused"}},
        "recompute": {"recompute": [7]},
        "window": {"window": 0},
        "optimizer": {"optimizer": lambda ps: sgd(ps, lr=0.1)},
        "wrong optimizer": {"optimizer": _wrong_optimizer},
        "no optimizer made": {"optimizer": lambda ps: None},
        "scale": {"optimizer": lambda ps: sgd(ps, lr=0.1)},
        "tied stage": {"tied": [((0, "first.weight"), (5, "first.weight"))]},
        "tied name": {"tied": [((0, "nothing"), (1, "nothing"))]},
        "tied alone": {"tied": [((0, "first.weight"),)]},
        "tied differently": {"tied": [((0, "first.weight"), (1, "first.weight"))] if seat.rank else []},
        "split kind": {"split": 5},
        "recompute kind": {"recompute": 0},
        "recompute none": {"recompute": None},
        "window kind": {"window": "a"},
        "window part": {"window": 1.5},
        "edge groups": {"edge_groups": "x"},
        "static kind": {"static": "yes"},
        "check finite": {"check_finite": "x"},
        "on task": {"on_task": 5},
        "tied kind": {"tied": 5},
        "tied member": {"tied": [(0, 1)]},
        "two differ": {"dynamic": seat.rank == 1, "edge_groups": seat.rank == 1},
    }.get(case, {})
    step: dict[str, Any] = {
        "kwargs": {"kwargs": 5},
        "scale text": {"scale": "x"},
        "scale none": {"scale": None},
        "scale nan": {"scale": float("nan")},
        "seed part": {"seed": 1.5},
        "seed text": {"seed": "x"},
    }.get(case, {"scale": 2.0} if case == "scale" else {})
    if case == "stage list":
        own = list(own.values())  # type: ignore[assignment]
    if case == "no stages":
        own = None  # type: ignore[assignment]
    if case == "schedule":
        schedule = "1f1b"  # type: ignore[assignment]
    if case == "stages":
        own = {(0, n + 1): m for (_, n), m in own.items()}
    if case == "no module":
        own = dict.fromkeys(own, 3)  # type: ignore[arg-type]
    if case == "no tensor" and (0, 0) in own:
        own[0, 0] = Silent()
    count = 2 if case == "schedule" else schedule.microbatches
    inputs: Any
    inputs, targets = toy.data(count, 0)
    if case == "inputs":
        inputs = None
    elif case == "targets":
        targets = None  # type: ignore[assignment]
    elif case == "list":
        inputs = list(inputs.chunk(count + 1))[:-1] if count == 1 else list(inputs.chunk(count - 1))
    elif case == "not divisible":
        inputs = inputs[:-1]
    elif case == "too small":
        inputs = inputs[: count - 1]
    function: Any = (lambda o, t: (o - t) ** 2) if case == "loss" else (3 if case == "loss kind" else toy.loss)
    if case == "detached":
        function = lambda o, t: toy.loss(o, t).detach()  # noqa: E731
    if case == "detached stage":
        own[0, 1].register_forward_hook(lambda _, __, output: output.detach())
    group: Any = dist.new_group([seat.rank], use_local_synchronization=True) if case == "group" else seat.group
    group = 5 if case == "group kind" else group
    try:
        pipeline = Pipeline(schedule, own, function, group=group, **options)
        if case in ("clip", "clip kind"):
            pipeline.clip_grad_norm(0 if case == "clip" else "x")  # type: ignore[arg-type]
        if case == "state":
            pipeline.load_state_dict(None)  # type: ignore[arg-type]
        pipeline.step(inputs, targets, **step)
    except InputError as error:
        return str(error)
    return "went through"
