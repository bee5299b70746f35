"""Local search over an order: annealing by moves on the critical path, each judged by a new longest path.

Moves: two neighbours on the critical path change places; an op of the critical path goes some positions earlier or
later; any W of any rank does. A move that deadlocks, or holds more than a limit, is not made.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from stageloom._kernel import Kernel
from stageloom.search.order import Value, evaluate
from stageloom.search.problem import Ints, Problem

LEG: Final = 20_000_000
"""Moves times ops after which the kernel comes back for a moment: only then Ctrl-C can end it."""
GUIDE = 0.02
"""Weight of the mean end of the ranks, which tells orders of one makespan apart."""


@Kernel
def anneal(
    stages: int,
    count: Any,
    rank_of: Any,
    time: Any,
    step: Any,
    lag: Any,
    limit: Any,
    offsets: Any,
    order: Any,
    best: Any,
    by_cost: bool,
    goal: float,
    moves: int,
    hot: float,
    cold: float,
    guide: float,
    seed: int,
) -> float:
    """Search from `order` (which it changes); the best order goes to `best`, what it takes comes back.

    Stops after `moves`, or once the value is no more than `goal`. The temperature falls from `hot` to `cold`.
    """
    places = count.shape[0]
    ranks = limit.shape[0]
    rows = offsets[ranks]
    most = 0
    for place in range(places):
        most = max(most, count[place])
    row_at = np.zeros((2, places, most), dtype=np.int64)
    done = np.zeros((3, places), dtype=np.int64)
    held = np.zeros(ranks, dtype=np.int64)
    at = np.zeros(ranks, dtype=np.int64)
    stack = np.zeros(ranks + 1, dtype=np.int64)
    waiting = np.zeros((2, places), dtype=np.int64)
    end = np.zeros(rows)
    cause = np.zeros(rows, dtype=np.int64)
    nth = np.zeros(rows, dtype=np.int64)
    kept_nth = np.zeros(rows, dtype=np.int64)
    path = np.zeros(rows, dtype=np.int64)
    state = (seed * 2654435761 + 88172645463325252) & 0xFFFFFFFFFFFF
    current = 1e300
    found: Any = 1e300
    long = 0
    low = 0
    high = 0
    moved = 0
    for number in range(moves + 1):
        # ---- the move: the op at `low` goes to `high` (or the reverse, with `moved` -1)
        ok = True
        if number > 0:
            state = (state * 25214903917 + 11) & 0xFFFFFFFFFFFF
            pick = (state >> 20) % 100
            state = (state * 25214903917 + 11) & 0xFFFFFFFFFFFF
            if pick < 85 and long > 1:
                row = path[(state >> 20) % long]
            else:
                row = (state >> 20) % rows
            rank = 0
            code = order[row]
            rank = rank_of[code % places]
            reach = 1
            if pick >= 50:
                state = (state * 25214903917 + 11) & 0xFFFFFFFFFFFF
                reach = 1 + (state >> 20) % 12
            state = (state * 25214903917 + 11) & 0xFFFFFFFFFFFF
            if (state >> 20) & 1:
                low = max(offsets[rank], row - reach)
                high = row
                moved = -1
            else:
                low = row
                high = min(offsets[rank + 1] - 1, row + reach)
                moved = 1
            # Ops of the same place that depend on one another must not pass.
            if moved > 0:
                place = code % places
                kind = code // places
                target = row
                while target < high:
                    other = order[target + 1]
                    if other % places == place and (
                        other == code or (other // places == kind + 1 and kept_nth[target + 1] == kept_nth[row])
                    ):
                        break
                    target += 1
                high = target
            else:
                place = code % places
                kind = code // places
                target = row
                while target > low:
                    other = order[target - 1]
                    if other % places == place and (
                        other == code or (other // places == kind - 1 and kept_nth[target - 1] == kept_nth[row])
                    ):
                        break
                    target -= 1
                low = target
            if low == high:
                continue
            if moved > 0:
                for each in range(low, high):
                    order[each] = order[each + 1]
                order[high] = code
            else:
                for each in range(high, low, -1):
                    order[each] = order[each - 1]
                order[low] = code
        # ---- its longest path
        for place in range(places):
            done[0, place] = 0
            done[1, place] = 0
            done[2, place] = 0
            waiting[0, place] = -1
            waiting[1, place] = -1
        for rank in range(ranks):
            at[rank] = offsets[rank]
            held[rank] = 0
            stack[rank] = rank
        depth = ranks
        ran = 0
        while depth > 0 and ok:
            depth -= 1
            rank = stack[depth]
            row = at[rank]
            begin_of_rank = offsets[rank]
            now = end[row - 1] if row > begin_of_rank else 0.0
            while row < offsets[rank + 1]:
                kind = order[row] // places
                place = order[row] % places
                which = done[kind, place]
                begin = now
                why = row - 1 if row > begin_of_rank else -1
                if kind == 0:
                    if place % stages > 0:
                        if done[0, place - 1] <= which:
                            waiting[0, place - 1] = rank
                            break
                        sender = row_at[0, place - 1, which]
                        ready = end[sender] + lag[0, place]
                        if ready > begin:
                            begin = ready
                            why = sender
                elif kind == 1:
                    if done[0, place] <= which:
                        break
                    if place % stages < stages - 1:
                        if done[1, place + 1] <= which:
                            waiting[1, place + 1] = rank
                            break
                        sender = row_at[1, place + 1, which]
                        ready = end[sender] + lag[1, place]
                        if ready > begin:
                            begin = ready
                            why = sender
                elif done[1, place] <= which:
                    break
                if step[kind, place] > 0 and held[rank] + step[kind, place] > limit[rank]:
                    ok = False
                    break
                held[rank] += step[kind, place]
                now = begin + time[kind, place]
                end[row] = now
                cause[row] = why
                nth[row] = which
                if kind < 2:
                    row_at[kind, place, which] = row
                    if waiting[kind, place] >= 0:
                        stack[depth] = waiting[kind, place]
                        depth += 1
                        waiting[kind, place] = -1
                done[kind, place] += 1
                row += 1
                ran += 1
            at[rank] = row
        ok = ok and ran == rows
        # ---- what it takes, and whether to keep it
        value = 1e300
        judged = 1e300
        longest = 0
        if ok:
            value = 0.0
            mean = 0.0
            for rank in range(ranks):
                if offsets[rank + 1] == offsets[rank]:
                    continue
                last = end[offsets[rank + 1] - 1]
                mean += last
                if by_cost:
                    head = offsets[rank]
                    last -= end[head] - time[order[head] // places, order[head] % places]
                if last > value:
                    value = last
                    longest = offsets[rank + 1] - 1
            judged = value + guide * mean / ranks
        warm = hot * (cold / hot) ** (number / (moves + 1.0))
        keep = ok and judged <= current
        if ok and not keep:
            state = (state * 25214903917 + 11) & 0xFFFFFFFFFFFF
            chance = (state >> 16) / 4294967296.0
            keep = chance < np.exp((current - judged) / warm)
        if keep:
            current = judged
            long = 0
            row = longest
            while row >= 0:
                path[long] = row
                long += 1
                row = cause[row]
            for row in range(rows):
                kept_nth[row] = nth[row]
            if value < found:
                found = value
                for row in range(rows):
                    best[row] = order[row]
                if found <= goal:
                    return found
        elif number > 0:
            if moved > 0:
                code = order[high]
                for each in range(high, low, -1):
                    order[each] = order[each - 1]
                order[low] = code
            else:
                code = order[low]
                for each in range(low, high):
                    order[each] = order[each + 1]
                order[high] = code
        else:
            return -1.0
    return found


def annealed(
    problem: Problem, order: Ints, *, objective: str, goal: float, moves: int, seed: int, hot: float, cold: float
) -> tuple[Ints, Value]:
    """The best order found from this one, and what it takes. `hot` and `cold` are parts of its value."""
    before = evaluate(problem, order)
    assert before is not None
    scale = before.of(objective)
    best, now, found = order.copy(), order.copy(), np.inf
    legs = 1 + problem.ops * moves // LEG
    for leg in range(legs):
        of_leg = order.copy()
        warm, cool = (scale * hot * (cold / hot) ** (at / legs) for at in (leg, leg + 1))
        value = anneal.pick(problem.ops * moves)(
            problem.stages, problem.count, problem.rank, problem.time, problem.step, problem.lag, problem.limit,
            problem.offsets, now, of_leg, objective == "cost", goal, moves // legs, warm, cool, GUIDE, seed + leg,
        )  # fmt: skip
        if value < found:
            best, found = of_leg, value
        if found <= goal:
            break
    after = evaluate(problem, best)
    assert after is not None
    return best, after
