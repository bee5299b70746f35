"""What no order can beat: lower bounds from the work of a rank, its memory, and the way of a micro-batch.

All are in the same time as the orders. `H` of a place is the earliest start of its first F, `R` of its first B, both
with nothing in the way. On a rank between the first H and the first R only forwards can run, as many as its memory
holds: the rest of that time is idle. After the last forward has started, that micro-batch still has to go to the last
stage and back; only what the memory holds then can fill the wait. In between, a micro-batch can begin only when one
that came before is out of the memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from stageloom.search.problem import UNLIMITED, Floats, Problem

MOST_STATES: Final = 4_000


@dataclass(frozen=True)
class Ways:
    """Of every place, free of all others: H, R, and the time from the end of its B to the end of the step."""

    head: Floats
    back: Floats
    tail: Floats
    own_tail: Floats
    """Like tail, but on the place's own rank alone."""


def ways(problem: Problem) -> Ways:
    stages, places = problem.stages, problem.places
    forward, backward, weight = problem.time
    head, back, tail, own = (np.zeros(places) for _ in range(4))
    for path in range(places // stages):
        at = range(path * stages, (path + 1) * stages)
        for place in at[1:]:
            head[place] = head[place - 1] + forward[place - 1] + problem.lag[0, place]
        back[at[-1]] = head[at[-1]] + forward[at[-1]]
        for place in at[-2::-1]:
            back[place] = back[place + 1] + backward[place + 1] + problem.lag[1, place]
        for place in at:
            after = 0.0
            tail[place] = own[place] = weight[place]
            for earlier in range(place - 1, at[0] - 1, -1):
                after += problem.lag[1, earlier] + backward[earlier]
                tail[place] = max(tail[place], after + weight[earlier])
                if problem.rank[earlier] == problem.rank[place]:
                    own[place] = max(own[place], after + weight[earlier])
    return Ways(head, back, tail, own)


def lower_bound(problem: Problem, objective: str) -> float:
    """The largest of all bounds for `makespan` or `cost`."""
    found = ways(problem)
    best = 0.0
    for rank in range(problem.ranks):
        places = problem.places_of(rank)
        if places:
            best = max(best, *_of_rank(problem, found, rank, places, objective))
    if objective == "makespan":
        best = max(best, _slowest_backwards(problem, found))
        for path in range(problem.places // problem.stages):
            if problem.count[path * problem.stages]:
                first = path * problem.stages
                best = max(best, float(found.back[first] + problem.time[1, first] + found.tail[first]))
    return best


def _of_rank(problem: Problem, found: Ways, rank: int, places: list[int], objective: str) -> list[float]:
    stages, limit = problem.stages, int(problem.limit[rank])
    work = float(problem.work[rank])
    live = [place for place in places if problem.count[place]]
    paths = sorted({place // stages for place in live})
    if not live:
        return [0.0]
    head = min(float(found.head[place]) for place in live)
    back = min(float(found.back[place]) for place in live)
    makespan = objective == "makespan"
    if not makespan and len(paths) > 1:
        return [work]
    base = head if makespan else 0.0
    first_idle = max(0.0, back - head - _forwards_before(problem, found, live, limit, head, back))
    bounds = [base + first_idle + work]
    firsts = [min(place for place in live if place // stages == path) for path in paths]
    # Every forward and backward of the rank is done by the end of its last backward, and then comes the way out.
    tails = found.tail if makespan else found.own_tail
    both = sum(float(problem.count[place] * (problem.time[0, place] + problem.time[1, place])) for place in live)
    bounds.append(base + first_idle + both + min(float(tails[place]) for place in firsts))
    for turn in range(max(len(live) // len(paths), 1)):
        anchors = [place + 0 for place in firsts]
        if turn:
            of_path = [sorted(place for place in live if place // stages == path) for path in paths]
            if any(len(each) <= turn for each in of_path) or len(paths) > 1:
                break
            anchors = [each[turn] for each in of_path]
        worst = np.inf
        for anchor in anchors:
            remaining = _remaining_work(problem, live, anchor, limit)
            remaining = min(remaining, work - _before_last(problem, live, anchor))
            trip = float(found.back[anchor] - found.head[anchor]) + float(problem.time[1, anchor])
            trip += float((found.tail if makespan else found.own_tail)[anchor])
            # With too little memory for all its forwards, the last one starts after a backward: both idles count.
            apart = int(problem.count[anchor]) * int(problem.step[0, anchor]) > limit
            idle = first_idle + _idle_between(problem, found, live, anchor, limit) if apart else 0.0
            found_here = base + idle + work - remaining + max(remaining, trip)
            if len(paths) == 1:
                # The last forward comes no sooner than the slowest stage before lets it.
                before = anchor // stages * stages if makespan else anchor
                spacing = float(problem.time[0, before : anchor + 1].max())
                last = float(found.head[anchor]) - head + (int(problem.count[anchor]) - 1) * spacing
                found_here = max(found_here, base + last + trip)
            worst = min(worst, found_here)
        bounds.append(float(worst))
    if len(live) == len(paths) == 1:
        bounds.append(base + _in_turns(problem, found, live[0], limit, makespan=makespan))
    return bounds


def _before_last(problem: Problem, live: list[int], anchor: int) -> float:
    """Forward work that a rank has done for certain when the last forward at `anchor` starts."""
    chain = [place for place in live if place // problem.stages == anchor // problem.stages and place < anchor]
    done = sum(float(problem.count[place] * problem.time[0, place]) for place in chain)
    return done + float((problem.count[anchor] - 1) * problem.time[0, anchor])


def _slowest_backwards(problem: Problem, found: Ways) -> float:
    """Backwards leave a place no closer together than the slowest stage after it lets them."""
    best = 0.0
    for place in range(problem.places):
        last = (place // problem.stages + 1) * problem.stages
        many = int(problem.count[place]) - 1
        if many >= 0:
            spacing = float(problem.time[1, place:last].max())
            own = float(problem.time[1, place])
            best = max(best, float(found.back[place]) + many * spacing + own + float(found.tail[place]))
    return best


def _forwards_before(problem: Problem, found: Ways, live: list[int], limit: int, head: float, back: float) -> float:
    """The most forward work a rank can do from `head` to `back`, the start of its first backward."""
    items: list[tuple[float, int]] = []
    for place in live:
        path = place // problem.stages * problem.stages
        slowest = float(problem.time[0, path : place + 1].max())
        begin, taken = float(found.head[place]), float(problem.time[0, place])
        for nth in range(int(problem.count[place])):
            start = begin + nth * slowest
            if start >= back or len(items) > MOST_STATES:
                break
            items.append((min(taken, back - start), int(problem.step[0, place])))
    return min(back - head, _knapsack(items, limit))


def _knapsack(items: list[tuple[float, int]], room: int) -> float:
    """The most that fits: exact where all sizes are equal, else with the last item cut."""
    sizes = {size for _, size in items}
    if len(sizes) == 1 and (size := next(iter(sizes))) > 0:
        return sum(sorted((value for value, _ in items), reverse=True)[: room // size])
    total = 0.0
    for value, size in sorted(items, key=lambda item: item[0] / item[1] if item[1] > 0 else np.inf, reverse=True):
        if size > room:
            return total + (value * room / size if size > 0 else 0.0)
        total, room = total + value, room - max(size, 0)
    return total


def _states(problem: Problem, chain: list[int], anchor: int | None) -> list[tuple[int, float]]:
    """(memory, remaining work) of a micro-batch on its rank at every point of its way, its F at `anchor` done.

    Points: forwards done up to some place, then backwards from the last; each W may be done or still owed.
    """
    f, b, w = (problem.time[kind] for kind in range(3))
    least = 0 if anchor is None else chain.index(anchor) + 1
    states: list[tuple[int, float]] = []
    for forwards in range(max(least, 1), len(chain) + 1):
        held = sum(int(problem.step[0, place]) for place in chain[:forwards])
        rest = sum(float(f[place]) for place in chain[forwards:])
        rest += sum(float(b[place] + w[place]) for place in chain)
        states.append((held, rest))
    points: list[tuple[int, float]] = [states[-1]]
    for place in reversed(chain):
        moved: list[tuple[int, float]] = []
        for held, rest in points:
            after = held + int(problem.step[1, place]), rest - float(b[place])
            moved.append(after)
            moved.append((after[0] + int(problem.step[2, place]), after[1] - float(w[place])))
        points = list(dict.fromkeys(moved))
        states += points
        if len(states) > MOST_STATES:
            break
    return [state for state in dict.fromkeys(states) if state[1] > 1e-12]


def _remaining_work(problem: Problem, live: list[int], anchor: int, limit: int) -> float:
    """The most work a rank can have left when the last forward at `anchor` starts, by what its memory holds."""
    f, b, w = (problem.time[kind] for kind in range(3))
    stages = problem.stages
    chain = sorted(place for place in live if place // stages == anchor // stages)
    at = chain.index(anchor)
    own = float(f[anchor]) + sum(float(f[p]) for p in chain[at + 1 :]) + sum(float(b[p] + w[p]) for p in chain)
    room = limit - sum(int(problem.step[0, p]) for p in chain[: at + 1])
    if limit >= UNLIMITED // 2:
        return np.inf
    states: list[tuple[int, float]] = []
    for path in {place // stages for place in live}:
        of_path = sorted(place for place in live if place // stages == path)
        states += _states(problem, of_path, anchor if path == anchor // stages else of_path[0])
    if any(held <= 0 for held, _ in states):
        return np.inf
    others = int(sum(problem.count[p] for p in live if p in {min(q for q in live if q // stages == p // stages)})) - 1
    if len(live) == 1:
        # Two kinds: both B and W to come, or W alone.
        whole, late = int(problem.step[0, anchor]), -int(problem.step[2, anchor])
        if whole <= 0:
            return np.inf  # a stage without layers holds nothing: its memory says nothing
        most = 0.0
        for both in range(min(others, max(room, 0) // whole) + 1):
            alone = others - both
            if late > 0:
                alone = min(alone, (room - both * whole) // late)
            most = max(most, both * float(b[anchor] + w[anchor]) + alone * float(w[anchor]))
        return own + most
    # Where nothing that is left takes time there is no state: the others then have no work left.
    densest = max((rest / held for held, rest in states), default=0.0)
    longest = max((rest for _, rest in states), default=0.0)
    return own + min(others * longest, max(room, 0) * densest)


def _idle_between(problem: Problem, found: Ways, live: list[int], anchor: int, limit: int) -> float:
    """Idle time in stretches between the first and the last that memory forces, for one stage a rank.

    `fit` micro-batches fit, so F(i + fit) starts after the end of B(i); from the start of F(i) to the end of B(i) only
    `fit` forwards, and the backwards and W's of what is live at either end, can run.
    """
    if len(live) > 1:
        return 0.0
    f, b, w = (float(problem.time[kind, anchor]) for kind in range(3))
    whole, late = int(problem.step[0, anchor]), -int(problem.step[2, anchor])
    fit = limit // whole if whole > 0 else 0
    if fit < 1:
        return 0.0
    stretches = (int(problem.count[anchor]) - 1) // fit - 1
    length = float(found.back[anchor] - found.head[anchor]) + b
    most = 0.0
    for live_then in range(1, fit + 1):
        owed = (limit - live_then * whole) // late if late > 0 else 10**9
        # All that are live do their B; W's of those but the last, whose B ends the stretch, and of those owed.
        most = max(most, live_then * b + (live_then - 1 + owed) * w)
    return max(0, stretches) * max(0.0, length - fit * f - most)


def _in_turns(problem: Problem, found: Ways, place: int, limit: int, *, makespan: bool) -> float:
    """With room for `fit` micro-batches, every `fit`-th begins after the end of the one before: turns of a trip."""
    whole, late = int(problem.step[0, place]), -int(problem.step[2, place])
    if whole <= 0 or limit // whole < 1:
        return 0.0
    fit = limit // whole
    trip = float(found.back[place] - found.head[place] + problem.time[1, place])
    # Where not even one W may be owed beside, a W or another B has to end first.
    extra = float(min(problem.time[2, place], problem.time[1, place])) if fit * whole + late > limit else 0.0
    if late <= 0:
        extra = 0.0
    turns = (int(problem.count[place]) - 1) // fit
    tail = float((found.tail if makespan else found.own_tail)[place])
    return turns * (trip + extra) + trip + tail


def smallest_limits(problem: Problem) -> Any:
    """Parts that every rank needs at least, so that one micro-batch can pass: with less, nothing can run."""
    need = np.zeros(problem.ranks, dtype=np.int64)
    for path in range(problem.places // problem.stages):
        first = path * problem.stages
        if not problem.count[first]:
            continue
        held = np.zeros(problem.ranks, dtype=np.int64)
        most = np.zeros(problem.ranks, dtype=np.int64)
        for place in range(first, first + problem.stages):
            held[problem.rank[place]] += problem.step[0, place]
            most = np.maximum(most, held)
        for place in range(first + problem.stages - 1, first - 1, -1):
            rank = problem.rank[place]
            most[rank] = max(most[rank], held[rank] + max(0, int(problem.step[1, place])))
            held[rank] += problem.step[1, place] + problem.step[2, place]
        need = np.maximum(need, most)
    return need
