"""The byte-level language model and its data."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stageloom.errors import InputError
from stageloom.execute.language import (
    Config,
    StageSequence,
    batches,
    bytes_of_library,
    language_model,
    next_byte_loss,
)

pytestmark = pytest.mark.torch

CONFIG = Config(layers=3, width=16, heads=4, context=12)


def leaves(carry: Any) -> list[Tensor]:
    """The tensors of a carry, from left to right."""
    if isinstance(carry, tuple):
        return [tensor for part in carry for tensor in leaves(part)]
    return [] if carry is None else [carry]


def cut_off(carry: Any) -> Any:
    """The carry as the next slice receives it: the same numbers, detached from the graph that made them."""
    if isinstance(carry, tuple):
        return tuple(cut_off(part) for part in carry)
    return carry.detach().requires_grad_(carry.is_floating_point()) if isinstance(carry, Tensor) else carry


def stage_of(model: nn.Sequential, first: int, end: int) -> StageSequence:
    return StageSequence(list(model.named_children())[first:end])


def inputs_and_targets() -> tuple[Tensor, Tensor]:
    return batches(bytes_of_library(5000), microbatches=1, size=2, context=12, step=0, seed=1)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_a_model_is_its_seed() -> None:
    state, again, other = (language_model(CONFIG, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(state[name], again[name]) for name in state)
    assert not torch.equal(state["0.token.weight"], other["0.token.weight"])
    double = language_model(CONFIG, 1, torch.float64).state_dict()
    assert all(torch.equal(state[name], double[name].float()) for name in state)


def test_making_a_model_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    language_model(CONFIG, 5)
    assert torch.equal(torch.rand(1), expected)


def test_output_depends_on_earlier_bytes_only() -> None:
    model = language_model(CONFIG, 3, torch.float64)
    inputs, _ = inputs_and_targets()
    changed = inputs.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 256
    before, after = model(inputs), model(changed)
    assert before.shape == (2, 12, 256)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(dim=2).all()


def test_stages_have_the_names_of_the_model() -> None:
    model = language_model(CONFIG, 3)
    first, last = stage_of(model, 0, 3), stage_of(model, 3, 5)
    assert "3.attention.qkv.weight" in last.state_dict()
    assert list(first.state_dict()) + list(last.state_dict()) == list(model.state_dict())
    inputs, _ = inputs_and_targets()
    assert torch.equal(last(first(inputs)), model(inputs))


def test_names_with_dots() -> None:
    stage = StageSequence([("decoder.layers.1", nn.Linear(3, 4)), ("decoder.norm", nn.LayerNorm(4))])
    assert list(stage.state_dict()) == [
        "decoder.layers.1.weight",
        "decoder.layers.1.bias",
        "decoder.norm.weight",
        "decoder.norm.bias",
    ]
    assert stage(torch.ones(2, 3)).shape == (2, 4)


def test_a_stage_without_modules_returns_its_input() -> None:
    stage, x = StageSequence([]), torch.ones(2, 3, 4)
    assert stage(x) is x
    output, carry = stage(x, carry=None)
    assert output is x
    assert stage(x, carry=carry)[0] is x


def test_stages_can_be_copied_and_pickled() -> None:
    stage = stage_of(language_model(CONFIG, 3), 0, 2)
    inputs, _ = inputs_and_targets()
    for twin in (copy.deepcopy(stage), pickle.loads(pickle.dumps(stage))):
        assert torch.equal(twin(inputs), stage(inputs))
        assert twin(inputs, carry=None)[1] is not None


@pytest.mark.parametrize("lengths", [(12,), (6, 6), (1, 11), (11, 1), (3, 4, 5), (1,) * 12])
def test_slices_with_carry_equal_the_whole_sequence(lengths: tuple[int, ...]) -> None:
    stage = stage_of(language_model(CONFIG, 3, torch.float64), 0, 5)
    inputs, _ = inputs_and_targets()
    carry: Any = None
    outputs: list[Tensor] = []
    for part in inputs.split(lengths, dim=1):
        output, carry = stage(part, carry=carry)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, dim=1), stage(inputs), rtol=0, atol=1e-12)


@pytest.mark.parametrize("lengths", [(6, 6), (3, 4, 5), (1,) * 12])
@pytest.mark.parametrize("cut", [0, 2, 5])
def test_gradients_of_slices_equal_those_of_the_whole_sequence(lengths: tuple[int, ...], cut: int) -> None:
    """Two stages, every slice a graph of its own; backward runs from the last slice to the first."""
    model = language_model(CONFIG, 3, torch.float64)
    inputs, targets = inputs_and_targets()
    whole_loss = next_byte_loss(model(inputs), targets)
    whole_loss.backward()
    expected = gradients(model)
    model.zero_grad()

    stages = [stage_of(model, 0, cut), stage_of(model, cut, 5)]
    passes: list[list[tuple[Any, ...]]] = [[], []]  # of each stage: (input, received carry, output, passed carry)
    losses: list[Tensor] = []
    received: list[Any] = [None, None]
    parts = zip(inputs.split(lengths, dim=1), targets.split(lengths, dim=1), strict=True)
    for part, target in parts:
        x = part
        for index, stage in enumerate(stages):
            output, passed = stage(x, carry=received[index])
            passes[index].append((x, received[index], output, passed))
            received[index] = cut_off(passed)
            x = output.detach().requires_grad_() if index == 0 and output.is_floating_point() else output
        losses.append(next_byte_loss(x, target) * target.numel() / targets.numel())
    torch.testing.assert_close(sum(losses), whole_loss, rtol=0, atol=1e-12)

    carry_gradients: list[list[Any]] = [[], []]
    for step in reversed(range(len(lengths))):
        gradient: Any = torch.autograd.grad(losses[step], passes[1][step][2], retain_graph=True)[0] if cut < 5 else None
        for index in (1, 0):
            x, carry, output, passed = passes[index][step]
            if index == 1 and cut == 5:  # a last stage that only takes the loss
                losses[step].backward()
                gradient = x.grad
                continue
            if not output.requires_grad:  # a first stage without modules
                continue
            pairs = [(output, gradient)]
            for tensor, known in zip(leaves(passed), carry_gradients[index], strict=False):
                if known is not None:
                    pairs.append((tensor, known))
            torch.autograd.backward([tensor for tensor, _ in pairs], [known for _, known in pairs])
            carry_gradients[index] = [tensor.grad for tensor in leaves(carry)]
            gradient = x.grad
    for name, found in gradients(model).items():
        torch.testing.assert_close(found, expected[name], rtol=0, atol=1e-12, msg=name)


def test_a_module_that_mixes_positions_cannot_take_slices() -> None:
    stage = StageSequence([("0", nn.Linear(4, 4)), ("1", nn.LayerNorm([3, 4]))])
    assert stage(torch.ones(2, 3, 4)).shape == (2, 3, 4)
    with pytest.raises(InputError, match=r"1 \(LayerNorm\): cannot take a slice"):
        stage(torch.ones(2, 3, 4), carry=None)


def test_training_lowers_the_loss() -> None:
    data = bytes_of_library(20_000)
    model = language_model(Config(layers=1, width=32, heads=4, context=16, dropout=0.1), 0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for step in range(40):
        inputs, targets = batches(data, microbatches=2, size=8, context=16, step=step, seed=0)
        loss = next_byte_loss(model(inputs), targets)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert abs(losses[0] - 5.545) < 0.1  # log 256: it knows nothing yet
    assert losses[-1] < 3.5


def test_library_bytes_are_deterministic_text() -> None:
    data = bytes_of_library(30_000)
    assert data.dtype == torch.uint8
    assert data.shape == (30_000,)
    assert torch.equal(data[:100], bytes_of_library(100))
    assert b"import" in bytes(data.tolist())


def test_batches_depend_on_seed_and_step_alone() -> None:
    data = bytes_of_library(5000)
    inputs, targets = batches(data, microbatches=3, size=2, context=8, step=4, seed=1)
    assert inputs.shape == targets.shape == (6, 8)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs, batches(data, 3, 2, 8, step=4, seed=1)[0])
    assert torch.equal(inputs, batches(data, 2, 3, 8, step=4, seed=1)[0])
    assert not torch.equal(inputs, batches(data, 3, 2, 8, step=5, seed=1)[0])
    assert not torch.equal(inputs, batches(data, 3, 2, 8, step=1, seed=4)[0])


def test_the_shortest_data_still_gives_a_batch() -> None:
    inputs, targets = batches(torch.arange(9, dtype=torch.uint8), 1, 4, context=8, step=0, seed=0)
    assert inputs.tolist() == [list(range(8))] * 4
    assert targets.tolist() == [list(range(1, 9))] * 4


def test_loss_of_half_precision_is_taken_in_single() -> None:
    logits, target = torch.randn(2, 3, 256), torch.randint(256, (2, 3))
    assert next_byte_loss(logits.bfloat16(), target).dtype == torch.float32
    assert next_byte_loss(logits.double(), target).dtype == torch.float64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "3 heads do not divide width 16"),
        ({"width": 0}, "width: 0 is too small"),
        ({"layers": -1}, "layers: -1 is negative"),
        ({"dropout": 1.0}, "dropout: 1.0"),
    ],
)
def test_wrong_sizes(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Config(**{"layers": 1, "width": 16, "heads": 4, "context": 8} | change)


def test_wrong_data_sizes() -> None:
    with pytest.raises(InputError, match="limit: 0"):
        bytes_of_library(0)
    with pytest.raises(InputError, match="9 are needed"):
        batches(torch.zeros(8, dtype=torch.uint8), 1, 1, context=8, step=0, seed=0)
    with pytest.raises(InputError, match="microbatches: 0"):
        batches(torch.zeros(80, dtype=torch.uint8), 0, 1, context=8, step=0, seed=0)
    with pytest.raises(InputError, match="a sequence of 13 bytes is longer than the model's context, 12"):
        language_model(CONFIG, 0)(torch.zeros(1, 13, dtype=torch.int64))
