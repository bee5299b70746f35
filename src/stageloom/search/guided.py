"""List scheduling by latest starts: the windows that a deadline close to the bound leaves say which op is urgent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from stageloom.search.asked import Deadlines
from stageloom.search.deadline import Table, Windows, shrink
from stageloom.search.dispatch import Rule, scheduled
from stageloom.search.order import value_of
from stageloom.search.problem import Floats, Problem
from stageloom.search.rules import ALL, base_rule
from stageloom.search.steps import Search, keep_best

DEADLINES: Final = 6
BLENDS: Final = (0.0, 0.25, 0.5)
"""Parts of the earliest start in the priority; the rest is the latest."""
HOLDS: Final = (ALL, -1, 0, 2)
WAITS: Final = (0.3, 0.8, 0.0)
FILLS: Final = (0.0, 0.3, 0.9)
KEPT: Final = 6


def first(run: Search) -> None:
    """Both steps, where windows say much; elsewhere the other steps do better to begin with."""
    if run.tight:
        guide(run)
        follow(run)


def later(run: Search) -> None:
    """Both steps, elsewhere."""
    if not run.tight:
        guide(run)
        follow(run)


def guide(run: Search) -> None:
    """Schedule by the windows of some deadlines between the bound and the best, over a grid of rules."""
    known = run.known
    if known is None or run.order is None:
        return
    base = base_rule(run.problem)
    before = known.effort
    for windows in _guides(known, run.best):
        run.effort += known.effort - before
        before = known.effort
        for blend in BLENDS:
            due = _due(run.problem, known.table, windows, blend)
            for hold in HOLDS:
                owed = np.arange(run.problem.ranks) if hold < 0 else np.full(run.problem.ranks, hold)
                for wait in WAITS:
                    for fill in FILLS:
                        _try(run, replace(base, hold=owed, wait=wait, fill=fill), due)
                        if run.over:
                            return


def _guides(known: Deadlines, best: float) -> Iterator[Windows]:
    """Windows to be guided by: what probing left of the last deadline that was not refuted, and some others."""
    if known.windows is not None:
        yield known.windows
    low, high = known.low * 1.0003, max(best, known.low * 1.001)
    for step in range(DEADLINES):
        deadline = low + step / (DEADLINES - 1) * (high - low)
        windows = known.table.windows(deadline)
        possible, work = shrink(known.table, windows, deadline)
        known.pay(work)
        if possible:
            yield windows


def _due(problem: Problem, table: Table, windows: Windows, blend: float) -> Floats:
    """Priorities `[kind, place, n]`: latest starts, with a part of the earliest."""
    es, le, _ = windows
    urgency = blend * es + (1 - blend) * (le - np.repeat(table.time, table.size))
    due = np.zeros((3, problem.places, int(problem.count.max())))
    for cls in range(len(table.base)):
        first, many = int(table.base[cls]), int(table.size[cls])
        due[cls // problem.places, cls % problem.places, :many] = urgency[first : first + many]
    return due


def _try(run: Search, rule: Rule, due: Floats) -> float:
    run.pay(1.6)
    out = scheduled(run.problem, rule, due)
    if out is None:
        return np.inf
    value = value_of(out[1])
    run.offer(out[0], value, run.step)
    found = value.of(run.objective)
    if len(run.guided) < KEPT or found < run.guided[-1][0] - 1e-9:
        keep_best(run.guided, KEPT, (found, rule, due))
    return found


def follow(run: Search) -> None:
    """Hill climbing on single ops' priorities, from the best and from another of the best."""
    if not run.guided:
        return
    for start in (0, int(run.random.integers(0, len(run.guided)))):
        value, rule, due = run.guided[start]
        budget = run.effort + 0.06 * run.seconds
        while run.effort < budget and not run.over:
            other, changed = _near(run, rule, due)
            found = _try(run, other, changed)
            if found <= value + 1e-9:
                value, rule, due = found, other, changed


def _near(run: Search, rule: Rule, due: Floats) -> tuple[Rule, Floats]:
    """Priorities near these: of some neighbours on one rank or on all, of one micro-batch, or of any ops."""
    random = run.random
    changed = due.copy()
    size = rule.period * (0.3, 1.0, 3.0)[int(random.integers(0, 3))]
    what = int(random.integers(0, 4))
    low = int(random.integers(0, int(run.problem.count.max())))
    high = low + int(random.integers(1, 6))
    kind, place = int(random.integers(0, 3)), int(random.integers(0, run.problem.places))
    if what == 0:
        changed[kind, place, low:high] += float(random.normal(0, size))
    elif what == 1:
        changed[kind, :, low:high] += float(random.normal(0, size))
    elif what == 2:
        changed[:, :, low] += float(random.normal(0, size))
    else:
        changed += (random.random(due.shape) < 0.02) * random.normal(0, size, due.shape)
    if random.random() < 0.1:
        rule = replace(rule, wait=float(random.random()), fill=float(random.random()))
    return rule, changed
