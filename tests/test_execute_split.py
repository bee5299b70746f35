"""B and W of a stage give the gradients of a plain backward, in every mode, whatever the stage does."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import weakref

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

from stageloom.errors import InputError, StageloomError
from stageloom.execute.split import (
    Experts,
    prepare,
    probe,
    restore,
    run_backward,
    run_backward_input,
    run_backward_weight,
    run_forward,
)

pytestmark = pytest.mark.torch

MODES = ["deferred", "graph", "fused"]
ROWS = 6


class Attention(nn.Module):
    """Pre-norm attention and MLP, with residual connections."""

    def __init__(self, width=8, heads=2, norm=nn.LayerNorm):
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = norm(width), norm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g


class Call(nn.Module):
    """A stage from submodules and a function of them and the inputs."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.function(self, *inputs)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def tied():
    embedding, head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
    head.weight = embedding.weight
    return Call(lambda s, x: s.head(s.mid(s.embedding(x))), embedding=embedding, mid=nn.Linear(8, 8), head=head)


def frozen():
    stage = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    stage[0].weight.requires_grad_(False)
    stage[1].bias.requires_grad_(False)
    stage[2].bias.requires_grad_(False)
    return stage


def partly_frozen_mix():
    return Call(
        lambda s, x: (s.a(x).chunk(2, -1)[0], s.a(x).argmax(-1), s.b(x)[:1], x), a=nn.Linear(8, 8), b=nn.Linear(8, 8)
    )


def inplace(s, x):
    y = s.a(x.mul_(2))
    y.add_(1).relu_()
    buffer = torch.zeros_like(y)
    buffer[:, :4] = y[:, :4]
    return s.b(buffer)


def experts():
    return Call(
        lambda s, x: s.b(F.silu(s.a(x, [3, 0, 1, 2])), sizes=torch.tensor([1, 1, 4, 0])),
        a=Experts(4, 8, 5),
        b=Experts(4, 5, 8, bias=False),
    )


def numbers(*shape, high=11):
    return lambda dtype: torch.randint(0, high, shape)


def floats(*shape):
    return lambda dtype: torch.randn(shape, dtype=dtype)


def no_bias(layer):
    """The layer with its bias frozen."""
    layer.bias.requires_grad_(False)
    return layer


def on(layer):
    """A layer behind a linear one over the same features, so that its input needs a gradient."""
    return nn.Sequential(nn.Identity(), layer)


