"""Every schedule on real processes: loss, gradients and weights equal to one process, after two steps with momentum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import stageloom as sl
from stageloom.execute.workers import Failure, Pool
from stageloom.schedule import Schedule
from stageloom.schedules import Record, records
from toy import compare, emulate, reference, train_asynchronously

pytestmark = pytest.mark.torch
LARGEST = 8
SYNCHRONOUS = [record for record in records() if record.synchronous]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(LARGEST, timeout=60) as started:
        yield started


def sizes(record: Record) -> list[tuple[int, int]]:
    """M < P, M = P, odd M and M = 3P at every number of ranks that the schedule allows; else its nearest sizes."""
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


HAND = {
    # the last stage forwards out of order, and backwards in yet another one
    "permuted": """
        rank 0: F0 F1 F2 F3 B2 B0 W2 B3 B1 W0 W1 W3
        rank 1: F2 F0 BW2 F3 BW0 BW3 F1 BW1
    """,
    # three stages on two ranks, one of them twice
    "uneven": """
        path: 0 1 0
        rank 0: F0@0 F1@0 F0@2 BW0@2 F2@0 F1@2 BW1@2 BW0@0 F2@2 B2@2 BW1@0 W2@2 BW2@0
        rank 1: F0 F1 BW0 F2 BW1 BW2
    """,
    # all weight gradients at the very end
    "late": """
        rank 0: F0 F1 F2 B0 B1 B2 W0 W1 W2
        rank 1: F0 B0 F1 B1 F2 B2 W2 W0 W1
    """,
}


@pytest.mark.parametrize("name", HAND)
def test_orders_written_by_hand(name: str, pool: Pool) -> None:
    lines = [line.strip() for line in HAND[name].strip().splitlines()]
    path = [] if any(line.startswith("path") for line in lines) else ["path: 0 1"]
    count = 4 if name == "permuted" else 3
    head = ["stageloom schedule 1", f"name: {name}", "ranks: 2", f"microbatches: {count}", *path]
    schedule = sl.loads("\n".join(head + lines) + "\n")
    assert sl.problems(schedule) == []
    check(pool, schedule)


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
