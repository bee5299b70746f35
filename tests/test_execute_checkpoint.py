"""Checkpoints: a kill at any moment and a full disk leave one whole, and what failed is said of the rank it failed on.

(Runs that go on to bit-equal parameters after a kill are in test_execute_chaos.py and test_execute_run.py.)
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import checkpoint_tasks as tasks
import stageloom as sl
from command import stageloom, workers_of
from stageloom.execute.checkpoint import newest
from stageloom.execute.language import Config
from stageloom.execute.training import Work
from stageloom.execute.workers import Failure, Pool

pytestmark = pytest.mark.torch
TESTS = Path(__file__).parent
SMALL = ["--layers", "2", "--width", "16", "--context", "16", "--size", "2"]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2, timeout=60) as started:
        yield started


# -------------------------------------------------------------------------------------------------- a kill, at any time


def test_a_kill_before_any_call_of_the_system_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """A save is killed before its first, second, .. call that changes files, until it comes through."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(TESTS)])}
    command = [sys.executable, tasks.__file__, str(tmp_path)]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert output.returncode == 0, output.stderr
    found = json.loads(output.stdout)
    for name, step, least in (("another", 2, 20), ("again", 1, 5)):
        *killed, through = found[name]
        assert len(killed) >= least
        assert all(each["killed"] for each in killed)
        assert not through["killed"]
        for each in found[name]:
            whole = 2.0 if each["numbers"][0] == 2.0 else 1.0
            assert each["numbers"] == [whole, whole + 0.5], each  # weights and momenta of one save alone
            assert each["step"] == (step if whole == 2.0 else 1), each
            assert each["after"] == ["step-00000003"], each
        assert [each["numbers"][0] for each in found[name]] == sorted(each["numbers"][0] for each in found[name])
        assert through["numbers"] == [2.0, 2.5]
    left = {file for each in (*found["another"], *found["again"]) for file in each["left"]}
    assert {re.sub(r"\d", "", file) for file in left} == {"step-", ".step-.partial", ".step-.before", ".step-.gone"}


# ------------------------------------------------------------------------------------------------- a rank that may not


@pytest.mark.parametrize(
    ("how", "victim", "cause"),
    [
        ("limit", 1, r"OSError: \[Errno 27\] File too large"),
        ("limit", 0, r"OSError: \[Errno 27\] File too large"),
        ("fsync", 1, r"OSError: \[Errno 28\] No space left on device"),
        ("rename", 0, r"OSError: \[Errno 122\] .*quota exceeded"),
        ("replace", 0, r"OSError: \[Errno 122\] .*quota exceeded"),
    ],
)
def test_a_full_disk_is_said_of_its_rank_and_leaves_the_checkpoint_before(
    how: str, victim: int, cause: str, pool: Pool, tmp_path: Path
) -> None:
    for rank, said in enumerate(pool.run(tasks.fail, str(tmp_path), victim, how)):
        expected = rf"the checkpoint of step 2 cannot be written: rank {victim}: {cause}"
        assert re.fullmatch(expected, said["message"]), said["message"]
        assert (said["rank"], said["here"]) == (victim, rank == victim)
        # what is written in vain is deleted, as a full disk needs the space; what is whole, by the next save
        partial = [".step-00000002.partial"] if how == "replace" else []
        assert said["folder"] == [*partial, "step-00000001"]
        assert (said["step"], said["numbers"]) == (1, [1.0, 1.5])
        assert said["after"] == ["step-00000003"]


def test_a_full_disk_of_all_ranks_is_said_of_each(pool: Pool, tmp_path: Path) -> None:
    for rank, said in enumerate(pool.run(tasks.fail, str(tmp_path), -1, "limit")):
        assert f"rank {rank} (and 1 more): OSError: [Errno 27]" in said["message"]
        assert said["here"]


