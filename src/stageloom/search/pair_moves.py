"""Local search over an order with pairs: annealing, each move judged by a new longest path.

Moves, mostly on the critical path: an item goes some positions earlier or later; a forward and a backward that stand
close become a pair (a B takes its W along, as one BW); a pair comes apart; a pair changes its forward or its backward
with one that stands close; a BW is split, a B and a W become one. All of them are said as up to three items that a rank
loses and up to three that it gets. One that breaks the rank's own order, or its memory, is seen before any time is run.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stageloom._kernel import Kernel


@Kernel
def anneal_pairs(
    stages: int, most: int, time: Any, paired: Any, step: Any, lag: Any, fused: Any, limit: Any, base: Any,
    front: Any, rear: Any, size: Any, best_front: Any, best_rear: Any, best_size: Any,
    by_cost: bool, goal: float, moves: int, hot: float, cold: float, guide: float, seed: int,
) -> float:  # fmt: skip
    """Search from `front`, `rear`, `size` (which it changes); the best order goes to `best_...`, what it takes comes
    back (-1.0 where the order that it starts from cannot run). Stops after `moves`, or once the value is no more than
    `goal`. The temperature falls from `hot` to `cold`."""
    places = lag.shape[1]
    ranks = limit.shape[0]
    rows = base[ranks]
    widest = 0
    rank_at = np.zeros(rows, dtype=np.int64)
    for rank in range(ranks):
        widest = max(widest, base[rank + 1] - base[rank])
        for row in range(base[rank], base[rank + 1]):
            rank_at[row] = rank
    ends = np.full((2, places, most), -1.0)
    row_of = np.zeros((2, places, most), dtype=np.int64)
    done = np.zeros((2, places), dtype=np.int64)
    owed = np.zeros(places, dtype=np.int64)
    waiting = np.zeros((2, places), dtype=np.int64)
    at = np.zeros(ranks, dtype=np.int64)
    stack = np.zeros(ranks + 1, dtype=np.int64)
    end = np.zeros(rows)
    cause = np.zeros(rows, dtype=np.int64)
    path = np.zeros(rows, dtype=np.int64)
    made = np.zeros((2, widest + 4), dtype=np.int32)
    kept = np.zeros((2, widest + 4), dtype=np.int32)
    gone = np.zeros(3, dtype=np.int64)  # positions of items that the rank loses
    to = np.zeros(3, dtype=np.int64)  # the item that comes there stands before this old position
    new = np.zeros((2, 3), dtype=np.int64)
    state = (seed * 2654435761 + 88172645463325252) & 0xFFFFFFFFFFFF
    current = 1e300
    found: Any = 1e300
    long = 0
    here = 0
    old = 0
    for number in range(moves + 1):
        ok = True
        if number > 0:
            # ---------------------------------------------------------------- the move: what goes, what comes
            state = (state * 25214903917 + 11) & 0xFFFFFFFFFFFF
            pick = (state >> 20) % 100
            state = (state * 25214903917 + 11) & 0xFFFFFFFFFFFF
            if pick < 80 and long > 0:
                row = path[(state >> 20) % long]
                here = rank_at[row]
            else:
                here = (state >> 20) % ranks
                if size[here] == 0:
                    continue
                state = (state * 25214903917 + 11) & 0xFFFFFFFFFFFF
                row = base[here] + (state >> 20) % size[here]
            low = base[here]
            old = size[here]
            one = row - low
            fore = front[row]
            back = rear[row]
            kind = back // places if back >= 0 else 0
            place = back % places if back >= 0 else -1
            state = (state * 25214903917 + 11) & 0xFFFFFFFFFFFF
            way = (state >> 20) % 100
            state = (state * 25214903917 + 11) & 0xFFFFFFFFFFFF
            reach = 1 + (state >> 20) % 12
            state = (state * 25214903917 + 11) & 0xFFFFFFFFFFFF
            later = (state >> 20) & 1 == 1
            far = (state >> 21) & 1 == 1  # whether what comes of two items stands where the further one stood
            losses = 1
            gains = 0
            gone[0] = one
            if way < 45:
                if way < 15:
                    reach = 1
                gains = 1
                to[0] = min(one + reach + 1, old) if later else max(one - reach, 0)
                new[0, 0] = fore
                new[1, 0] = back
            elif fore >= 0 and back >= 0 and way < 75:
                # the pair comes apart; its BW may be split as well
                gains = 2
                new[0, 0] = fore if later else -1
                new[1, 0] = -1 if later else back
                new[0, 1] = -1 if later else fore
                new[1, 1] = back if later else -1
                to[0] = one
                to[1] = one
                if far and not fused[place]:
                    gains = 3
                    new[1, 1 if later else 0] = places + place
                    new[0, 2] = -1
                    new[1, 2] = 2 * places + place
                    to[2] = min(one + reach, old)
            elif back >= 0 and fore < 0 and (kind == 3 or kind == 1) and way >= 85:
                if kind == 3:
                    if fused[place]:
                        continue
                    gains = 2
                    new[0, 0] = -1
                    new[1, 0] = places + place
                    new[0, 1] = -1
                    new[1, 1] = 2 * places + place
                    to[0] = one
                    to[1] = min(one + reach, old)
                else:
                    other = one + 1
                    while other < old and rear[low + other] != 2 * places + place:
                        other += 1
                    if other == old:
                        continue
                    losses = 2
                    gone[1] = other
                    gains = 1
                    new[0, 0] = -1
                    new[1, 0] = 3 * places + place
                    to[0] = other if far else one
            else:
                # with an item close by: a forward and a backward become a pair, or a pair changes one of its two
                whole = fore >= 0 and back >= 0
                other = one
                for _ in range(reach):
                    other = other + 1 if later else other - 1
                    if other < 0 or other >= old:
                        break
                    partner = front[low + other]
                    beside = rear[low + other]
                    if partner >= 0 and beside >= 0:
                        if not whole and kind != 2 and kind != 1:
                            break
                        continue
                    if beside >= 0 and beside // places == 2:
                        continue
                    if whole or (fore >= 0 and beside >= 0) or (back >= 0 and partner >= 0 and kind != 2):
                        break
                if other < 0 or other >= old or other == one:
                    continue
                partner = front[low + other]
                beside = rear[low + other]
                if kind == 2 or (beside >= 0 and beside // places == 2):
                    continue
                gone[1] = other
                losses = 2
                weight = -1  # the place whose B takes its W along
                pair_front = -1
                pair_rear = -1
                alone_front = -1
                alone_rear = -1
                if whole or (partner >= 0 and beside >= 0):
                    if whole and partner >= 0 and beside >= 0:
                        continue
                    # one is a pair, the other is not: they change what both have
                    pair_front = fore if whole else partner
                    pair_rear = back if whole else beside
                    single_front = partner if whole else fore
                    single_rear = beside if whole else back
                    if single_front >= 0:
                        alone_front = pair_front
                        pair_front = single_front
                    else:
                        alone_rear = pair_rear
                        pair_rear = single_rear
                    if pair_front == alone_front or pair_rear == alone_rear:
                        continue
                    gains = 2
                    to[0] = one if whole else other
                    to[1] = other if whole else one
                    new[0, 1] = alone_front
                    new[1, 1] = alone_rear
                else:
                    if (fore >= 0) == (partner >= 0):
                        continue
                    pair_front = fore if fore >= 0 else partner
                    pair_rear = back if back >= 0 else beside
                    gains = 1
                    to[0] = other if far else one
                if pair_rear // places == 1:
                    weight = pair_rear % places
                    pair_rear += 2 * places
                new[0, 0] = pair_front
                new[1, 0] = pair_rear
                if weight >= 0:
                    third = (one if back == places + weight else other) + 1
                    while third < old and rear[low + third] != 2 * places + weight:
                        third += 1
                    if third == old:
                        continue
                    gone[2] = third
                    losses = 3
            # ------------------------------------------------ the rank's new order, its precedence and its memory
            for each in range(places):
                done[0, each] = 0
                done[1, each] = 0
                owed[each] = 0
            held = 0
            count = 0
            for position in range(old + 1):
                for turn in range(gains + 1):
                    fore = -1
                    back = -1
                    if turn < gains:
                        if to[turn] != position:
                            continue
                        fore = new[0, turn]
                        back = new[1, turn]
                    else:
                        if position == old or gone[0] == position:
                            continue
                        if (losses > 1 and gone[1] == position) or (losses > 2 and gone[2] == position):
                            continue
                        fore = front[low + position]
                        back = rear[low + position]
                    more = 0
                    less = 0
                    if back >= 0:
                        kind = back // places
                        place = back % places
                        if kind == 2:
                            owed[place] -= 1
                            ok = ok and owed[place] >= 0
                        else:
                            ok = ok and done[0, place] > done[1, place]
                            done[1, place] += 1
                            if kind == 1:
                                owed[place] += 1
                        if step[kind, place] > 0:
                            more += step[kind, place]
                        else:
                            less -= step[kind, place]
                    if fore >= 0:
                        more += step[0, fore]
                        done[0, fore] += 1
                    ok = ok and (more == 0 or held + more <= limit[here])
                    held += more - less
                    made[0, count] = fore
                    made[1, count] = back
                    count += 1
                if not ok:
                    break
            if not ok:
                continue
            for position in range(old):
                kept[0, position] = front[low + position]
                kept[1, position] = rear[low + position]
            for position in range(count):
                front[low + position] = made[0, position]
                rear[low + position] = made[1, position]
            size[here] = count
        # -------------------------------------------------------------------------------------- the longest path
        total = 0
        for place in range(places):
            done[0, place] = 0
            done[1, place] = 0
            waiting[0, place] = -1
            waiting[1, place] = -1
        for rank in range(ranks):
            at[rank] = 0
            stack[rank] = rank
            total += size[rank]
        depth = ranks
        ran = 0
        while depth > 0:
            depth -= 1
            rank = stack[depth]
            row = base[rank] + at[rank]
            stop = base[rank] + size[rank]
            now = end[row - 1] if at[rank] > 0 else 0.0
            while row < stop:
                fore = front[row]
                back = rear[row]
                why = row - 1 if row > base[rank] else -1
                begin = now
                if fore >= 0 and fore % stages > 0:
                    which = done[0, fore]
                    if done[0, fore - 1] <= which:
                        waiting[0, fore - 1] = rank
                        break
                    ready = ends[0, fore - 1, which] + lag[0, fore]
                    if ready > begin:
                        begin = ready
                        why = row_of[0, fore - 1, which]
                kind = 0
                place = -1
                if back >= 0:
                    kind = back // places
                    place = back % places
                    if kind != 2 and place % stages < stages - 1:
                        which = done[1, place]
                        if done[1, place + 1] <= which:
                            waiting[1, place + 1] = rank
                            break
                        ready = ends[1, place + 1, which] + lag[1, place]
                        if ready > begin:
                            begin = ready
                            why = row_of[1, place + 1, which]
                if fore >= 0 and back >= 0:
                    now = begin + paired[0, fore] + paired[1, place]
                elif fore >= 0:
                    now = begin + time[0, fore]
                else:
                    now = begin + time[kind, place]
                end[row] = now
                cause[row] = why
                if fore >= 0:
                    which = done[0, fore]
                    ends[0, fore, which] = now
                    row_of[0, fore, which] = row
                    done[0, fore] = which + 1
                    if waiting[0, fore] >= 0:
                        if waiting[0, fore] != rank:
                            stack[depth] = waiting[0, fore]
                            depth += 1
                        waiting[0, fore] = -1
                if kind == 1 or kind == 3:
                    which = done[1, place]
                    ends[1, place, which] = now
                    row_of[1, place, which] = row
                    done[1, place] = which + 1
                    if waiting[1, place] >= 0:
                        if waiting[1, place] != rank:
                            stack[depth] = waiting[1, place]
                            depth += 1
                        waiting[1, place] = -1
                row += 1
                ran += 1
            at[rank] = row - base[rank]
        ok = ran == total
        # ------------------------------------------------------------------ what it takes, and whether to keep it
        value = 1e300
        judged = 1e300
        longest = 0
        if ok:
            value = 0.0
            mean = 0.0
            for rank in range(ranks):
                if size[rank] == 0:
                    continue
                head = base[rank]
                last = end[head + size[rank] - 1]
                mean += last
                if by_cost:
                    last -= end[head] - time[0, front[head]]
                if last > value:
                    value = last
                    longest = head + size[rank] - 1
            judged = value + guide * mean / ranks
        warm = hot * (cold / hot) ** (number / (moves + 1.0))
        keep = ok and judged <= current
        if ok and not keep:
            state = (state * 25214903917 + 11) & 0xFFFFFFFFFFFF
            keep = (state >> 16) / 4294967296.0 < np.exp((current - judged) / warm)
        if keep:
            current = judged
            long = 0
            row = longest
            while row >= 0:
                path[long] = row
                long += 1
                row = cause[row]
            if value < found:
                found = value
                best_front[:] = front
                best_rear[:] = rear
                best_size[:] = size
                if found <= goal:
                    return found
        elif number > 0:
            low = base[here]
            for position in range(old):
                front[low + position] = kept[0, position]
                rear[low + position] = kept[1, position]
            size[here] = old
        else:
            return -1.0
    return found
