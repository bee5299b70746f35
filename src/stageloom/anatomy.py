"""Chunk anatomy: what one chunk is made of, and how much all-to-all a forward-backward pair hides.

A chunk is `layers` mixture-of-experts transformer layers of one stage. For one micro-batch a layer is

    forward     attention(F)  dispatch(F)  mlp(F)  combine(F)
    backward    combine(B)    mlp(B)  dispatch(B)  attention(B)     and the W parts mlp(W), attention(W)

where B is the gradient for the input and W the gradient for the weights. Dispatch and combine are
all-to-alls: each has a backward all-to-all and no W. Compute parts and all-to-alls run on two streams
of the rank, so the forward of one micro-batch can hide the all-to-alls of another one's backward, and
the other way round. Both streams are in-order queues, like CUDA streams: a part starts when the part
queued before it has ended *and* the part it takes its data from has ended.

Source of the queue order: DeepSeek-V3 (arXiv 2412.19437, section 3.2.1), Figure 4, which is a cycle:

    compute         MLP(B)  MLP(W)  MLP(F)  ATTN(B)  ATTN(W)  ATTN(F)
    communication   DISPATCH(F)  DISPATCH(B)  COMBINE(F)  PP  COMBINE(B)

The figure does not say where in the cycle a pair starts. The profile published beside it does
(github.com/deepseek-ai/profile-data, train.json, the ranges under "1F1B", four layers): each layer
starts with combine(B) under attn(F), and ends with combine(F) under attn(B) and attn(W).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, Literal

from stageloom.errors import InputError

Stream = Literal["compute", "communication"]
Part = Literal["attention", "dispatch", "mlp", "combine", "boundary"]
Direction = Literal["forward", "backward", "both"]
Kind = Literal["F", "B", "W", "PP"]


@dataclass(frozen=True, slots=True)
class Parts:
    """How long each part of ONE layer takes for one micro-batch, alone on the rank.

    Any time unit; every result is in the same one. A part left at None takes as long as its forward.
    """

    attention: float
    dispatch: float
    mlp: float
    combine: float
    attention_b: float | None = None
    attention_w: float | None = None
    mlp_b: float | None = None
    mlp_w: float | None = None
    dispatch_b: float | None = None
    combine_b: float | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """One part on its stream, from `start` to `end` (the pair starts at 0).

    `layer` counts in forward order in both directions: a backward starts at the highest one. The
    "boundary" span belongs to the whole chunk: direction "both", kind "PP", the highest layer.
    """

    stream: Stream
    part: Part
    direction: Direction
    kind: Kind
    layer: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Exposed:
    """The part of one communication during which the compute stream stood idle (`time` > 0)."""

    part: Part
    direction: Direction
    layer: int
    time: float


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Times of a chunk and of a forward-backward pair, in the unit of the parts.

    forward, backward_input, backward_weight
        F, B and W of one chunk alone: its parts one after another, nothing overlapped.
    backward
        The full backward of one chunk alone, B + W.
    pair, pair_input
        F of one micro-batch overlapped with B + W, and with B only, of another micro-batch.
    hidden, hidden_dispatch, hidden_combine
        Of the time during which an all-to-all (any, a dispatch, a combine) runs in the pair, the share
        during which the compute stream is busy: 0 to 1, or None where no all-to-all takes any time.
    exposed
        The rest, communication by communication in the order they start; boundary messages too.
    spans
        The pair, for drawing, by start time. `hidden`, `exposed` and `spans` describe `pair`, or
        `pair_input` where `anatomy` was called with weight=False.
    """

    forward: float
    backward_input: float
    backward_weight: float
    backward: float
    pair: float
    pair_input: float
    hidden: float | None
    hidden_dispatch: float | None
    hidden_combine: float | None
    exposed: tuple[Exposed, ...]
    spans: tuple[Span, ...]


