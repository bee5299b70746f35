"""Where nothing fits: how much is missing, and the nearest change that would help."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import replace

from stageloom.errors import InputError
from stageloom.plan import presets
from stageloom.plan.alternatives import try_form
from stageloom.plan.cluster import Cluster
from stageloom.plan.floors import Setup
from stageloom.plan.floors_memory import cut_memory_floor
from stageloom.plan.forms import forms
from stageloom.plan.load_cluster import load_cluster
from stageloom.plan.score import Scored
from stageloom.plan.search import prepare
from stageloom.plan.space import Refusal, Space, chunk_counts

MOST_TIMES = 64
"""How many times larger clusters are tried."""


def least(setup: Setup, space: Space) -> Scored | None:
    """The plan that holds the least, whether it fits or not; None where no schedule can be built."""
    chosen = prepare(setup, space)
    heap = [(cut_memory_floor(setup, cut), at) for at, cut in enumerate(chosen)]
    heapq.heapify(heap)
    best: Scored | None = None
    while heap and (best is None or heap[0][0] < best.memory):
        cut = chosen[heapq.heappop(heap)[1]]
        for form in forms(space.schedules, chunk_counts(len(setup.model.layers), cut.pipeline, space)):
            if form.searched and space.schedules is None:  # those hold more than the others, and take longer
                continue
            one = try_form(setup, cut, form)
            if one is not None and (best is None or one.memory < best.memory):
                best = one
    return best


def shortage(setup: Setup, space: Space) -> Refusal:
    """Why nothing fits: what is missing, and what would fit; for the caller to raise."""
    one = least(setup, space)
    cluster, limit = setup.cluster, setup.cluster.gpu.memory
    if one is None or one.fits:
        return Refusal("schedule", "no schedule that is allowed can be built in any layout that is allowed")
    at = one.layout
    text = (
        f"no configuration fits: {setup.model.name} on {cluster.name} needs at least {one.memory / 1e9:.1f} GB a GPU "
        f"(tensor {at.tensor}, pipeline {at.pipeline}, data {at.data}, expert {at.expert}, micro-batch "
        f"{at.microbatch}, recompute {_word(at.recompute)}, {one.schedule}), and {cluster.gpu.name} has "
        f"{limit / 1e9:.1f} GB: {(one.memory - limit) / 1e9:.1f} GB are missing"
    )
    fits = next(_changes(setup, space), None)
    return Refusal("memory", f"{text}; {f'nearest that would fit: {fits}' if fits else _bigger(one.memory)}")


def _word(recompute: object) -> str:
    return recompute if isinstance(recompute, str) else "by layer"


def _changes(setup: Setup, space: Space) -> Iterator[str]:
    """Changes that make it fit, the smallest first: recomputation, more sharding, then more GPUs."""
    training = setup.training
    if "full" not in space.recompute and _fits(setup, replace(space, recompute=("full",))):
        yield "recompute full"
    for zero in range(training.zero + 1, 4):
        if _fits(replace(setup, training=replace(training, zero=zero)), space):
            yield f"ZeRO stage {zero}"
    free = replace(space, data=None)
    times = 2
    while times <= MOST_TIMES and training.global_batch >= times:
        larger = _times(setup.cluster, times)
        if _fits(replace(setup, cluster=larger), free):
            yield f"{larger.gpus:,} such GPUs"
        times *= 2


def _fits(setup: Setup, space: Space) -> bool:
    try:
        one = least(setup, space)
    except InputError:  # sizes that do not go together any more
        return False
    return one is not None and one.fits


def _times(cluster: Cluster, times: int) -> Cluster:
    return replace(cluster, groups=tuple(replace(group, nodes=group.nodes * times) for group in cluster.groups))


def _bigger(need: float) -> str:
    """GPUs among the presets whose memory would do."""
    known = [load_cluster(f"{name}x8").gpu for name in presets.names("nodes")]
    enough = sorted((gpu.memory, gpu.name) for gpu in known if gpu.memory >= need)
    if not enough:
        return "no GPU that is known has as much; a larger depth, a smaller micro-batch or ZeRO may help"
    return f"nearest that would fit: {enough[0][1]} with {enough[0][0] / 1e9:.1f} GB"
