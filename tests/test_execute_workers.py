"""Local workers: runs that go well, and every way in which one rank can end a run for all of them."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import worker_tasks as tasks
from stageloom.errors import InputError
from stageloom.execute.workers import Failure, Pool, doing, launch

pytestmark = pytest.mark.torch

# Far above what any test needs: a failure that is only found by the timeout would show as "gave no sign".
PATIENT = 120.0
IMPATIENT = 3.0


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4, timeout=PATIENT) as pool:
        yield pool


# The faults use pools of their own, as small as they can be: each fault costs new workers.


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    with Pool(2, timeout=PATIENT) as pair:
        yield pair


@pytest.fixture(scope="module")
def impatient() -> Iterator[Pool]:
    with Pool(2, timeout=IMPATIENT) as impatient:
        yield impatient


@pytest.fixture(scope="module")
def single() -> Iterator[Pool]:
    with Pool(1, timeout=PATIENT) as single:
        yield single


def pids(pool: Pool) -> list[int]:
    return [pid for _, _, pid in pool.run(tasks.place)]


# ------------------------------------------------------------ runs that go well


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_run_takes_as_many_ranks_as_it_is_told(pool: Pool, size: int) -> None:
    places = pool.run(tasks.place, size=size)
    assert [(rank, of) for rank, of, _ in places] == [(rank, size) for rank in range(size)]
    assert pool.run(tasks.total, 2.0, size=size) == [size * (size + 1.0)] * size
    if size > 1:
        assert pool.run(tasks.ring, size=size) == [(rank - 1) % size for rank in range(size)]


def test_processes_are_reused(pool: Pool) -> None:
    first = pids(pool)
    assert len({*first, os.getpid()}) == 5
    pool.run(tasks.total, 1.0, size=2)
    assert pids(pool) == first


def test_a_message_left_unread_does_not_reach_the_next_run(pool: Pool) -> None:
    pool.run(tasks.leave_unread)
    assert pool.run(tasks.ring) == [3, 0, 1, 2]


def test_what_one_run_stores_the_next_does_not_see(pool: Pool) -> None:
    assert pool.run(tasks.through_store, "first") == ["first"] * 4
    assert pool.run(tasks.through_store, "second") == ["second"] * 4


def test_workers_have_one_thread_and_talk_over_the_loopback(pool: Pool) -> None:
    for threads, interfaces in pool.run(tasks.settings):
        assert threads == 1
        assert interfaces in ("lo,lo", "lo0,lo0")  # a connection for messages up the ranks, one for those down


def test_large_tensors_go_there_and_back(pool: Pool) -> None:
    tensor = torch.arange(1_000_000)
    for rank, got in enumerate(pool.run(tasks.big, tensor)):
        assert torch.equal(got, tensor + rank)


def test_what_workers_print_passes_through_and_torch_adds_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    launch(tasks.speak, 2)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["rank 0 speaks", "rank 1 speaks"]
    assert err == ""


def test_two_pools_at_once(pool: Pool, pair: Pool) -> None:
    with ThreadPoolExecutor() as threads:
        four = [threads.submit(pool.run, tasks.total, 1.0) for _ in range(5)]
        two = [threads.submit(pair.run, tasks.total, 1.0) for _ in range(5)]
        assert [future.result() for future in four] == [[10.0] * 4] * 5
        assert [future.result() for future in two] == [[3.0] * 2] * 5


def test_doing_is_nothing_outside_of_a_worker() -> None:
    doing("F0@0")


# ------------------------------------------------------------------------ faults


def fails(pool: Pool, task: object, *args: object) -> Failure:
    with pytest.raises(Failure) as caught:
        pool.run(task, *args)
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_rank_raises_while_others_receive_and_the_next_run_has_new_workers(pair: Pool) -> None:
    before = pids(pair)
    failure = fails(pair, tasks.raise_while_others_receive, 1)
    assert str(failure) == "rank 1 failed at F3@2: ValueError: no such shape"
    assert (failure.rank, failure.where, failure.cause) == (1, "F3@2", "ValueError: no such shape")
    assert any("raise_while_others_receive" in note for note in failure.__notes__)
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not {*before} & {*pids(pair)}


def test_a_rank_raises_while_others_reduce(pair: Pool) -> None:
    assert str(fails(pair, tasks.raise_while_others_reduce, 1)) == "rank 1 failed at reduce: ValueError: too large"


def test_the_cause_is_named_although_its_consequence_is_heard_of_first(pair: Pool) -> None:
    assert str(fails(pair, tasks.break_off_and_raise, 1)) == "rank 1 failed at B1@0: KeyError: 'weights'"


def test_a_rank_exits(pair: Pool) -> None:
    assert str(fails(pair, tasks.exit_while_others_receive, 1, 7)) == "rank 1 died (exit status 7) at B3@1"


def test_a_rank_is_killed(pair: Pool) -> None:
    failure = fails(pair, tasks.die_while_others_receive, 0)
    assert str(failure) == "rank 0 died (signal 9) at W7@1"
    assert str(pickle.loads(pickle.dumps(failure))) == str(failure)


def test_a_worker_killed_between_runs_is_replaced(single: Pool) -> None:
    victim = pids(single)[0]
    os.kill(victim, signal.SIGKILL)
    while single._crew is not None and single._crew.alive():
        time.sleep(0.01)
    assert victim not in pids(single)


def test_a_result_that_cannot_be_pickled(single: Pool) -> None:
    failure = fails(single, tasks.unpicklable)
    assert failure.where == "returning the result"
    assert "cannot pickle" in failure.cause


def test_a_result_that_cannot_be_read(single: Pool) -> None:
    failure = fails(single, tasks.unreadable)
    assert (failure.rank, failure.where) == (0, "reading its result")


def test_an_error_that_cannot_be_pickled_and_one_that_is_no_exception(single: Pool) -> None:
    assert fails(single, tasks.raise_unpicklable).cause.startswith("Poison: ('poison', <unlocked")
    assert fails(single, tasks.leave_through_sys_exit).cause == "SystemExit: 3"


def test_a_task_that_cannot_be_imported_or_sent(single: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = pids(single)
    unsendable = fails(single, lambda seat: None)
    assert unsendable.rank is None
    assert str(unsendable).startswith("the run failed at sending the task: ")
    assert pids(single) == before  # nothing has reached the workers

    # The workers run already: a module found here since is none that they find.
    (tmp_path / "passing_module.py").write_text("def task(seat):\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    import passing_module

    failure = fails(single, passing_module.task)
    assert failure.where == "loading the task"
    assert failure.cause == "ModuleNotFoundError: No module named 'passing_module'"


def test_wrong_sizes_and_a_closed_pool() -> None:
    for wrong in ({"size": 0}, {"size": 1, "timeout": 0.0}, {"size": 1, "threads": 0}):
        with pytest.raises(InputError):
            Pool(**wrong)
    with Pool(1) as pool:
        with pytest.raises(InputError, match="1 to 1 ranks, not 2"):
            pool.run(tasks.place, size=2)
        pool.close()
        pool.close()
        with pytest.raises(InputError, match="closed"):
            pool.run(tasks.place)


# ----------------------------------------------------------------------- silence


def test_a_rank_that_hangs_is_named_and_not_those_that_wait_for_it(impatient: Pool) -> None:
    failure = fails(impatient, tasks.hang_while_others_receive, 1)
    assert str(failure).startswith("rank 1 gave no sign for 3 s at F5@1: worker_tasks.py:")
    assert "time.sleep(LONG)" in failure.detail


def test_a_stopped_rank(impatient: Pool) -> None:
    failure = fails(impatient, tasks.stop_while_others_receive, 0)
    assert str(failure) == "rank 0 gave no sign for 3 s at F6@1: it does not answer"


def test_ranks_that_wait_for_each_other(impatient: Pool) -> None:
    failure = fails(impatient, tasks.wait_for_each_other)
    assert failure.where == f"recv on {failure.rank}"
    assert "dist.recv(" in failure.detail


def test_waiting_for_a_rank_that_works_is_no_silence(impatient: Pool) -> None:
    assert impatient.run(tasks.work_while_others_receive, 1, 1.5 * IMPATIENT) == ["received", "worked"]


# ------------------------------------------------------------- ends from outside


def parent(scratch: Path, stopped: int | None) -> subprocess.Popen[str]:
    """A process with a pool of two workers in the middle of a task; the system has stopped one of them."""
    here = str(Path(__file__).parent)
    process = subprocess.Popen(
        [sys.executable, "-c", f"import worker_tasks; worker_tasks.hold(2, {stopped})"],
        env={**os.environ, "PYTHONPATH": here, "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["worker\n"] * 2
    return process


def ended(process: subprocess.Popen[str], scratch: Path) -> str:
    """What it wrote to stderr. Its pipes only end when all who have inherited them have: workers included."""
    try:
        _, err = process.communicate(timeout=30)
    finally:
        # Only if the test fails is somebody left.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert list(scratch.iterdir()) == []
    return err


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    # A stopped worker runs no code of its own: only Linux is asked to end it.
    process = parent(tmp_path, 1 if sys.platform == "linux" else None)
    process.kill()
    assert ended(process, tmp_path) == ""


def test_ctrl_c_ends_the_workers(tmp_path: Path) -> None:
    process = parent(tmp_path, None)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers, too
    err = ended(process, tmp_path)
    assert process.returncode == -signal.SIGINT
    assert err.count("Traceback") == err.count("KeyboardInterrupt") == 1
