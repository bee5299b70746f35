"""How many layers each stage gets: exact by dynamic programming for balanced work, then refined by what a step takes.

A stage may be given no layer at all; what the first and the last layer cost more (embedding, vocabulary head) is in
their own numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import numpy as np
from numpy.typing import NDArray

from stageloom.costs import Costs
from stageloom.errors import InputError

Counts = tuple[int, ...]
LAYERED = ("F", "B", "W", "BW", "activation_bytes", "parameter_bytes", "gradient_bytes", "optimizer_bytes")


@dataclass(frozen=True)
class Partition:
    """Layers of every stage, the costs by stage that follow, and what was found for them."""

    counts: Counts
    costs: Costs
    value: float


def layers_of(costs: Costs) -> int:
    """How many layers the lists of the costs describe. Raises InputError where there is none, or lengths differ."""
    lengths = {key: len(value) for key in LAYERED if (value := _listed(costs, key)) is not None}
    if not lengths:
        raise InputError("partition: the costs have no list; give F, B and W (or one of them) as one number a layer")
    if len(set(lengths.values())) > 1:
        given = ", ".join(f"{key} has {length}" for key, length in lengths.items())
        raise InputError(f"partition: the lists differ in length ({given}); each needs one number a layer")
    return next(iter(lengths.values()))


def by_stage(costs: Costs, counts: Sequence[int], ranks: int) -> Costs:
    """Costs of stages of these numbers of layers, one after another. A plain number is spread over the layers."""
    layers = sum(counts)
    edges = np.concatenate(([0], np.cumsum(counts)))
    changed: dict[str, object] = {}
    for key in LAYERED:
        each = _listed(costs, key)
        if each is None:
            value = getattr(costs, key)
            if not value:
                continue
            each = [float(value) * ranks / layers] * layers
        changed[key] = [float(sum(each[low:high])) for low, high in pairwise(edges.tolist())]
    if costs.overlap_time is not None:  # of one pair; stages differ now, and the part of the sum is what they share
        changed |= {"overlap_time": None, "overlap_fraction": costs.overlap_factor(), "anatomy": None}
    return costs.model_copy(update=changed)


def _listed(costs: Costs, key: str) -> list[float] | None:
    value: object = getattr(costs, key)
    return [float(each) for each in cast(list[float], value)] if isinstance(value, list) else None


def balanced(work: Sequence[float] | NDArray[np.float64], stages: int) -> Counts:
    """Layers of each of `stages` stages so that the largest sum of work is the smallest possible: exact.

    Dynamic programming over (stages so far, layers so far); of equal ones the later stages get fewer layers.
    """
    total = np.concatenate(([0.0], np.cumsum(np.asarray(work, dtype=float))))
    layers = len(total) - 1
    best = np.full((stages + 1, layers + 1), np.inf)
    cut = np.zeros((stages + 1, layers + 1), dtype=np.int64)
    best[0, 0] = 0.0
    for stage in range(1, stages + 1):
        for upto in range(layers + 1):
            worst = np.maximum(best[stage - 1, : upto + 1], total[upto] - total[: upto + 1])
            at = int(np.argmin(worst))
            best[stage, upto], cut[stage, upto] = worst[at], at
    counts: list[int] = []
    upto = layers
    for stage in range(stages, 0, -1):
        at = int(cut[stage, upto])
        counts.append(upto - at)
        upto = at
    return tuple(counts[::-1])


def partition(costs: Costs, stages: int, ranks: int, judge: Callable[[Costs], float], *, rounds: int = 40) -> Partition:
    """Layers a stage for the smallest `judge(costs by stage)`, from the balanced partition by moving one layer at a
    time over a boundary, or one over each of two boundaries, while that helps (`rounds` times at most)."""
    layers = layers_of(costs)
    if layers < 1:
        raise InputError("partition: at least one layer is needed")
    single = by_stage(costs, [1] * layers, ranks)
    times = single.stage_times(layers, ranks)
    counts = balanced(times[0] + (times[3] if costs.BW is not None else times[1] + times[2]), stages)
    seen: dict[Counts, float] = {}

    def judged(candidate: Counts) -> float:
        if candidate not in seen:
            seen[candidate] = judge(by_stage(costs, candidate, ranks))
        return seen[candidate]

    value = judged(counts)
    for _ in range(rounds):
        moves = [moved for moved in _neighbours(counts) if moved not in seen or seen[moved] < value - 1e-12]
        best = min(moves, key=judged, default=None)
        if best is None or judged(best) >= value - 1e-12:
            break
        counts, value = best, judged(best)
    return Partition(counts, by_stage(costs, counts, ranks), value)


def _neighbours(counts: Counts) -> list[Counts]:
    """One layer moved from a stage to any other (the boundaries between shift by one)."""
    found: list[Counts] = []
    for source, amount in enumerate(counts):
        if not amount:
            continue
        for target in range(len(counts)):
            if target != source:
                moved = list(counts)
                moved[source] -= 1
                moved[target] += 1
                found.append(tuple(moved))
    return found
