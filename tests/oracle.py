"""A second simulator, plain, slow and obvious, written from the definitions and not from the package's own loops.

    F waits for F of the stage before; B for B of the stage after and for its own F; W for its B; BW is B and W in one.
    Cut along the sequence, F of slice k waits for F of slice k-1 on its stage, and B of slice k for B of slice k+1.
    A rank does one thing at a time, in its order. The two ops of a pair start when both can, and end together.
    A message between two ranks leaves when its op ends and arrives latency + bytes / bandwidth later.

It keeps a queue of events in time and looks at all ranks after each.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

F, B, W, BW = range(4)
PARTS = {F: (F,), B: (B,), W: (W,), BW: (B, W)}

Op = tuple[int, int, int, int]
"""(kind, stage, micro-batch, slice)"""
Part = tuple[int, int, int, int]
"""(F, B or W; stage, micro-batch, slice)"""


@dataclass
class Work:
    """A schedule in plain lists: `items[rank]` are tuples of one op, or two overlapped ones."""

    items: list[list[tuple[Op, ...]]]
    paths: list[list[int]]
    path_of: list[int]
    slices: int = 1
    sequence: bool = False
    versions: dict[tuple[int, int, int], int] | None = None  # by (rank, item, op of the item)
    update_every: int = 0

    @property
    def stages(self) -> int:
        return len(self.paths[0])

    def home(self, stage: int, microbatch: int) -> int:
        return self.paths[self.path_of[microbatch]][stage]


@dataclass
class Prices:
    """Times of one whole micro-batch: `time[kind][stage]`; latency and transfer by (from rank, to rank)."""

    time: list[list[float]]
    latency: dict[tuple[int, int], float] = field(default_factory=dict)
    transfer: dict[tuple[int, int], float] = field(default_factory=dict)
    overlap: float = 1.0
    overhead: float = 0.0
    factor: dict[int, float] = field(default_factory=dict)
    occupancy: bool = False
    blocking: bool = False
    activation: list[float] = field(default_factory=list)
    w_share: float = 0.5


def plain(schedule) -> Work:
    """A Schedule as plain lists. A pair mark on a rank's last op, or on the second op of a pair, does nothing."""
    columns = (schedule.kind, schedule.stage, schedule.microbatch, schedule.slice)
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    items, versions = [], {}
    for low, high in zip(schedule.offsets[:-1].tolist(), schedule.offsets[1:].tolist(), strict=True):
        mine, row = [], low
        while row < high:
            width = 2 if schedule.pair[row] and row + 1 < high else 1
            for at in range(width):
                versions[len(items), len(mine), at] = int(schedule.versions[row + at])
            mine.append(tuple(rows[row : row + width]))
            row += width
        items.append(mine)
    return Work(
        items,
        [list(path) for path in schedule.placement.paths],
        schedule.path_of.tolist(),
        schedule.slices,
        schedule.slices > 1 and schedule.cut == "sequence",
        None if schedule.version is None else versions,
        schedule.update_every,
    )


def needs(work: Work, op: Op) -> list[Part]:
    """The parts an op waits for."""
    kind, stage, microbatch, cut = op
    found: list[Part] = []
    if kind == F:
        if stage > 0:
            found.append((F, stage - 1, microbatch, cut))
        if work.sequence and cut > 0:
            found.append((F, stage, microbatch, cut - 1))
    elif kind in (B, BW):
        found.append((F, stage, microbatch, cut))
        if stage + 1 < work.stages:
            found.append((B, stage + 1, microbatch, cut))
        if work.sequence and cut + 1 < work.slices:
            found.append((B, stage, microbatch, cut + 1))
    else:
        found.append((B, stage, microbatch, cut))
    return found


def run(work: Work, prices: Prices) -> dict[tuple[int, int], tuple[float, float]] | None:
    """(start, end) by (rank, item); None where ranks wait for one another for ever. Every part must be done once."""
    rank_of = {
        (part, *op[1:]): rank
        for rank, items in enumerate(work.items)
        for item in items
        for op in item
        for part in PARTS[op[0]]
    }
    users: dict[Part, list[int]] = {}
    for rank, items in enumerate(work.items):
        for item in items:
            for op in item:
                for part in needs(work, op):
                    users.setdefault(part, []).append(rank)
    here: list[set[Part]] = [set() for _ in work.items]  # what each rank has, done by itself or received
    at = [0] * len(work.items)
    busy = [False] * len(work.items)
    link_free: dict[tuple[int, int], float] = {}
    times: dict[tuple[int, int], tuple[float, float]] = {}
    events: list[tuple[float, int, str, int, object]] = []
    number = 0

    def later(time: float, what: str, rank: int, thing: object = None) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (time, number, what, rank, thing))

    def duration(rank: int, item: tuple[Op, ...]) -> float:
        total = sum(prices.time[kind][stage] / work.slices for kind, stage, _, _ in item)
        total *= prices.overlap if len(item) == 2 else 1.0
        return (total + len(item) * prices.overhead) * prices.factor.get(rank, 1.0)

    def send(now: float, rank: int, part: Part) -> float:
        """The message of a finished part goes to the one rank that waits for it; when has it arrived?"""
        target = next(user for user in users[part] if user != rank)
        link = rank, target
        transfer = prices.transfer.get(link, 0.0) / work.slices
        leaves = max(now, link_free.get(link, 0.0)) if prices.occupancy else now
        link_free[link] = leaves + transfer
        later(leaves + transfer + prices.latency.get(link, 0.0), "arrives", target, part)
        return leaves + transfer + prices.latency.get(link, 0.0)

    for rank in range(len(work.items)):
        later(0.0, "free", rank)
        busy[rank] = True
    while events:
        now, _, what, rank, thing = heapq.heappop(events)
        if what == "arrives":
            here[rank].add(thing)
        elif what == "free":
            busy[rank] = False
        else:  # "ends"
            held = now
            for op in thing:
                parts = [(part, *op[1:]) for part in PARTS[op[0]]]
                here[rank].update(parts)
                for part in parts:
                    if any(user != rank for user in users.get(part, ())):
                        held = max(held, send(now, rank, part))
            later(held if prices.blocking else now, "free", rank)
        for each, items in enumerate(work.items):
            if busy[each] or at[each] == len(items):
                continue
            item = items[at[each]]
            if all(part in here[each] for op in item for part in needs(work, op)):
                end = now + duration(each, item)
                times[each, at[each]] = now, end
                later(end, "ends", each, item)
                busy[each] = True
                at[each] += 1
    assert all(part in rank_of for part in users)
    return times if all(done == len(items) for done, items in zip(at, work.items, strict=True)) else None


def peaks(work: Work, prices: Prices) -> list[float]:
    """The most activations every rank holds: a plain walk along its order.

    F allocates when it starts; B frees the part that W does not need, W the rest, when they end. Where W needs
    more than F made, B allocates the difference when it starts.
    """
    found = []
    for items in work.items:
        held = peak = 0.0
        for item in items:
            steps = []
            for kind, stage, _, _ in item:
                size = prices.activation[stage] / work.slices
                by_w = size * prices.w_share
                steps.append({F: size, B: by_w - size, W: -by_w, BW: -size}[kind])
            peak = max(peak, held + sum(step for step in steps if step > 0))
            held += sum(steps)
        found.append(peak)
    return found
