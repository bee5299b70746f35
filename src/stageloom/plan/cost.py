"""Model, cluster, training and layout -> Costs: what the simulator takes.

Every stage's F, B and W are its layers' (`cost_layer`), with the embedding on the first stage and the last norm, head,
loss and multi-token-prediction modules on the last.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from stageloom.anatomy import Parts, anatomy
from stageloom.costs import Costs, Link
from stageloom.plan.cluster import Cluster
from stageloom.plan.constants import Constants, fitted
from stageloom.plan.cost_layer import LayerTimes, layer_times
from stageloom.plan.cost_setting import Pass, Setting
from stageloom.plan.cost_work import Machine, Tally, all_reduce, machine, ring
from stageloom.plan.layout import Layout
from stageloom.plan.memory_stage import StageBytes, stage_bytes, words_of
from stageloom.plan.model import Layer, Model, layer_parameters
from stageloom.plan.software import MODERN, Software
from stageloom.plan.training import Recompute, Training

LOSS_BYTES = 52.0
"""Bytes that go to and from memory for each logit: to FP32 and back, maximum, difference, exponential, sum, quotient,
and the gradient (Megatron-LM's vocab-parallel cross entropy)."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """One stage, one micro-batch, in seconds. work: F, B and W; joint: B and W as one. exposed: of `work`, the
    collectives inside a pass (tensor-parallel, all-to-all, gathers) that nothing hides. fraction: an overlapped pair
    over the sum of its two ops (1 where there is nothing to overlap)."""

    work: Pass
    joint: float
    exposed: Pass
    fraction: float


def setting(
    model: Model, cluster: Cluster, training: Training, layout: Layout, constants: Constants, software: Software
) -> Setting:
    """What the layers' times depend on. Raises InputError where the GPU has no products of the training's type."""
    return Setting(
        on=_machine(cluster, training.dtype, constants, training.scaling),
        constants=constants,
        software=software,
        hidden=model.hidden,
        sequence=training.sequence,
        microbatch=layout.microbatch,
        tensor=layout.tensor,
        expert=layout.expert,
        sequence_parallel=layout.sequence_parallel and layout.tensor > 1,
        rotary=model.positions == 0,
    )


_machine = lru_cache(maxsize=256)(machine)


def counts(layers: Iterable[tuple[Layer, Recompute]]) -> list[tuple[tuple[Layer, Recompute], int]]:
    """Layers that are one object, counted: a model repeats few, and to compare them by value takes long."""
    found: dict[tuple[int, str], tuple[tuple[Layer, Recompute], int]] = {}
    for one in layers:
        key = (id(one[0]), one[1])
        found[key] = (one, found[key][1] + 1 if key in found else 1)
    return list(found.values())


def stages_of(model: Model, layout: Layout) -> list[list[tuple[Layer, Recompute]]]:
    """The layers of every stage, each with what is recomputed of it."""
    rest = iter(zip(model.layers, words_of(model, layout), strict=True))
    return [[next(rest) for _ in range(count)] for count in layout.layers]


def stage_times(model: Model, layout: Layout, s: Setting, share: float) -> list[StageTimes]:
    """Times of every stage. share: of the multiprocessors, for communication beside compute."""
    stages = stages_of(model, layout)
    known: dict[Any, StageTimes] = {}
    out: list[StageTimes] = []
    for at, layers in enumerate(stages):
        first, last = at == 0, at == len(stages) - 1
        key = (first, last, tuple((id(layer), word) for layer, word in layers))
        if key not in known:
            ends = (embedding(model, s) if first else Pass()) + (head(model, s) if last else Pass())
            extra = model.predicted if last else 0
            known[key] = _stage(model, layout, s, layers, ends, extra, share)
        out.append(known[key])
    return out


def _stage(
    model: Model,
    layout: Layout,
    s: Setting,
    layers: list[tuple[Layer, Recompute]],
    ends: Pass,
    predicted: int,
    share: float,
) -> StageTimes:
    forward, backward, weight, joint = ends.forward, ends.backward, ends.weight, ends.backward + ends.weight
    exposed = Pass()
    whole = paired = forward + joint
    counted: list[tuple[tuple[Layer, Recompute], int]] = counts(layers)
    if predicted:
        more = head(model, s, projection=True)
        forward, backward, weight = (
            forward + predicted * more.forward,
            backward + predicted * more.backward,
            weight + predicted * more.weight,
        )
        joint += predicted * (more.backward + more.weight)
        whole, paired = whole + predicted * more.total, paired + predicted * more.total
        module: tuple[Layer, Recompute] = (model.layers[-1], words_of(model, layout)[-1])
        counted.append((module, predicted))
    for (layer, word), count in counted:
        one = layer_times(layer, s, word)
        gathers = _gathers(model, layout, s, layer, one)
        forward += count * (one.F + gathers.forward)
        backward += count * (one.B + gathers.backward)
        weight += count * one.W
        joint += count * (one.BW + gathers.backward)
        inside = one.tensor + one.dispatch + one.combine + gathers
        exposed += Pass(count * inside.forward, count * inside.backward)
        alone = one.F + one.BW
        whole += count * alone
        paired += count * min(1.0, pair_fraction(one, share) if one.dispatch.forward else 1.0) * alone
    return StageTimes(Pass(forward, backward, weight), joint, exposed, paired / whole if whole else 1.0)


def _gathers(model: Model, layout: Layout, s: Setting, layer: Layer, one: LayerTimes) -> Pass:
    """ZeRO 2 scatters a micro-batch's gradients, ZeRO 3 gathers parameters for both passes: what compute leaves."""
    if layout.zero < 2 or layout.data < 2:
        return Pass()
    size = 2.0 * (layer_parameters(model, layer).total - layer_parameters(model, layer).experts) / layout.tensor
    scatter = ring(s.on, 2.0 * size, layout.data, layout.tensor)
    gather = ring(s.on, size, layout.data, layout.tensor) if layout.zero == 3 else 0.0
    return Pass(max(0.0, gather - one.F), max(0.0, gather + scatter - one.BW))


@lru_cache(maxsize=1024)
def pair_fraction(one: LayerTimes, share: float) -> float:
    """The overlapped pair of two micro-batches over the sum of its halves, for a layer of experts.

    share: of the multiprocessors, set aside for communication as long as the pair runs: compute has the rest, whether
    something is being sent or not (DeepSeek-V3, section 3.2.2; its profile's kernels run on 112 of 132 throughout).
    Tensor-parallel collectives stay with attention."""
    attention, mlp, both, slower = one.attention, one.mlp, one.tensor, 1.0 / (1.0 - share)
    parts = Parts(
        attention=attention.forward * slower + both.forward,
        dispatch=one.dispatch.forward,
        mlp=mlp.forward * slower,
        combine=one.combine.forward,
        attention_b=(attention.backward + one.recompute) * slower + both.backward,
        attention_w=attention.weight * slower,
        mlp_b=mlp.backward * slower,
        mlp_w=mlp.weight * slower,
        dispatch_b=one.dispatch.backward,
        combine_b=one.combine.backward,
    )
    return anatomy(parts, layers=4).pair / (4.0 * (one.gpu.total))


@lru_cache(maxsize=1024)
def _embedding(hidden: int, positions: int, s: Setting) -> Pass:
    n = s.tokens * hidden
    forward = Tally(s.on).moved(4.0 * n)
    if positions:
        forward.moved(6.0 * n)
    if s.software.dropout:
        forward.moved(5.0 * n)
    backward = Tally(s.on).moved(8.0 * n, 2)
    reduce = all_reduce(s.on, 2.0 * n, s.tensor)
    return Pass(forward.seconds + reduce, 0.0, backward.seconds)


def embedding(model: Model, s: Setting) -> Pass:
    """Looking up tokens and positions. Its backward pass is a W: no input wants a gradient."""
    return _embedding(model.hidden, model.positions, s)


@lru_cache(maxsize=1024)
def _head(hidden: int, vocabulary: int, s: Setting, projection: bool) -> Pass:
    n, rows = s.tokens, vocabulary / s.tensor
    forward = Tally(s.on).product(n, rows, hidden).moved((LOSS_BYTES - 14.0) * n * rows, 6)
    forward.moved(4.0 * n * hidden / s.cut)
    backward = Tally(s.on).moved(14.0 * n * rows, 2).product(n, hidden, rows).moved(10.0 * n * hidden / s.cut)
    weight = Tally(s.on).product(rows, hidden, n, out=8.0)
    if projection:  # of a multi-token-prediction module: two hidden widths to one, and two more norms
        forward.product(n, hidden, 2 * hidden / s.tensor).moved(8.0 * n * hidden)
        backward.product(n, 2 * hidden / s.tensor, hidden).moved(20.0 * n * hidden)
        weight.product(2 * hidden / s.tensor, hidden, n, out=8.0)
    reduce = all_reduce(s.on, 2.0 * n * hidden, s.tensor)
    host = s.constants.host_head
    return Pass(max(forward.seconds, host / 3), max(backward.seconds + reduce, host / 3), max(weight.seconds, host / 3))


def head(model: Model, s: Setting, projection: bool = False) -> Pass:
    """The last norm, the product with the vocabulary, and the loss."""
    return _head(model.hidden, model.vocabulary, s, projection)


def stage_costs(
    model: Model,
    cluster: Cluster,
    training: Training,
    layout: Layout,
    constants: Constants | None = None,
    software: Software = MODERN,
    *,
    paths: int = 1,
) -> Costs:
    """Costs of every stage in seconds and bytes, for `simulate` with a schedule of `layout.pipeline` ranks.

    paths: of the schedule (2: each rank holds two stages, its own and its mirror's, and optimiser state is sharded over
    both replicas). F, B, W and BW have one number a stage, as have bytes of activations, parameters, gradients and
    optimiser state.
    """
    constants = fitted() if constants is None else constants
    s = setting(model, cluster, training, layout, constants, software)
    times = stage_times(model, layout, s, training.communication_share)
    held = stage_bytes(model, training, layout, s, paths)
    return costs_of(times, held, s, layout)


def costs_of(times: list[StageTimes], held: list[StageBytes], s: Setting, layout: Layout) -> Costs:
    """The stages' times and bytes as one value; a message takes the slower kind of link unless all are inside nodes."""
    on, alone = s.on, layout.pipeline == 1
    size = 2.0 * s.tokens * s.hidden
    scattered = s.cut > 1 or s.software.scattered_messages
    sent = size / layout.tensor if scattered else size
    between, links = _links(on, layout, sent, size)
    latency = s.constants.message
    if scattered and s.cut == 1 and layout.tensor > 1:  # put together again beyond
        latency += ring(on, size, layout.tensor)
    kept = sum(one.activations for one in held)
    # One number for all pairs: how much the average stage's work shrinks where it is overlapped.
    whole = sum(one.work.forward + one.joint for one in times)
    paired = sum((one.work.forward + one.joint) * one.fraction for one in times)
    return Costs(
        unit="s",
        F=[one.work.forward for one in times],
        B=[one.work.backward for one in times],
        W=[one.work.weight for one in times],
        BW=[one.joint for one in times],
        overlap_fraction=paired / whole if whole else 1.0,
        latency=0.0 if alone else latency,
        bandwidth=None if alone else between,
        message_bytes=0.0 if alone else sent,
        blocking=s.software.waits_for_messages and not alone,
        links=() if alone else links,
        activation_bytes=[one.activations for one in held],
        w_share=sum(one.for_weights for one in held) / kept if kept else 0.5,
        parameter_bytes=[one.parameters for one in held],
        gradient_bytes=[one.gradients for one in held],
        optimizer_bytes=[one.optimizer for one in held],
        tokens=float(s.tokens),
    )


def _links(on: Machine, layout: Layout, sent: float, size: float) -> tuple[float, tuple[Link, ...]]:
    """Bandwidth of a message, and the links that differ. Ranks of a pipeline stand tensor x data GPUs apart."""
    stride, ranks = layout.tensor * layout.data, layout.pipeline
    if stride * ranks <= on.node:
        return on.inside, ()
    if stride >= on.node:
        return on.between, ()
    near = [(r, (r + 1) % ranks) for r in range(ranks) if r * stride // on.node == (r + 1) % ranks * stride // on.node]
    both = dict.fromkeys([*near, *((b, a) for a, b in near)])
    links = (Link.model_validate({"from": a, "to": b, "bandwidth": on.inside}) for a, b in both if a != b)
    return on.between, tuple(links)
