"""What ranks did and when, as the simulator's own `Timeline`: metrics and drawings work on a real run as on a simulated
one.

Ranks of one machine share a clock (`time.perf_counter`), so their spans need no alignment. A span is computing alone:
waiting for a message is outside of it.
"""

# pyright: reportUnknownMemberType=false
# (torch leaks unknown types)
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from stageloom.costs import SECONDS, Costs, Unit
from stageloom.errors import InputError
from stageloom.op import KIND_NAMES, Kind
from stageloom.schedule import Schedule
from stageloom.simulate import Timeline

Spans = Mapping[int, tuple[float, float]]
"""When each of a rank's rows began and ended, in seconds of the machine's clock."""

TIMES: Final = ("F", "B", "W", "BW")


def gather_timeline(
    group: dist.ProcessGroup,
    schedule: Schedule,
    spans: Spans,
    costs: Costs,
    zero: float | None = None,
    *,
    unit_seconds: float | None = None,
) -> Timeline | None:
    """Every rank's spans of one step on the group's first rank, as a timeline; None on the others. All ranks call it.

    The other parameters are those of `timeline_of`.
    """
    first = dist.get_rank(group) == 0
    found: list[Any] | None = [None] * dist.get_world_size(group) if first else None
    dist.gather_object(dict(spans), found, group=group, group_dst=0)
    if found is None:
        return None
    return timeline_of(schedule, found, costs, zero, unit_seconds=unit_seconds)


def timeline_of(
    schedule: Schedule,
    spans: Iterable[Spans],
    costs: Costs,
    zero: float | None = None,
    *,
    unit_seconds: float | None = None,
) -> Timeline:
    """The spans of all ranks as a timeline in the unit of `costs`.

    zero: the clock at the timeline's 0; the first start unless given. unit_seconds: how long a time unit of the costs
    took, where that is another time than its name says (as in emulation) or it has none (then 1 s). A message arrives
    when its sender ends, plus the latency that `costs` state. Raises InputError where a row has no span.
    """
    start, end = _columns(schedule, spans)
    zero = float(start.min(initial=np.inf)) if zero is None else zero
    unit = unit_seconds if unit_seconds is not None else costs.seconds or 1.0
    start, end = (start - zero) / unit, (end - zero) / unit
    first = np.flatnonzero(schedule.pair)
    start[first] = start[first + 1] = np.minimum(start[first], start[first + 1])
    end[first] = end[first + 1] = np.maximum(end[first], end[first + 1])
    arrival = end[schedule.links.source] + message_times(schedule, costs)
    arrival[schedule.links.source < 0] = -np.inf
    # What has been used had arrived.
    return Timeline(schedule, costs, start, end, np.minimum(arrival, start))


def message_times(schedule: Schedule, costs: Costs) -> NDArray[np.float64]:
    """How long every row's incoming message takes from the end of the op that sends it; 0 where none is sent."""
    source = schedule.links.source
    latency, transfer = costs.link_times(schedule.ranks, schedule.rank[source], schedule.rank)
    return np.where(source >= 0, latency + transfer / schedule.slices, 0.0)


def measured_costs(schedule: Schedule, spans: Iterable[Spans], *, unit: Unit = "ms") -> Costs:
    """Costs that say what ops took: the mean time of each kind on every stage. Messages take no time.

    `simulate(schedule, measured_costs(...))` tells how much of a run's idle time is the schedule's: the rest is
    messages, and ops that took longer than others of their kind. Raises InputError where a row has no span.
    """
    start, end = _columns(schedule, spans)
    taken = (end - start) / SECONDS[unit] * schedule.slices
    times: dict[str, Any] = {}
    for name in TIMES:
        of_kind = schedule.kind == Kind[name]
        count = np.bincount(schedule.stage[of_kind], minlength=schedule.stages)
        total = np.bincount(schedule.stage[of_kind], weights=taken[of_kind], minlength=schedule.stages)
        if name != "BW" or of_kind.any():
            times[name] = (total / np.maximum(count, 1)).tolist()
    return Costs(unit=unit, **times)


def _columns(schedule: Schedule, spans: Iterable[Spans]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(start, end) of every row, in seconds of the clock."""
    start, end = np.full(len(schedule), np.nan), np.full(len(schedule), np.nan)
    for of_rank in spans:
        for row, (began, ended) in of_rank.items():
            start[row], end[row] = began, ended
    missing = np.flatnonzero(np.isnan(start))
    if len(missing):
        op, rank = schedule.op(int(missing[0])), int(schedule.rank[missing[0]])
        name = f"{KIND_NAMES[op.kind]}{op.microbatch}@{op.stage}"
        raise InputError(
            f"{schedule.name}: {len(missing)} of {len(schedule)} ops have no measured time, first {name} on rank {rank}"
        )
    return start, end