# name: (stage, inputs)
STAGES = {
    "linear": (lambda: nn.Linear(8, 5), [floats(ROWS, 8)]),
    "linear-no-bias-4d": (lambda: nn.Linear(8, 5, bias=False), [floats(2, 3, 2, 8)]),
    "linear-1d": (lambda: nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 2)), [floats(8)]),
    "linear-empty": (lambda: nn.Sequential(nn.Linear(8, 5), nn.LayerNorm(5)), [floats(0, 8)]),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(4, 6, 3, stride=2, padding=1), nn.Conv1d(6, 2, 2)), [floats(2, 4, 9)]),
    "conv2d-groups": (lambda: nn.Conv2d(4, 6, (3, 2), padding=(1, 0), groups=2, dilation=(2, 1)), [floats(2, 4, 7, 6)]),
    "conv2d-same": (lambda: nn.Conv2d(4, 6, 3, padding="same", bias=False), [floats(2, 4, 5, 5)]),
    "conv2d-valid": (lambda: nn.Conv2d(4, 6, 3, padding="valid"), [floats(2, 4, 5, 5)]),
    "conv2d-same-uneven": (lambda: nn.Conv2d(4, 6, 2, padding="same"), [floats(2, 4, 5, 5)]),
    "conv2d-reflect": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), [floats(2, 4, 5, 5)]),
    "conv2d-unbatched": (lambda: nn.Conv2d(4, 6, 3), [floats(4, 5, 5)]),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, padding=1), [floats(2, 2, 3, 4, 3)]),
    "transposed": (lambda: nn.Sequential(Conv1D(5, 8), nn.GELU(), Conv1D(3, 5)), [floats(2, 3, 8)]),
    "transposed-frozen-bias": (lambda: no_bias(Conv1D(5, 8)), [floats(4, 8)]),
    "embedding": (lambda: nn.Embedding(11, 8), [numbers(2, 5)]),
    "embedding-padding": (lambda: nn.Sequential(nn.Embedding(11, 8, padding_idx=3), nn.Linear(8, 2)), [numbers(4, 9)]),
    "embedding-frequency": (lambda: nn.Embedding(4, 8, scale_grad_by_freq=True), [numbers(20, high=4)]),
    "embedding-max-norm": (lambda: nn.Embedding(11, 8, max_norm=1.0), [numbers(2, 5)]),
    "layernorm": (lambda: nn.Sequential(nn.LayerNorm((3, 8)), nn.LayerNorm(8, bias=False)), [floats(4, 3, 8)]),
    "layernorm-no-affine": (
        lambda: nn.Sequential(nn.LayerNorm(8, elementwise_affine=False), nn.Linear(8, 2)),
        [floats(4, 8)],
    ),
    "rmsnorm": (lambda: nn.Sequential(nn.RMSNorm(8), nn.RMSNorm((3, 8), eps=1e-3)), [floats(4, 3, 8)]),
    "groupnorm": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.GroupNorm(3, 6)), [floats(2, 4, 5, 5)]),
    "batchnorm": (
        lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True)),
        [floats(2, 4, 5, 5)],
    ),
    "experts": (experts, [floats(6, 8)]),
    "attention": (lambda: nn.Sequential(Attention(), Attention(norm=nn.RMSNorm)), [floats(2, 5, 8)]),
    "torch-transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), [floats(2, 5, 8)]),
    "tied": (tied, [numbers(2, 5)]),
    "frozen": (frozen, [floats(ROWS, 8)]),
    "all-frozen": (lambda: nn.Linear(8, 8).requires_grad_(False), [floats(ROWS, 8)]),
    "no-parameters": (lambda: nn.ReLU(inplace=True), [floats(ROWS, 8)]),
    "own-parameter": (
        lambda: Call(lambda s, x: s.a(x * s.p), a=nn.Linear(8, 8), p=nn.Parameter(torch.randn(8))),
        [floats(ROWS, 8)],
    ),
    "functional-use": (
        lambda: Call(lambda s, x: s.a(F.linear(x, s.a.weight)) @ s.a.weight, a=nn.Linear(8, 8)),
        [floats(ROWS, 8)],
    ),
    "functional-use-alone": (
        lambda: Call(lambda s, x: F.linear(s.b(x), s.a.weight), a=nn.Linear(8, 8), b=nn.Linear(8, 8)),
        [floats(ROWS, 8)],
    ),
    "used-twice": (lambda: Call(lambda s, x: s.a(F.tanh(s.a(x))), a=nn.Linear(8, 8)), [floats(ROWS, 8)]),
    "unused-layer": (lambda: Call(lambda s, x: s.a(x), a=nn.Linear(8, 8), b=nn.Linear(8, 8)), [floats(ROWS, 8)]),
    "dead-branch": (
        lambda: Call(lambda s, x: [s.a(x), s.b(s.a(x)).sum()][0], a=nn.Linear(8, 8), b=nn.Linear(8, 8)),
        [floats(ROWS, 8)],
    ),
    "many-outputs": (partly_frozen_mix, [floats(ROWS, 8)]),
    "views-out": (lambda: Call(lambda s, x: s.a(x).split(2, -1), a=nn.Linear(8, 8)), [floats(ROWS, 8)]),
    "overlapping-views": (
        lambda: Call(lambda s, x: (lambda y: (y, y[1:], y.t()))(s.a(x)), a=nn.Linear(8, 8)),
        [floats(ROWS, 8)],
    ),
    "in-place": (lambda: Call(inplace, a=nn.Linear(8, 8), b=nn.Linear(8, 8)), [floats(ROWS, 8)]),
    "pass-through": (
        lambda: Call(lambda s, x, y, n: (x, s.a(y), n, x), a=nn.Linear(8, 8)),
        [floats(3, 8), floats(3, 8), numbers(3)],
    ),
    "unused-input": (lambda: Call(lambda s, x, y: s.a(x), a=nn.Linear(8, 8)), [floats(3, 8), floats(3, 8)]),
    "detached-output": (lambda: Call(lambda s, x: (s.a(x), s.a(x).detach()), a=nn.Linear(8, 8)), [floats(3, 8)]),
    "custom-function": (
        lambda: Call(lambda s, x: s.b(Square.apply(s.a(x))), a=nn.Linear(8, 8), b=nn.Linear(8, 8)),
        [floats(3, 8)],
    ),
    "subclass": (lambda: nn.Sequential(nn.Linear(8, 8), Doubled(8, 8)), [floats(3, 8)]),
    "weight-norm": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))),
        [floats(3, 8)],
    ),
    "checkpoint": (
        lambda: Call(lambda s, x: s.b(checkpoint(s.a, x, use_reentrant=False)), a=Attention(), b=Attention()),
        [floats(2, 5, 8)],
    ),
    "checkpoint-reentrant": (
        lambda: Call(lambda s, x: s.b(checkpoint(s.a, x, use_reentrant=True)), a=Attention(), b=Attention()),
        [floats(2, 5, 8)],
    ),
    "gradient-penalty": (
        lambda: Call(penalty, a=nn.Linear(8, 8), n=nn.LayerNorm(8), r=nn.RMSNorm(8), b=nn.Linear(8, 1)),
        [floats(3, 8)],
    ),
}
NO_GRAPH = {"checkpoint-reentrant"}  # torch refuses autograd.grad there


