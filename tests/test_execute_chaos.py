"""Faults at random places of a training run: each ends as it should, at once, with its cause named.

    STAGELOOM_FAULTS=200 python -m pytest tests/test_execute_chaos.py

draws 200 instead of those of the ordinary suite; fault n is the same in both.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import chaos_tasks as tasks
import stageloom as sl
import toy
from chaos_tasks import Fault, Kind
from stageloom.execute.language import Config
from stageloom.execute.tasks import Task, tasks_of
from stageloom.execute.training import Work
from stageloom.execute.training import train as train_model
from stageloom.execute.workers import Failure, Pool
from stageloom.lower import Code, lower
from stageloom.schedule import Schedule

pytestmark = pytest.mark.torch

FAULTS = int(os.environ.get("STAGELOOM_FAULTS", "24"))
STEPS = 3
IMPATIENT = 4.0
PATIENT = 120.0  # a fault that is only found by the timeout would show as "gave no sign"
SOON = 40.0  # seconds in which any failure is to be known, on a busy machine too: far below PATIENT

# Each failure costs new workers: mostly two of them, and few of the hangs, which last as long as the timeout.
PAIRS = ("1f1b", "gpipe", "zb-h1", "zb-v", "dualpipe", "interleaved-1f1b", "seq1f1b", "pipedream", "hanayo", "chimera")
LARGER = (("1f1b", 3), ("zb-h2", 3), ("zb-v", 4), ("dualpipe", 4), ("chimera", 4), ("hanayo", 3))
KINDS: tuple[Kind, ...] = (
    "kill", "shape", "delay", "nan", "exit", "gradient shape",
    "delay", "raise", "dtype", "delay", "gradient nan", "hang",
)  # fmt: skip
COMPUTING = (Code.F, Code.B, Code.W, Code.BW)


# --------------------------------------------------------------------------------------------------- drawing the faults


@dataclass(frozen=True)
class Case:
    """A fault, and what is to be said of it: the rank, the tasks that may be named, what the cause may begin with."""

    schedule: Schedule
    fault: Fault
    rank: int
    where: tuple[str, ...]
    cause: tuple[str, ...]


def draw(number: int) -> Case:
    """Fault `number`: the kinds take turns, and all else is drawn."""
    chance = random.Random(f"fault {number}")
    kind = KINDS[number % len(KINDS)]
    name, ranks = chance.choice(LARGER) if number % 8 == 7 else (chance.choice(PAIRS), 2)
    schedule = sl.build(name, ranks, 2 * ranks)
    program = lower(schedule)
    by_rank = [tasks_of(program, rank) for rank in range(ranks)]
    step = chance.randrange(STEPS)
    last = schedule.stages - 1

    def pick(fits: Callable[[Task], bool]) -> tuple[int, Task]:
        return chance.choice([(rank, task) for rank, own in enumerate(by_rank) for task in own if fits(task)])

    def of_row(rank: int, row: int) -> Task:
        return next(task for task in by_rank[rank] if task.row == row and task.code in COMPUTING)

    if kind in ("shape", "dtype", "gradient shape"):
        rank, sent = pick(lambda task: task.code is Code.SEND and task.forward is (kind != "gradient shape"))
        fault = Fault(kind, rank, step, str(of_row(rank, sent.row)))
        if sent.forward and step == 0:  # the first step announces whatever comes: it does not fit the next stage
            place = sent.place
            taker = next(t for t in by_rank[sent.peer] if t.code is Code.F and t.place == place)
            return Case(schedule, fault, sent.peer, (str(taker),), ("RuntimeError",))
        shape = (toy.ROWS, toy.LENGTH // schedule.slices, toy.WIDTH)
        what = (
            "dtype torch.float32, expected torch.float64" if kind == "dtype" else f"shape {(*shape[:2], shape[2] - 1)}"
        )
        stage = sent.place.stage + (-1 if sent.forward else 1)
        told = f"StageloomError: {sent}: stage {stage} gives a tensor of {what}"
        if kind != "dtype":
            told += f", expected {shape} as "
        return Case(schedule, fault, rank, (str(sent),), (told,))
    if kind == "nan":
        rank, task = pick(lambda task: task.code is Code.F)
        what = "loss" if task.place.stage == last else "activations"
        cause = f"StageloomError: {task} on rank {rank}: nan in its {what}"
        return Case(schedule, Fault(kind, rank, step, str(task)), rank, (str(task),), (cause,))
    if kind == "gradient nan":
        # (on a stage that is first and last no gradient arrives or leaves)
        rank, task = pick(lambda task: task.code in (Code.B, Code.BW))
        later = [t for t in by_rank[rank] if t.code is Code.W and t.place == task.place]  # the first stage has W alone
        named = tuple(str(t) for t in (task, *later))
        return Case(schedule, Fault(kind, rank, step, str(task)), rank, named, ("StageloomError: ",))
    rank, task = pick(lambda task: True)
    fault = Fault(kind, rank, step, str(task), seconds=chance.uniform(0.05, 0.3))
    cause = {
        "kill": "died (signal 9)",
        "exit": f"died (exit status {tasks.STATUS})",
        "raise": f"ArithmeticError: raised at {task}",
        "hang": f"gave no sign for {IMPATIENT:g} s",
        "delay": "",
    }[kind]
    return Case(schedule, fault, rank, (str(task),), (cause,))


CASES = [draw(number) for number in range(FAULTS)]


def label(number: int) -> str:
    fault, schedule = CASES[number].fault, CASES[number].schedule
    text = f"{number}-{fault.kind}-{schedule.name}-{schedule.ranks}-step {fault.step}-{fault.task}@rank {fault.rank}"
    return text.replace(" ", "_")


# ------------------------------------------------------------------------------------------------------------- the runs


class Pools:
    """A pool for two ranks and one for more, started when they are first wanted."""

    def __init__(self) -> None:
        self.started: dict[int, Pool] = {}

    def __call__(self, ranks: int) -> Pool:
        size = 2 if ranks == 2 else 4
        if size not in self.started:
            self.started[size] = Pool(size, timeout=PATIENT)
        return self.started[size]


@contextmanager
def impatient(pool: Pool, schedule: Schedule) -> Iterator[None]:
    """Workers that have trained already, and so have all loaded that they need, may be silent for a short time only.

    (Started with so short a timeout, they would be taken for hanging on a busy machine.)
    """
    pool.run(tasks.ready)
    pool.run(tasks.train, schedule, 1, None, True, size=schedule.ranks)
    crew = pool._crew
    assert crew is not None
    crew._timeout = IMPATIENT
    yield
    crew._timeout = PATIENT


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    found = Pools()
    yield found
    for pool in found.started.values():
        pool.close()


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def fails(pool: Pool, task: Any, *args: object, size: int = 2) -> Failure:
    """The failure that a run ends with: soon, in one line, and with all workers gone."""
    workers = pool.run(tasks.ready, size=pool.size)
    began = time.monotonic()
    with pytest.raises(Failure) as caught:
        pool.run(task, *args, size=size)
    assert time.monotonic() - began < SOON
    assert "\n" not in str(caught.value)
    assert [pid for pid in workers if not is_gone(pid)] == []
    return caught.value


@cache
def undisturbed(pools: Pools, name: str, ranks: int) -> list[Any]:
    schedule = sl.build(name, ranks, 2 * ranks)
    return pools(ranks).run(tasks.train, schedule, STEPS, None, True, size=ranks)


def equal(one: list[Any], other: list[Any]) -> bool:
    """Losses and weights of all ranks, to the last bit."""
    return all(
        losses == other_losses
        and weights.keys() == other_weights.keys()
        and all(torch.equal(weights[name], other_weights[name]) for name in weights)
        for (losses, weights), (other_losses, other_weights) in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("number", range(FAULTS), ids=label)
def test_fault(number: int, pools: Pools) -> None:
    case = CASES[number]
    schedule, fault = case.schedule, case.fault
    pool = pools(schedule.ranks)
    arguments = tasks.train, schedule, STEPS, fault, True
    if fault.kind == "delay":
        result = pool.run(*arguments, size=schedule.ranks)
        assert equal(result, undisturbed(pools, schedule.name, schedule.ranks))
        return
    with impatient(pool, schedule) if fault.kind == "hang" else nullcontext():
        failure = fails(pool, *arguments, size=schedule.ranks)
    assert failure.rank == case.rank, failure
    assert failure.where in case.where, failure
    assert failure.cause.startswith(case.cause), failure
    if fault.kind == "hang":
        assert "time.sleep(LONG" in failure.detail
    if fault.kind == "gradient nan":
        assert "nan in its gradients" in failure.cause


# ------------------------------------------------------------------------------------------ what is said, and what not


def test_a_number_between_stages_that_changes_is_refused(pools: Pools) -> None:
    """Numbers and text between the tensors travel with the first step's shapes alone, so they may not change."""
    schedule = sl.build("1f1b", 2, 4)
    failure = fails(pools(2), tasks.change_a_number, schedule)
    assert failure.rank == 0, failure
    assert failure.where in ("F0@0", "send activations for 0@1 to rank 1"), failure
    assert failure.cause.startswith(("StageloomError: ", "InputError: stage 0 returned other ")), failure


