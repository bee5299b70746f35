"""Cheap sound floors of the bytes that the fullest GPU holds.

Of a cut alone: the mean over ranks of what stands there anyway. Of a schedule on it: what each rank holds all the time,
and one micro-batch on its way through; once the order is built, as many micro-batches as it has under way at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from stageloom.plan.cost import setting
from stageloom.plan.floors import Setup, costs_with_measured
from stageloom.plan.forms import Form
from stageloom.plan.layout import Layout
from stageloom.plan.memory import CONTEXT, FRAGMENTS
from stageloom.plan.memory_stage import stage_bytes
from stageloom.plan.score import fixed_order
from stageloom.plan.space import Cut
from stageloom.rules import ALLOCATES

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes on every rank of a candidate: all the time; and of one micro-batch, on each stage (by path and stage)."""

    fixed: Floats
    kept: Floats

    def floor(self, live: Floats) -> float:
        """live: micro-batches under way, on each rank, path and stage."""
        under_way = (live * self.kept).sum(axis=(1, 2))
        return float((self.fixed + (1.0 + FRAGMENTS) * under_way).max()) + CONTEXT


def held(setup: Setup, layout: Layout, form: Form) -> Held:
    """What the ranks of a candidate hold."""
    s = setting(setup.model, setup.cluster, setup.training, layout, setup.constants, setup.software)
    stages = stage_bytes(setup.model, setup.training, layout, s, form.paths)
    if setup.measured is None:
        state = np.array([one.parameters + one.gradients + one.optimizer for one in stages])
        kept = np.array([one.activations for one in stages])
    else:
        costs = costs_with_measured(setup, layout, form)
        sizes = [
            costs.pieces(key, layout.stages, layout.pipeline)
            for key in ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes")
        ]
        state, kept = sizes[0] + sizes[1] + sizes[2], sizes[3]
    fixed = np.zeros(layout.pipeline)
    for path in form.placement(layout.pipeline).table:
        np.add.at(fixed, path, state)
    return Held(fixed, kept / form.slices)


def memory_floor(setup: Setup, layout: Layout, form: Form, limit: float) -> float:
    """Bytes of the fullest GPU: with a single micro-batch under way; where that is within `limit`, with as many as the
    order has, which is not known of one that is searched for costs."""
    found, placement = held(setup, layout, form), form.placement(layout.pipeline)
    table, stages = placement.table, np.arange(placement.stages)
    each: list[float] = []
    for number, path in enumerate(table):
        live = np.zeros((layout.pipeline, *table.shape))
        live[path, number, stages] = 1.0
        each.append(found.floor(live))
    if form.searched or max(each) > limit:
        return max(each)
    return max(*each, found.floor(_live(form, layout.pipeline, layout.microbatches(setup.training))))


@lru_cache(maxsize=4096)
def _live(form: Form, ranks: int, microbatches: int) -> Floats:
    """Of each rank, what is under way (forward begun, backward not ended) on its stages when most is."""
    schedule = fixed_order(form, ranks, microbatches)
    table = schedule.placement.table
    live = np.zeros((ranks, *table.shape))
    step = ALLOCATES[:, 0][schedule.kind].astype(np.int64)
    for rank in range(ranks):
        low, high = int(schedule.offsets[rank]), int(schedule.offsets[rank + 1])
        if low == high:
            continue
        upto = low + int(np.cumsum(step[low:high]).argmax()) + 1
        path = schedule.path_of[schedule.microbatch[low:upto]]
        np.add.at(live[rank], (path, schedule.stage[low:upto]), step[low:upto])
    return live


def cut_memory_floor(setup: Setup, cut: Cut) -> float:
    """Bytes of the fullest GPU under any schedule: no less than the mean over ranks of what stands there anyway, and
    of a micro-batch that is on its last stage."""
    if setup.measured is not None:
        return 0.0
    layers = len(setup.model.layers)
    one = replace(cut, pipeline=1)
    layout = setup.layout(one, 1, (layers,))
    s = setting(setup.model, setup.cluster, setup.training, layout, setup.constants, setup.software)
    held = stage_bytes(setup.model, setup.training, layout, s, 1)[0]
    state = held.parameters + held.gradients + held.optimizer
    return (state + held.activations) / cut.pipeline + CONTEXT