def penalty(s, x):
    y = s.b(F.tanh(s.r(s.n(s.a(x)))))
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y, g.square().sum()


def flat(module):
    def fn(inputs):
        result = module(*inputs)
        return list(result) if isinstance(result, (list, tuple)) else [result]

    return fn


def tolerance(dtype):
    return {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 2e-5, "atol": 2e-5}


def build(name, dtype=torch.float64):
    torch.manual_seed(7)
    make, inputs = STAGES[name]
    module = make().to(dtype)
    return module, [make_input(dtype) for make_input in inputs], [make_input(dtype) for make_input in inputs]


def plain(module, inputs, grads=None):
    """Outputs, output gradients and input gradients of a plain backward; parameters' are accumulated."""
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    outputs = flat(module)([x * 1 if x.is_floating_point() else x for x in leaves])
    if grads is None:
        torch.manual_seed(3)
        grads = [torch.randn_like(y) if y.is_floating_point() else None for y in outputs]
    pairs = [(y, g) for y, g in zip(outputs, grads, strict=True) if y.requires_grad and g is not None]
    torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
    return outputs, grads, [x.grad for x in leaves]


def same(found, expected, dtype=torch.float64):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, **tolerance(dtype))


def gradients(module):
    return [p.grad for p in module.parameters()]


def forward(module, mode, inputs, **options):
    fn = flat(module)
    return run_forward(mode, fn, [x.clone() for x in inputs], list(module.parameters()), **options)


# ------------------------------------------------------------------------------------------------- equal gradients


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", STAGES)
def test_gradients_of_two_microbatches_equal_a_plain_backwards(name, mode, dtype):
    if mode == "graph" and name in NO_GRAPH:
        pytest.skip("torch's reentrant checkpointing refuses autograd.grad")
    module, first, second = build(name, dtype)
    twin = copy.deepcopy(module)
    outputs, grads, expected = plain(twin, first)
    outputs2, grads2, expected2 = plain(twin, second)

    report = prepare(module, mode)
    got, saved = forward(module, report.mode, first)
    got2, saved2 = forward(module, report.mode, second)
    same(got, [y.detach() for y in outputs], dtype)
    same(got2, [y.detach() for y in outputs2], dtype)
    assert not any(y.requires_grad for y in got)
    found = run_backward_input(saved, grads)
    found2 = run_backward_input(saved2, grads2)
    run_backward_weight(saved2)
    run_backward_weight(saved)
    same(found, expected, dtype)
    same(found2, expected2, dtype)
    same(gradients(module), gradients(twin), dtype)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", STAGES)
