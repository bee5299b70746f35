"""(Schedule, Costs) -> Timeline: when every op runs.

Every op starts as early as its rank's previous op and its message allow: the longest path over the order on each rank,
the rules and the messages. Conventions (those that reproduce the published tables): a message is pure latency on
edges between two ranks and does not occupy the sender; the two ops of an overlapped pair start and end together.
Bandwidth, queueing links, blocking senders, per-op overhead, stragglers and jitter are options of `Costs` and here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stageloom import _kernel
from stageloom.costs import Costs
from stageloom.errors import InputError, ScheduleError
from stageloom.schedule import Schedule
from stageloom.validate import problems, sound_on_ranks

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Messages:
    """One row a message, as columns: the rows that send and receive, when it leaves and when it has arrived."""

    sender: NDArray[np.int32]
    receiver: NDArray[np.int64]
    depart: Floats
    arrive: Floats

    def __len__(self) -> int:
        return len(self.sender)


@dataclass(frozen=True)
class Timeline:
    """When every op of the schedule runs: `start` and `end` aligned with the schedule's rows, in the costs' time unit.

    The two ops of an overlapped pair have the same start and end. `arrival[row]` is when the message that row waits for
    is there (-inf where it waits for none, the sender's end where sender and receiver share a rank).
    """

    schedule: Schedule
    costs: Costs
    start: Floats
    end: Floats
    arrival: Floats

    @cached_property
    def messages(self) -> Messages:
        """All messages between two ranks, by receiving row."""
        schedule = self.schedule
        receiver, sender = _crossing(schedule)
        depart = self.end[sender]
        if self.costs.occupancy:  # it may have queued for its link
            latency, transfer = self.costs.link_times(schedule.ranks, schedule.rank[sender], schedule.rank[receiver])
            depart = np.maximum(depart, self.arrival[receiver] - latency - transfer / schedule.slices)
        return Messages(sender, receiver, depart, self.arrival[receiver])


def durations(schedule: Schedule, costs: Costs) -> Floats:
    """How long every row takes; the first row of a pair takes the time of the pair, the second 0.

    Every op's overhead is included, a pair's twice; stragglers are slower in all of it.
    """
    times = costs.stage_times(schedule.stages, schedule.ranks) / schedule.slices
    taken = times.ravel()[schedule.kind * np.int32(schedule.stages) + schedule.stage]
    first = np.flatnonzero(schedule.pair)
    if len(first):
        taken[first] = (taken[first] + taken[first + 1]) * costs.overlap_factor() + costs.overhead
        taken[first + 1] = -costs.overhead
    if costs.overhead:
        taken += costs.overhead
    if costs.stragglers:
        taken *= costs.rank_factors(schedule.ranks)[schedule.rank]
    return taken


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Run the schedule in time. Raises ScheduleError where it cannot run to its end, with the validator's lines."""
    costs = Costs() if costs is None else costs
    require_sound(schedule)
    return _run(schedule, costs, durations(schedule, costs))


def require_sound(schedule: Schedule) -> None:
    """Raise ScheduleError unless every part is done once, at its place, after what it waits for on its rank."""
    if not sound_on_ranks(schedule):
        raise _refused(schedule)


def _refused(schedule: Schedule) -> ScheduleError:
    found = [str(problem) for problem in problems(schedule)]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return ScheduleError(f"{schedule.name} cannot run: {found[0]}{more}", found)


def _run(schedule: Schedule, costs: Costs, taken: Floats) -> Timeline:
    rows = len(schedule)
    source = schedule.links.source
    start, end = np.empty(rows), np.full(rows, -1.0)
    waiter = np.full(rows, -1, dtype=np.int32)
    if costs.occupancy or costs.blocking:
        ran, arrival = _run_links(schedule, costs, taken, start, end, waiter)
    else:
        delay = _delays(schedule, costs)
        ran = _kernel.longest_path.pick(rows)(schedule.offsets, source, delay, taken, schedule.pair, start, end, waiter)
        arrival = end[source]
        arrival += delay
        arrival[source < 0] = -np.inf
    if ran < rows:
        raise _refused(schedule)
    return Timeline(schedule, costs, start, end, arrival)


def _delays(schedule: Schedule, costs: Costs) -> Floats:
    """The time of every row's incoming message."""
    delay = np.zeros(len(schedule))
    if not (costs.latency or costs.message_bytes or costs.links):
        return delay
    receiver, sender = _crossing(schedule)
    latency, transfer = costs.link_times(schedule.ranks, schedule.rank[sender], schedule.rank[receiver])
    delay[receiver] = latency + transfer / schedule.slices
    return delay


def _crossing(schedule: Schedule) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """(receiving rows, sending rows) of the messages between two ranks."""
    source = schedule.links.source
    receiver = np.flatnonzero(source >= 0)
    receiver = receiver[schedule.rank[source[receiver]] != schedule.rank[receiver]]
    return receiver, source[receiver]


def _run_links(
    schedule: Schedule, costs: Costs, taken: Floats, start: Floats, end: Floats, waiter: NDArray[np.int32]
) -> tuple[int, Floats]:
    """Run with links that can be busy and senders that can be held up; the arrival of every row's message."""
    rows, source = len(schedule), schedule.links.source
    receiver, sender = _crossing(schedule)
    from_rank, to_rank = schedule.rank[sender], schedule.rank[receiver]
    edges, number = np.unique(from_rank * np.int64(schedule.ranks) + to_rank, return_inverse=True)
    link = np.full(rows, -1, dtype=np.int64)
    latency, transfer = np.zeros(rows), np.zeros(rows)
    link[sender] = number
    latency[sender], transfer[sender] = costs.link_times(schedule.ranks, from_rank, to_rank)
    arrive = np.zeros(rows)
    ran = _kernel.longest_path_links.pick(rows)(
        schedule.offsets,
        source,
        link,
        latency,
        transfer / schedule.slices,
        len(edges),
        costs.occupancy,
        costs.blocking,
        taken,
        schedule.pair,
        start,
        end,
        arrive,
        waiter,
    )
    return int(ran), np.where(source >= 0, arrive[source], -np.inf)


@dataclass(frozen=True)
class Spread:
    """Makespans of `runs` runs with jitter, sorted, in the costs' time unit."""

    makespans: Floats

    def percentile(self, percent: float) -> float:
        return float(np.percentile(self.makespans, percent))


MOST_OPS: Final = 2_000_000_000
"""Ops that all runs of a Monte-Carlo may have together (half a minute or so)."""


def monte_carlo(
    schedule: Schedule,
    costs: Costs,
    *,
    jitter: float,
    runs: int,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> Spread:
    """Repeat the simulation with every op's time multiplied by a lognormal factor of mean 1 and deviation `jitter`.

    The same seed gives the same makespans; `progress` is told how many runs are done. Raises InputError for jitter
    outside 0 to 10, for too few or too many runs, and for a seed below 0.
    """
    if not 0 <= jitter <= 10:
        raise InputError(f"jitter = {jitter:g}; a relative deviation from 0 to 10 is needed (0.05 is 5 %)")
    if runs < 1:
        raise InputError(f"runs = {runs}; at least 1 is needed")
    if runs * len(schedule) > MOST_OPS:
        most = MOST_OPS // max(len(schedule), 1)
        raise InputError(f"runs = {runs}; up to {most:,} runs of this schedule's {len(schedule):,} ops can be made")
    if seed < 0:
        raise InputError(f"seed = {seed}; a whole number of at least 0 is needed")
    require_sound(schedule)
    taken = durations(schedule, costs)
    random = np.random.default_rng(seed)
    sigma = float(np.sqrt(np.log1p(jitter**2)))
    makespans = np.empty(runs)
    for run in range(runs):
        factors = random.lognormal(-(sigma**2) / 2, sigma, len(taken))
        timeline = _run(schedule, costs, taken * factors)
        makespans[run] = timeline.end.max() - timeline.start.min()
        if progress is not None:
            progress(run + 1)
    return Spread(np.sort(makespans))
