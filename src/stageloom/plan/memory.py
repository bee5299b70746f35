"""What each GPU of a pipeline holds at its worst, by part. Activations come from the simulated schedule, so that ranks,
schedules and the first and last stage differ as they do when it runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stageloom.metrics import rank_memory
from stageloom.plan.cost_setting import Setting
from stageloom.plan.layout import Layout
from stageloom.plan.memory_stage import StageBytes
from stageloom.plan.model import Model
from stageloom.simulate import Timeline

CONTEXT = 1.5e9
"""Bytes of a CUDA context, libraries and communicators, which no allocator sees."""

FRAGMENTS = 0.04
"""Of what an allocator hands out for activations, the part that lies unused between blocks."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one GPU at its worst. allocated: what a framework's allocator reports at its peak; total: that and what
    no allocator sees, to compare with the GPU's memory."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    buffers: float
    fragments: float
    context: float

    @property
    def allocated(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.working + self.buffers

    @property
    def total(self) -> float:
        return self.allocated + self.fragments + self.context


def memory(
    model: Model, layout: Layout, s: Setting, held: list[StageBytes], timeline: Timeline
) -> tuple[RankMemory, ...]:
    """What every rank of the pipeline holds, first rank first."""
    found = rank_memory(timeline)
    working = np.zeros(timeline.schedule.ranks)
    for path in timeline.schedule.placement.table:
        for stage, rank in enumerate(path):
            working[rank] = max(working[rank], held[stage].working)
    buffers = _buffers(model, layout, s)
    return tuple(
        RankMemory(
            parameters=float(found.parameters[rank]),
            gradients=float(found.gradients[rank]),
            optimizer=float(found.optimizer[rank]),
            activations=float(found.activations[rank]),
            working=float(working[rank]),
            buffers=buffers,
            fragments=FRAGMENTS * float(found.activations[rank] + working[rank]),
            context=CONTEXT,
        )
        for rank in range(timeline.schedule.ranks)
    )


def _buffers(model: Model, layout: Layout, s: Setting) -> float:
    """Messages on their way (one in and one out, each way), and all-to-alls of one layer."""
    message = 2.0 * s.tokens * s.hidden / s.cut
    size = 4.0 * message if layout.pipeline > 1 else 0.0
    chosen = max((layer.experts.per_token for layer in model.layers if layer.experts is not None), default=0)
    if layout.expert > 1:
        size += 2.0 * (s.on.width + 2.0) * s.tokens / s.tensor * chosen * s.hidden
    return size
