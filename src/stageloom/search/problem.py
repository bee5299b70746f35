"""What a search is given, as columns: who runs what, how long, how much it holds, and what each rank can hold.

A *place* is a stage of a path (`path * stages + stage`). Micro-batches are identical, so each of a place's three
classes of op (F, B, W) runs them in order, and an order of a rank is a merge of these sequences. Memory is counted in
whole numbers, so that a limit of exactly P micro-batches is not missed by rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stageloom.costs import Costs
from stageloom.errors import InputError
from stageloom.op import Kind
from stageloom.placement import Placement
from stageloom.schedule import Schedule

Floats = NDArray[np.float64]
Longs = NDArray[np.int64]
Ints = NDArray[np.int32]

PARTS: Final = 10**12
"""Parts in which the activations of the fullest place's micro-batch are counted."""

UNLIMITED: Final = 2**62


@dataclass(frozen=True, eq=False)
class Problem:
    """One instance. Rows of the tables are F, B, W (`Kind`), columns places.

    count: micro-batches that pass a place. time: of each op, with overheads and stragglers; where W is fused with B,
    B's is that of both and W's is 0. step: what an op adds to the activations its rank holds, in parts: at its start
    where it adds, at its end where it frees. lag: time of the message that F (row 0) and B (row 1) wait for.
    limit: parts a rank can hold. unit: parts of what a limit is given in, `unit_name`.
    """

    placement: Placement
    microbatches: int
    costs: Costs
    path_of: NDArray[np.int8]
    count: Longs
    rank: Ints
    time: Floats
    step: Longs
    lag: Floats
    fused: NDArray[np.bool_]
    limit: Longs
    unit: float
    unit_name: str

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @property
    def stages(self) -> int:
        return self.placement.stages

    @property
    def places(self) -> int:
        return len(self.rank)

    @cached_property
    def work(self) -> Floats:
        """Busy time of every rank."""
        total = np.zeros(self.ranks)
        np.add.at(total, self.rank, self.count * self.time.sum(axis=0))
        return total

    @cached_property
    def offsets(self) -> Longs:
        """Where each rank's ops begin among all."""
        ops = np.zeros(self.ranks, dtype=np.int64)
        np.add.at(ops, self.rank, self.count * np.where(self.fused, 2, 3))
        return np.concatenate(([0], np.cumsum(ops)))

    @property
    def ops(self) -> int:
        return int(self.offsets[-1])

    @cached_property
    def members(self) -> tuple[Longs, Longs, Longs]:
        """Places by rank (those of rank r are `[first[r] : first[r + 1]]`, by path and stage), `first`, and for each
        place the last place of its path on its rank."""
        members = np.argsort(self.rank, kind="stable")
        first = np.searchsorted(self.rank[members], np.arange(self.ranks + 1))
        path = np.arange(self.places) // self.stages
        order = np.lexsort((np.arange(self.places), path, self.rank))
        group = self.rank[order].astype(np.int64) * len(self.placement.paths) + path[order]
        last_of = np.empty(self.places, dtype=np.int64)
        last_of[order] = order[np.searchsorted(group, group, side="right") - 1]
        return members, first, last_of

    def places_of(self, rank: int) -> list[int]:
        return np.flatnonzero(self.rank == rank).tolist()