def test_the_whole_backward_in_one_gives_the_same(name, mode):
    module, inputs, _ = build(name)
    twin = copy.deepcopy(module)
    _, grads, expected = plain(twin, inputs)
    report = prepare(module, mode)
    _, saved = forward(module, report.mode, inputs)
    same(run_backward(saved, grads), expected)
    same(gradients(module), gradients(twin))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6), mode=st.sampled_from(MODES), name=st.sampled_from(["attention", "tied", "checkpoint"])
)
def test_passes_of_many_microbatches_in_any_order(seed, mode, name):
    module, inputs, _ = build(name)
    twin = copy.deepcopy(module)
    draw = random.Random(seed)
    batches = [[torch.roll(x, n, 0) for x in inputs] for n in range(4)]
    results = [plain(twin, batch) for batch in batches]
    prepare(module, mode)
    steps = {n: [*draw.choice([["B", "W"], ["BW"]])] for n in range(4)}
    saved = {}
    while steps:
        n = draw.choice(list(steps))
        if n not in saved:
            _, saved[n] = forward(module, mode, batches[n])
            continue
        step = steps[n].pop(0)
        if step == "W":
            run_backward_weight(saved[n])
        else:
            run = run_backward if step == "BW" else run_backward_input
            same(run(saved[n], results[n][1]), results[n][2])
        if not steps[n]:
            del steps[n]
    same(gradients(module), gradients(twin))


@pytest.mark.parametrize("mode", MODES)
def test_loss_in_the_stage(mode):
    module, inputs, _ = build("attention")
    twin = copy.deepcopy(module)
    twin(inputs[0]).square().mean().backward()
    prepare(module, mode)
    outputs, saved = run_forward(mode, lambda i: [module(i[0]).square().mean()], inputs, list(module.parameters()))
    assert outputs[0].shape == ()
    run_backward_input(saved, [None])
    run_backward_weight(saved)
    same(gradients(module), gradients(twin))


@pytest.mark.parametrize("mode", MODES)
def test_an_output_that_gets_no_gradient(mode):
    module = Call(lambda s, x: (s.a(x), s.b(x)), a=nn.Linear(8, 8), b=nn.Linear(8, 8)).double()
    inputs = [torch.randn(3, 8, dtype=torch.float64)]
    twin = copy.deepcopy(module)
    grads = [torch.randn(3, 8, dtype=torch.float64), None]
    _, _, expected = plain(twin, inputs, grads)
    prepare(module, mode)
    _, saved = forward(module, mode, inputs)
    same(run_backward_input(saved, grads), expected)
    run_backward_weight(saved)
    same(gradients(module), gradients(twin))
    assert module.b.weight.grad is None
    _, saved = forward(module, mode, inputs)
    assert run_backward_input(saved, [None, None]) == [None]
    run_backward_weight(saved)
    same(gradients(module), gradients(twin))


@pytest.mark.parametrize("mode", MODES)
def test_inputs_whose_gradient_is_not_wanted(mode):
    module, inputs, _ = build("attention")
    twin = copy.deepcopy(module)
    _, grads, _ = plain(twin, inputs)
    prepare(module, mode)
    _, saved = forward(module, mode, inputs, wanted=[False])
    assert run_backward_input(saved, grads) == [None]
    run_backward_weight(saved)
    same(gradients(module), gradients(twin))


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, lambda width: nn.GroupNorm(1, width)])
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_autocast(norm, split):
    torch.manual_seed(0)
    width = 16
    module = nn.Sequential(nn.Linear(width, width), norm(width), nn.Linear(width, width, bias=False), norm(width))
    twin = copy.deepcopy(module)
    x, g = torch.randn(5, width), torch.randn(5, width)
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = twin(leaf)
    y.backward(g.to(y.dtype))
    report = prepare(module)
    assert report.mode == "deferred"
    assert not report.at_once
    with torch.autocast("cpu", torch.bfloat16):
        (got,), saved = run_forward("deferred", flat(module), [x], list(module.parameters()))
    assert got.dtype == y.dtype
    torch.testing.assert_close(got, y.detach(), rtol=0, atol=0)
    if split:
        (found,) = run_backward_input(saved, [g.to(y.dtype)])
        kinds = [t.dtype for entry in saved.queue.entries for t in entry.tensors[:2]]
        assert kinds.count(torch.bfloat16) >= 4  # both tensors of both linear layers
        run_backward_weight(saved)
    else:
        (found,) = run_backward(saved, [g.to(y.dtype)])
    assert found.dtype == torch.float32
    for a, b in zip([found, *gradients(module)], [leaf.grad, *gradients(twin)], strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())


