"""Cheap sound floors of a step's seconds, by which the search orders and drops (`floors_memory`: of bytes).

Of a cut alone: a rank does at least its share of all work. Of a schedule on it: a rank waits for its first forward to
arrive, does its own work, and what is left of its last micro-batch when it has done its part runs on the ranks before
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stageloom.costs import Costs
from stageloom.plan.cluster import Cluster
from stageloom.plan.constants import Constants, fitted
from stageloom.plan.cost import setting, stage_costs, stage_times
from stageloom.plan.forms import Form
from stageloom.plan.layout import Layout
from stageloom.plan.model import Model
from stageloom.plan.predict import replaced
from stageloom.plan.software import MODERN, Software
from stageloom.plan.space import Cut
from stageloom.plan.training import Training

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Setup:
    """What every candidate of a search shares. measured: costs of a profile."""

    model: Model
    cluster: Cluster
    training: Training
    constants: Constants
    software: Software
    measured: Costs | None = None

    def layout(self, cut: Cut, chunks: int, layers: tuple[int, ...]) -> Layout:
        return Layout(
            cut.tensor,
            cut.pipeline,
            cut.data,
            cut.expert,
            chunks,
            cut.microbatch,
            cut.recompute,
            self.training.zero,
            self.training.sequence_parallel,
            layers,
        )


def set_up(
    model: Model,
    cluster: Cluster,
    training: Training,
    constants: Constants | None = None,
    software: Software = MODERN,
    measured: Costs | None = None,
) -> Setup:
    """What a search is about; the fitted constants unless others are given."""
    return Setup(model, cluster, training, fitted() if constants is None else constants, software, measured)


def costs_with_measured(setup: Setup, layout: Layout, form: Form) -> Costs:
    """Costs of a candidate's stages, with what was measured in its place."""
    modelled = stage_costs(
        setup.model, setup.cluster, setup.training, layout, setup.constants, setup.software, paths=form.paths
    )
    return modelled if setup.measured is None else replaced(modelled, setup.measured)


@dataclass(frozen=True, slots=True)
class Items:
    """Seconds of one micro-batch's passes, of the embedding, of each layer, and of the head (with multi-token
    prediction). joint: B and W as one; paired: F and joint overlapped with another micro-batch's."""

    forward: Floats
    backward: Floats
    weight: Floats
    joint: Floats
    paired: Floats

    @property
    def work(self) -> Floats:
        """The least that F, B and W take."""
        return self.forward + np.minimum(self.joint, self.backward + self.weight)


def items(setup: Setup, cut: Cut) -> Items:
    """Times of a cut's layers; cuts that differ in what does not matter to them share them."""
    data = cut.data if setup.training.zero >= 2 else 1
    return _items(_Same(setup), cut.tensor, data, cut.expert, cut.microbatch, cut.recompute)


class _Same:
    """A setup as a key of caches: the same one, not an equal one, for comparing models layer by layer is slow."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def __hash__(self) -> int:
        return id(self.setup)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.setup is self.setup


@lru_cache(maxsize=8192)
def _items(same: _Same, tensor: int, data: int, expert: int, microbatch: int, recompute: Any) -> Items:
    setup = same.setup
    layers = len(setup.model.layers)
    cut = Cut(tensor, layers + 2, data, expert, microbatch, recompute)
    apart = setup.layout(cut, 1, (0, *[1] * layers, 0))
    s = setting(setup.model, setup.cluster, setup.training, apart, setup.constants, setup.software)
    times = stage_times(setup.model, apart, s, setup.training.communication_share)

    def column(values: Sequence[float]) -> Floats:
        return np.asarray(values, dtype=np.float64)

    whole = [one.work.forward + one.joint for one in times]
    return Items(
        column([one.work.forward for one in times]),
        column([one.work.backward for one in times]),
        column([one.work.weight for one in times]),
        column([one.joint for one in times]),
        column([one.fraction * each for one, each in zip(times, whole, strict=True)]),
    )


def cut_floor(setup: Setup, cut: Cut, microbatches: int, *, pairs: bool) -> float:
    """Seconds: an even share of all work, overlapped as well as can be where schedules that pair are allowed."""
    if setup.measured is not None:
        return 0.0
    one = items(setup, cut)
    work = one.work
    if pairs:
        whole = one.forward + one.joint
        fraction = float((one.paired / np.where(whole > 0, whole, 1.0))[whole > 0].min(initial=1.0))
        work = work * min(1.0, fraction)
    return float(work.sum()) * microbatches / cut.pipeline


@dataclass(frozen=True, slots=True)
class StageSums:
    """F, B, W and joint seconds of every stage, and the factor of an overlapped pair."""

    forward: Floats
    backward: Floats
    weight: Floats
    joint: Floats
    pair: float


def stage_sums(setup: Setup, cut: Cut, form: Form, layers: tuple[int, ...]) -> StageSums:
    """Times of the stages that `layers` make."""
    if setup.measured is not None:
        layout = setup.layout(cut, form.chunks, layers)
        costs = costs_with_measured(setup, layout, form)
        table = costs.stage_times(layout.stages, cut.pipeline)
        return StageSums(table[0], table[1], table[2], table[3], costs.overlap_factor())
    one = items(setup, cut)
    counts = np.array(layers, dtype=np.int64)
    counts[0] += 1
    counts[-1] += 1
    first = np.concatenate(([0], np.cumsum(counts)[:-1]))

    def sums(values: Floats) -> Floats:
        # a stage without items cannot be: the ends have their own, and others a layer
        return np.add.reduceat(values, first)

    forward, joint, paired = sums(one.forward), sums(one.joint), sums(one.paired)
    backward, weight = sums(one.backward), sums(one.weight)
    longest = int((forward + backward + weight).argmax())
    whole = float(forward[longest] + joint[longest])
    return StageSums(forward, backward, weight, joint, float(paired[longest]) / whole if whole else 1.0)


def time_floor(sums: StageSums, form: Form, pipeline: int, microbatches: int) -> float:
    """Seconds from the first start to the last end of any order of this form's ops. Sound for synchronous steps."""
    placement = form.placement(pipeline)
    each = microbatches // form.paths
    least = sums.forward + np.minimum(sums.joint, sums.backward + sums.weight)
    if form.paired:
        least = least * min(1.0, sums.pair)
    work, inner = np.zeros(pipeline), np.zeros(pipeline)
    head = np.full(pipeline, np.inf)
    tail = np.full(pipeline, np.inf)
    back = sums.backward if form.split else sums.joint
    back = np.minimum(back, sums.joint)
    for path in placement.table:
        np.add.at(work, path, least * each)
        np.add.at(inner, path, (sums.forward + back) * each)
        starts, ends = _before(sums.forward), _before(back)
        np.minimum.at(head, path, starts / form.slices)
        np.minimum.at(tail, path, ends / form.slices)
    floor = float((head + work).max())
    if form.paired or not form.synchronous:
        return floor
    # The last pass of a rank but weight gradients is a backward of its first stage, and goes on to the ranks before.
    return max(floor, float((head + inner + tail).max()))


def _before(values: Floats) -> Floats:
    """What the stages before each stage take."""
    return np.cumsum(values) - values
