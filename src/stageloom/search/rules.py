"""Which rules the list scheduler is run with: a grid, then hill climbing from the best of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from stageloom.search.bounds import Ways, ways
from stageloom.search.dispatch import Rule
from stageloom.search.problem import Problem

ALL: Final = 10**6

LEADS: Final = (0.0, -1.0, 1.0, 3.0, -3.0)
"""How much later, in periods, a backward's phase stands than the time at which it can first start."""
REACHES: Final = (np.inf, 1.0, 1.3, 0.75, 0.5)
"""Micro-batches between F and B, as a multiple of a round trip over the period."""
HOLDS: Final = (ALL, -1, 1, 3, 0)
"""W's that may be owed; -1: as many as ranks stand before this one."""
WAITS: Final = (0.3, 0.0, 0.8)
FILLS: Final = (0.3, 0.0, 0.9)


def base_rule(problem: Problem, found: Ways | None = None) -> Rule:
    """Every class stands at the time at which it can first start; no limit but memory; W fills waits."""
    found = ways(problem) if found is None else found
    period = float(problem.work.max()) / max(problem.microbatches, 1)
    phase = np.stack((found.head, found.back, found.back + problem.time[1]))
    return Rule(
        phase=phase,
        period=period,
        ahead=np.full(problem.places, ALL),
        hold=np.full(problem.ranks, ALL),
        wait=0.3,
        fill=0.3,
    )


def grid(problem: Problem) -> Iterator[Rule]:
    """Rules in an order in which the first are the most likely."""
    found = ways(problem)
    base = base_rule(problem, found)
    trip = np.ceil((found.back - found.head + problem.time[0]) / max(base.period, 1e-300))
    axes = itertools.product(range(len(REACHES)), range(len(LEADS)), range(len(HOLDS)), range(3), range(3))
    for reach, lead, hold, wait, fill in sorted(axes, key=lambda at: (sum(at), at)):
        phase = base.phase.copy()
        phase[1:] += LEADS[lead] * base.period
        ahead = base.ahead
        if np.isfinite(REACHES[reach]):
            ahead = np.maximum(1, np.rint(trip * REACHES[reach])).astype(np.int64)
        owed = np.arange(problem.ranks) if HOLDS[hold] < 0 else np.full(problem.ranks, HOLDS[hold])
        yield replace(base, phase=phase, ahead=ahead, hold=owed, wait=WAITS[wait], fill=FILLS[fill])


def changed(rule: Rule, problem: Problem, random: np.random.Generator) -> Rule:
    """A rule near this one."""
    phase = rule.phase.copy()
    what = random.integers(0, 10)
    if what < 6:
        size = rule.period * float(random.choice((0.1, 0.4, 1.5)))
        mask = random.random(phase.shape) < float(random.choice((0.1, 0.4)))
        mask[random.integers(0, 3), random.integers(0, phase.shape[1])] = True
        return replace(rule, phase=phase + mask * random.normal(0, size, phase.shape))
    if what == 6:
        # A slope: places further on stand later, or earlier, all by the same more.
        slope = float(random.normal(0, 0.2)) * rule.period
        phase[int(random.integers(0, 3))] += slope * np.arange(phase.shape[1])
        return replace(rule, phase=phase, period=rule.period * (1 + random.normal(0, 0.01)))
    if what == 7:
        hold = rule.hold.copy()
        hold[random.random(len(hold)) < 0.4] = random.choice((0, 1, 2, 3, 5, ALL))
        return replace(rule, hold=hold)
    if what == 8:
        most = int(problem.microbatches)
        ahead = np.minimum(rule.ahead, most)
        mask = random.random(len(ahead)) < 0.4
        ahead = np.maximum(1, ahead + mask * random.integers(-2, 3, len(ahead)))
        return replace(rule, ahead=ahead)
    return replace(rule, wait=float(random.random()), fill=float(random.random()))
