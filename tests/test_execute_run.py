"""`verify` and `run`: a real byte-level model on real text; checkpoints survive a kill and move between schedules."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import stageloom as sl
from command import stageloom
from stageloom.execute.language import Config
from stageloom.execute.training import Work, train
from stageloom.execute.workers import Pool
from stageloom.schedule import Schedule

pytestmark = pytest.mark.torch
SMALL = ["--layers", "2", "--width", "16", "--context", "16", "--size", "2"]
CONFIG = Config(layers=2, width=16, heads=2, context=16)


def work(schedule: Schedule, steps: int) -> Work:
    return Work(schedule, CONFIG, size=2, steps=steps, rate=3e-3, data_bytes=200_000)


def state(folder: Path) -> dict[str, torch.Tensor]:
    """What the newest checkpoint in a folder holds."""
    newest = max(folder.glob("step-*"))
    file = folder / "whole.pt"
    dcp_to_torch_save(newest, file)
    return torch.load(file)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_training_lowers_the_loss_and_resumes_bit_equal(tmp_path: Path) -> None:
    schedule = sl.build("zb-h1", 2, 4)
    with Pool(2) as pool:
        straight = pool.run(train, work(schedule, 8), str(tmp_path / "a"), 8, False, False)
        pool.run(train, work(schedule, 3), str(tmp_path / "b"), 3, False, False)
        rest = pool.run(train, work(schedule, 8), str(tmp_path / "b"), 8, True, False)
    assert straight[0].losses[-1] < straight[0].losses[0] - 0.1
    assert rest[0].losses == straight[0].losses[3:]
    assert same(state(tmp_path / "a"), state(tmp_path / "b"))
    assert [path.name for path in (tmp_path / "b").glob("step-*")] == ["step-00000008"]


def test_a_checkpoint_moves_to_another_schedule_and_number_of_ranks(tmp_path: Path) -> None:
    """Names are the unsplit model's: from 1F1B on two ranks to ZB-V on one and DualPipe's two replicas."""
    with Pool(2) as pool:
        pool.run(train, work(sl.build("1f1b", 2, 4), 3), str(tmp_path / "a"), 3, False, False)
        straight = pool.run(train, work(sl.build("1f1b", 2, 4), 6), None, 1, False, False)
        for schedule in (sl.build("zb-v", 1, 4), sl.build("zb-v", 2, 4), sl.build("dualpipe", 2, 4)):
            copy = tmp_path / schedule.name / str(schedule.ranks)
            shutil.copytree(tmp_path / "a", copy)
            rest = pool.run(train, work(schedule, 6), str(copy), 6, True, False, size=schedule.ranks)
            assert rest[0].losses == pytest.approx(straight[0].losses[3:], rel=1e-5)


def test_a_kill_leaves_the_checkpoint_before_it_whole(tmp_path: Path) -> None:
    arguments = "run 1f1b -p 2 -m 4 --steps 200 --every 1 --layers 2 --width 16 --context 16 --size 2 --checkpoint"
    command = [sys.executable, "-m", "stageloom", *arguments.split(), str(tmp_path / "k")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    end = time.monotonic() + 60
    while len(list((tmp_path / "k").glob("step-*"))) == 0 and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    step = int(max((tmp_path / "k").glob("step-*")).name.split("-")[1])
    killed = state(tmp_path / "k")
    schedule = sl.build("1f1b", 2, 4)
    with Pool(2) as pool:
        again = Work(schedule, CONFIG, size=2, steps=step, rate=1e-3)
        pool.run(train, again, str(tmp_path / "s"), step, False, False)
    assert same(killed, state(tmp_path / "s"))


def test_verify_says_equal_and_how(tmp_path: Path) -> None:
    result = stageloom("verify", "zb-h1", "-p", "2", "-m", "3", "--json")
    assert result.status == 0, result.err
    data = json.loads(result.out)
    assert data["equal"] is True
    assert [rank["modes"] for rank in data["ranks"]] == [{"0": "fused"}, {"1": "deferred"}]  # rank 0 has no lag: BW
    assert max(rank["gradient_error"] for rank in data["ranks"]) < 1e-12
    assert all((rank["worst"] == "") == (rank["gradient_error"] == 0.0) for rank in data["ranks"])
    file = tmp_path / "mine.loom"
    file.write_text(sl.dumps(sl.build("zb-v", 2, 4)))
    shown = stageloom("verify", str(file), "--precision", "float32")
    assert (shown.status, "equal to one process" in shown.out) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("verify pipedream -p 2 -m 2", "is asynchronous"),
        ("verify 1f1b -p 100 -m 2", "more local processes than the 64"),
        ("verify 1f1b -p 4 -m 2 --layers 1", "4 stages need as many modules, and the model has 3"),
        ("verify seq1f1b -p 2 -m 2 --context 30", "--context 30 is no multiple of the schedule's 4 slices"),
        ("verify chimera -p 2 -m 2 -O concatenation=halving --size 3", "--size 3 is no multiple"),
        ("verify 1f1b -p 2 -m 2 --size 0", "--size 0: too small"),
        ("verify 1f1b -p 2 -m 2 --seed -1", "--seed -1: too small"),
        ("verify 1f1b -p 2 -m 2 --width 0", "width: 0 is too small"),
        ("verify 1f1b -p 2 -m 2 --timeout 0", "the timeout must be above 0"),
        ("run 1f1b -p 2 -m 2 --steps 0", "--steps 0: at least 1"),
        ("run 1f1b -p 2 -m 2 --every 0 --checkpoint x", "--every 0: at least 1"),
        ("run 1f1b -p 2 -m 2 --rate 0", "--rate 0: a finite number above 0"),
        ("run 1f1b -p 2 -m 2 --rate inf", "--rate inf: a finite number above 0"),
        ("run 1f1b -p 2 -m 2 --seed 99999999999999999999999", "--seed 99999999999999999999999: too large"),
        ("verify 1f1b -p 2 -m 2 --size 1000000000", "--size 1000000000 and --context 32: 2 micro-batches of 32,0"),
        ("run 1f1b -p 2 -m 2 --context 1000000000", "--context 1000000000: a model of 64,000,131,072 parameters"),
        ("profile 1f1b -p 2 -m 2 --layers 1000000", "--layers 1000000: too many; at most 10000"),
        ("profile 1f1b -p 2 -m 2 -o costs.txt", "-o costs.txt: costs are written as YAML or JSON"),
        (f"run 1f1b -p 2 -m 2 --svg {'a' * 300}.svg", "...: cannot be written: File name too long"),
        ("run 1f1b -p 2 -m 2 --resume", "--resume needs --checkpoint"),
        ("run pipedream -p 2 -m 2 --checkpoint x", "are not checkpointed"),
        ("run 1f1b -p 2", "--microbatches/-m is missing"),
    ],
)
def test_wrong_invocations(arguments: str, message: str) -> None:
    result = stageloom(*arguments.split())
    assert result.status == 2, result
    assert message in result.err
    assert len(result.err.splitlines()) == 1


@pytest.mark.parametrize("verb", ["run", "verify", "profile"])
def test_a_file_that_cannot_run_starts_no_process(verb: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.loom"
    file.write_text("stageloom schedule 1\nname: s\nranks: 1\nmicrobatches: 2\npath: 0\nrank 0: BW0 F0 F1\n")
    with mock.patch("stageloom.execute.workers.launch", side_effect=AssertionError):
        result = stageloom(verb, str(file))
    assert result.status == 2
    assert re.fullmatch(rf"error: {file}: cannot run: .*; `stageloom validate {file}` shows where\n", result.err)


def test_a_reader_that_goes_away_ends_a_run_quietly() -> None:
    command = [sys.executable, "-m", "stageloom", "run", "1f1b", "-p", "2", "-m", "2", "--steps", "100000", *SMALL]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("step 1/100000")
    process.stdout.close()
    assert process.stderr is not None
    assert (process.stderr.read(), process.wait(60)) == ("", 0)


def test_one_step_is_no_mean_of_those_after_the_first() -> None:
    result = stageloom("run", "1f1b", "-p", "2", "-m", "32", "--steps", "1", *SMALL)
    assert result.status == 0, result.err
    assert re.search(r"^loss \d\.\d+; the one step took [\d.,]+ ms$", result.out, re.MULTILINE)
    assert "--svg FILE draws all" in " ".join(result.out.split())
    assert "-o FILE" not in result.out


def test_asynchronous_schedules_train(tmp_path: Path) -> None:
    result = stageloom("run", "pipedream", "-p", "2", "-m", "8", "--steps", "3", "--json")
    assert result.status == 0, result.err
    data = json.loads(result.out)
    first, second = data["ranks"]
    assert data["schedule"] == "pipedream"
    assert list(data["losses"].items()) == [(str(step + 1), loss) for step, loss in enumerate(first["losses"])]
    assert 0 < data["makespan_seconds"]["measured"] < first["seconds"][-1]
    assert data["makespan_seconds"]["predicted"] > 0
    assert first["losses"][-1] < first["losses"][0]
    for rank in (first, second):
        assert set(rank["op_seconds"]) == {"F", "BW"}
        assert 0 < 8 * sum(rank["op_seconds"].values()) < sum(rank["seconds"])
