"""A transformer as the planner sees it: widths and counts, layer by layer, and how many parameters they make.

A layer is attention and either one MLP or a set of experts, each with the norms before (or after) it. All widths are
in elements, all counts of parameters are exact: a test holds them equal to those of the modules that `transformers`
builds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from stageloom.errors import InputError

MOST_LAYERS: Final = 2_000
"""A model has no more: those published have up to a few hundred, and to spread layers takes their number squared."""


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: keys and values come from one short vector (arXiv 2405.04434, section 2.1).

    query_rank: width of the compressed queries, None where queries are not compressed; kv_rank: of the compressed
    keys and values; a head's query and key have `nope_width` elements from these and `rope_width` with rotary
    positions.
    """

    query_rank: int | None
    kv_rank: int
    rope_width: int
    nope_width: int


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal self-attention. Grouped queries: `kv_heads` heads of keys and values serve `heads` heads of queries.

    head_width: of a query and a key; value_width: of a value. bias: on the query, key and value projections (with
    `latent`: on the two projections down); output_bias: on the output's. qk_norm: norms on queries and keys, one for
    the width of a head ("head") or for all heads' ("all"). window: how many tokens back a token sees, None for all.
    """

    heads: int
    kv_heads: int
    head_width: int
    value_width: int
    bias: bool = False
    output_bias: bool = False
    latent: Latent | None = None
    window: int | None = None
    qk_norm: Literal["none", "head", "all"] = "none"

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise InputError(f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly")
        if self.latent is not None and self.head_width != self.latent.nope_width + self.latent.rope_width:
            raise InputError(
                f"a head is {self.head_width} wide and its parts {self.latent.nope_width} + {self.latent.rope_width}"
            )


@dataclass(frozen=True, slots=True)
class Mlp:
    """Two projections, to `width` and back, or three where one gates another (SwiGLU and its kin)."""

    width: int
    gated: bool
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """`count` routed experts, `per_token` of them for a token, beside `shared` experts that see every token.

    width, shared_width: of one expert. Routing limited to `groups_per_token` of `groups` equal groups (DeepSeek-V3's
    node-limited routing; 1 of 1 where there is none). shared_gate: a learned scalar on the shared experts' output.
    """

    count: int
    per_token: int
    width: int
    gated: bool
    shared: int = 0
    shared_width: int = 0
    groups: int = 1
    groups_per_token: int = 1
    shared_gate: bool = False

    def __post_init__(self) -> None:
        if self.per_token > self.count:
            raise InputError(f"{self.per_token} experts a token are more than the {self.count} there are")
        if self.count % self.groups:
            raise InputError(f"{self.count} experts cannot make {self.groups} equal groups")
        if self.groups_per_token > self.groups:
            raise InputError(f"{self.groups_per_token} groups a token are more than the {self.groups} there are")
        if self.per_token > self.groups_per_token * (self.count // self.groups):
            raise InputError(f"{self.groups_per_token} groups a token hold fewer than {self.per_token} experts")


@dataclass(frozen=True, slots=True)
class Layer:
    """Attention and one of `mlp` and `experts`. parallel: both read the same input (GPT-NeoX), and are added.

    norms: how many norms of the hidden width (2 before attention and MLP; Phi has 1, Gemma 2 has 4); norm_bias: each
    has a bias beside its scale.
    """

    attention: Attention
    mlp: Mlp | None = None
    experts: Experts | None = None
    norm_bias: bool = False
    parallel: bool = False
    norms: int = 2

    def __post_init__(self) -> None:
        if (self.mlp is None) == (self.experts is None):
            raise InputError("a layer has either an MLP or experts")


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder-only language model.

    hidden: width of a token between layers; vocabulary: rows of the embedding, padding included; positions: rows of a
    learned position embedding, 0 without; tied: embedding and head are one matrix. predicted: multi-token-prediction
    modules (DeepSeek-V3, arXiv 2412.19437, section 2.2), each a layer like the last one, three norms and a projection
    of two hidden widths to one; they use the model's embedding and head. norm_bias: the last norm has a bias;
    head_bias: the head has one. context: the longest sequence that the configuration allows, None where it does not
    say. source: where the figures are from.
    """

    name: str
    hidden: int
    vocabulary: int
    layers: tuple[Layer, ...]
    positions: int = 0
    tied: bool = False
    predicted: int = 0
    norm_bias: bool = False
    head_bias: bool = False
    context: int | None = None
    source: str = ""

    def __post_init__(self) -> None:
        if not self.layers:
            raise InputError("a model has at least one layer")


@dataclass(frozen=True, slots=True)
class Count:
    """Parameters of one layer, by what is cut how.

    attention, mlp: cut by tensor parallelism. experts: all routed experts, cut by expert parallelism; experts_active:
    those that one token uses. shared: shared experts, which expert parallelism does not cut. router, norms: never
    cut.
    """

    attention: int
    mlp: int
    experts: int
    experts_active: int
    shared: int
    router: int
    norms: int

    @property
    def total(self) -> int:
        return self.attention + self.mlp + self.experts + self.shared + self.router + self.norms

    @property
    def active(self) -> int:
        """What a token passes through."""
        return self.total - self.experts + self.experts_active