def test_unchecked_nan_goes_on_to_the_loss(pools: Pools) -> None:
    schedule = sl.build("1f1b", 2, 4)
    for fault, first in ((Fault("nan", 0, 1, "F1@0"), 1), (Fault("gradient nan", 1, 0, "BW1@1"), 1)):
        for losses, _ in pools(2).run(tasks.train, schedule, STEPS, fault, False):
            assert [math.isnan(loss) for loss in losses] == [step >= first for step in range(STEPS)]


def test_a_rank_that_waits_for_its_sends_is_not_taken_for_one_that_hangs(pools: Pools) -> None:
    """The last rank has sent everything long before the first one, which works, takes it."""
    schedule = sl.build("gpipe", 2, 4)
    task = "receive gradients for 1@0 from rank 1"
    with impatient(pools(2), schedule):
        losses = pools(2).run(tasks.slow, schedule, 0, task, 1.5 * IMPATIENT)
    assert len(set(losses)) == 1


def test_an_evaluation_leaves_the_shapes_of_training_as_they_were(pools: Pools) -> None:
    schedule = sl.build("1f1b", 2, 4)
    losses = pools(2).run(tasks.evaluate_between, schedule, 8)
    whole = pools(2).run(tasks.evaluate_between, schedule, 4 * toy.ROWS)
    assert losses == whole


