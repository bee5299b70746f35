"""Bytes of one stage: what it keeps of a micro-batch between F and its backward, and what it holds all the time.

Activations are counted kernel input by kernel input, as in arXiv 2205.05198, section 4.1; for its GPT layers the sums
are the formulas of its table 2 (a test holds them equal).
"""

from __future__ import annotations

from dataclasses import dataclass

from stageloom.plan.cost_setting import Setting
from stageloom.plan.layout import Layout
from stageloom.plan.model import (
    Layer,
    Model,
    embedding_parameters,
    final_norm_parameters,
    layer_parameters,
)
from stageloom.plan.training import OPTIMIZERS, Recompute, Training


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes on one GPU. activations: of one micro-batch, from F to its backward; for_weights: what stays, or is made by
    B, until W: inputs of products with weights, and gradients of their outputs. parameters, gradients, optimizer: held
    all the time. working: the most that a pass needs beside them while it runs. dense, routed: parameters on this GPU
    without and of routed experts."""

    activations: float
    for_weights: float
    parameters: float
    gradients: float
    optimizer: float
    working: float
    dense: float
    routed: float

    @property
    def count(self) -> float:
        """Parameters on this GPU, sharded or not."""
        return self.dense + self.routed


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes that one layer keeps of a micro-batch; for_weights: from B to W; whole: without recomputation."""

    bytes: float
    for_weights: float
    whole: float


def layer_kept(layer: Layer, s: Setting, recompute: Recompute) -> Kept:
    """What a layer keeps of a micro-batch.

    Selective recomputation drops attention's scores (unfused) or, where attention is fused, what is cheap to make
    again: outputs of norms and of the MLP's activation, whose inputs are kept as products take them (8 bits where they
    do), and the queries, keys and values of latent attention (DeepSeek-V3, sections 3.2.3 and 3.3.3).

    From B to W stay, whether recomputed or not, the inputs of products with weights and the gradients of their outputs:
    32 bytes a token and hidden unit in a GPT layer (arXiv 2401.10241, table 1: 14 of inputs, 18 of gradients)."""
    a, t, n = layer.attention, s.tensor, float(s.tokens)
    drop, fused = s.software.dropout, s.software.attention == "fused"
    width = s.on.width  # bytes of a product's inputs
    hidden, heads, keys = n * s.hidden, a.heads / t, max(a.kv_heads / t, 1.0)
    norms = 2.0 * layer.norms * hidden / s.cut
    masks = 2.0 * drop * hidden / s.cut
    # Tensor-parallel halves read the whole sequence; with sequence parallelism each GPU keeps its part of it.
    normed = width * hidden / s.cut
    latents = 0.0
    if a.latent is not None:  # before and after their norms
        latents = (2.0 + width) * n * (a.latent.kv_rank + (a.latent.query_rank or 0))
    core = 2.0 * n * (heads * a.head_width + keys * (a.head_width + a.value_width))
    out = 2.0 * n * heads * a.value_width  # of attention: fused, its backward wants it; and the projection's input
    scores = 4.0 * n * heads if fused else (2.0 + 3.0 * drop) * s.microbatch * heads * s.sequence**2
    out += width * n * heads * a.value_width if fused and width == 1.0 else 0.0
    middle = _middle(layer, s)
    whole = norms + masks + normed + latents + core + out + scores + middle.bytes
    inputs = normed + width * n * heads * a.value_width + middle.inputs
    gradients = width * (n * (heads * a.head_width + keys * (a.head_width + a.value_width)) + hidden / s.cut)
    gradients += middle.gradients
    if a.latent is not None:  # of products down, and into those up
        small = width * n * (a.latent.kv_rank + (a.latent.query_rank or 0))
        inputs, gradients = inputs + small, gradients + small + width * n * a.latent.rope_width
    kept = whole
    if recompute == "full":
        kept = 2.0 * hidden / s.cut
    elif recompute == "selective" and fused:
        kept -= normed + middle.again + (core if a.latent is not None else 0.0)
    elif recompute == "selective":
        kept -= scores
    return Kept(kept, inputs + gradients, whole)


@dataclass(frozen=True, slots=True)
class Middle:
    """What an MLP or experts keep; inputs: of products with weights; gradients: of their outputs, from B to W; again:
    what selective recomputation saves."""

    bytes: float
    inputs: float
    gradients: float
    again: float