# ----------------------------------------------------------------------------------------------------------- hooks


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", ["attention", "tied", "used-twice", "functional-use", "own-parameter", "checkpoint"])
def test_hooks_of_parameters_fire_once_a_microbatch_with_the_whole_gradient(name, mode, whole):
    module, inputs, second = build(name)
    twin = copy.deepcopy(module)
    seen, expected = {}, {}
    for owner, into in ((module, seen), (twin, expected)):
        for key, p in owner.named_parameters():
            into[key], into[key + " after"] = [], []
            p.register_hook(lambda g, at=into[key]: at.append(g.clone()) or 2 * g)
            p.register_post_accumulate_grad_hook(lambda p, at=into[key + " after"]: at.append(p.grad.clone()))
    prepare(module, mode)
    for batch in (inputs, second):
        _, grads, _ = plain(twin, batch)
        _, saved = forward(module, mode, batch)
        if whole:
            run_backward(saved, grads)
        else:
            run_backward_input(saved, grads)
            if mode == "deferred" and name != "own-parameter":
                assert sum(map(len, seen.values())) == sum(map(len, expected.values())) - 2 * len(
                    list(module.parameters())
                )
            run_backward_weight(saved)
    assert [len(v) for v in seen.values()] == [len(v) for v in expected.values()] == [2] * len(seen)
    for key in seen:
        same(seen[key], expected[key])
    same(gradients(module), gradients(twin))


def test_hooks_of_modules_keep_working():
    module, inputs, _ = build("linear")
    calls = []
    module.register_forward_hook(lambda m, i, o: calls.append("after") or 3 * o)
    module.register_forward_pre_hook(lambda m, i: calls.append("before"))
    module.register_full_backward_hook(lambda m, gi, go: calls.append("backward"))
    twin = copy.deepcopy(module)
    _, grads, expected = plain(twin, inputs)
    calls.clear()
    prepare(module)
    _, saved = forward(module, "deferred", inputs)
    same(run_backward_input(saved, grads), expected)
    run_backward_weight(saved)
    same(gradients(module), gradients(twin))
    assert calls == ["before", "after", "backward"]


# ------------------------------------------------------------------------------------------- work done and memory kept


@pytest.mark.parametrize("mode", MODES)
def test_recomputation_happens_once_and_in_b(mode):
    module, inputs, _ = build("checkpoint")
    runs = []
    module.a.register_forward_pre_hook(lambda m, i: runs.append("a"))
    _, grads, _ = plain(copy.deepcopy(module), inputs)
    runs.clear()
    prepare(module, mode)
    _, saved = forward(module, mode, inputs)
    assert runs == ["a"]
    run_backward_input(saved, grads)
    assert runs == ["a", "a"]
    run_backward_weight(saved)
    assert len(runs) == (3 if mode == "graph" else 2)


def test_recomputation_of_the_whole_stage():
    module, inputs, _ = build("attention")
    twin = copy.deepcopy(module)
    _, grads, expected = plain(twin, inputs)
    prepare(module)
    fn = flat(module)
    _, saved = run_forward("deferred", lambda i: checkpoint(fn, i, use_reentrant=False), inputs, [])
    assert saved.queue.entries == []
    same(run_backward_input(saved, grads), expected)
    assert len(saved.queue.entries) == 12
    assert all(p.grad is None for p in module.parameters())
    run_backward_weight(saved)
    same(gradients(module), gradients(twin))


@pytest.mark.parametrize("name", ["attention", "checkpoint", "conv2d-groups", "tied"])
def test_b_and_w_do_no_more_arithmetic_than_one_backward(name):
    module, inputs, _ = build(name)
    _, grads, _ = plain(copy.deepcopy(module), inputs)

    def flops(mode):
        prepare(module, mode)
        _, saved = forward(module, mode, inputs)
        with FlopCounterMode(display=False) as counter:
            run_backward_input(saved, grads)
            run_backward_weight(saved)
        return counter.get_total_flops()

    assert flops("deferred") == flops("fused") > 0


