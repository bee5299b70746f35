"""Weight versions of asynchronous schedules (PipeDream's weight stashing, arXiv 1806.03377; 2BW, arXiv 2006.09503).

The rule, stage by stage: all ops of a micro-batch use the version that its first forward used (the gradient belongs to
the weights that made the activations); forwards never go back to an older version than the forward before them; and
a forward uses no version that is not there yet: version v takes v times `update_every` micro-batches whose weight
gradients were done before it (asked only where one path holds the stage, as its updates then depend on nobody else).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stageloom.op import Kind
from stageloom.schedule import Schedule
from stageloom.validate.local import Doers
from stageloom.validate.problem import Problem, at, position


def versions_agree(schedule: Schedule) -> bool:
    """Does a schedule that is sound otherwise keep the rule?"""
    if schedule.version is None:
        return True
    of_part = schedule.version[schedule.links.rows]
    if (of_part != of_part[:1, :, :, :1]).any():
        return False
    path = schedule.path_of[schedule.microbatch]
    group = schedule.stage.astype(np.int64) * len(schedule.placement.paths) + path
    order = np.argsort(group, kind="stable")  # every stage's ops, in the order of its rank
    group, version, forward = group[order], schedule.version[order], schedule.kind[order] == Kind.F
    back = np.diff(version[forward]) < 0
    if (back & (np.diff(group[forward]) == 0)).any():
        return False
    return not (forward & (version > _updates(schedule, order))).any()


def _updates(schedule: Schedule, order: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many updates each op's stage has made before the op; `order` is by stage, on one path."""
    if len(schedule.placement.paths) > 1:
        return np.full(len(order), np.iinfo(np.int64).max)
    weight = schedule.kind[order] >= Kind.W
    before = np.cumsum(weight) - weight
    # Stages have the same number of weight gradients, and all those of earlier stages are counted too.
    before -= schedule.stage[order].astype(np.int64) * schedule.microbatches * schedule.slices
    # An op overlapped with the weight gradient before it starts before that has ended.
    joined = np.concatenate(([False], schedule.pair[:-1])) & np.concatenate(([False], _same_stage(schedule)))
    before -= (joined & np.concatenate(([False], schedule.kind[:-1] >= Kind.W)))[order]
    return before // (schedule.slices * schedule.update_every)


def _same_stage(schedule: Schedule) -> NDArray[np.bool_]:
    return schedule.stage[1:] == schedule.stage[:-1]


def version_problems(schedule: Schedule, doers: Doers) -> list[Problem]:
    found: list[Problem] = []
    version = schedule.versions.tolist()
    newest: dict[tuple[int, int, int], int] = {}
    done: dict[tuple[int, int], int] = {}  # weight gradients of each rank and stage so far
    for row, kind in enumerate(doers.kind):
        if not doers.known[row]:
            continue
        rank, (stage, microbatch, _) = doers.rank[row], doers.place[row]
        first = next(
            (r for cut in range(schedule.slices) if (r := _forward(doers, stage, microbatch, cut)) is not None),
            row,
        )
        if version[first] != version[row]:
            message = (
                f"uses weight version {version[row]}, but {schedule.op(first)} used {version[first]}; "
                "all ops of a micro-batch on a stage need one version"
            )
            found.append(at(schedule, "version", row, message, (first,)))
        if kind in (Kind.W, Kind.BW):
            done[rank, stage] = done.get((rank, stage), 0) + 1
        if kind is not Kind.F:
            continue
        if len(schedule.placement.paths) == 1:
            ended = done.get((rank, stage), 0)
            if row and schedule.pair[row - 1] and doers.kind[row - 1] >= Kind.W and doers.place[row - 1][0] == stage:
                ended -= 1  # overlapped with this forward: it ends no sooner
            updates = ended // (schedule.slices * schedule.update_every)
            if version[row] > updates:
                message = (
                    f"uses weight version {version[row]} before it is there; the stage has made {updates} updates by "
                    f"then, one every {schedule.update_every} micro-batches"
                )
                found.append(at(schedule, "version", row, message))
        group = rank, stage, int(schedule.path_of[microbatch])
        before = newest.setdefault(group, row)
        if version[row] < version[before]:
            message = (
                f"uses weight version {version[row]} after {schedule.op(before)} at position "
                f"{position(schedule, before)} used {version[before]}; versions of a stage only go forward"
            )
            found.append(at(schedule, "version", row, message, (before,)))
        else:
            newest[group] = row
    return found


def _forward(doers: Doers, stage: int, microbatch: int, cut: int) -> int | None:
    return doers.first.get((Kind.F, stage, microbatch, cut))