def pose(
    placement: Placement,
    microbatches: int,
    costs: Costs,
    *,
    limit: float | Sequence[float] | None = None,
    limit_bytes: float | Sequence[float] | None = None,
    fused: Sequence[int] = (),
    path_of: NDArray[np.int8] | None = None,
) -> Problem:
    """The instance of this placement at these costs.

    `limit`: micro-batches of a whole rank's layers that a rank can hold (one number, or one a rank); `limit_bytes`: the
    same in bytes of activations. Neither: no limit. `fused`: stages that cannot split B and W. `path_of` as in
    `schedule.assemble`. Raises InputError for a list that does not fit and a limit that is no number.
    """
    paths, stages, ranks = len(placement.paths), placement.stages, placement.ranks
    if path_of is None:
        path_of = (np.arange(microbatches) * paths // microbatches).astype(np.int8)
    rank = placement.table.reshape(-1)
    for stage in fused:
        if not 0 <= stage < stages:
            raise InputError(f"fused: stage {stage}; the placement has stages 0 to {stages - 1}")
    fused_at = np.tile(np.isin(np.arange(stages), np.asarray(list(fused), dtype=np.int64)), paths)
    times = np.tile(costs.stage_times(stages, ranks), (1, paths))
    factors = costs.rank_factors(ranks)[rank]
    time = (times[:3] + costs.overhead) * factors
    time[1, fused_at] = ((times[3] + costs.overhead) * factors)[fused_at]
    time[2, fused_at] = 0.0
    step, parts = _steps(placement, costs, fused_at, in_bytes=limit_bytes is not None)
    given = limit if limit_bytes is None else limit_bytes
    return Problem(
        placement=placement,
        microbatches=microbatches,
        costs=costs,
        path_of=path_of,
        count=np.repeat(np.bincount(path_of, minlength=paths), stages).astype(np.int64),
        rank=rank,
        time=time,
        step=step,
        lag=_lags(placement, costs),
        fused=fused_at,
        limit=_limits(given, parts, ranks),
        unit=parts,
        unit_name="micro-batches" if limit_bytes is None else "bytes",
    )


def _steps(placement: Placement, costs: Costs, fused: NDArray[np.bool_], *, in_bytes: bool) -> tuple[Longs, float]:
    """(memory step of every class, parts of one unit of the limit)."""
    paths, stages, ranks = len(placement.paths), placement.stages, placement.ranks
    held = np.ones(stages)
    parts = PARTS * stages / ranks
    if in_bytes:
        held = costs.pieces("activation_bytes", stages, ranks)
        if not held.max() > 0:
            raise InputError("a limit in bytes is given, but the costs have no activation_bytes; give them")
        parts = PARTS / float(held.max())
        held = held / held.max()
    whole = np.tile(np.round(held * PARTS).astype(np.int64), paths)
    late = np.round(whole * costs.w_share).astype(np.int64)
    step = np.stack((whole, late - whole, -late))
    step[1, fused], step[2, fused] = -whole[fused], 0
    return step, parts


def _limits(given: float | Sequence[float] | None, parts: float, ranks: int) -> Longs:
    if given is None:
        return np.full(ranks, UNLIMITED, dtype=np.int64)
    each = np.asarray(given, dtype=float)
    if each.ndim and len(each) != ranks:
        raise InputError(f"memory: {len(each)} limits for {ranks} ranks; give one number, or one a rank")
    if not np.isfinite(each).all() or (each <= 0).any():
        raise InputError("memory: every limit is a finite number above 0")
    # A limit written as a decimal or a sum of floats still means the whole number it is next to.
    exact = np.floor(np.minimum(np.broadcast_to(each, ranks), UNLIMITED / parts) * parts * (1 + 1e-11) + 0.5)
    return np.where(exact < UNLIMITED // 2, exact, UNLIMITED).astype(np.int64)


def _lags(placement: Placement, costs: Costs) -> Floats:
    """Time of the message that the F and the B of every place wait for (0 where it stays on its rank)."""
    lag = np.zeros((2, placement.table.size))
    for path, ranks in enumerate(placement.table):
        first = path * placement.stages
        for row, source, target in ((0, ranks[:-1], ranks[1:]), (1, ranks[1:], ranks[:-1])):
            latency, transfer = costs.link_times(placement.ranks, source, target)
            at = first + 1 if row == 0 else first
            lag[row, at : at + len(source)] = latency + transfer
    return lag


def to_schedule(problem: Problem, order: Ints, name: str) -> Schedule:
    """The schedule of an order: `order[row]` is the class (`kind * places + place`) of every row, rank by rank."""
    places, stages = problem.places, problem.stages
    kind, place = order // places, order % places
    nth = np.empty(len(order), dtype=np.int64)
    for each in range(3 * places):
        rows = np.flatnonzero(order == each)
        nth[rows] = np.arange(len(rows))
    path = place // stages
    numbers = np.argsort(problem.path_of, kind="stable")
    first = np.concatenate(([0], np.cumsum(np.bincount(problem.path_of, minlength=len(problem.placement.paths)))))
    full = problem.fused[place] & (kind == Kind.B)
    return Schedule(
        name=name,
        placement=problem.placement,
        microbatches=problem.microbatches,
        offsets=problem.offsets,
        kind=np.where(full, Kind.BW, kind).astype(np.int8),
        stage=(place % stages).astype(np.int32),
        microbatch=numbers[first[path] + nth].astype(np.int32),
        slice=np.zeros(len(order), dtype=np.int32),
        pair=np.zeros(len(order), dtype=np.bool_),
        path_of=problem.path_of,
    )


def from_schedule(problem: Problem, schedule: Schedule) -> Ints | None:
    """The classes of a schedule's rows; None where it cannot be said in them (pairs, slices, another placement).

    A BW counts as a B and a W where the problem can split them, and a B with its W as one where it cannot.
    """
    if (
        schedule.placement != problem.placement
        or schedule.microbatches != problem.microbatches
        or schedule.slices > 1
        or schedule.pair.any()
        or not schedule.synchronous
        or not np.array_equal(schedule.path_of, problem.path_of)
    ):
        return None
    place = schedule.path_of[schedule.microbatch].astype(np.int64) * problem.stages + schedule.stage
    fused = problem.fused[place]
    keep = ~(fused & (schedule.kind == Kind.W))
    kind = np.where(schedule.kind == Kind.BW, Kind.B, schedule.kind)
    twice = (schedule.kind == Kind.BW) & ~fused
    times = np.where(keep, 1 + twice, 0)
    row = np.repeat(np.arange(len(schedule)), times)
    second = np.concatenate(([False], row[1:] == row[:-1]))
    return (kind * problem.places + place)[row].astype(np.int32) + np.where(second, problem.places, 0).astype(np.int32)


def pose_again(problem: Problem, microbatches: int) -> Problem:
    """The same instance with another number of micro-batches, which its paths share in equal runs."""
    paths = len(problem.placement.paths)
    path_of = (np.arange(microbatches) * paths // microbatches).astype(np.int8)
    count = np.repeat(np.bincount(path_of, minlength=paths), problem.stages).astype(np.int64)
    return replace(problem, microbatches=microbatches, path_of=path_of, count=count)
