"""Stages compute what the unsplit model computes, and call its parameters by the same names."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from stageloom.errors import InputError
from stageloom.execute.language import Config, language_model
from stageloom.execute.partition import (
    DECODERS,
    load_stage,
    merge_state,
    split,
    stage_state_dict,
    tied,
)

pytestmark = pytest.mark.torch

LLAMA_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": None,
}
KINDS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]


def decoder(name: str, **changes: Any) -> nn.Module:
    """A tiny decoder with random weights in float64."""
    if name == "GPT2LMHeadModel":
        sizes: dict[str, Any] = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 4, "n_head": 4}
        sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
        config = transformers.GPT2Config(**sizes | changes)
    else:
        family = name.removesuffix("ForCausalLM")
        config = getattr(transformers, f"{family}Config")(**LLAMA_SIZES | changes)
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).double()
    with torch.no_grad():
        for parameter in model.parameters():  # norms start as ones, which would hide a norm that is left out
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


VARIANTS: dict[str, Callable[[], nn.Module]] = {
    "GPT2": lambda: decoder("GPT2LMHeadModel"),
    "GPT2 untied": lambda: decoder("GPT2LMHeadModel", tie_word_embeddings=False),
    "Llama": lambda: decoder("LlamaForCausalLM"),
    "Llama tied": lambda: decoder("LlamaForCausalLM", tie_word_embeddings=True),
    "Llama eager": lambda: decoder("LlamaForCausalLM", attn_implementation="eager", attention_bias=True),
    "Mistral": lambda: decoder("MistralForCausalLM", sliding_window=4),
    "Qwen2": lambda: decoder("Qwen2ForCausalLM"),
    "Qwen2 sliding": lambda: decoder(
        "Qwen2ForCausalLM", use_sliding_window=True, sliding_window=4, layer_types=KINDS, tie_word_embeddings=True
    ),
    "Qwen3": lambda: decoder("Qwen3ForCausalLM"),
}


class Stacked(nn.Module):
    """A model whose layers stand in an nn.ModuleList of one of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.body = nn.Module()
        self.body.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        self.body.norm = nn.BatchNorm1d(12)  # it has buffers
        self.head = nn.Linear(8, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.body.blocks:
            x = block(x)
        return self.head(self.body.norm(x))


STACKED: dict[str, Any] = {"layers": "body.blocks", "before": ["embed"], "after": ["body.norm", "head"]}


def ids() -> Tensor:
    return torch.randint(64, (3, 12), generator=torch.Generator().manual_seed(1))


def through(stages: Sequence[nn.Module], x: Tensor) -> Tensor:
    for stage in stages:
        x = stage(x)
    return x


def loss_of(output: Tensor) -> Tensor:
    """Reads every element with a weight of its own."""
    return (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)).sum()


