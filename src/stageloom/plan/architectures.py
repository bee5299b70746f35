"""What a Hugging Face `config.json` leaves unsaid: one record an architecture, and a new one is a new record.

A record says what the modelling code of its architecture does and the file does not say: where there are biases and
norms, what an absent key means. Source: the modelling and configuration files of `transformers` 5, which tests build
and count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from stageloom.plan.fields import Fields
from stageloom.plan.model import Experts

Flag = bool | Literal["attention_bias", "mlp_bias", "qkv_bias"]
"""True or False for every model of the architecture, or the key of the file that says so."""

FLAGS: Final = {"attention_bias": False, "mlp_bias": False, "qkv_bias": True}
"""What an absent flag means."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The file's names of what every architecture has."""

    hidden: str = "hidden_size"
    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    mlp: str = "intermediate_size"
    context: str = "max_position_embeddings"


@dataclass(frozen=True, slots=True)
class Architecture:
    """How to read the models of one architecture.

    model_type, classes: its names in the file. kv_heads: whether `num_key_value_heads` may be absent (then every head
    has its own). head_width: of a head where `head_dim` is absent, None for hidden over heads. tied: where the file
    does not say. attention_bias, output_bias, mlp_bias, norm_bias, head_bias: where there are biases. window,
    experts: how a layer, by its number, finds its window and its experts (None: an MLP).
    """

    model_type: str
    classes: tuple[str, ...]
    keys: Keys = Keys()
    kv_heads: Literal["needed", "as heads", "always heads"] = "as heads"
    head_width: int | None = None
    tied: bool = False
    gated: bool = True
    attention_bias: Flag = False
    output_bias: Flag = False
    mlp_bias: Flag = False
    norm_bias: bool = False
    head_bias: bool = False
    norms: int = 2
    qk_norm: Literal["none", "head", "all"] = "none"
    parallel: bool = False
    positions: bool = False
    latent: bool = False
    mlp_width: Callable[[Fields, int], int] | None = None
    window: Callable[[Fields, int], int | None] = lambda _fields, _layer: None
    experts: Callable[[Fields, int], Experts | None] = lambda _fields, _layer: None
    refuse: Mapping[str, object] | None = None


def _gpt2_mlp(config: Fields, hidden: int) -> int:
    return config.whole("n_inner", 4 * hidden)


def _window(config: Fields, _layer: int) -> int | None:
    return config.maybe_whole("sliding_window")


def _upper_window(config: Fields, layer: int) -> int | None:
    """Qwen: only where it is switched on, and from layer `max_window_layers` up."""
    if not config.truth("use_sliding_window", False) or layer < config.whole("max_window_layers", 28, least=0):
        return None
    return config.maybe_whole("sliding_window")


def _every_other_window(config: Fields, layer: int) -> int | None:
    return None if layer % 2 else config.maybe_whole("sliding_window")


def _mixtral_experts(config: Fields, _layer: int) -> Experts:
    count, per_token = _routed(config, "num_local_experts")
    return Experts(count, per_token, config.whole("intermediate_size"), gated=True)


def _qwen_experts(config: Fields, layer: int) -> Experts | None:
    dense = config.list("mlp_only_layers") if config.data.get("mlp_only_layers") else []
    if any(type(each) is not int for each in dense):  # 0.0 and False are equal to 0
        raise config.wrong("mlp_only_layers", "a list of layers' numbers is needed, such as [0, 1]")
    if layer in dense or (layer + 1) % config.whole("decoder_sparse_step", 1):
        return None
    count, per_token = _routed(config, "num_experts")
    return Experts(count, per_token, config.whole("moe_intermediate_size"), gated=True)


def _qwen2_experts(config: Fields, layer: int) -> Experts | None:
    routed = _qwen_experts(config, layer)
    if routed is None:
        return None
    return replace(routed, shared=1, shared_width=config.whole("shared_expert_intermediate_size"), shared_gate=True)


