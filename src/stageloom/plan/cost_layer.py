"""What one layer takes for one micro-batch, by part and pass: the kernels it runs, one after another.

The lists of kernels are those of GPT layers in Megatron-LM (arXiv 1909.08053; bytes as counted in arXiv 2205.05198,
section 4.1), and their modern kin: gated MLPs, grouped queries, rotary positions, latent attention, experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from stageloom.plan.cost_experts import all_to_all, exchange
from stageloom.plan.cost_setting import Pass, Setting
from stageloom.plan.cost_work import Tally, ring
from stageloom.plan.model import Attention, Experts, Layer, Mlp
from stageloom.plan.training import Recompute


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """One layer, one micro-batch. attention, mlp: with the norm before and the residual after them; for a layer of
    experts, `mlp` is experts, shared ones and router. tensor: collectives that nothing hides. dispatch, combine: the
    all-to-alls of the forward and of the backward pass. recompute: what the backward pass does again. host_*: the
    host's time; a pass takes no less."""

    attention: Pass
    mlp: Pass
    tensor: Pass
    dispatch: Pass
    combine: Pass
    recompute: float
    host_forward: float
    host_backward: float
    host_recompute: float

    @property
    def gpu(self) -> Pass:
        both = self.attention + self.mlp + self.tensor + self.dispatch + self.combine
        return Pass(both.forward, both.backward + self.recompute, both.weight)

    @property
    def F(self) -> float:
        return max(self.gpu.forward, self.host_forward)

    @property
    def B(self) -> float:
        return max(self.gpu.backward, self.host_backward * BACKWARD_SHARE + self.host_recompute)

    @property
    def W(self) -> float:
        return max(self.gpu.weight, self.host_backward * (1 - BACKWARD_SHARE))

    @property
    def BW(self) -> float:
        return max(self.gpu.backward + self.gpu.weight, self.host_backward + self.host_recompute)


BACKWARD_SHARE = 0.7
"""Of the kernels of a backward pass, those for the gradient of the input."""

FUSED_SOFTMAX_ROWS = 4
"""Megatron-LM's fused softmax wants this to divide micro-batch x heads on a GPU; else several kernels do its work."""


@lru_cache(maxsize=4096)
def layer_times(layer: Layer, setting: Setting, recompute: Recompute) -> LayerTimes:
    """Times of `layer`; parts that several layouts share are computed once."""
    attention, core = _attention(layer.attention, setting)
    edges = _edges(layer, setting)
    tensor, hidden_under = _collectives(layer, setting)
    dispatch = combine = Pass()
    if layer.experts is not None:
        mlp, dispatch, combine = _experts(layer.experts, setting)
    else:
        assert layer.mlp is not None
        mlp = _mlp(layer.mlp, setting, setting.tokens)
    attention += edges[0]
    mlp += edges[1]
    free = attention.weight + mlp.weight + (mlp.backward if setting.sequence_parallel else 0.0)
    tensor = Pass(tensor.forward, tensor.backward + max(0.0, hidden_under - free))
    again, host_again = 0.0, 0.0
    host = _host(layer, setting)
    if recompute == "full":
        again, host_again = (attention + mlp + tensor + dispatch + combine).forward, host[0]
    elif recompute == "selective":
        again = core if setting.software.attention == "unfused" else _cheap(layer, setting)
    return LayerTimes(attention, mlp, tensor, dispatch, combine, again, host[0], host[1], host_again)


def _cheap(layer: Layer, s: Setting) -> float:
    """What is worth doing again where attention is fused: norms, the MLP's activation, and latent attention's
    projections up (DeepSeek-V3, sections 3.2.3 and 3.3.3)."""
    again = Tally(s.on).moved(4.0 * layer.norms * s.tokens * s.hidden / s.cut, layer.norms).seconds
    if layer.experts is not None:
        wide = s.tokens / s.tensor * layer.experts.per_token * layer.experts.width
        again += _activation(s, wide, layer.experts.gated, False).forward
    elif layer.mlp is not None:
        again += _activation(s, s.tokens * layer.mlp.width / s.tensor, layer.mlp.gated, False).forward
    if layer.attention.latent is None:
        return again
    return again + _up(layer.attention, s, layer.attention.heads / s.tensor).forward