def _middle(layer: Layer, s: Setting) -> Middle:
    n, t, width = float(s.tokens), s.tensor, s.on.width
    normed = width * n * s.hidden / s.cut
    if layer.experts is None:
        assert layer.mlp is not None
        wide, ways = n * layer.mlp.width / t, 1 + layer.mlp.gated
        arriving, leaving = 0.0, width * n * s.hidden / s.cut
    else:
        e = layer.experts
        tokens = n / t * e.per_token
        wide, ways = tokens * e.width + n * e.shared * e.shared_width / t, 1 + e.gated
        arriving = width * tokens * s.hidden + 2.0 * n / t * s.hidden  # at their experts; and the router's input
        leaving = width * tokens * s.hidden + width * n * s.hidden / s.cut * bool(e.shared)
    inputs = normed + arriving + width * wide
    again = normed + width * wide + (2.0 - width) * ways * wide
    return Middle(inputs + 2.0 * ways * wide, inputs, width * ways * wide + leaving, again)


def words_of(model: Model, layout: Layout) -> tuple[Recompute, ...]:
    """What is recomputed of every layer."""
    return layout.recompute if isinstance(layout.recompute, tuple) else (layout.recompute,) * len(model.layers)


def stage_bytes(model: Model, training: Training, layout: Layout, s: Setting, paths: int = 1) -> list[StageBytes]:
    """Bytes of every stage of a path, first stage first."""
    words = words_of(model, layout)
    known: dict[tuple[int, Recompute], tuple[Kept, float, float]] = {}
    rest = iter(zip(model.layers, words, strict=True))
    out: list[StageBytes] = []
    for at, count in enumerate(layout.layers):
        layers = [next(rest) for _ in range(count)]
        last = at == len(layout.layers) - 1
        if last:
            module: tuple[Layer, Recompute] = (model.layers[-1], words[-1])
            layers += [module] * model.predicted
        kept = stays = dense = routed = working = 0.0
        for layer, word in layers:
            key = (id(layer), word)
            if key not in known:
                known[key] = (layer_kept(layer, s, word), *_parameters(model, layer, layout))
            one, of_layer, of_experts = known[key]
            kept, stays = kept + one.bytes, stays + one.for_weights
            dense, routed = dense + of_layer, routed + of_experts
            working = max(working, one.whole - one.bytes)
        if at == 0:
            dense += embedding_parameters(model) / s.tensor
            kept += s.software.dropout * s.tokens * s.hidden / s.cut
        if last:
            one, later, of_head, scratch = _head(model, layout, s)
            kept, stays, dense, working = kept + one, stays + later, dense + of_head, working + scratch
        out.append(_held(kept, stays, dense, routed, working, training, layout, paths))
    return out


def _parameters(model: Model, layer: Layer, layout: Layout) -> tuple[float, float]:
    """(parameters but for routed experts, of routed experts) of a layer on one GPU."""
    count = layer_parameters(model, layer)
    cut = (count.attention + count.mlp + count.shared) / layout.tensor
    return cut + count.router + count.norms, count.experts / layout.expert


def _head(model: Model, layout: Layout, s: Setting) -> tuple[float, float, float, float]:
    """(activations, what stays until W, parameters, scratch) of last norm, head and loss, and of what multi-token
    prediction adds."""
    heads = 1 + model.predicted
    logits = s.tokens * model.vocabulary / s.tensor
    kept = heads * (4.0 * s.tokens * s.hidden / s.cut + 4.0 * logits)
    matrix = model.vocabulary * model.hidden / s.tensor
    # A tied head is the embedding's matrix where one GPU has both, and a copy of it where not.
    here = 0.0 if model.tied and layout.stages == 1 else matrix
    if model.predicted and layout.stages > 1:  # the modules embed as well
        here += matrix
    modules = model.predicted * 2.0 * model.hidden**2
    stays = heads * (2.0 * s.tokens * s.hidden / s.cut + 2.0 * logits)
    return kept, stays, here + modules + final_norm_parameters(model), 4.0 * logits


def _held(
    kept: float,
    stays: float,
    dense: float,
    routed: float,
    working: float,
    training: Training,
    layout: Layout,
    paths: int,
) -> StageBytes:
    """Parameters, gradients and optimiser state of `dense` + `routed` parameters, as far as ZeRO leaves them here."""
    replicas = layout.data * paths
    of_experts = max(1.0, layout.data * layout.tensor / layout.expert * paths)

    def sharded(stage: int) -> float:
        """Parameters that are held, where ZeRO shards them from `stage` on."""
        return dense / replicas + routed / of_experts if layout.zero >= stage else dense + routed

    gradient = 4.0 if training.gradients == "fp32" else 2.0
    return StageBytes(
        activations=kept,
        for_weights=stays,
        parameters=2.0 * sharded(3),
        gradients=gradient * sharded(2),
        optimizer=OPTIMIZERS[training.optimizer] * sharded(1),
        working=working,
        dense=dense,
        routed=routed,
    )
