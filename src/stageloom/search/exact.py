# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportUnknownParameterType=false
"""CP-SAT over orders: all ops of a small problem with a proven bound, or those of a window of time in a large one.

Whole numbers: times and memory are rounded down, which makes every order at most easier; the solver's bound is then a
bound, and an order it finds is judged again with the exact numbers. In a window, what comes before keeps its times and
what comes after keeps its order.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np

from stageloom.errors import MissingExtra
from stageloom.search.order import evaluate, starts
from stageloom.search.problem import UNLIMITED, Ints, Problem
from stageloom.search.solving import held_interrupts, solve

TICKS: Final = 2_000_000
"""Whole-number steps of time in which the longest makespan is counted."""
PARTS: Final = 1_000_000
"""Whole-number steps in which the memory of the fullest place's micro-batch is counted."""


@dataclass(frozen=True)
class Solved:
    """The best order (None: none better), a proven lower bound (None: none), whether the order is optimal, and whether
    the clock, not the effort, ended the search."""

    order: Ints | None
    bound: float | None
    optimal: bool
    cut_short: bool


def load() -> Any:
    """The solver. Raises MissingExtra where it is not installed."""
    try:
        with held_interrupts():
            from ortools.sat.python import cp_model
    except ImportError:
        raise MissingExtra("the exact search", "ortools", "search") from None
    return cp_model


@dataclass
class _Model:
    """A model under construction: start variables by row, and where they end."""

    cp: Any
    model: Any
    problem: Problem
    scale: float
    horizon: int
    duration: Any
    lag: Any


def _begin(problem: Problem, upper: float) -> _Model:
    cp = load()
    scale = _scale(problem, upper)
    return _Model(
        cp, cp.CpModel(), problem, scale, int(np.ceil(upper * scale)) + 1,
        np.floor(problem.time * scale + 1e-6).astype(np.int64), np.floor(problem.lag * scale + 1e-6).astype(np.int64),
    )  # fmt: skip


def _scale(problem: Problem, upper: float) -> float:
    """Ticks a time unit: a power of ten that makes all times whole where one does, within TICKS."""
    times = np.concatenate((problem.time.ravel(), problem.lag.ravel()))
    for power in range(7):
        scale = 10.0**power
        if upper * scale > 50 * TICKS:
            break
        if np.abs(times * scale - np.round(times * scale)).max() < 1e-6:
            return scale
    return TICKS / upper