def _host(layer: Layer, s: Setting) -> tuple[float, float]:
    collectives = 2 * (s.tensor > 1) + 2 * (layer.experts is not None and s.expert > 1)
    more = collectives * s.constants.host_collective
    if s.software.attention == "unfused" and (s.microbatch * layer.attention.heads // s.tensor) % FUSED_SOFTMAX_ROWS:
        more += s.constants.host_softmax
    return s.constants.host_forward + more, s.constants.host_backward + collectives * s.constants.host_collective


def _linear(s: Setting, rows: float, inputs: float, outputs: float, batch: float = 1.0) -> Pass:
    """A projection: its product, the two of its gradients, casts to 8 bits, and adding to the sum of gradients."""
    forward = Tally(s.on).product(rows, outputs, inputs, batch=batch)
    backward = Tally(s.on).product(rows, inputs, outputs, batch=batch)
    fused = s.software.fused_accumulation
    weight = Tally(s.on).product(outputs, inputs, rows, batch=batch, out=8.0 if fused else 2.0)
    if not fused:
        weight.moved(6.0 * inputs * outputs * batch)
    if s.on.width == 1.0:  # cast to 8 bits: gradients along both dimensions, inputs back and along the other one
        forward.moved(3.0 * rows * inputs * batch)
        backward.moved(6.0 * rows * outputs * batch, 2)
        weight.moved(6.0 * rows * inputs * batch, 2)
    return Pass(forward.seconds, backward.seconds, weight.seconds)


def _attention(a: Attention, s: Setting) -> tuple[Pass, float]:
    """Projections and core; and the forward core alone, which selective recomputation repeats."""
    n, t = s.tokens, s.tensor
    heads = a.heads / t
    keys = max(a.kv_heads / t, 1.0)
    queries = heads * a.head_width
    if a.latent is None:
        ins = _linear(s, n, s.hidden, queries + keys * (a.head_width + a.value_width))
    else:
        ins = _latent(a, s, heads)
    out = _linear(s, n, heads * a.value_width, s.hidden)
    core = _unfused_core(a, s, heads) if s.software.attention == "unfused" else _fused_core(a, s, heads)
    moves = Tally(s.on)
    back = Tally(s.on)
    if s.software.attention == "unfused":  # transposing the output; backward, also joining three gradients to one
        moves.moved(4.0 * n * heads * a.value_width)
        back.moved(4.0 * n * heads * a.value_width)
        back.moved(4.0 * n * (queries + keys * (a.head_width + a.value_width)))
    if a.bias:
        back.moved(2.0 * n * (queries + keys * (a.head_width + a.value_width)))
    if s.rotary:
        turned = n * (heads + keys) * (a.latent.rope_width if a.latent else a.head_width)
        moves.moved(4.0 * turned)
        back.moved(4.0 * turned)
    return ins + out + core + Pass(moves.seconds, back.seconds), core.forward


def _latent(a: Attention, s: Setting, heads: float) -> Pass:
    assert a.latent is not None
    n, of = s.tokens, a.latent
    # The projections down are small and not cut by tensor parallelism.
    parts = _linear(s, n, s.hidden, of.kv_rank + of.rope_width)
    parts += _up(a, s, heads)
    return parts + _linear(s, n, s.hidden, heads * a.head_width if of.query_rank is None else of.query_rank)


def _up(a: Attention, s: Setting, heads: float) -> Pass:
    """From the short vectors to the heads' queries, keys and values."""
    assert a.latent is not None
    keys = _linear(s, s.tokens, a.latent.kv_rank, heads * (a.latent.nope_width + a.value_width))
    if a.latent.query_rank is None:
        return keys
    return keys + _linear(s, s.tokens, a.latent.query_rank, heads * a.head_width)


def _unfused_core(a: Attention, s: Setting, heads: float) -> Pass:
    length, batch = s.sequence, s.microbatch * heads
    scores = batch * length * length
    fused_softmax = (s.microbatch * a.heads // s.tensor) % FUSED_SOFTMAX_ROWS == 0
    forward = Tally(s.on).product(length, length, a.head_width, batch=batch, core=True)
    forward.scored((4.0 if fused_softmax else 12.0) * scores, 1 if fused_softmax else 3)
    forward.scored(5.0 * scores * s.software.dropout)
    forward.product(length, a.value_width, length, batch=batch, core=True)
    backward = Tally(s.on)
    for width in (a.head_width, a.value_width):
        backward.product(length, width, length, batch=batch, core=True)
        backward.product(length, length, width, batch=batch, core=True)
    backward.scored(6.0 * scores).scored(5.0 * scores * s.software.dropout)
    return Pass(forward.seconds, backward.seconds)


def _fused_core(a: Attention, s: Setting, heads: float) -> Pass:
    """FlashAttention: two products forward, five backward; causal, so half of the square (arXiv 2307.08691, 4.1)."""
    seen = min(a.window or s.sequence, s.sequence)
    pairs = seen * (s.sequence - seen / 2)
    flops = 2.0 * s.microbatch * heads * pairs * (a.head_width + a.value_width)
    return Pass(flops / s.on.attention_forward + s.on.kernel, 2.5 * flops / s.on.attention_backward + 3 * s.on.kernel)


def _mlp(mlp: Mlp, s: Setting, tokens: float) -> Pass:
    width = mlp.width / s.tensor
    ways = _linear(s, tokens, s.hidden, width * (1 + mlp.gated)) + _linear(s, tokens, width, s.hidden)
    return ways + _activation(s, tokens * width, mlp.gated, mlp.bias)


def _activation(s: Setting, elements: float, gated: bool, bias: bool) -> Pass:
    forward = Tally(s.on).moved((6.0 if gated else 4.0) * elements)
    backward = Tally(s.on).moved((10.0 if gated else 6.0) * elements).moved(2.0 * elements * bias)
    return Pass(forward.seconds, backward.seconds)


def _experts(e: Experts, s: Setting) -> tuple[Pass, Pass, Pass]:
    """Router, routed and shared experts; dispatch; combine. Each GPU routes its part of the sequence."""
    n = s.tokens / s.tensor
    here = e.count / s.expert
    arriving = n * e.per_token  # as many as leave, where experts are chosen evenly
    each = arriving / here
    mlp = _linear(s, each, s.hidden, e.width * (1 + e.gated), here) + _linear(s, each, e.width, s.hidden, here)
    mlp += _activation(s, arriving * e.width, e.gated, False)
    # Tokens are put in the experts' order and back.
    moves = Tally(s.on).moved(4.0 * arriving * s.hidden).moved(4.0 * arriving * s.hidden)
    mlp += Pass(moves.seconds, moves.seconds) + _linear(s, n, s.hidden, e.count)
    if e.shared:
        mlp += _mlp(Mlp(e.shared * e.shared_width, e.gated), s, s.tokens)
    sent = exchange(s.on, e, s.hidden, s.expert)
    narrow, wide = all_to_all(s.on, sent, n, s.on.width), all_to_all(s.on, sent, n, 2.0)
    # Gradients go the other way: the combine's backward sends like a dispatch, the dispatch's like a combine.
    return mlp, Pass(narrow, wide), Pass(wide, narrow)


def _edges(layer: Layer, s: Setting) -> tuple[Pass, Pass]:
    """Norms and residuals, with dropout where there is some: around attention, and around the MLP."""
    n = s.tokens * s.hidden / s.cut
    halves: list[Pass] = []
    for half in range(2):
        norms = (layer.norms + 1 - half) // 2
        forward, backward = Tally(s.on), Tally(s.on)
        for _ in range(norms):
            forward.moved(4.0 * n)
            backward.moved(6.0 * n)
        forward.moved((7.0 if s.software.dropout else 6.0) * n)
        backward.moved(7.0 * n * s.software.dropout).moved(6.0 * n)
        halves.append(Pass(forward.seconds, backward.seconds))
    return halves[0], halves[1]


def _collectives(layer: Layer, s: Setting) -> tuple[Pass, float]:
    """Tensor-parallel collectives that stand in the way, and those that the backward can hide.

    Without sequence parallelism each half of a layer all-reduces its output, and in the backward its input's gradient.
    With it the half gathers its input and scatters its output; the backward gathers the output's gradient, gathers the
    input again for the weight gradient, and scatters the input's gradient (arXiv 2205.05198, section 4.2.2)."""
    if s.tensor < 2:
        return Pass(), 0.0
    halves = 1 if layer.parallel or layer.experts is not None else 2
    one = halves * ring(s.on, 2.0 * s.tokens * s.hidden, s.tensor)
    if not s.sequence_parallel:
        hidden = 2.0 * one
        exposed = Pass(2.0 * one, 0.0)
    else:
        hidden = 2.0 * one
        exposed = Pass(2.0 * one, one)
    if s.software.tensor_overlap:
        return exposed, hidden
    return Pass(exposed.forward, exposed.backward + hidden), 0.0
