"""What a step takes beside its pipeline: reducing gradients, sharing them, gathering parameters, the optimiser."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stageloom.plan.cost_setting import Setting
from stageloom.plan.cost_work import all_reduce, ring
from stageloom.plan.layout import Layout
from stageloom.plan.memory_stage import StageBytes
from stageloom.plan.model import Model
from stageloom.plan.training import OPTIMIZERS, Training
from stageloom.simulate import Timeline

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Beside:
    """Seconds of a step outside the pipeline's passes.

    reduce: per rank, its gradients over its data-parallel replicas; exposed: of that, per rank, what does not run
    beside the last backward; spans: per rank, from the start of the step (where steps roll on: the rank's own first
    pass) until it has its reduced gradients; tied: the embedding's gradient between first and last stage; optimizer:
    its step; step: what the host does once a step."""

    reduce: Floats
    exposed: Floats
    spans: Floats
    tied: float
    optimizer: float
    step: float

    @property
    def last(self) -> int:
        """The rank that the step waits for."""
        return int(self.spans.argmax())

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return float(self.spans.max()) + self.tied + self.optimizer + self.step


def beside(
    model: Model, training: Training, layout: Layout, s: Setting, held: list[StageBytes], timeline: Timeline
) -> Beside:
    """When gradients are reduced and applied. A rank reduces as soon as its own last pass has ended (while it runs,
    where the software overlaps them): ranks that end early do so in the pipeline's bubble."""
    schedule = timeline.schedule
    table = schedule.placement.table
    paths, ranks = len(table), schedule.ranks
    reduce, count, state = np.zeros(ranks), np.zeros(ranks), OPTIMIZERS[training.optimizer]
    for path in table:
        for stage, rank in enumerate(path):
            reduce[rank] += _reduce(layout, s, held[stage], paths)
            count[rank] += held[stage].optimizer / state
    last = schedule.offsets[1:] - 1
    ends = np.maximum.reduceat(timeline.end, schedule.offsets[:-1])
    exposed = reduce
    if s.software.gradient_overlap:
        # The last layers' gradients are there first; what is left when the pass ends is its own share of the buckets.
        layers = max(1.0, sum(layout.layers) / layout.stages)
        room = timeline.end[last] - timeline.start[last]
        exposed = np.maximum(reduce - room, reduce / layers)
    starts = np.minimum.reduceat(timeline.start, schedule.offsets[:-1])
    begin = starts if s.software.rolling_steps else starts.min()
    return Beside(
        reduce=reduce,
        exposed=exposed,
        spans=ends + exposed - begin,
        tied=_tied(model, training, layout, s),
        optimizer=float(count.max()) * _update_bytes(training) / s.on.memory,
        step=s.constants.step,
    )


def _reduce(layout: Layout, s: Setting, held: StageBytes, paths: int) -> float:
    """Seconds to reduce a stage's gradients over its replicas; with ZeRO 1 to scatter them and gather parameters."""
    if layout.zero >= 2:
        return 0.0 if layout.zero == 3 else ring(s.on, held.parameters, layout.data, layout.tensor)
    width = held.gradients / held.count if held.count else 0.0
    # The mirror's replica stands on another rank, so it comes like data parallelism, over the network.
    took = _both_ways(s, held.dense, width, layout.data * paths, layout.tensor, layout.zero)
    if held.routed:
        replicas = layout.data * layout.tensor // layout.expert * paths
        took += _both_ways(s, held.routed, width, replicas, layout.expert, layout.zero)
    return took


def _both_ways(s: Setting, count: float, width: float, replicas: int, stride: int, zero: int) -> float:
    if zero == 0:
        return all_reduce(s.on, count * width, replicas, stride)
    return ring(s.on, count * width, replicas, stride) + ring(s.on, count * 2.0, replicas, stride)


def _tied(model: Model, training: Training, layout: Layout, s: Setting) -> float:
    """The gradient of an embedding that first and last stage both hold."""
    if not model.tied or layout.pipeline < 2:
        return 0.0
    width = 4.0 if training.gradients == "fp32" else 2.0
    size = width * model.vocabulary * model.hidden / layout.tensor
    return all_reduce(s.on, size, 2, layout.tensor * layout.data * (layout.pipeline - 1))


def _update_bytes(training: Training) -> float:
    """To and from memory for a parameter: its state both ways, its gradient for norm, update and zeroing, and the
    working copy."""
    gradient = 4.0 if training.gradients == "fp32" else 2.0
    return 2.0 * OPTIMIZERS[training.optimizer] + 3.0 * gradient + 2.0