def _deepseek_experts(config: Fields, layer: int) -> Experts | None:
    sparse = layer >= config.whole("first_k_dense_replace", 0, least=0)
    if not config.has("n_routed_experts") or not sparse or layer % config.whole("moe_layer_freq", 1):
        return None
    count, per_token = _routed(config, "n_routed_experts")
    width = config.whole("moe_intermediate_size")
    groups = config.whole("n_group", 1, most=count)
    chosen = config.whole("topk_group", 1, most=groups)
    if count % groups:
        raise config.wrong("n_group", f"a divisor of n_routed_experts = {count} is needed")
    if per_token > chosen * (count // groups):
        raise config.wrong(
            "topk_group", f"enough groups of {count // groups} for {per_token} experts a token are needed"
        )
    shared = config.whole("n_shared_experts", 0, least=0)
    return Experts(count, per_token, width, True, shared, width if shared else 0, groups, chosen)


def _routed(config: Fields, key: str) -> tuple[int, int]:
    count = config.whole(key)
    return count, config.whole("num_experts_per_tok", most=count)


_GPT2_KEYS: Final = Keys("n_embd", "n_layer", "n_head", "n_inner", "n_positions")

ARCHITECTURES: Final = (
    Architecture(
        "gpt2",
        ("GPT2LMHeadModel",),
        keys=_GPT2_KEYS,
        kv_heads="always heads",
        tied=True,
        gated=False,
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        norm_bias=True,
        positions=True,
        mlp_width=_gpt2_mlp,
        refuse={"add_cross_attention": False},
    ),
    Architecture(
        "gpt_neox",
        ("GPTNeoXForCausalLM",),
        kv_heads="always heads",
        gated=False,
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        norm_bias=True,
        parallel=True,
        refuse={"attention_bias": True},
    ),
    Architecture(
        "llama",
        ("LlamaForCausalLM",),
        attention_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    Architecture("mistral", ("MistralForCausalLM",), kv_heads="needed", window=_window),
    Architecture("mixtral", ("MixtralForCausalLM",), kv_heads="needed", window=_window, experts=_mixtral_experts),
    Architecture("qwen2", ("Qwen2ForCausalLM",), kv_heads="needed", attention_bias=True, window=_upper_window),
    Architecture(
        "qwen2_moe",
        ("Qwen2MoeForCausalLM",),
        kv_heads="needed",
        attention_bias="qkv_bias",
        window=_upper_window,
        experts=_qwen2_experts,
    ),
    Architecture(
        "qwen3",
        ("Qwen3ForCausalLM",),
        kv_heads="needed",
        head_width=128,
        qk_norm="head",
        attention_bias="attention_bias",
        output_bias="attention_bias",
        window=_upper_window,
    ),
    Architecture(
        "qwen3_moe",
        ("Qwen3MoeForCausalLM",),
        kv_heads="needed",
        qk_norm="head",
        attention_bias="attention_bias",
        output_bias="attention_bias",
        window=_upper_window,
        experts=_qwen_experts,
    ),
    Architecture(
        "deepseek_v2",
        ("DeepseekV2ForCausalLM",),
        latent=True,
        attention_bias="attention_bias",
        output_bias="attention_bias",
        experts=_deepseek_experts,
    ),
    Architecture(
        "deepseek_v3",
        ("DeepseekV3ForCausalLM",),
        latent=True,
        attention_bias="attention_bias",
        output_bias="attention_bias",
        experts=_deepseek_experts,
    ),
    Architecture(
        "phi",
        ("PhiForCausalLM",),
        gated=False,
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        norm_bias=True,
        head_bias=True,
        norms=1,
        parallel=True,
        refuse={"qk_layernorm": False},
    ),
    Architecture("phi3", ("Phi3ForCausalLM",), window=_window),
    Architecture(
        "gemma",
        ("GemmaForCausalLM",),
        kv_heads="needed",
        head_width=256,
        tied=True,
        attention_bias="attention_bias",
        output_bias="attention_bias",
    ),
    Architecture(
        "gemma2",
        ("Gemma2ForCausalLM",),
        kv_heads="needed",
        head_width=256,
        tied=True,
        norms=4,
        attention_bias="attention_bias",
        output_bias="attention_bias",
        window=_every_other_window,
    ),
    Architecture(
        "olmo2", ("Olmo2ForCausalLM",), qk_norm="all", attention_bias="attention_bias", output_bias="attention_bias"
    ),
)