def anatomy(
    parts: Parts, *, layers: int = 1, sm_share: float = 0.0, boundary: float = 0.0, weight: bool = True
) -> Anatomy:
    """Times of a chunk of `layers` layers, and of the pair that overlaps two micro-batches.

    layers
        Layers in the chunk. The forward's layer k runs beside the backward's layer layers - 1 - k.
    sm_share
        Share of the SMs that a running communication takes from compute: compute beside communication
        takes 1 / (1 - sm_share) times as long. Compute alone runs at full speed, and communication is
        never slowed. DeepSeek-V3 gives communication 20 of 132 SMs (section 3.2.2).
    boundary
        Time of the pair's exchange with the neighbouring stages ("PP" in Figure 4): the activation one
        way, the gradient the other way, at once. It closes the pair on the communication stream, once
        both are there. The chunk times F, B and W do not contain it.
    weight
        False: `hidden`, `exposed` and `spans` describe the pair without W parts.

    With c and d the total compute and communication of a pair, at any sm_share
    max(c, d) <= pair <= forward + backward + boundary; with d = 0, pair is forward + backward.

    Raises InputError for a time that is negative or not finite, layers below 1, sm_share not in [0, 1).
    """
    for field in fields(parts):
        value = getattr(parts, field.name)
        if value is not None or field.default is MISSING:
            _check_time(field.name, value)
    _check_time("boundary", boundary)
    if not isinstance(layers, Integral) or not _is_number(layers) or layers < 1:
        raise InputError(f"layers is {layers!r}; it must be a whole number of layers, at least 1")
    if not _is_number(sm_share) or not 0 <= float(sm_share) < 1:
        raise InputError(f"sm_share is {sm_share!r}; it must be a share of the SMs, at least 0 and below 1")
    layers, sm_share = int(layers), float(sm_share)

    lengths = _lengths(parts)
    full, full_idle = _play(_pair(lengths, layers, boundary, "FBW"), sm_share)
    input_only, input_only_idle = _play(_pair(lengths, layers, boundary, "FB"), sm_share)
    spans, idle = (full, full_idle) if weight else (input_only, input_only_idle)

    def alone(wanted: Kind) -> float:
        return layers * math.fsum(length for (_, kind), length in lengths.items() if kind == wanted)

    return Anatomy(
        forward=alone("F"),
        backward_input=alone("B"),
        backward_weight=alone("W"),
        backward=alone("B") + alone("W"),
        pair=max(span.end for span in full),
        pair_input=max(span.end for span in input_only),
        hidden=_hidden(spans, idle, {"dispatch", "combine"}),
        hidden_dispatch=_hidden(spans, idle, {"dispatch"}),
        hidden_combine=_hidden(spans, idle, {"combine"}),
        exposed=tuple(
            Exposed(span.part, span.direction, span.layer, time)
            for span, time in zip(spans, idle, strict=True)
            if time > 0
        ),
        spans=tuple(spans),
    )


# The queue order of one layer pair; the module's docstring says where it comes from.
# fmt: off
_COMPUTE: tuple[tuple[Part, Kind], ...] = (
    ("attention", "F"), ("mlp", "B"), ("mlp", "W"), ("mlp", "F"), ("attention", "B"), ("attention", "W"),
)
_COMMUNICATION: tuple[tuple[Part, Kind], ...] = (
    ("combine", "B"), ("dispatch", "F"), ("dispatch", "B"), ("combine", "F"),
)
# fmt: on

# What data flows through within a layer. W parts are on no chain: nothing in the pair waits for them,
# and their own data is there because B of the same part is queued before them.
_FORWARD: tuple[Part, ...] = ("attention", "dispatch", "mlp", "combine")
_BACKWARD: tuple[Part, ...] = ("combine", "mlp", "dispatch", "attention")

_Key = tuple[Part, Kind, int]  # part, kind, layer

# Two parts that should end together can miss each other by rounding. Less than this share of the longest
# part left over counts as done: it keeps slivers of 1e-17 out of `exposed`.
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class _Queued:
    key: _Key
    length: float
    needs: tuple[_Key, ...]


