"""Every schedule on real processes: loss, gradients and weights equal to one process, after two steps with momentum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

import stageloom as sl
from random_schedules import random_schedule
from stageloom.execute.workers import Failure, Pool
from stageloom.placement import Placement, loop, zigzag
from stageloom.schedule import Schedule
from stageloom.schedules import Record, records
from stageloom.search.published import SEARCHES
from toy import LENGTH, ROWS, compare, emulate, reference, train_asynchronously

pytestmark = pytest.mark.torch
LARGEST = 8
SYNCHRONOUS = [record for record in records() if record.synchronous]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(LARGEST, timeout=60) as started:
        yield started


def sizes(record: Record) -> list[tuple[int, int]]:
    """M < P, M = P, odd M and M = 3P at every number of ranks that the schedule allows; else its nearest sizes.

    Searched orders are many, of ops in placements that other schedules cover: two sizes of each.
    """
    if record in SEARCHES:
        return [(3, 2), (4, 9)]
    found: list[tuple[int, int]] = []
    for ranks in (1, 2, 3, 4, 8):
        for microbatches in (max(1, ranks - 1), ranks, 2 * ranks + 1, 2 * ranks, 3 * ranks):
            if record.refusal(ranks, microbatches) is None and (ranks, microbatches) not in found:
                found.append((ranks, microbatches))
    return found


def check(
    pool: Pool, schedule: Schedule, *, dtype: torch.dtype = torch.float64, split: str = "auto", tolerance: float = 1e-10
) -> None:
    """Two steps by the schedule, on as many processes as it has ranks, against the same in this process."""
    expected = reference(schedule.stages, schedule.microbatches, 2, dtype)
    results = pool.run(compare, schedule, 2, dtype, split, expected, size=schedule.ranks)
    for rank, result in enumerate(results):
        for what in ("loss", "gradient", "weight"):
            assert result[what] <= tolerance, f"rank {rank}: {what} is off by {result[what]}"


@pytest.mark.parametrize("record", SYNCHRONOUS, ids=lambda record: record.name)
def test_gradients_are_those_of_one_process(record: Record, pool: Pool) -> None:
    for ranks, microbatches in sizes(record):
        schedule = record(ranks, microbatches)
        check(pool, schedule)


@pytest.mark.parametrize("split", ["graph", "fused"])
def test_other_splits_give_the_same_gradients(split: str, pool: Pool) -> None:
    for name in ("zb-h1", "zb-v", "dualpipe"):
        check(pool, sl.build(name, 2, 5 if name != "dualpipe" else 6), split=split)


def test_float32_to_rounding(pool: Pool) -> None:
    for name in ("1f1b", "zb-h2", "interleaved-zb", "chimera"):
        check(pool, sl.build(name, 4, 8), dtype=torch.float32, tolerance=1e-5)


@pytest.mark.parametrize("options", [{"concatenation": "doubling"}, {"concatenation": "halving"}])
def test_chimera_with_doubled_forwards(options: dict[str, Any], pool: Pool) -> None:
    check(pool, sl.build("chimera", 4, 8, **options))


def test_more_chunks_waves_and_slices(pool: Pool) -> None:
    for name, options in (
        ("interleaved-1f1b", {"chunks": 3}),
        ("breadth-first", {"chunks": 3, "order": "in-order"}),
        ("hanayo", {"waves": 2}),
        ("seq1f1b", {"slices": 3}),
        ("gpipe", {"order": "in-order"}),
    ):
        check(pool, sl.build(name, 3, 5, **options))


def relabelled(schedule: Schedule, order: list[int]) -> Schedule:
    """The same schedule with micro-batch m called order[m]; its path goes with it."""
    numbers = np.array(order, dtype=np.int32)
    path_of = np.empty_like(schedule.path_of)
    path_of[numbers] = schedule.path_of
    return replace(schedule, microbatch=numbers[schedule.microbatch], path_of=path_of)


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "zb-v", "dualpipe", "chimera", "interleaved-zb"])
def test_micro_batches_in_another_order(name: str, pool: Pool) -> None:
    """Last first, and shuffled: no stage runs them in the order of their numbers."""
    plain = sl.build(name, 4, 8)
    for order in (list(range(8))[::-1], Random(name).sample(range(8), 8)):
        schedule = relabelled(plain, order)
        assert sl.problems(schedule) == []
        check(pool, schedule)


@pytest.mark.parametrize("seed", range(4))
def test_micro_batches_in_another_order_on_each_rank(seed: int, pool: Pool) -> None:
    """Where all forwards come first, every rank may take them in an order of its own, and so the backwards."""
    random, ranks, count = Random(seed), 4, 5
    backwards = ("BW{0}",) if seed % 2 else ("B{0}", "W{0}")
    lines = []
    for rank in range(ranks):
        ops = [f"F{m}" for m in random.sample(range(count), count)]
        ops += [kind.format(m) for m in random.sample(range(count), count) for kind in backwards]
        lines.append(f"rank {rank}: {' '.join(ops)}")
    check(pool, written(f"ranks: {ranks}\nmicrobatches: {count}\npath: 0 1 2 3\n" + "\n".join(lines)))


PLACEMENTS = {
    "several stages on some ranks": Placement(3, ((0, 0, 1, 2, 2),)),
    "not in the order of ranks": Placement(3, ((2, 0, 1),)),
    "here and there": Placement(4, ((0, 3, 3, 1, 0, 2),)),
    "an idle rank": Placement(3, ((0, 2, 0),)),
    "half a wave more": zigzag(3, 3),
    "three waves": zigzag(2, 6),
    "a loop of one": loop(1, 3),
    "two paths in one direction": Placement(3, ((0, 1, 2), (1, 2, 0))),
    "a path on one rank": Placement(3, ((0, 1, 2), (1, 1, 1))),
    "three paths": Placement(2, ((0, 1, 0), (1, 1, 0), (0, 0, 1))),
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_uneven_and_wave_placements(name: str, pool: Pool) -> None:
    """Each in three random orders that keep every wait: whole and split backwards, overlapped pairs, slices."""
    for seed in range(3):
        schedule = random_schedule(Random(f"{name} {seed}"), PLACEMENTS[name])
        if schedule.slices == 1 or (LENGTH if schedule.cut == "sequence" else ROWS) % schedule.slices == 0:
            check(pool, schedule)


def test_random_orders_on_random_placements(pool: Pool) -> None:
    ran = 0
    for seed in range(30):
        schedule = random_schedule(Random(seed))
        if schedule.slices == 1 or (LENGTH if schedule.cut == "sequence" else ROWS) % schedule.slices == 0:
            check(pool, schedule)
            ran += 1
    assert ran >= 20


def written(text: str) -> Schedule:
    schedule = sl.loads(f"stageloom schedule 1\nname: by hand\n{text}\n")
    assert sl.problems(schedule) == []
    return schedule


HAND = {
    "last stage forwards and backwards out of order": """
        ranks: 2
        microbatches: 4
        path: 0 1
        rank 0: F0 F1 F2 F3 B2 B0 W2 B3 B1 W0 W1 W3
        rank 1: F2 F0 BW2 F3 BW0 BW3 F1 BW1
    """,
    "three stages on two ranks": """
        ranks: 2
        microbatches: 3
        path: 0 1 0
        rank 0: F0@0 F1@0 F0@2 BW0@2 F2@0 F1@2 BW1@2 BW0@0 F2@2 B2@2 BW1@0 W2@2 BW2@0
        rank 1: F0 F1 BW0 F2 BW1 BW2
    """,
    "weight gradients at the very end": """
        ranks: 2
        microbatches: 3
        path: 0 1
        rank 0: F0 F1 F2 B0 B1 B2 W0 W1 W2
        rank 1: F0 B0 F1 B1 F2 B2 W2 W0 W1
    """,
    "overlapped pairs of all kinds": """
        ranks: 2
        microbatches: 4
        path: 0 1
        rank 0: F0 F1&F2 BW0&F3 B1 B2&W1 W2&BW3
        rank 1: F0 BW0&F1 BW1 F2&F3 B3&B2 W2&W3
    """,
    "two paths, one op at a time": """
        ranks: 2
        microbatches: 4
        path: 0 1
        path: 1 0
        paths of micro-batches: 0*2 1*2
        rank 0: F0 F2 B2 F1 BW0 F3 W2 BW3 BW1
        rank 1: F2 F0 BW0 F3 BW2 F1 B1 BW3 W1
    """,
    "slices of a sequence": """
        ranks: 2
        microbatches: 2
        slices: 2 sequence
        path: 0 1
        rank 0: F0.0 F0.1 F1.0 F1.1 BW0.1 BW0.0 BW1.1 BW1.0
        rank 1: F0.0 F0.1 BW0.1 F1.0 BW0.0 F1.1 B1.1 B1.0 W1.1 W1.0
    """,
    "slices of a batch, in any order": """
        ranks: 2
        microbatches: 2
        slices: 2 batch
        path: 0 1
        rank 0: F1.1 F0.0 F0.1 F1.0 BW0.0 BW1.1 BW1.0 BW0.1
        rank 1: F0.0 BW0.0 F1.1 F0.1 BW1.1 F1.0 BW1.0 BW0.1
    """,
    "a rank without a stage": """
        ranks: 3
        microbatches: 2
        path: 0 2
        rank 0: F0 F1 BW0 BW1
        rank 1:
        rank 2: F0 BW0 F1 BW1
    """,
}


@pytest.mark.parametrize("name", HAND)
def test_orders_written_by_hand(name: str, pool: Pool) -> None:
    check(pool, written("\n".join(line.strip() for line in HAND[name].strip().splitlines())))


def test_an_unsound_order_is_refused_before_it_runs(pool: Pool) -> None:
    text = "stageloom schedule 1\nname: bad\nranks: 2\nmicrobatches: 1\npath: 0 1\nrank 0: F0 BW0\nrank 1: BW0 F0\n"
    with pytest.raises(Failure, match="cannot run"):
        pool.run(compare, sl.loads(text), 1, torch.float64, "auto", ([], [], []), size=2)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (3, 2), (4, 9)])
def test_pipedream_trains_with_the_staleness_of_its_paper(ranks: int, microbatches: int, pool: Pool) -> None:
    """Each stage's forward has seen m - (P - s) + 1 updates (arXiv 1806.03377); at most P - s versions are held."""
    expected = emulate(ranks, microbatches, 1, lambda m, s: max(0, m - (ranks - s) + 1))
    results = pool.run(train_asynchronously, sl.build("pipedream", ranks, microbatches), size=ranks)
    for rank, result in enumerate(results):
        for name, weight in result["weights"].items():
            assert torch.allclose(weight, expected[rank][name], rtol=0, atol=1e-10), f"rank {rank}: {name}"
        assert result["most"] <= min(ranks - rank, microbatches) + 1  # what is used, and the newest


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (3, 9), (4, 12)])
def test_pipedream_2bw_trains_one_minibatch_late(ranks: int, microbatches: int, pool: Pool) -> None:
    """Micro-batch k of mini-batches of P uses version max(k // P - 1, 0) on every stage (arXiv 2006.09503)."""
    expected = emulate(ranks, microbatches, ranks, lambda m, s: max(m // ranks - 1, 0))
    results = pool.run(train_asynchronously, sl.build("pipedream-2bw", ranks, microbatches), size=ranks)
    for rank, result in enumerate(results):
        for name, weight in result["weights"].items():
            assert torch.allclose(weight, expected[rank][name], rtol=0, atol=1e-10), f"rank {rank}: {name}"
        assert result["most"] <= 3


def test_asynchronous_is_not_synchronous(pool: Pool) -> None:
    """The staleness is real: the same data and optimiser without it end elsewhere."""
    stale = emulate(3, 6, 1, lambda m, s: max(0, m - (3 - s) + 1))
    fresh = emulate(3, 6, 1, lambda m, s: m)
    assert max(float((stale[0][n] - fresh[0][n]).abs().max()) for n in stale[0]) > 1e-4
