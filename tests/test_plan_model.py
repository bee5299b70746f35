"""Models as the planner reads them: counts of parameters equal to the published ones, and to those of real modules.

`transformers` builds each model from the same configuration without memory (torch's meta device), and counting what it
has built is the oracle: the counts have to be equal, not near.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from stageloom.errors import InputError
from stageloom.plan import gpt, load_model, presets
from stageloom.plan.architectures import ARCHITECTURES
from stageloom.plan.huggingface import from_config
from stageloom.plan.model import (
    Attention,
    Experts,
    Latent,
    Layer,
    Mlp,
    Model,
    active_parameters,
    embedding_parameters,
    final_norm_parameters,
    head_parameters,
    layer_parameters,
    predicted_parameters,
    total_parameters,
)

DATA: Final = Path(__file__).parent / "data" / "plan"
PUBLISHED: Final[dict[str, dict[str, Any]]] = json.loads((DATA / "published_parameters.json").read_text())["models"]
CONFIGS: Final = sorted((DATA / "configs").glob("*.json"))

SMALL: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
EXPERTS: Final = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT: Final = {
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "n_group": 2,
    "topk_group": 1,
}
# What the published files do not have: an architecture, and what differs from SMALL.
VARIANTS: Final[list[tuple[str, dict[str, Any]]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "tie_word_embeddings": True}),
    ("llama", {"num_key_value_heads": None}),
    ("mistral", {"head_dim": 32}),
    ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 80}),
    ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 80, "decoder_sparse_step": 2, "qkv_bias": False}),
    ("qwen3", {"attention_bias": True}),
    ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    ("qwen3_moe", EXPERTS | {"head_dim": 16, "mlp_only_layers": [1]}),
    ("deepseek_v2", LATENT | {"first_k_dense_replace": 1, "q_lora_rank": None}),
    ("deepseek_v2", LATENT | {"first_k_dense_replace": 2, "attention_bias": True}),
    ("deepseek_v3", LATENT | {"first_k_dense_replace": 1}),
    ("deepseek_v3", LATENT | {"first_k_dense_replace": 0, "attention_bias": True, "n_shared_experts": 1}),
    ("phi", {"num_key_value_heads": 8}),
    ("phi3", {"tie_word_embeddings": True}),
    ("gemma", {"head_dim": 16}),
    ("gemma2", {"attention_bias": True}),
    ("olmo2", {"attention_bias": True}),
    ("gpt_neox", {}),
    ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 32, "n_inner": 80, "vocab_size": 100}),
]


def built(config: dict[str, Any]) -> int:
    """Parameters of the model that `transformers` builds from a configuration."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    known = transformers.AutoConfig.for_model(**{"model_type": config["model_type"]} | config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(known)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_counts_are_the_published_ones(path: Path) -> None:
    model, published = load_model(path), PUBLISHED[path.stem]
    assert total_parameters(model) / 1e9 == pytest.approx(published["total"], rel=0.01)
    if "active" in published:
        # Some count the token embedding, of which a token uses one row, as active, some do not.
        active = active_parameters(model) / 1e9
        nearest = min(active, active - embedding_parameters(model) / 1e9, key=lambda n: abs(n - published["active"]))
        assert nearest == pytest.approx(published["active"], rel=0.025)
    if "predicted" in published:
        assert predicted_parameters(model) / 1e9 == pytest.approx(published["predicted"], rel=0.01)


@pytest.mark.torch
@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_counts_are_those_of_the_modules(path: Path) -> None:
    assert total_parameters(load_model(path)) == built(json.loads(path.read_text()))


@pytest.mark.torch
@pytest.mark.parametrize(("kind", "change"), VARIANTS, ids=[f"{at}-{row[0]}" for at, row in enumerate(VARIANTS)])
def test_counts_of_variants_are_those_of_the_modules(kind: str, change: dict[str, Any]) -> None:
    config = ({} if kind == "gpt2" else SMALL) | {"model_type": kind} | change  # GPT-2 has keys of its own
    assert total_parameters(from_config(config, "config.json", kind)) == built(config)


def test_every_architecture_is_held_to_the_oracle() -> None:
    counted = {kind for kind, _ in VARIANTS}
    assert counted == {architecture.model_type for architecture in ARCHITECTURES}
    assert len(CONFIGS) >= 12
    assert {path.stem for path in CONFIGS} == set(PUBLISHED)


def test_a_model_is_the_sum_of_its_parts() -> None:
    model = load_model("deepseek-v3")
    layers = [layer_parameters(model, layer) for layer in model.layers]
    ends = embedding_parameters(model) + head_parameters(model) + final_norm_parameters(model)
    assert sum(count.total for count in layers) + ends == total_parameters(model)
    assert sum(count.active for count in layers) + ends == active_parameters(model)
    assert [count.experts == 0 for count in layers] == [True] * 3 + [False] * 58