def test_after_b_only_inputs_and_output_gradients_of_deferred_layers_are_alive():
    batch, length, width, heads = 2, 256, 16, 2
    module = Attention(width, heads)
    probabilities = []
    inner = torch.Tensor.softmax
    prepare(module)
    x = torch.randn(batch, length, width)
    try:
        torch.Tensor.softmax = lambda s, *a, **k: probabilities.append(inner(s, *a, **k)) or probabilities[-1]
        (y,), saved = run_forward("deferred", flat(module), [x], list(module.parameters()))
    finally:
        torch.Tensor.softmax = inner
    (probability,) = map(weakref.ref, probabilities)
    probabilities.clear()
    gc.collect()
    run_backward_input(saved, [torch.randn_like(y)])
    assert probability() is None
    kept = 4 * batch * length  # bytes of one feature
    # Inputs and output gradients of norm, qkv, out, norm2, up, down; two norms hold mean and deviation of a row too.
    features = (
        (width + width) + (width + 3 * width) + (width + width) * 2 + (width + 4 * width) + (4 * width + width) + 4
    )
    assert saved.queued_bytes <= kept * features
    assert saved.queued_bytes < kept * heads * length  # less than the attention's probabilities alone
    run_backward_weight(saved)
    assert saved.queued_bytes == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_forward_keeps_no_output_and_nothing_lives_on_without_a_backward(mode):
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    prepare(module, mode)
    kept = []
    module[1].register_forward_hook(lambda m, i, o: kept.append(weakref.ref(o)))
    module[0].register_forward_hook(lambda m, i, o: kept.append(weakref.ref(o)))
    gc.collect()
    gc.disable()
    try:
        outputs, saved = forward(module, mode, [torch.randn(3, 8)])
        assert kept[0]() is not None  # the second layer's input
        assert kept[1]() is None  # the output; the caller has a detached one
        del saved, outputs
        assert kept[0]() is None  # no cycle keeps the graph
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------------ what is deferred


def test_all_of_gpt2_is_deferred():
    """Its linear layers have their weights the other way round; no other layer computes a weight's gradient in B."""
    torch.manual_seed(0)
    sizes = {"n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 11}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(bos_token_id=0, eos_token_id=0, **sizes)).double()
    twin, x = copy.deepcopy(model).eval(), torch.randint(0, 11, (2, 5))
    model.eval()
    report = prepare(model, "auto")
    assert report.mode == "deferred"
    assert report.at_once == ()
    assert report.deferred["Conv1D"] == 8  # two of attention and two of the MLP, in each of two layers
    outputs, saved = run_forward("deferred", lambda flat: [model(flat[0]).logits], [x], list(model.parameters()))
    g = torch.randn_like(outputs[0])
    run_backward_input(saved, [g])
    assert all(p.grad is None for name, p in model.named_parameters() if "ln_" not in name)
    run_backward_weight(saved)
    twin(x).logits.backward(g)
    for (name, p), wanted in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p.grad, wanted.grad, rtol=1e-10, atol=1e-12), name


def test_report_says_what_is_deferred_and_what_is_not():
    module, _, _ = build("own-parameter")
    report = prepare(module)
    assert (report.mode, report.deferred, report.at_once) == ("deferred", {"Linear": 1}, ("p",))
    assert "1" in report.reason
    assert prepare(module) == report
    report = prepare(module, "fused")
    assert (report.mode, report.deferred, report.at_once) == ("fused", {}, ("p", "a.weight", "a.bias"))
    assert prepare(module, "graph").at_once == ()


@pytest.mark.parametrize(
    ("name", "at_once"),
    [
        ("subclass", ("1.weight", "1.bias")),
        ("weight-norm", ("1.bias", "1.parametrizations.weight.original0", "1.parametrizations.weight.original1")),
        ("batchnorm", ("1.weight", "1.bias")),
        ("frozen", ("0.bias",)),
        (
            "torch-transformer",
            (
                "self_attn.in_proj_weight",
                "self_attn.in_proj_bias",
                "self_attn.out_proj.weight",
                "self_attn.out_proj.bias",
            ),
        ),
    ],
)
def test_other_layers_are_at_once(name, at_once):
    module, _, _ = build(name)
    report = prepare(module)
    assert report.mode == "deferred"
    assert report.at_once == at_once


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("no-parameters", "no parameter"),
        ("all-frozen", "no parameter"),
        ("embedding-max-norm", "none of Linear"),
        ("conv2d-same-uneven", "none of"),
    ],
)
@pytest.mark.parametrize("mode", ["auto", "deferred"])
def test_stages_that_cannot_be_split_are_fused_and_say_why(name, word, mode):
    report = prepare(build(name)[0], mode)
    assert report.mode == "fused"
    assert word in report.reason
    assert report.deferred == {}