def layer_parameters(model: Model, layer: Layer) -> Count:
    """Parameters of a layer of this model."""
    hidden, experts = model.hidden, layer.experts
    norms = layer.norms * _norm(hidden, layer.norm_bias) + _inner_norms(layer.attention)
    attention = _attention(hidden, layer.attention)
    if experts is None:
        mlp = 0 if layer.mlp is None else _mlp(hidden, layer.mlp.width, layer.mlp.gated, layer.mlp.bias)
        return Count(attention, mlp, experts=0, experts_active=0, shared=0, router=0, norms=norms)
    one = _mlp(hidden, experts.width, experts.gated)
    return Count(
        attention=attention,
        mlp=0,
        experts=experts.count * one,
        experts_active=experts.per_token * one,
        shared=experts.shared * _mlp(hidden, experts.shared_width, experts.gated),
        router=hidden * (experts.count + experts.shared_gate),
        norms=norms,
    )


def _attention(hidden: int, a: Attention) -> int:
    queries, values = a.heads * a.head_width, a.heads * a.value_width
    output = values * hidden + a.output_bias * hidden
    if a.latent is None:
        columns = queries + a.kv_heads * (a.head_width + a.value_width)
        return columns * (hidden + a.bias) + output
    down = a.latent.kv_rank + a.latent.rope_width
    up = a.latent.kv_rank * a.heads * (a.latent.nope_width + a.value_width)
    if a.latent.query_rank is None:
        return hidden * queries + down * (hidden + a.bias) + up + output
    return (down + a.latent.query_rank) * (hidden + a.bias) + up + a.latent.query_rank * queries + output


def _mlp(hidden: int, width: int, gated: bool, bias: bool = False) -> int:
    return (2 + gated) * hidden * width + bias * ((1 + gated) * width + hidden)


def _norm(width: int, bias: bool) -> int:
    return width * (1 + bias)


def _inner_norms(a: Attention) -> int:
    if a.latent is not None:
        return a.latent.kv_rank + (a.latent.query_rank or 0)
    if a.qk_norm == "none":
        return 0
    return 2 * a.head_width if a.qk_norm == "head" else (a.heads + a.kv_heads) * a.head_width


def embedding_parameters(model: Model) -> int:
    """Parameters of the token embedding and of learned positions."""
    return (model.vocabulary + model.positions) * model.hidden


def head_parameters(model: Model) -> int:
    """Parameters of the output projection, 0 where it is the embedding's matrix.

    Where first and last stage are not on one rank, both hold that matrix.
    """
    return (0 if model.tied else model.vocabulary * model.hidden) + model.head_bias * model.vocabulary


def final_norm_parameters(model: Model) -> int:
    """Parameters of the norm between the last layer and the head."""
    return _norm(model.hidden, model.norm_bias)


def predicted_parameters(model: Model) -> int:
    """Parameters of ONE multi-token-prediction module, without the embedding and head that it shares with the model."""
    return (
        layer_parameters(model, model.layers[-1]).total + 2 * model.hidden**2 + 3 * _norm(model.hidden, model.norm_bias)
    )


def total_parameters(model: Model) -> int:
    """All parameters, each counted once, without multi-token-prediction modules: the figure that is published."""
    layers = sum(layer_parameters(model, layer).total for layer in model.layers)
    return layers + embedding_parameters(model) + head_parameters(model) + final_norm_parameters(model)


def active_parameters(model: Model) -> int:
    """What one token uses: as `total_parameters`, but of the routed experts only those it is sent to."""
    idle = sum((c := layer_parameters(model, layer)).total - c.active for layer in model.layers)
    return total_parameters(model) - idle


def gpt(
    hidden: int, heads: int, layers: int, vocabulary: int = 51200, sequence: int = 2048, name: str = "gpt"
) -> Model:
    """GPT-2 and GPT-3 in these sizes: learned positions, biases everywhere, an MLP of four hidden widths, a tied head.

    Megatron-LM's papers train such models, with a vocabulary padded to 51,200. Raises InputError where a size is not
    above 0 or the heads do not divide the hidden width.
    """
    for key, value in (("hidden", hidden), ("heads", heads), ("layers", layers), ("vocabulary", vocabulary)):
        if value < 1:
            raise InputError(f"{key} = {value}; a whole number of at least 1 is needed")
    if sequence < 0:
        raise InputError(f"sequence = {sequence}; a whole number of at least 0 is needed")
    if hidden % heads:
        raise InputError(f"hidden = {hidden} cannot be cut into {heads} heads evenly")
    width = hidden // heads
    layer = Layer(
        Attention(heads, heads, width, width, bias=True, output_bias=True),
        Mlp(4 * hidden, gated=False, bias=True),
        norm_bias=True,
    )
    return Model(
        name,
        hidden,
        vocabulary,
        (layer,) * layers,
        positions=sequence,
        tied=True,
        norm_bias=True,
        context=sequence or None,
    )