def test_presets_are_the_published_models() -> None:
    sizes = {name: total_parameters(load_model(name)) / 1e9 for name in presets.names("models")}
    assert sizes == pytest.approx(
        {
            "deepseek-v3": 671,
            "gpt3-175b": 175,
            "llama3-8b": 8.03,
            "llama3-70b": 70.6,
            "llama3-405b": 406,  # safetensors of meta-llama/Llama-3.1-405B
            "mixtral-8x7b": 46.7,
            "zb-1.5b": 1.5,
            "zb-6.2b": 6.2,
            "zb-14.6b": 14.6,
            "zb-28.3b": 28.3,
        },
        rel=0.015,  # the zero-bubble paper's names have two digits
    )
    assert all(load_model(name).source != name for name in presets.names("models"))


@pytest.mark.parametrize(
    ("preset", "file"),
    [("llama3-8b", "llama-3-8b"), ("mixtral-8x7b", "mixtral-8x7b"), ("deepseek-v3", "deepseek-v3")],
)
def test_a_preset_and_the_published_file_say_the_same_layers(preset: str, file: str) -> None:
    ours, theirs = load_model(preset), load_model(DATA / "configs" / f"{file}.json")
    assert ours.layers == theirs.layers
    assert (ours.hidden, ours.vocabulary, ours.context) == (theirs.hidden, theirs.vocabulary, theirs.context)
    assert (ours.tied, ours.predicted) == (theirs.tied, theirs.predicted)


# arXiv 2104.04473, Table 1: parameters in billions, hidden size, attention heads, layers.
MEGATRON: Final = [
    (1.7, 2304, 24, 24),
    (7.5, 4096, 32, 36),
    (39.1, 8192, 64, 48),
    (145.6, 12288, 96, 80),
    (529.6, 20480, 128, 105),
]


@pytest.mark.parametrize(("billions", "hidden", "heads", "layers"), MEGATRON)
def test_gpt_has_the_sizes_of_megatrons_table(billions: float, hidden: int, heads: int, layers: int) -> None:
    assert round(total_parameters(gpt(hidden, heads, layers)) / 1e9, 1) == billions


def test_the_short_form_of_gpt_is_gpt() -> None:
    model = load_model("gpt3-175b")
    assert model.layers == gpt(12288, 96, 96, 51200, 2048).layers
    assert total_parameters(model) == total_parameters(gpt(12288, 96, 96, 51200, 2048))


def test_windows_are_those_of_the_layers() -> None:
    gemma = from_config(SMALL | {"model_type": "gemma2", "sliding_window": 32}, "config.json", "m")
    assert [layer.attention.window for layer in gemma.layers] == [32, None, 32]
    qwen = SMALL | {"model_type": "qwen2", "sliding_window": 32, "max_window_layers": 2}
    assert {layer.attention.window for layer in from_config(qwen, "config.json", "m").layers} == {None}
    on = from_config(qwen | {"use_sliding_window": True}, "config.json", "m")
    assert [layer.attention.window for layer in on.layers] == [None, None, 32]


def test_a_folder_stands_for_its_config(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL | {"model_type": "llama"}))
    assert load_model(folder).name == "my-model"
    assert load_model(folder / "config.json") == load_model(folder)


IMPOSSIBLE: Final = [
    (lambda: Attention(6, 4, 8, 8), "6 heads cannot share 4 key-value heads"),
    (lambda: Attention(4, 4, 8, 8, latent=Latent(None, 8, 4, 8)), "a head is 8 wide and its parts 8 \\+ 4"),
    (lambda: Experts(4, 5, 8, True), "5 experts a token are more than the 4"),
    (lambda: Experts(4, 1, 8, True, groups=3), "cannot make 3 equal groups"),
    (lambda: Experts(4, 1, 8, True, groups=2, groups_per_token=3), "3 groups a token are more than the 2"),
    (lambda: Experts(4, 3, 8, True, groups=2, groups_per_token=1), "1 groups a token hold fewer than 3 experts"),
    (lambda: Layer(Attention(4, 4, 8, 8)), "either an MLP or experts"),
    (lambda: Model("m", 8, 8, ()), "at least one layer"),
    (lambda: gpt(100, 3, 1), "hidden = 100 cannot be cut into 3 heads"),
    (lambda: gpt(0, 1, 1), "hidden = 0; a whole number of at least 1"),
    (lambda: gpt(8, 1, 1, sequence=-1), "sequence = -1"),
]


@pytest.mark.parametrize(("make", "message"), IMPOSSIBLE, ids=[message for _, message in IMPOSSIBLE])
def test_impossible_sizes_make_no_model(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_equal_layers_are_one_value() -> None:
    """3,072 GPUs' worth of searching hashes and compares layers all the time."""
    model = load_model(DATA / "configs" / "deepseek-v3.json")
    assert len({id(layer) for layer in model.layers}) == 2
    assert model.layers[0] == Layer(model.layers[0].attention, Mlp(18432, gated=True))
