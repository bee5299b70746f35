"""Reading a model from a Hugging Face `config.json`, as it is published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stageloom.errors import InputError
from stageloom.files import short
from stageloom.plan.architectures import ARCHITECTURES, FLAGS, Architecture, Flag
from stageloom.plan.fields import Fields, at, fields
from stageloom.plan.model import MOST_LAYERS, Attention, Latent, Layer, Mlp, Model


def find(config: Fields) -> Architecture:
    """The architecture a config names by `architectures`, or where there is none by `model_type`. Raises InputError."""
    named = config.data.get("architectures")
    known = ", ".join(architecture.classes[0] for architecture in ARCHITECTURES)
    if named is None:
        model_type = config.text("model_type")
        for architecture in ARCHITECTURES:
            if architecture.model_type == model_type:
                return architecture
        types = ", ".join(architecture.model_type for architecture in ARCHITECTURES)
        raise InputError(f"{config.place}: model_type: {model_type!r} is not known; known: {types}")
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):  # pyright: ignore[reportUnknownArgumentType]
        raise config.wrong("architectures", 'a list of one name is needed, such as ["LlamaForCausalLM"]')
    for architecture in ARCHITECTURES:
        if named[0] in architecture.classes:
            return architecture
    raise InputError(f"{config.place}: architectures: {named[0]!r} is not known; known: {known}")


def from_config(data: object, place: str, name: str) -> Model:
    """The model that a Hugging Face configuration describes.

    Raises InputError with `place`, key and value where the architecture is not known, a key is missing, or sizes do
    not fit.
    """
    config = fields(data, place)
    arch = find(config)
    for key, wanted in (arch.refuse or {}).items():
        if config.data.get(key, wanted) != wanted:
            raise config.wrong(key, f"only {short(wanted)} is read for {arch.model_type}")
    hidden = config.whole(arch.keys.hidden)
    count = config.whole(arch.keys.layers, most=MOST_LAYERS)
    context = config.maybe_whole(arch.keys.context)
    vocabulary = config.whole("vocab_size")
    attention = _latent(config) if arch.latent else _attention(config, arch, hidden)
    biases = _flag(config, arch.attention_bias), _flag(config, arch.output_bias)
    attention = replace(attention, bias=biases[0], output_bias=biases[1])
    layers: list[Layer] = []
    with at(place):
        for index in range(count):
            experts = arch.experts(config, index)
            mlp = _mlp(config, arch, hidden) if experts is None else None
            seen = replace(attention, window=arch.window(config, index))
            layers.append(Layer(seen, mlp, experts, arch.norm_bias, _parallel(config, arch), arch.norms))
        return Model(
            name=str(config.data.get("_name_or_path") or name),
            hidden=hidden,
            vocabulary=vocabulary,
            layers=_shared(layers),
            positions=config.whole(arch.keys.context) if arch.positions else 0,
            tied=config.truth("tie_word_embeddings", arch.tied),
            predicted=config.whole("num_nextn_predict_layers", 0, least=0, most=count),
            norm_bias=arch.norm_bias,
            head_bias=arch.head_bias,
            context=context,
            source=place,
        )


def _attention(config: Fields, arch: Architecture, hidden: int) -> Attention:
    heads = config.whole(arch.keys.heads)
    if config.has("head_dim"):
        width = config.whole("head_dim")
    elif arch.head_width is not None:
        width = arch.head_width
    elif hidden % heads:
        raise config.wrong(arch.keys.heads, f"a divisor of {arch.keys.hidden} = {hidden} is needed")
    else:
        width = hidden // heads
    kv_heads = heads
    if arch.kv_heads != "always heads":
        kv_heads = config.whole("num_key_value_heads", heads if arch.kv_heads == "as heads" else None, most=heads)
    if heads % kv_heads:
        raise config.wrong("num_key_value_heads", f"a divisor of {arch.keys.heads} = {heads} is needed")
    return Attention(heads, kv_heads, width, width, qk_norm=arch.qk_norm)


def _latent(config: Fields) -> Attention:
    if "q_lora_rank" not in config.data:
        raise InputError(
            f"{config.place}: q_lora_rank is missing; a whole number is needed, or null for queries as they are"
        )
    latent = Latent(
        query_rank=config.maybe_whole("q_lora_rank"),
        kv_rank=config.whole("kv_lora_rank"),
        rope_width=config.whole("qk_rope_head_dim"),
        nope_width=config.whole("qk_nope_head_dim"),
    )
    heads = config.whole("num_attention_heads")
    return Attention(
        heads, heads, latent.nope_width + latent.rope_width, value_width=config.whole("v_head_dim"), latent=latent
    )


def _mlp(config: Fields, arch: Architecture, hidden: int) -> Mlp:
    width = config.whole(arch.keys.mlp) if arch.mlp_width is None else arch.mlp_width(config, hidden)
    return Mlp(width, arch.gated, _flag(config, arch.mlp_bias))


def _parallel(config: Fields, arch: Architecture) -> bool:
    return config.truth("use_parallel_residual", True) if arch.model_type == "gpt_neox" else arch.parallel


def _flag(config: Fields, flag: Flag) -> bool:
    return flag if isinstance(flag, bool) else config.truth(flag, FLAGS[flag])


def _shared(layers: list[Layer]) -> tuple[Layer, ...]:
    """Equal layers as one object, which makes comparing and counting them cheap."""
    one: dict[Layer, Layer] = {}
    return tuple(one.setdefault(layer, layer) for layer in layers)


def is_config(data: Mapping[str, Any]) -> bool:
    """Whether a mapping is a Hugging Face configuration rather than the short form."""
    return "architectures" in data or "model_type" in data