# ---------------------------------------------------------------------------------------------------------- checkpoints

MODEL = Config(layers=2, width=16, heads=2, context=16)
LENGTH, EVERY = 6, 2  # steps, and those between two checkpoints


def work(name: str) -> Work:
    return Work(sl.build(name, 2, 4), MODEL, size=2, steps=LENGTH, rate=3e-3, data_bytes=100_000)


def state(folder: Path) -> dict[str, torch.Tensor]:
    """The newest checkpoint in a folder."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(max(folder.glob("step-*")), folder / "whole.pt")
    found = torch.load(folder / "whole.pt")
    (folder / "whole.pt").unlink()
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@cache
def straight(pools: Pools, name: str, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    trained = pools(2).run(train_model, work(name), str(folder), LENGTH, False, False)
    return trained[0].losses, state(folder)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("straight")


@pytest.mark.parametrize("number", range(max(3, FAULTS // 10)))
def test_a_killed_run_resumes_bit_equal(number: int, pools: Pools, shared: Path, tmp_path: Path) -> None:
    """Killed at any op, or at any time within a checkpoint."""
    chance = random.Random(f"kill {number}")
    name = ("zb-h1", "1f1b", "dualpipe", "zb-v")[number % 4]
    victim = chance.randrange(2)
    losses, weights = straight(pools, name, shared / name)
    if number % 2:
        after, seconds = chance.randrange(1, LENGTH // EVERY + 1), chance.uniform(0.0, 0.03)
    else:
        ops = len(tasks_of(lower(work(name).schedule), victim)) * LENGTH
        after, seconds = chance.randrange(1, ops), None
    failure = fails(pools(2), tasks.train_and_die, work(name), str(tmp_path), EVERY, victim, after, seconds)
    assert (failure.rank, failure.cause) == (victim, "died (signal 9)")
    whole = [path.name for path in tmp_path.glob("step-*")]
    rest = pools(2).run(train_model, work(name), str(tmp_path), EVERY, True, False)
    began = max((int(found.split("-")[1]) for found in whole), default=0)
    assert rest[0].losses == losses[began:]
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{LENGTH:08d}"]
    assert same(state(tmp_path), weights)


@pytest.mark.parametrize("how", ["limit", "error"])
def test_a_full_disk_leaves_the_checkpoint_before(how: str, pools: Pools, shared: Path, tmp_path: Path) -> None:
    losses, weights = straight(pools, "1f1b", shared / "1f1b")
    failure = fails(pools(2), tasks.train_on_a_full_disk, work("1f1b"), str(tmp_path), EVERY, 1, how)
    assert failure.where == f"checkpoint of step {2 * EVERY}"
    assert failure.rank == 1, failure
    said = "[Errno 27] File too large" if how == "limit" else "[Errno 28] No space left on device"
    assert f"cannot be written: rank 1: OSError: {said}" in failure.cause, failure
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path, copy, ignore=shutil.ignore_patterns("copy"))
    assert [path.name for path in copy.glob("step-*")] == [f"step-{EVERY:08d}"]
    rest = pools(2).run(train_model, work("1f1b"), str(copy), EVERY, True, False)
    assert rest[0].losses == losses[EVERY:]
    assert same(state(copy), weights)