def _lengths(parts: Parts) -> dict[tuple[Part, Kind], float]:
    lengths: dict[tuple[Part, Kind], float] = {}
    for part, kind in (*_COMPUTE, *_COMMUNICATION):
        forward = getattr(parts, part)
        own = forward if kind == "F" else getattr(parts, f"{part}_{kind.lower()}")
        lengths[part, kind] = float(forward if own is None else own)
    return lengths


def _pair(
    lengths: dict[tuple[Part, Kind], float], layers: int, boundary: float, kinds: str
) -> tuple[list[_Queued], list[_Queued]]:
    """The compute and the communication queue of a pair made of these kinds of parts."""
    forward: list[_Key] = [(part, "F", layer) for layer in range(layers) for part in _FORWARD]
    backward: list[_Key] = [(part, "B", layer) for layer in reversed(range(layers)) for part in _BACKWARD]
    needs = {later: (earlier,) for chain in (forward, backward) for earlier, later in pairwise(chain)}

    def queue(order: Sequence[tuple[Part, Kind]]) -> Iterator[_Queued]:
        for step in range(layers):
            for part, kind in order:
                if kind in kinds:
                    key: _Key = (part, kind, step if kind == "F" else layers - 1 - step)
                    yield _Queued(key, lengths[part, kind], needs.get(key, ()))

    compute, communication = list(queue(_COMPUTE)), list(queue(_COMMUNICATION))
    if boundary > 0:
        ends = (forward[-1], backward[-1])
        communication.append(_Queued(("boundary", "PP", layers - 1), float(boundary), ends))
    return compute, communication


def _play(queues: tuple[list[_Queued], list[_Queued]], sm_share: float) -> tuple[list[Span], list[float]]:
    """The spans by start time and, beside each, how long it was a communication next to idle compute.

    Speeds change only where a part starts or ends, so going from one such moment to the next is exact.
    """
    sliver = _ROUNDING * max(part.length for queue in queues for part in queue)
    waiting = [iter(queue) for queue in queues]
    head = [next(queue, None) for queue in waiting]
    start: list[float | None] = [None, None]  # when the head started; None while it waits for data
    left = [0.0, 0.0]  # what remains of the running head, in time at full speed
    idle = 0.0  # how long the running communication has run beside an idle compute stream
    done: set[_Key] = set()
    now = 0.0
    out: list[tuple[Span, float]] = []

    while any(head):
        for i, part in enumerate(head):
            if part is not None and start[i] is None and done.issuperset(part.needs):
                start[i], left[i] = now, part.length
        computing, communicating = (began is not None for began in start)
        speed = (1 - sm_share if communicating else 1.0, 1.0)
        step = min(left[i] / speed[i] for i in (0, 1) if start[i] is not None)
        now += step
        if communicating and not computing:
            idle += step
        for i, part in enumerate(head):
            began = start[i]
            if part is None or began is None:
                continue
            if left[i] / speed[i] - step > sliver:
                left[i] -= step * speed[i]
                continue
            done.add(part.key)
            out.append((_span(i, part.key, began, now), idle if i == 1 else 0.0))
            head[i], start[i] = next(waiting[i], None), None
            idle = 0.0 if i == 1 else idle
    out.sort(key=lambda row: (row[0].start, row[0].end, row[0].stream))
    return [span for span, _ in out], [time for _, time in out]


def _span(queue: int, key: _Key, start: float, end: float) -> Span:
    part, kind, layer = key
    stream: Stream = "communication" if queue else "compute"
    direction: Direction = "forward" if kind == "F" else "both" if kind == "PP" else "backward"
    return Span(stream, part, direction, kind, layer, start, end)


def _hidden(spans: Sequence[Span], idle: Sequence[float], names: set[Part]) -> float | None:
    total = math.fsum(span.end - span.start for span in spans if span.part in names)
    exposed = math.fsum(time for span, time in zip(spans, idle, strict=True) if span.part in names)
    return None if total == 0 else min(1.0, max(0.0, 1 - exposed / total))


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real)


def _check_time(name: str, value: Any) -> None:
    if not _is_number(value) or not math.isfinite(value) or value < 0:
        raise InputError(f"{name} is {value!r}; it must be a time: a finite number, 0 or more")