def _memory_units(problem: Problem) -> tuple[Any, Any]:
    """(part that B frees, part that W frees) of every place and the limits, as small whole numbers, rounded down."""
    unit = float(problem.step[0].max()) / PARTS
    late = np.floor(-problem.step[2] / unit + 1e-6).astype(np.int64)
    early = np.floor((problem.step[0] + problem.step[2]) / unit + 1e-6).astype(np.int64)
    limit = np.array([min(int(each // unit) + 1, 10**12) if each < UNLIMITED // 2 else -1 for each in problem.limit])
    return np.stack((early, late)), limit


def solve_all(
    problem: Problem, order: Ints, objective: str, *, bound: float, effort: float, wall: float, seed: int
) -> Solved:
    """All ops free, from this order on; `bound` is one that is known, `effort` in the solver's deterministic seconds,
    `wall` the clock's seconds after which it is stopped."""
    value = evaluate(problem, order)
    assert value is not None
    m = _begin(problem, value.makespan)
    begins, _ = starts(problem, order)
    variables: dict[tuple[int, int, int], Any] = {}
    hints = _hints(problem, order, begins, m.scale)
    for kind in range(3):
        for place in range(problem.places):
            if kind == 2 and problem.fused[place]:
                continue
            for which in range(int(problem.count[place])):
                start = m.model.new_int_var(0, m.horizon, "")
                variables[kind, place, which] = start
                m.model.add_hint(start, hints[kind, place, which])
                if which:
                    before = variables[kind, place, which - 1]
                    m.model.add(start >= before + int(m.duration[kind, place]))
    for (kind, place, which), start in variables.items():
        for other, lag in _waits(problem, m, kind, place):
            m.model.add(start >= variables[(*other, which)] + int(m.duration[other]) + lag)
    for rank in range(problem.ranks):
        places = problem.places_of(rank)
        rows = [key for key in variables if key[1] in places]
        m.model.add_no_overlap(
            [m.model.new_fixed_size_interval_var(variables[key], int(m.duration[key[:2]]), "") for key in rows]
        )
        _limit_memory(m, rank, places, variables)
    spread = m.model.new_int_var(int(np.floor(bound * m.scale * (1 - 1e-9))), m.horizon, "")
    for rank in range(problem.ranks):
        places = problem.places_of(rank)
        for place in places:
            kind = 1 if problem.fused[place] else 2
            if not problem.count[place]:
                continue
            last = variables[kind, place, int(problem.count[place]) - 1] + int(m.duration[kind, place])
            if objective == "cost":
                for other in places:
                    if problem.count[other] and other % problem.stages == min(p % problem.stages for p in places):
                        m.model.add(spread >= last - variables[0, other, 0])
            else:
                m.model.add(spread >= last)
    m.model.minimize(spread)
    solver = _solver(m.cp, effort, seed)
    solver.parameters.max_time_in_seconds = wall
    status = solve(solver, m.model)
    cut = status != m.cp.OPTIMAL and solver.wall_time >= 0.98 * wall
    proven: float | None = None
    if status in (m.cp.OPTIMAL, m.cp.FEASIBLE, m.cp.UNKNOWN) and objective == "makespan":
        proven = float(solver.best_objective_bound) / m.scale
    if status not in (m.cp.OPTIMAL, m.cp.FEASIBLE):
        return Solved(None, proven, optimal=False, cut_short=cut)
    found = _order_of(problem, {key: solver.value(start) for key, start in variables.items()})
    return Solved(found, proven, optimal=status == m.cp.OPTIMAL, cut_short=cut)


def _waits(problem: Problem, m: _Model, kind: int, place: int) -> list[tuple[tuple[int, int], int]]:
    """The classes whose op of the same micro-batch this class waits for, and how long their message takes."""
    stage, stages = place % problem.stages, problem.stages
    if kind == 0:
        return [((0, place - 1), int(m.lag[0, place]))] if stage else []
    if kind == 1:
        own = [((0, place), 0)]
        return own + ([((1, place + 1), int(m.lag[1, place]))] if stage < stages - 1 else [])
    return [((1, place), 0)]


def _limit_memory(m: _Model, rank: int, places: list[int], variables: dict[tuple[int, int, int], Any]) -> None:
    """A micro-batch's two parts as blocks that stand from its F to the end of its B and of its W."""
    parts, limit = _memory_units(m.problem)
    if limit[rank] < 0:
        return
    blocks: list[Any] = []
    demands: list[int] = []
    for place in places:
        for which in range(int(m.problem.count[place])):
            for part, kind in ((0, 1), (1, 1 if m.problem.fused[place] else 2)):
                demand = int(parts[part, place])
                if demand <= 0:
                    continue
                begin = variables[0, place, which]
                size = m.model.new_int_var(0, m.horizon, "")
                end = variables[kind, place, which] + int(m.duration[kind, place])
                blocks.append(m.model.new_interval_var(begin, size, end, ""))
                demands.append(demand)
    m.model.add_cumulative(blocks, demands, int(limit[rank]))


def _solver(cp: Any, effort: float, seed: int) -> Any:
    solver = cp.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed & 0x7FFFFFFF
    solver.parameters.max_deterministic_time = effort
    solver.parameters.interleave_search = False
    solver.parameters.catch_sigint_signal = False  # an interrupt ends the program, not this alone
    return solver


def _hints(problem: Problem, order: Ints, begins: Any, scale: float) -> dict[tuple[int, int, int], int]:
    kind, place = order // problem.places, order % problem.places
    seen: dict[tuple[int, int], int] = {}
    hints: dict[tuple[int, int, int], int] = {}
    for row in range(len(order)):
        key = int(kind[row]), int(place[row])
        which = seen.get(key, 0)
        seen[key] = which + 1
        hints[(*key, which)] = int(begins[row] * scale)
    return hints


def _order_of(problem: Problem, times: dict[tuple[int, int, int], int]) -> Ints:
    """Every rank's classes by start; of two that start together (an op of no time) the one that is waited for first."""
    rows: list[list[tuple[int, int, int, int, int]]] = [[] for _ in range(problem.ranks)]
    for (kind, place, which), time in times.items():
        stage = place % problem.stages
        chain = (stage, 2 * problem.stages - stage, 3 * problem.stages)[kind]
        rows[int(problem.rank[place])].append((time, which, chain, kind, place))
    return np.array(
        [kind * problem.places + place for rank in rows for _, _, _, kind, place in sorted(rank)], dtype=np.int32
    )


def solve_window(problem: Problem, order: Ints, *, begin: float, end: float, effort: float, seed: int) -> Ints | None:
    """An order whose makespan is no longer, with the ops that start from `begin` to before `end` free; or None."""
    value = evaluate(problem, order)
    assert value is not None
    m = _begin(problem, value.makespan)
    begins, ends = starts(problem, order)
    ticks = np.floor(begins * m.scale).astype(np.int64)
    kind, place = order // problem.places, order % problem.places
    nth = np.zeros(len(order), dtype=np.int64)
    for each in np.unique(order):
        rows = np.flatnonzero(order == each)
        nth[rows] = np.arange(len(rows))
    at = {(int(kind[row]), int(place[row]), int(nth[row])): row for row in range(len(order))}
    free = (begins >= begin) & (begins < end)
    before = begins < begin
    variables: dict[int, Any] = {}
    for row in np.flatnonzero(~before).tolist():
        variables[row] = m.model.new_int_var(0, m.horizon, "")
        m.model.add_hint(variables[row], int(ticks[row]))
    finish = np.floor(ends * m.scale).astype(np.int64)

    def done(row: int) -> Any:
        return int(finish[row]) if before[row] else variables[row] + int(m.duration[kind[row], place[row]])

    for row, start in variables.items():
        key = int(kind[row]), int(place[row])
        for other, lag in _waits(problem, m, *key):
            m.model.add(start >= done(at[(*other, int(nth[row]))]) + lag)
        if nth[row]:
            m.model.add(start >= done(at[(*key, int(nth[row]) - 1)]))
    ends_of_ranks: list[Any] = []
    for rank in range(problem.ranks):
        low, high = int(problem.offsets[rank]), int(problem.offsets[rank + 1])
        inside = [row for row in range(low, high) if free[row]]
        first = next((row for row in range(low, high) if not before[row]), None)
        if first is None:
            continue
        if first > low:
            for row in inside or [first]:
                m.model.add(variables[row] >= int(finish[first - 1]))
        after = [row for row in range(low, high) if not before[row] and not free[row]]
        if after:
            for row in inside:
                m.model.add(variables[after[0]] >= done(row))
        for one, two in pairwise(after):
            m.model.add(variables[two] >= done(one))
        m.model.add_no_overlap(
            [
                m.model.new_fixed_size_interval_var(variables[row], int(m.duration[kind[row], place[row]]), "")
                for row in inside
            ]
        )
        _limit_window(m, rank, inside, low, before, kind, place, variables)
        ends_of_ranks += [done(after[-1])] if after else [done(row) for row in inside]
    spread = m.model.new_int_var(0, m.horizon, "")
    for each in ends_of_ranks:
        m.model.add(spread >= each)
    m.model.minimize(spread * 64 * problem.ranks + sum(ends_of_ranks))
    solver = _solver(m.cp, effort, seed)
    if solve(solver, m.model) not in (m.cp.OPTIMAL, m.cp.FEASIBLE):
        return None
    changed = order.copy()
    for rank in range(problem.ranks):
        low, high = int(problem.offsets[rank]), int(problem.offsets[rank + 1])
        inside = [row for row in range(low, high) if free[row]]
        placed = sorted(inside, key=lambda row: (solver.value(variables[row]), nth[row], kind[row], row))
        changed[inside] = order[placed]
    return changed


def _limit_window(
    m: _Model, rank: int, inside: list[int], low: int, before: Any, kind: Any, place: Any, variables: dict[int, Any]
) -> None:
    """Memory within the window: what is held at its begin, plus what starts, less what ends, never above the limit."""
    parts, limit = _memory_units(m.problem)
    if limit[rank] < 0 or not inside:
        return
    held = 0
    row = low
    while row < inside[0]:
        held += _step(m.problem, parts, int(kind[row]), int(place[row])) if before[row] else 0
        row += 1
    times: list[Any] = []
    changes: list[int] = []
    for row in inside:
        step = _step(m.problem, parts, int(kind[row]), int(place[row]))
        if step:
            late = 0 if step > 0 else int(m.duration[kind[row], place[row]])
            times.append(variables[row] + late)
            changes.append(step)
    m.model.add_reservoir_constraint(times, changes, -(10**12), int(limit[rank]) - held)


def _step(problem: Problem, parts: Any, kind: int, place: int) -> int:
    early, late = int(parts[0, place]), int(parts[1, place])
    if kind == 0:
        return early + late
    if kind == 1:
        return -(early + late) if problem.fused[place] else -early
    return -late