def test_old_style_weight_norm_and_pruning_are_at_once():
    from torch.nn.utils import prune

    pruned = prune.l1_unstructured(nn.Linear(8, 8), "weight", amount=0.5)
    assert prepare(nn.Sequential(nn.Linear(8, 8), pruned)).deferred == {"Linear": 1}
    assert prepare(pruned).mode == "fused"


def test_compiled_stages_are_fused():
    compiled = torch.compile(nn.Linear(8, 8), backend="eager")
    report = prepare(compiled)
    assert report.mode == "fused"
    assert "compiled" in report.reason
    own = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    own[1].compile(backend="eager")
    report = prepare(own)
    assert report.deferred == {"Linear": 1}
    assert report.at_once == ("1.weight", "1.bias")


def test_a_function_compiled_around_prepared_layers_is_right():
    module, inputs, _ = build("attention")
    twin = copy.deepcopy(module)
    _, grads, expected = plain(twin, inputs)
    prepare(module)
    fn = torch.compile(flat(module), backend="eager")
    _, saved = run_forward("deferred", fn, inputs, list(module.parameters()))
    same(run_backward_input(saved, grads), expected)
    run_backward_weight(saved)
    same(gradients(module), gradients(twin))


def test_restore_copy_and_pickle():
    module, inputs, _ = build("attention")
    before = [set(vars(m)) for m in module.modules()]
    prepare(module)
    twin = copy.deepcopy(module)
    assert twin[0].up.forward.args[0] is twin[0].up
    again = pickle.loads(pickle.dumps(module[0].up))
    same([again(inputs[0])], [module[0].up(inputs[0])])
    restore(module)
    assert [set(vars(m)) for m in module.modules()] == before
    with torch.no_grad():
        same([twin(inputs[0])], [module(inputs[0])])
    restore(module)


def test_prepared_layers_outside_a_split_are_ordinary():
    module, inputs, _ = build("attention")
    twin = copy.deepcopy(module)
    _, grads, expected = plain(twin, inputs)
    prepare(module)
    _, _, found = plain(module, inputs, grads)
    same(found, expected)
    same(gradients(module), gradients(twin))
    state = {name: p.detach().clone() for name, p in module.named_parameters()}

    def loss(state):
        return torch.func.functional_call(module, state, inputs[0]).square().sum()

    found = torch.func.grad(loss)(state)
    restore(module)
    same(list(found.values()), list(torch.func.grad(loss)(state).values()))


# ---------------------------------------------------------------------------------------------------------- errors


def test_wrong_use_is_refused():
    module = nn.Linear(8, 8)
    with pytest.raises(InputError, match="'sideways' is unknown"):
        prepare(module, "sideways")
    with pytest.raises(InputError, match="'auto' is unknown"):
        run_forward("auto", flat(module), [torch.randn(2, 8)], [])
    with pytest.raises(InputError, match="returned a Tensor"):
        run_forward("fused", lambda i: module(i[0]), [torch.randn(2, 8)], [])
    with pytest.raises(InputError, match="a list with a str"):
        run_forward("fused", lambda i: ["a"], [torch.randn(2, 8)], [])
    with pytest.raises(InputError, match="2 values of wanted for 1 inputs"):
        run_forward("fused", flat(module), [torch.randn(2, 8)], [], wanted=[True, True])
    for mode in MODES:
        prepare(module, mode)
        _, saved = forward(module, mode, [torch.randn(2, 8)])
        with pytest.raises(StageloomError, match="W of a micro-batch must come right after B, but F came last"):
            run_backward_weight(saved)
        with pytest.raises(InputError, match="2 gradients for 1 outputs"):
            run_backward_input(forward(module, mode, [torch.randn(2, 8)])[1], [None, None])
        with pytest.raises(InputError, match=r"output 0 has shape \[3, 8\]; expected the output's, \[2, 8\]"):
            run_backward(forward(module, mode, [torch.randn(2, 8)])[1], [torch.ones(3, 8)])
        run_backward_input(saved, [torch.ones(2, 8)])
        with pytest.raises(StageloomError, match="B came last"):
            run_backward(saved, [torch.ones(2, 8)])
        run_backward_weight(saved)
        with pytest.raises(StageloomError, match="W came last"):
            run_backward_weight(saved)
    with pytest.raises(InputError, match=r"sizes \[1, 2\] do not fit 2 experts"):
        Experts(2, 8, 8)(torch.randn(4, 8), [1, 2])
    with pytest.raises(InputError, match="experts is 0"):
        Experts(0, 8, 8)