def summed_gradients(stages: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Gradients by name, those of tied parameters summed as a runtime sums them."""
    own = [dict(stage.named_parameters(remove_duplicate=False)) for stage in stages]
    for group in tied(stages):
        total = sum(own[stage][name].grad for stage, name in group)
        for stage, name in group:
            own[stage][name].grad = total
    return {name: parameter.grad for parameters in own for name, parameter in parameters.items()}


def assert_equals_the_model(model: nn.Module, counts: Sequence[int] | int, **names: Any) -> list[nn.Module]:
    """Output, names, state and gradients; the stages' parameters are the model's, so its gradients are taken first."""
    expected = model(ids())
    expected = expected if isinstance(expected, Tensor) else expected.logits
    loss_of(expected).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters(remove_duplicate=False)}
    model.zero_grad()

    stages = split(model, counts, **names)
    state = merge_state([stage_state_dict(stage) for stage in stages])
    assert set(state) == set(model.state_dict())
    assert sum(len(stage.state_dict()) for stage in stages) == len(state)
    output = through(stages, ids())
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)
    loss_of(output).backward()
    found = summed_gradients(stages)
    assert set(found) == set(gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-10, msg=name)
    return stages


@pytest.mark.parametrize("counts", [[4], [2, 2], [1, 3], [0, 2, 0, 2, 0], [4, 0], [0, 4], 1, 2], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_decoders(variant: str, counts: list[int] | int) -> None:
    assert_equals_the_model(VARIANTS[variant](), counts)


def test_every_known_decoder_is_tested() -> None:
    assert {type(make()).__name__ for make in VARIANTS.values()} == set(DECODERS)


@pytest.mark.parametrize("counts", [[5], [2, 3], [1, 0, 4], [0, 5, 0], [1, 1, 1, 1, 1], 1, 5], ids=str)
def test_the_language_model(counts: list[int] | int) -> None:
    model = language_model(Config(layers=3, width=16, heads=2, context=12), seed=0, dtype=torch.float64)
    assert_equals_the_model(model, counts)


@pytest.mark.parametrize("counts", [[4], [1, 3], [0, 4, 0], [3, 0, 1], 2], ids=str)
def test_a_model_with_a_module_list(counts: list[int] | int) -> None:
    torch.manual_seed(0)
    stages = assert_equals_the_model(Stacked().double(), counts, **STACKED)
    assert "body.norm.running_mean" in stages[-1].state_dict()


@pytest.mark.parametrize("name", ["GPT2", "language"])
def test_dropout_is_drawn_as_often_as_in_the_model(name: str) -> None:
    """Stages that run one after the other use up the same random numbers."""
    model: nn.Module
    if name == "GPT2":
        model = decoder("GPT2LMHeadModel", resid_pdrop=0.1, embd_pdrop=0.2, attn_pdrop=0.1)
    else:
        model = language_model(Config(layers=2, width=16, heads=2, context=12, dropout=0.2), seed=0)
    stages = split(model, [1, 2, 1])
    torch.manual_seed(7)
    output = model(ids())
    torch.manual_seed(7)
    assert torch.equal(through(stages, ids()), output if isinstance(output, Tensor) else output.logits)


def test_names_of_a_decoder_stage() -> None:
    first, middle, last = split(decoder("LlamaForCausalLM"), [1, 2, 1])
    assert {name.split(".")[2] for name in middle.state_dict()} == {"1", "2"}
    assert "model.layers.2.self_attn.q_proj.weight" in middle.state_dict()
    assert "model.embed_tokens.weight" in first.state_dict()
    assert {"model.norm.weight", "lm_head.weight"} < set(last.state_dict())


def test_a_stage_without_layers_passes_its_input_on() -> None:
    stages = split(decoder("LlamaForCausalLM"), [2, 0, 2])
    x = torch.randn(2, 3, 32)
    assert stages[1](x) is x
    assert not list(stages[1].parameters())


def test_tied_parameters_of_stages() -> None:
    both, head = "transformer.wte.weight", "lm_head.weight"
    model = decoder("GPT2LMHeadModel")
    stages = split(model, [2, 1, 1])
    assert tied(stages) == [((0, both), (2, head))]
    assert stages[0].get_parameter(both) is model.get_parameter(both)
    assert stages[2].get_parameter(head) is not model.get_parameter(head)
    assert tied(split(model, [4])) == []
    assert tied(split(decoder("GPT2LMHeadModel", tie_word_embeddings=False), [2, 2])) == []
    assert tied(pickle.loads(pickle.dumps(stages))) == tied(stages)


def test_a_module_that_occurs_in_several_stages() -> None:
    shared = nn.Linear(3, 3).double()
    model = nn.Sequential(shared, nn.Tanh(), shared, shared)
    stages = split(model, [1, 1, 2])
    assert tied(stages) == [((0, "0.weight"), (2, "2.weight")), ((0, "0.bias"), (2, "2.bias"))]
    x = torch.randn(4, 3, dtype=torch.float64)
    loss_of(model(x)).backward()
    expected = shared.weight.grad.clone()
    model.zero_grad()
    loss_of(through(stages, x)).backward()
    assert set(merge_state([stage_state_dict(stage) for stage in stages])) == set(model.state_dict())
    torch.testing.assert_close(summed_gradients(stages)["3.weight"], expected)


def test_a_layer_that_occurs_twice_in_a_module_list() -> None:
    model = Stacked().double()
    model.body.blocks[3] = model.body.blocks[1]
    stages = assert_equals_the_model(model, [2, 2], **STACKED)
    assert [len(group) for group in tied(stages)] == [2, 2]


def test_a_model_without_layers() -> None:
    assert split(nn.Sequential(), [0, 0])[1](ids()).shape == (3, 12)
    with pytest.raises(InputError, match="the model's 0 layers; what divides them is nothing"):
        split(nn.Sequential(), 1)


def test_stages_share_parameters_and_nothing_else() -> None:
    model = decoder("LlamaForCausalLM")
    stages = split(model, [2, 2])
    assert model.config.num_hidden_layers == 4
    assert len(model.model.layers) == 4
    assert stages[1].get_parameter("model.norm.weight") is model.model.norm.weight
    stages[0].eval()
    assert model.training
    assert stages[1].training
    assert stages[0].model.rotary_emb is not stages[1].model.rotary_emb


@pytest.mark.parametrize("variant", ["GPT2", "Llama", "Qwen2 sliding"])
def test_stages_can_be_pickled(variant: str) -> None:
    stages = split(VARIANTS[variant](), [2, 0, 2])
    twins = pickle.loads(pickle.dumps(stages))
    assert torch.equal(through(twins, ids()), through(stages, ids()))


def test_state_of_the_model_loads_into_stages_and_back() -> None:
    trained = decoder("GPT2LMHeadModel")
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.5)
    full = trained.state_dict()
    stages = split(decoder("GPT2LMHeadModel"), [1, 2, 1])
    for stage in stages:
        load_stage(stage, {name: tensor for name, tensor in full.items() if name != "lm_head.weight"})
    merged = merge_state([stage_state_dict(stage) for stage in stages])
    assert all(torch.equal(merged[name], full[name]) for name in full)
    decoder("GPT2LMHeadModel").load_state_dict(merged)
    torch.testing.assert_close(through(stages, ids()), trained(ids()).logits)


def test_state_that_does_not_fit() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    stage = split(model, 1)[1]
    with pytest.raises(InputError, match=r"1\.weight: is not in the given state"):
        load_stage(stage, {})
    with pytest.raises(InputError, match=r"1\.weight: has shape \(3, 2\); the stage needs \(2, 2\)"):
        load_stage(stage, {"1.weight": torch.zeros(3, 2)})
    with pytest.raises(InputError, match="a: stage 1 has another tensor"):
        merge_state([{"a": torch.zeros(2)}, {"a": torch.ones(2)}])
    assert list(merge_state([{"a": torch.ones(2)}, {"a": torch.ones(2)}])) == ["a"]


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([2, 3], r"2 \+ 3 = 5, but the model has 4 layers; expected counts that sum to 4"),
        ([], "names no stage; expected counts that sum to the model's 4 layers"),
        ([5, -1], "a stage of -1 layers"),
        (3, "3 on every stage do not make up the model's 4 layers; what divides them is 1, 2, 4"),
        (0, "0 on every stage"),
        (-2, "-2 on every stage"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["decoder", "sequential"])
def test_wrong_counts(kind: str, counts: list[int] | int, message: str) -> None:
    model = decoder("LlamaForCausalLM") if kind == "decoder" else nn.Sequential(*[nn.Identity() for _ in range(4)])
    with pytest.raises(InputError, match=message):
        split(model, counts)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({}, "Stacked: is neither an nn.Sequential nor one of GPT2LMHeadModel, "),
        ({"before": ["embed"]}, "say nothing without layers"),
        ({"layers": "blocks"}, "has no module 'blocks'"),
        ({"layers": "head"}, "head is a Linear; expected the name of an nn.ModuleList"),
        (STACKED | {"before": []}, r"embed\.weight is in no module of a stage"),
        (STACKED | {"before": ["embed", "head"]}, r"head\.weight is in head and head; before and after"),
        (STACKED | {"after": ["body", "head"]}, r"weight is in body\.blocks\.0 and body; "),
    ],
    ids=str,
)
def test_wrong_names(names: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        split(Stacked(), [2, 2], **names)


def test_classes_that_may_compute_something_else_are_refused() -> None:
    class Residual(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)

    class Scaled(transformers.LlamaForCausalLM):
        pass

    with pytest.raises(InputError, match="Residual: is neither"):
        split(Residual(nn.Linear(2, 2)), [1])
    with pytest.raises(InputError, match="Scaled: is neither"):
        split(Scaled(transformers.LlamaConfig(**LLAMA_SIZES)), [4])


def test_a_decoder_takes_no_slices() -> None:
    stage = split(decoder("LlamaForCausalLM"), [4])[0]
    with pytest.raises(InputError, match="whole sequences only"):
        stage(ids(), carry=None)
