"""The short form of a model: a few lines of YAML.

    style: llama            # or gpt; says what every line left out means, as the table below
    hidden: 4096
    layers: 32
    heads: 32
    kv_heads: 8             # as many as heads
    mlp: 14336              # gpt: four times hidden
    vocabulary: 128256
    context: 8192           # the longest sequence; with learned positions it is needed

Each line above but `hidden`, `layers`, `heads`, `vocabulary` and a llama's `mlp` may be left out. More keys, and what
they are without a line:

    key            llama     gpt       meaning
    name           the file's          what tables and plans call the model
    head_width     hidden / heads      of a query and a key
    value_width    head_width          of a value
    gated          true      false     the MLP has a third projection that gates (SwiGLU)
    bias           false     true      projections have biases; `qkv` for those of query, key and value alone
    norm           rms       layer     a `layer` norm has a bias
    positions      rotary    learned
    tied           false     true      embedding and head are one matrix
    parallel       false     false     attention and MLP read the same input
    window         all       all       how many tokens back a token sees
    qk_norm        none      none      norms on queries and keys: one for a `head`'s width, or for `all` heads'
    predicted      0         0         multi-token-prediction modules
    experts        none      none      {count, per_token, width, shared: 0, shared_width: width, groups: 1,
                                       groups_per_token: groups, dense_layers: 0}: the first `dense_layers` have an MLP
    latent         none      none      {query_rank: none, kv_rank, rope_width, nope_width}: multi-head latent attention
    source         the file's path     where the figures are from
"""

from __future__ import annotations

from typing import Any, Final

from stageloom.errors import InputError
from stageloom.plan.fields import Fields, at, fields
from stageloom.plan.model import MOST_LAYERS, Attention, Experts, Latent, Layer, Mlp, Model

STYLES: Final[dict[str, dict[str, Any]]] = {
    "llama": {"gated": True, "bias": False, "norm": "rms", "positions": "rotary", "tied": False},
    "gpt": {"gated": False, "bias": True, "norm": "layer", "positions": "learned", "tied": True},
}


def from_short_form(data: object, place: str, name: str) -> Model:
    """The model that a mapping in the short form describes. Raises InputError with `place`, key and value."""
    model = fields(data, place)
    style_name = model.choice("style", STYLES, "llama")
    style = STYLES[style_name]
    hidden = model.whole("hidden")
    count = model.whole("layers", most=MOST_LAYERS)
    attention = _attention(model, hidden, style)
    gated = model.truth("gated", style["gated"])
    biased = _bias(model, style) is True
    learned = model.choice("positions", ("rotary", "learned"), style["positions"]) == "learned"
    layer_norm = model.choice("norm", ("rms", "layer"), style["norm"]) == "layer"
    parallel = model.truth("parallel", False)
    vocabulary = model.whole("vocabulary")
    tied, predicted = model.truth("tied", style["tied"]), model.whole("predicted", 0, least=0, most=count)
    context = model.whole("context") if learned else model.maybe_whole("context")
    sparse, dense_layers = _experts(model, gated, count)
    mlp = None
    if sparse is None or dense_layers or model.has("mlp"):
        mlp = Mlp(model.whole("mlp", 4 * hidden if style_name == "gpt" else None), gated, biased)
    name, source = model.text("name", name), model.text("source", place)
    model.done()
    with at(place):
        dense = [Layer(attention, mlp, None, layer_norm, parallel)] if mlp is not None else []
        mixed = [Layer(attention, None, sparse, layer_norm, parallel)] if sparse is not None else []
        layers = dense * dense_layers + mixed * (count - dense_layers) if mixed else dense * count
        return Model(
            name,
            hidden,
            vocabulary,
            tuple(layers),
            positions=context if learned and context is not None else 0,
            tied=tied,
            predicted=predicted,
            norm_bias=layer_norm,
            context=context,
            source=source,
        )


def _bias(model: Fields, style: dict[str, Any]) -> bool | str:
    if model.has("bias") and model.data["bias"] == "qkv":
        return "qkv"
    if model.has("bias") and not isinstance(model.data["bias"], bool):
        raise model.wrong("bias", "true, false or qkv is needed")
    return model.truth("bias", style["bias"])


def _attention(model: Fields, hidden: int, style: dict[str, Any]) -> Attention:
    heads = model.whole("heads")
    kv_heads = model.whole("kv_heads", heads, most=heads)
    if heads % kv_heads:
        raise model.wrong("kv_heads", f"a divisor of heads = {heads} is needed")
    latent = None
    if model.has("latent"):
        latent = _latent(model.inner("latent"))
        width = model.whole("head_width", latent.nope_width + latent.rope_width)
        if width != latent.nope_width + latent.rope_width:
            raise model.wrong("head_width", f"{latent.nope_width + latent.rope_width}, as latent has it, is needed")
    elif not model.has("head_width") and hidden % heads:
        raise model.wrong("heads", f"a divisor of hidden = {hidden} is needed, or a head_width")
    else:
        width = model.whole("head_width", hidden // heads)
    value_width = model.whole("value_width", width if latent is None else latent.nope_width)
    bias = _bias(model, style)
    norm = model.choice("qk_norm", ("none", "head", "all"), "none")
    return Attention(
        heads,
        kv_heads,
        width,
        value_width,
        bias=bool(bias),
        output_bias=bias is True,
        latent=latent,
        window=model.maybe_whole("window"),
        qk_norm="head" if norm == "head" else "all" if norm == "all" else "none",
    )


def _latent(latent: Fields) -> Latent:
    found = Latent(
        query_rank=latent.maybe_whole("query_rank"),
        kv_rank=latent.whole("kv_rank"),
        rope_width=latent.whole("rope_width"),
        nope_width=latent.whole("nope_width"),
    )
    latent.done()
    return found


def _experts(model: Fields, gated: bool, layers: int) -> tuple[Experts | None, int]:
    """The experts and how many layers before them have none."""
    if not model.has("experts"):
        return None, 0
    given = model.inner("experts")
    count = given.whole("count")
    per_token = given.whole("per_token", most=count)
    width = given.whole("width")
    shared = given.whole("shared", 0, least=0)
    shared_width = given.whole("shared_width", width if shared else 0, least=int(shared > 0))
    groups = given.whole("groups", 1, most=count)
    chosen = given.whole("groups_per_token", groups, most=groups)
    dense_layers = given.whole("dense_layers", 0, least=0, most=layers - 1)
    given.done()
    if count % groups:
        raise given.wrong("groups", f"a divisor of count = {count} is needed")
    if shared_width and not shared:
        raise InputError(f"{given.place}: shared_width: {shared_width} without shared experts; shared is needed")
    with at(given.place):
        return Experts(count, per_token, width, gated, shared, shared_width, groups, chosen), dense_layers