def test_a_disk_that_is_really_full(pool: Pool, tmp_path: Path) -> None:
    """`stageloom run` on a file system of 1.1 MB, which does not hold two checkpoints of 0.7 MB."""
    script = """
        mount -t tmpfs -o size=1100k none "$0" || exit 77
        "$2" -m stageloom run 1f1b -p 2 -m 2 --steps 3 --every 1 --layers 2 --width 32 --checkpoint "$0/c"
        status=$?
        cp -r "$0/c" "$1"
        exit $status
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("this user may not mount a file system; the test above limits the size of files instead")
    command = ["unshare", "-rm", "sh", "-c", script, str(disk), str(tmp_path / "out"), sys.executable]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if result.returncode == 77:
        pytest.skip("this user may not mount a file system; the test above limits the size of files instead")
    assert result.returncode == 2, result
    *_, said = result.stderr.splitlines()
    pattern = r"error: the checkpoint of step 2 cannot be written: rank \d( \(and 1 more\))?: OSError: \[Errno 28\]"
    assert re.search(pattern, said), result.stderr
    assert newest(tmp_path / "out") == 1
    again = f"run 1f1b -p 2 -m 2 --steps 3 --every 1 --layers 2 --width 32 --json --resume --checkpoint {tmp_path}/out"
    with workers_of(pool):
        assert [len(rank["losses"]) for rank in json.loads(stageloom(*again.split()).out)["ranks"]] == [2, 2]


# ------------------------------------------------------------------------------------------------- what cannot be read


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("cut", "is damaged: rank 1: __1_0.distcp: ends before "),
        ("garbled", "is damaged: rank 1: __1_0.distcp: cannot be read ("),
        ("missing", "is damaged: rank 1: FileNotFoundError: [Errno 2]"),
        ("metadata", "is damaged: rank 0: FileNotFoundError: [Errno 2]"),
        ("garbled metadata", "is damaged: rank 0 (and 1 more): .metadata: cannot be read ("),
        ("model", "is of another model: rank 0 (and 1 more): model.extra.weight is not in it"),
        ("shape", "is of another model: rank 1: model.layer1.first.weight has the shape (12, 6) there and (3, 6) here"),
        ("optimizer", "is of another model: rank 0 (and 1 more): optimizer.layer0."),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(how: str, expected: str, pool: Pool, tmp_path: Path) -> None:
    told = pool.run(tasks.load_damaged, str(tmp_path), how)
    assert [more for _, more in told] == ["", ""]  # nor does torch tell of it by itself
    messages = [message for message, _ in told]
    for message in messages:
        assert re.search("step-00000001: is (damaged|of another model): rank ", message)
        assert "\n" not in message
    assert any(expected in message for message in messages), messages


def test_a_new_run_does_not_mix_its_checkpoints_with_those_of_another(pool: Pool, tmp_path: Path) -> None:
    command = f"run 1f1b -p 2 -m 2 --steps 2 --checkpoint {tmp_path}/c --layers 2 --width 16 --context 16".split()
    with workers_of(pool):
        assert stageloom(*command).status == 0
        before = sorted(path.name for path in (tmp_path / "c").iterdir())
        result = stageloom(*command)
    assert result.status == 2
    assert f"--checkpoint {tmp_path}/c: holds a checkpoint of step 2 already; add --resume" in result.err
    assert len(result.err.splitlines()) == 1
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == before


def test_a_run_says_what_it_goes_on_from(pool: Pool, tmp_path: Path) -> None:
    config = Config(layers=2, width=16, heads=2, context=16)
    found: list[tuple[int, str]] = []
    others = "--seed 7 (before: 0) and --rate 0.5 (before: 0.001)"
    for more in ({"steps": 2}, {"steps": 3}, {"steps": 4, "rate": 0.5, "seed": 7}):
        work = Work(sl.build("1f1b", 2, 2), config, data_bytes=100_000, **more)
        (losses, said), (_, other_rank) = pool.run(tasks.go_on, work, f"{tmp_path}/c", 10, True)
        assert other_rank == ""
        found.append((len(losses), said))
    assert found == [
        (2, f"--resume: {tmp_path}/c holds no checkpoint; starting from the first step\n"),
        (1, f"going on from step 2 of {tmp_path}/c\n"),
        (1, f"going on from step 3 of {tmp_path}/c, with another {others}\n"),
    ]
    command = ["run", "1f1b", "-p", "2", "-m", "2", *SMALL, "--json", "--resume", "--checkpoint"]
    with workers_of(pool):
        assert list(json.loads(stageloom(*command, f"{tmp_path}/c", "--steps", "5").out)["losses"]) == ["5"]
        other = stageloom(*command, f"{tmp_path}/c", "--width", "32")
    assert other.status == 2
    assert re.match(
        r"error: .*step-00000005: is of another model: .*model.*weight has the shape \((256, )?16,?\) ", other.err
    )
    file = tmp_path / "file"
    file.touch()
    for place, message in ((file, "is a file; give a folder"), (file / "c", "is a file")):
        result = stageloom(*command, str(place))
        assert (result.status, message in result.err) == (2, True), result


def test_a_folder_that_may_not_be_written_to_is_refused_before_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    result = stageloom("run", "1f1b", "-p", "2", "-m", "2", "--checkpoint", f"{tmp_path}/a/b")
    assert result.status == 2
    assert f"--checkpoint {tmp_path}/a/b: {tmp_path} may not be written to by this user" in result.err


def test_ctrl_c_says_what_was_kept(tmp_path: Path) -> None:
    arguments = (
        f"run 1f1b -p 2 -m 2 --steps 100000 --every 1 --layers 2 --width 16 --context 16 --checkpoint {tmp_path}/c"
    )
    command = [sys.executable, "-m", "stageloom", *arguments.split()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert [process.stdout.readline()[:6] for _ in range(3)] == ["step 1", "step 2", "step 3"]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    said = re.fullmatch(r"interrupted; the last checkpoint is of step (\d+); go on from it with --resume\n", err)
    assert said is not None, err
    assert int(said[1]) == newest(tmp_path / "c")


def test_a_failure_names_the_rank_whose_disk_is_full(pool: Pool, tmp_path: Path) -> None:
    """The other ranks raise the same at the same time; it is not theirs."""
    with pytest.raises(Failure) as caught:
        pool.run(tasks.fail_to_the_end, str(tmp_path), 1)
    assert caught.value.rank == 1
    assert "rank 1: OSError: [Errno 27] File too large" in caught.value.cause
