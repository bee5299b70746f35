"""Random sound schedules and random costs, for laws that must hold of any."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np

from oracle import BW, PARTS, B, F, Op, W, Work, needs
from stageloom.costs import Costs
from stageloom.placement import Placement, line, loop, two_way, zigzag
from stageloom.schedule import Schedule


def schedule_of(
    items: list[list[tuple[Op, ...]]],
    placement: Placement,
    path_of: list[int],
    slices: int = 1,
    cut: Any = "sequence",
    name: str = "random",
) -> Schedule:
    """The schedule of these items (an op or an overlapped pair), rank by rank."""
    rows = [(*op, at + 1 < len(item)) for of_rank in items for item in of_rank for at, op in enumerate(item)]
    kind, stage, microbatch, part, pair = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    counts = [sum(map(len, of_rank)) for of_rank in items]
    return Schedule(
        name=name,
        placement=placement,
        microbatches=len(path_of),
        offsets=np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        kind=kind.astype(np.int8),
        stage=stage.astype(np.int32),
        microbatch=microbatch.astype(np.int32),
        slice=part.astype(np.int32),
        pair=pair.astype(np.bool_),
        path_of=np.array(path_of, dtype=np.int8),
        slices=slices,
        cut=cut,
    )


def random_placement(random: Random) -> Placement:
    ranks = random.randint(1, 4)
    kind = random.choice(["line", "loop", "zigzag", "two_way", "any"])
    if kind == "line":
        return line(ranks)
    if kind == "loop":
        return loop(ranks, random.randint(1, 3))
    if kind == "zigzag":
        return zigzag(ranks, random.randint(1, 4))
    if kind == "two_way":
        return two_way(ranks)
    stages, paths = random.randint(1, 5), random.randint(1, 3)
    return Placement(ranks, tuple(tuple(random.randrange(ranks) for _ in range(stages)) for _ in range(paths)))


def random_schedule(random: Random, placement: Placement | None = None) -> Schedule:
    """Ops in a random order that keeps every wait, some of them overlapped: always sound."""
    placement = placement or random_placement(random)
    microbatches = random.randint(1, 4)
    path_of = [random.randrange(len(placement.paths)) for _ in range(microbatches)]
    slices = random.choice([1, 1, 2, 3])
    cut = random.choice(["sequence", "batch"]) if slices > 1 else "sequence"
    paths = [list(path) for path in placement.paths]
    work = Work([[] for _ in range(placement.ranks)], paths, path_of, slices, slices > 1 and cut == "sequence")
    split, pairs = random.choice([0.0, 0.5, 1.0]), random.choice([0.0, 0.3])
    eager = random.choice([0.2, 0.5, 0.8])  # how much forwards are preferred: how many micro-batches are in flight
    todo: set[Op] = set()
    for stage in range(placement.stages):
        for place in ((stage, microbatch, part) for microbatch in range(microbatches) for part in range(slices)):
            backward = [(B, *place), (W, *place)] if random.random() < split else [(BW, *place)]
            todo.update([(F, *place), *backward])
    done: set[tuple[int, ...]] = set()
    while todo:
        ready = sorted(op for op in todo if done.issuperset(needs(work, op)))
        forwards = [op for op in ready if op[0] == F]
        others = [op for op in ready if op[0] != F]
        chosen = random.choice(forwards if forwards and (not others or random.random() < eager) else others)
        rank = work.home(chosen[1], chosen[2])
        beside = [op for op in ready if op != chosen and work.home(op[1], op[2]) == rank]
        item = (chosen, random.choice(beside)) if beside and random.random() < pairs else (chosen,)
        work.items[rank].append(item)
        todo.difference_update(item)
        done.update((part, *op[1:]) for op in item for part in PARTS[op[0]])
    return schedule_of(work.items, placement, path_of, slices, cut)


def random_costs(random: Random, schedule: Schedule) -> Costs:
    """Costs of every sort: numbers and lists, zeros, links, and each option now and then."""

    def time() -> float:
        return random.choice([0.0, 0.25, 0.5, 1.0, 1.5, 3.0])

    def pieces() -> Any:
        return [time() for _ in range(schedule.stages)] if random.random() < 0.4 else time()

    given: dict[str, Any] = {"F": 1.0 + time(), "B": pieces(), "W": pieces()}
    if random.random() < 0.4:
        given["F"] = [0.5 + time() for _ in range(schedule.stages)]
    if random.random() < 0.3:
        given["BW"] = time()
    if all(isinstance(given[key], float) for key in ("F", "B", "W")) and random.random() < 0.3:
        backward = given.get("BW", given["B"] + given["W"])
        given["overlap_time"] = max(given["F"], backward, given["B"] + given["W"]) * random.choice([1.0, 1.25])
    elif random.random() < 0.5:
        given["overlap_fraction"] = random.choice([0.5, 0.75, 1.0])
    if random.random() < 0.6:
        given["latency"] = time()
    if random.random() < 0.5:
        given |= {"message_bytes": 8.0, "bandwidth": random.choice([4.0, 8.0, 16.0])}
    if schedule.ranks > 1 and random.random() < 0.4:
        ends = random.sample(range(schedule.ranks), 2)
        link = {"from": ends[0], "to": ends[1], "latency": time()}
        if "bandwidth" in given:
            link["bandwidth"] = random.choice([2.0, 32.0])
        given["links"] = [link]
    given["occupancy"] = random.random() < 0.4
    given["blocking"] = random.random() < 0.4
    if random.random() < 0.3:
        given["overhead"] = time()
    if random.random() < 0.3:
        given["stragglers"] = {random.randrange(schedule.ranks): random.choice([0.5, 1.25, 2.0])}
    return Costs(**given)
