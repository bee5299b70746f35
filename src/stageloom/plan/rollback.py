"""When a plan that looked best should be given up: what a run has to reach so that its schedule is worth its trouble.

The plan's busy time on each rank is fixed by its work; the step grows where messages, stragglers or pairs do not behave
as they were simulated. As soon as the measured step is as long as the simulated one of a simpler schedule in the same
layout, the simpler one is the better choice. In utilisation: a rank's planned busy time over that step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from stageloom.plan.alternatives import cut_of
from stageloom.plan.floors import Setup
from stageloom.plan.predict import Prediction
from stageloom.plan.score import Scored, predicted
from stageloom.schedule import Schedule
from stageloom.simulate import Timeline

MOST = 2.0
"""A simpler schedule that takes more than this many times as long is none to go back to."""

CLOSE = 0.02
"""Steps that differ by less are equal for all that a prediction can tell."""

STEPS = 1000
"""Steps over which utilisation is to be measured, after warming up."""


@dataclass(frozen=True, slots=True)
class Rollback:
    """to: the fastest simpler schedule that fits and is not as good, in the same layout or 1F1B in its own; expected,
    trigger: utilisation of each rank (busy time over the step) as planned, and below which to change; seconds: the step
    above which to change.

    unpaired: seconds of a step whose overlapped pairs take as long as their parts one after another; None where there
    are no pairs, or nothing that they hide. equal: the simplest schedule that is within `CLOSE` of the plan, and so as
    good for all that a prediction can tell; None where there is none.
    """

    to: Scored
    expected: tuple[float, ...]
    trigger: tuple[float, ...]
    seconds: float
    unpaired: float | None
    equal: Scored | None

    @property
    def worst(self) -> int:
        """The rank with the least utilisation, to watch."""
        return int(np.argmin(self.expected))


def rollback(setup: Setup, best: Scored, found: Prediction, others: Iterable[Scored]) -> Rollback | None:
    """The trigger of a plan; None where no simpler schedule fits."""
    simpler = [
        one
        for one in others
        if one.fits and one.form.complexity < best.form.complexity and one.seconds < best.seconds * MOST
    ]
    if not simpler:
        return None
    close = [one for one in simpler if one.seconds < best.seconds * (1 + CLOSE)]
    # A trigger next to the plan itself would go off by chance.
    near = {(one.schedule, cut_of(one)) for one in close}
    to = min([one for one in simpler if (one.schedule, cut_of(one)) not in near] or simpler, key=lambda one: one.place)
    busy = busy_times(found.timeline)
    return Rollback(
        to=to,
        expected=tuple((busy / found.seconds).tolist()),
        trigger=tuple((busy / max(to.seconds, found.seconds)).tolist()),
        seconds=max(to.seconds, found.seconds),
        unpaired=_unpaired(setup, best, found),
        equal=min(close, key=lambda one: (one.form.complexity, one.place), default=None),
    )


def busy_times(timeline: Timeline) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Seconds that each rank is busy in a step, a pair once."""
    schedule: Schedule = timeline.schedule
    took = timeline.end - timeline.start
    took[np.flatnonzero(schedule.pair) + 1] = 0.0
    return np.add.reduceat(took, schedule.offsets[:-1])


def _unpaired(setup: Setup, best: Scored, found: Prediction) -> float | None:
    if not best.form.paired or found.costs.overlap_factor() >= 1.0:
        return None
    costs = found.costs.model_copy(update={"overlap_time": None, "overlap_fraction": 1.0})
    return predicted(replace(setup, measured=costs), best.layout, best.form, found.timeline.schedule).seconds
