"""Can a step end by a deadline? Windows of time, one an op, narrowed until they contradict or stand still.

An op x has an earliest start `es` and a latest end `le`, and for every class c of its rank `ahead[x, c]`: how many ops
of c come before it in every order that keeps the deadline (the ops of a class run in turn, so those are its first).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stageloom._kernel import Kernel


@Kernel
def narrow(
    stages: int,
    size: Any,
    base: Any,
    rank_of: Any,
    classes: Any,
    local: Any,
    time: Any,
    lag: Any,
    early: Any,
    late: Any,
    limit: Any,
    es: Any,
    le: Any,
    ahead: Any,
    stale: Any,
    work: Any,
    most: int,
    eps: float,
    least: float,
) -> int:
    """Narrow `es`, `le`, `ahead` in place, in at most `most` sweeps; False where no order keeps the windows.

    Classes are `kind * places + place`; op n of class c is `base[c] + n`, `size[c]` of them. `classes[rank]`: the
    classes of a rank, -1 behind them, and `local` their numbers there. `early`, `late`: what the end of a B and of a W
    frees. `stale[i, rank]`: 1 where a rank has to be looked at again: 0 for its earliest starts, 1 for its latest
    ends, 2 and 3 for pairs and sets (`take_sides`). `work[0]` grows by the ops of its rank for each op that is looked
    at. `eps`: what rounding may come to; what moves by no more than `least` is not followed up.

    Rules, each sound for every order that keeps the deadline:

    - an op starts after the one before it of its class, and after what it waits for and its message;
    - what comes before B(n) of a stage at that stage comes before it too at the stage before (its F's there are
      earlier, its B later), and likewise forwards at the stage after;
    - an op starts after all that are ahead of it have run one after the other (`together`), from no earlier than each
      can; and it ends before all that are behind it have to begin;
    - two ops of a rank that cannot run in one order run in the other; an op that cannot be among or before a set that
      has to end by some time runs after it, and one that cannot be among or after a set runs before it;
    - when a forward starts, what its rank then holds fits: of the B's and W's that can have ended by then enough have.
    """
    places = rank_of.shape[0]
    ranks = limit.shape[0]
    width = classes.shape[1]
    longest = 0
    for each in range(3 * places):
        longest = max(longest, size[each])
    pre = np.zeros(width, dtype=np.int64)
    b_most: Any = np.zeros(width, dtype=np.int64)
    w_most = np.zeros(width, dtype=np.int64)
    finger = np.zeros(width, dtype=np.int64)
    now = np.zeros(ranks, dtype=np.int64)
    rows = np.zeros(ranks, dtype=np.int64)
    for each in range(3 * places):
        rows[rank_of[each % places]] += size[each]

    def together(rank: int) -> float:
        """When the first `pre[c]` ops of each class of a rank can have ended at the earliest."""
        rest = 0.0
        for c in range(width):
            finger[c] = pre[c] - 1
            if pre[c] > 0:
                rest += pre[c] * time[classes[rank, c]]
        load = 0.0
        found = 0.0
        last = 1e300
        while True:
            pick = -1
            at = -1.0
            for c in range(width):
                if finger[c] >= 0 and es[base[classes[rank, c]] + finger[c]] > at:
                    at = es[base[classes[rank, c]] + finger[c]]
                    pick = c
            # All that were taken before start no earlier than this, also where a class is not yet in order.
            at = min(at, last)
            last = at
            if pick < 0 or at + rest <= found:
                return found
            finger[pick] -= 1
            load += time[classes[rank, pick]]
            found = max(found, at + load)

    def behind(rank: int, own: int, n: int) -> float:
        """When the ops that come after op n of class `own` (its number on the rank) have to begin at the latest."""
        rest = 0.0
        for c in range(width):
            finger[c] = 0
            if classes[rank, c] < 0:
                continue
            cls = classes[rank, c]
            if c == own:
                finger[c] = n + 1
            else:
                lo = 0
                hi = size[cls]
                while lo < hi:
                    mid = (lo + hi) // 2
                    if ahead[base[cls] + mid, own] > n:
                        hi = mid
                    else:
                        lo = mid + 1
                finger[c] = lo
            rest += (size[cls] - finger[c]) * time[cls]
        load = 0.0
        found = 1e300
        last = -1e300
        while True:
            pick = -1
            at = 1e300
            for c in range(width):
                cls = classes[rank, c]
                if cls >= 0 and finger[c] < size[cls] and le[base[cls] + finger[c]] < at:
                    at = le[base[cls] + finger[c]]
                    pick = c
            at = max(at, last)
            last = at
            if pick < 0 or at - rest >= found:
                return found
            finger[pick] += 1
            load += time[classes[rank, pick]]
            found = min(found, at - load)

    def ended(cls: int, until: float, own: int, n: int) -> int:
        """How many ops of a class can have ended by a time, none of them known to come after op n of class `own`."""
        lo = 0
        hi = size[cls]
        while lo < hi:
            mid = (lo + hi) // 2
            if es[base[cls] + mid] + time[cls] <= until + eps and ahead[base[cls] + mid, own] <= n:
                lo = mid + 1
            else:
                hi = mid
        return lo

    def freed(rank: int, place: int, x: int, n: int, most_b: int) -> float:
        """When memory lets forward n of a rank's only place start: over all numbers of B's that may be ahead of it,
        with the W's that it then needs."""
        best = 1e300
        cls = places + place
        splits = size[2 * places + place] > 0
        b_at = local[cls]
        w_at = local[2 * places + place]
        b = ahead[x, b_at]
        while True:
            over = (n + 1 - b) * early[place] - limit[rank]
            w = ahead[x, w_at] if splits else 0
            if splits and late[place] > 0:
                w = max(w, n + 1 + over // late[place] + (1 if over % late[place] else 0))
            if over <= 0 and w <= b:
                for c in range(width):
                    pre[c] = ahead[x, c]
                pre[b_at] = b
                if splits:
                    pre[w_at] = w
                best = min(best, together(rank))
            b += 1
            if b > most_b or es[base[cls] + b - 1] + time[cls] >= best:
                return best

    def room(rank: int, x: int, n: int, own: int, begin: float) -> float:
        """When memory lets forward n of class `own` start, where a rank has several places: the first time by which
        enough B's and W's can have ended."""
        until = begin
        while True:
            held = 0
            soonest = 1e300
            for c in range(width):
                if classes[rank, c] < 0 or classes[rank, c] >= places:
                    continue
                begun = ahead[x, c] + (1 if c == own else 0)
                for kind in range(1, 3):
                    cls = kind * places + classes[rank, c]
                    count = ended(cls, until, own, n)
                    if size[cls] > 0 and count < begun:
                        frees = early[classes[rank, c]] if kind == 1 else late[classes[rank, c]]
                        held += (begun - count) * frees
                        if ahead[base[cls] + count, own] <= n:
                            soonest = min(soonest, es[base[cls] + count] + time[cls])
            if held <= limit[rank]:
                return until
            if soonest >= 1e299:
                return soonest
            until = soonest

    for sweep in range(most):
        # ---- forward in time: earliest starts, and what is ahead
        for rank in range(ranks):
            now[rank] = stale[0, rank]
            stale[0, rank] = 0
        for n in range(longest):
            for step in range(3 * places):
                kind = step // places
                place = step % places
                if kind > 0:
                    place = places - 1 - place
                cls = kind * places + place
                if n >= size[cls]:
                    continue
                rank = rank_of[place]
                own = local[cls]
                x = base[cls] + n
                begin = es[x]
                raised = False
                if kind == 0 and place % stages > 0:
                    y = base[cls - 1] + n
                    begin = max(begin, es[y] + time[cls - 1] + lag[0, place])
                    if ahead[y, local[places + place - 1]] > ahead[x, local[places + place]]:
                        ahead[x, local[places + place]] = ahead[y, local[places + place - 1]]
                        raised = True
                elif kind == 1 and place % stages < stages - 1:
                    y = base[cls + 1] + n
                    begin = max(begin, es[y] + time[cls + 1] + lag[1, place])
                    if ahead[y, local[place + 1]] > ahead[x, local[place]]:
                        ahead[x, local[place]] = ahead[y, local[place + 1]]
                        raised = True
                if not (now[rank] or stale[0, rank] or raised or begin > es[x] + least):
                    continue
                work[0] += rows[rank]
                if n > 0:
                    begin = max(begin, es[x - 1] + time[cls])
                    for c in range(width):
                        if ahead[x - 1, c] > ahead[x, c]:
                            ahead[x, c] = ahead[x - 1, c]
                            raised = True
                for c in range(width):
                    if ahead[x, c] > 0 and c != own:
                        y = base[classes[rank, c]] + ahead[x, c] - 1
                        for d in range(width):
                            if ahead[y, d] > ahead[x, d]:
                                ahead[x, d] = ahead[y, d]
                                raised = True
                if kind == 0 and limit[rank] >= 0:
                    until = le[x] - time[cls]
                    held = 0
                    single = 0
                    for c in range(width):
                        if classes[rank, c] < 0 or classes[rank, c] >= places:
                            continue
                        single += 1
                        q = classes[rank, c]
                        begun = ahead[x, c] + (1 if c == own else 0)
                        b_most[c] = min(begun, ended(places + q, until, own, n))
                        held += (begun - b_most[c]) * early[q]
                        if size[2 * places + q] > 0:
                            w_most[c] = min(b_most[c], ended(2 * places + q, until, own, n))
                            held += (begun - w_most[c]) * late[q]
                    if held > limit[rank]:
                        return -1
                    for c in range(width):
                        if classes[rank, c] < 0 or classes[rank, c] >= places:
                            continue
                        q = classes[rank, c]
                        slack = limit[rank] - held
                        b = b_most[c]
                        splits = size[2 * places + q] > 0
                        while b > 0:
                            more = early[q] + (late[q] if splits and b - 1 < w_most[c] else 0)
                            if more > slack:
                                break
                            slack -= more
                            b -= 1
                        at = local[places + q]
                        if b > ahead[x, at]:
                            ahead[x, at] = b
                            raised = True
                        if splits and late[q] > 0:
                            b = w_most[c] - (limit[rank] - held) // late[q]
                            at = local[2 * places + q]
                            if b > ahead[x, at]:
                                ahead[x, at] = b
                                raised = True
                    if single == 1:
                        begin = max(begin, freed(rank, place, x, n, b_most[own]))
                    else:
                        begin = max(begin, room(rank, x, n, own, begin) - eps)
                    if begin >= 1e299:
                        return -1
                if ahead[x, own] > n:
                    return -1
                for c in range(width):
                    pre[c] = ahead[x, c]
                begin = max(begin, together(rank))
                if begin + time[cls] > le[x] + eps:
                    return -1
                if begin > es[x]:
                    raised = raised or begin > es[x] + least
                    es[x] = begin
                if raised:
                    for each in range(4):
                        stale[each, rank] = 1
        # ---- backward in time: latest ends
        for rank in range(ranks):
            now[rank] = stale[1, rank]
            stale[1, rank] = 0
        for back in range(longest):
            n = longest - 1 - back
            for step in range(3 * places):
                kind = 2 - step // places
                place = step % places
                if kind == 0:
                    place = places - 1 - place
                cls = kind * places + place
                if n >= size[cls]:
                    continue
                rank = rank_of[place]
                x = base[cls] + n
                end = le[x]
                if kind == 0 and place % stages < stages - 1:
                    end = min(end, le[base[cls + 1] + n] - time[cls + 1] - lag[0, place + 1])
                elif kind == 1 and place % stages > 0:
                    end = min(end, le[base[cls - 1] + n] - time[cls - 1] - lag[1, place - 1])
                if not (now[rank] or stale[1, rank] or end < le[x] - least):
                    continue
                work[0] += rows[rank]
                end = min(end, behind(rank, local[cls], n))
                if es[x] + time[cls] > end + eps:
                    return -1
                if end < le[x]:
                    if end < le[x] - least:
                        for each in range(4):
                            stale[each, rank] = 1
                    le[x] = end
        still = True
        for rank in range(ranks):
            still = still and not stale[0, rank] and not stale[1, rank]
        if still:
            return sweep + 1
    return most