def test_overwriting_what_w_needs_is_noticed():
    module = nn.Linear(8, 8)
    prepare(module)
    x, g = torch.randn(2, 8), torch.randn(2, 8)
    for overwritten in (x, g):
        _, saved = run_forward("deferred", flat(module), [x], [])
        run_backward_input(saved, [g])
        overwritten.zero_()
        with pytest.raises(StageloomError, match="overwritten between B and W"):
            run_backward_weight(saved)


def test_a_weight_changed_between_forward_and_backward_is_noticed():
    module = nn.Linear(8, 8)
    prepare(module)
    _, saved = forward(module, "deferred", [torch.randn(2, 8)])
    with torch.no_grad():
        module.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_backward_input(saved, [torch.randn(2, 8)])


def test_a_failing_backward_leaves_nothing_queued():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, g):
            raise ValueError("no gradient today")

    module = nn.Sequential(nn.Linear(8, 8))
    prepare(module)
    _, saved = run_forward("deferred", lambda i: [module(Fails.apply(i[0]))], [torch.randn(2, 8)], [])
    with pytest.raises(ValueError, match="today"):
        run_backward_input(saved, [torch.ones(2, 8)])
    assert saved.queue.entries == []


# ----------------------------------------------------------------------------------------------------------- probe


def test_probe_confirms_and_leaves_no_trace():
    module = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Dropout(0.5))
    fired = []
    for p in module.parameters():
        p.grad = torch.full_like(p, 2.0)
        p.register_hook(fired.append)
        p.register_post_accumulate_grad_hook(fired.append)
    state, rng = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    x = torch.randn(2, 4, 5, 5)
    torch.set_rng_state(rng)
    for mode in ("auto", *MODES):
        report = probe(module, flat(module), [x], mode)
        assert report.mode == ("deferred" if mode == "auto" else mode)
        assert mode == "fused" or "equal those of a plain backward" in report.reason
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(a, b) for a, b in zip(state.values(), module.state_dict().values(), strict=True))
    assert all(torch.equal(p.grad, torch.full_like(p, 2.0)) for p in module.parameters())
    assert fired == []


def test_probe_gives_fused_where_deferring_fails_or_is_wrong():
    def own_derivative(s, x):
        y = s.a(x).square().sum()
        (g,) = torch.autograd.grad(y, s.a.weight, create_graph=True)
        return y + g.square().sum()

    module = Call(own_derivative, a=nn.Linear(8, 8))
    report = probe(module, flat(module), [torch.randn(3, 8)])
    assert report.mode == "fused"
    assert "failed with RuntimeError" in report.reason
    assert "forward" not in vars(module.a)

    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, g):
            return g if "forward" not in vars(module.a) else 3 * g

    module = Call(lambda s, x: s.a(Odd.apply(s.a(x))), a=nn.Linear(8, 8))
    report = probe(module, flat(module), [torch.randn(3, 8)], "deferred")
    assert report.mode == "fused"
    assert "another gradient for input 0" in report.reason

    count = iter(range(1, 100))
    module = Call(lambda s, x: s.a(x) * next(count), a=nn.Linear(8, 8))
    report = probe(module, flat(module), [torch.randn(3, 8)])
    assert report.mode == "fused"
    assert "two plain backwards give different gradients" in report.reason
