"""PyTorch's own runtime beside ours: the same gradients wherever it can run a schedule, and a reason wherever not."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

import stageloom as sl
from command import stageloom, workers_of
from random_schedules import random_schedule
from stageloom.execute.torch_backend import refusal
from stageloom.execute.workers import Pool
from stageloom.schedule import Schedule
from stageloom.schedules import Record, records
from torch_tasks import both, refused
from toy import reference

pytestmark = pytest.mark.torch

REFUSED = {
    "chimera": "it has 2 paths (stage 0 is on ranks [0, 3])",
    "dualpipe": "it has 2 paths (stage 0 is on ranks [0, 3])",
    "pipedream": "it updates weights under way",
    "pipedream-2bw": "it updates weights under way",
    "seq1f1b": "it cuts micro-batches in 4 slices",
}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4, timeout=60) as started:
        yield started


def check(pool: Pool, schedule: Schedule, steps: int) -> None:
    """Losses and gradients, added up over the steps: theirs, ours and one process's."""
    losses, whole = reference(schedule.stages, schedule.microbatches, steps, add_up=True)[:2]
    for rank, runtimes in enumerate(pool.run(both, schedule, steps, size=schedule.ranks)):
        for name, (found, gradients) in zip(("PyTorch's", "ours"), runtimes, strict=True):
            assert found == pytest.approx(losses, rel=0, abs=1e-10), (rank, name)
            assert list(gradients) == list(schedule.placement.stages_of[rank][0])
            for stage, of_stage in gradients.items():
                for key, wanted in whole[stage].items():
                    off = float((of_stage[key] - wanted).abs().max())
                    assert off <= 1e-10, f"{name} {key} of stage {stage} on rank {rank} is off by {off}"


@pytest.mark.parametrize("record", records(), ids=lambda record: record.name)
def test_gradients_are_pytorchs_or_it_cannot_run_the_schedule(record: Record, pool: Pool) -> None:
    schedule = record(4, 8)
    if record.name in REFUSED:
        assert (refusal(schedule) or "").startswith(REFUSED[record.name])
        for message in pool.run(refused, schedule, ""):
            assert message.startswith(f"ScheduleError: {record.name} cannot run on PyTorch's runtime: ")
            assert REFUSED[record.name] in message
        return
    assert refusal(schedule) is None
    check(pool, schedule, 2)


def test_random_orders_give_the_same_on_both(pool: Pool) -> None:
    found = 0
    for seed in range(400):
        schedule = random_schedule(Random(seed))
        if refusal(schedule) is None and schedule.ranks > 1 and schedule.microbatches > 1:
            check(pool, schedule, 1)
            found += 1
    assert found >= 12


def by_hand(text: str) -> Schedule:
    return sl.loads(f"stageloom schedule 1\nname: mine\n{text}")


def test_orders_that_pytorch_would_run_wrong_are_refused(pool: Pool) -> None:
    permuted = by_hand("ranks: 2\nmicrobatches: 2\npath: 0 1\nrank 0: F0 F1 BW0 BW1\nrank 1: F1 F0 BW0 BW1\n")
    for message in pool.run(refused, permuted, "", size=2):
        assert "its last stage runs micro-batches in the order 1, 0, and PyTorch's runtime takes the n-th" in message
    idle = by_hand("ranks: 3\nmicrobatches: 1\npath: 0 2\nrank 0: F0 BW0\nrank 1:\nrank 2: F0 BW0\n")
    assert (refusal(idle) or "").startswith("ranks [1] hold no stage")


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("stages", "InputError: stages: are given for [1]; 1f1b puts [0] on this rank"),
        ("inputs", "InputError: inputs: nothing; expected equal parts for 3 micro-batches"),
        ("targets", "InputError: inputs: 11 rows; expected equal parts for 3 micro-batches"),
    ],
)
def test_wrong_use_is_refused(case: str, expected: str, pool: Pool) -> None:
    [message] = pool.run(refused, sl.build("1f1b", 1, 3), case, size=1)
    assert message == expected


def test_tied_weights_are_refused_as_pytorchs_runtime_would_train_them_apart(pool: Pool) -> None:
    for message in pool.run(refused, sl.build("1f1b", 2, 4), "tied", size=2):
        assert "[(0, '0.weight'), (1, '1.weight')] are one parameter in the model that was split" in message


def test_verify_by_pytorchs_runtime(pool: Pool) -> None:
    with workers_of(pool):
        result = stageloom("verify", "zb-h1", "-p", "2", "-m", "3", "--backend", "torch")
    assert result.status == 0, result.err
    assert "zb-h1: equal to one process (2 processes, 3 micro-batches, float64; PyTorch's runtime; " in result.out
    refused = stageloom("verify", "dualpipe", "-p", "2", "-m", "4", "--backend", "torch")
    assert refused.status == 2
    assert "dualpipe cannot run on PyTorch's runtime: it has 2 paths (stage 0 is on ranks [0, 1])" in refused.err
