"""PyTorch's schedule CSV: what we write is read by PyTorch's own loader, and what we read is what we wrote."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stageloom import BW, EMPTY, F, Placement, assemble, build, line, numbered, problems, records
from stageloom.errors import InputError, ScheduleError
from stageloom.formats.torch_csv import dumps, loads, refusal
from stageloom.schedule import Schedule

RANKS, MICROBATCHES = 4, 8
BUILT = {record.name: record(RANKS, MICROBATCHES) for record in records()}
WRITABLE = [name for name, schedule in BUILT.items() if refusal(schedule) is None]


def torch_reads(schedule: Schedule, file: Path) -> dict[int, list[str]]:
    """The order that PyTorch's runtime has after loading the file, checked and given its messages by PyTorch."""
    theirs: Any = pytest.importorskip("torch.distributed.pipelining.schedules")
    stages = [
        SimpleNamespace(
            group_rank=0,
            group_size=schedule.ranks,
            num_stages=schedule.stages,
            stage_index=0,
            is_first=True,
            is_last=schedule.stages == 1,
            has_backward=True,
            submod=None,
            stage_index_to_group_rank=None,
        )
        for _ in range(schedule.chunks)
    ]
    runtime = theirs._PipelineScheduleRuntime(stages, schedule.microbatches)
    runtime._load_csv(str(file), "compute_only")
    assert runtime.pipeline_order_with_comms
    return {rank: [str(action) for action in row] for rank, row in runtime.pipeline_order.items()}


@pytest.mark.torch
@pytest.mark.parametrize("name", WRITABLE)
def test_pytorch_loads_what_we_write(name: str, tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text(dumps(BUILT[name]))
    order = torch_reads(BUILT[name], file)
    cells = [line.split(",") for line in file.read_text().splitlines()]
    assert [order[rank] for rank in range(RANKS)] == cells


@pytest.mark.parametrize("name", WRITABLE)
def test_what_is_written_reads_back(name: str) -> None:
    schedule = BUILT[name]
    back = loads(dumps(schedule), schedule.name)
    assert problems(back) == []
    assert dumps(back) == dumps(schedule)
    assert back.placement == schedule.placement
    if not schedule.pair.any():
        assert back == schedule


def test_which_schedules_can_be_written() -> None:
    refused = {name: refusal(schedule) for name, schedule in BUILT.items() if refusal(schedule) is not None}
    assert set(refused) == {"chimera", "dualpipe", "pipedream", "pipedream-2bw", "seq1f1b"}
    assert refused["dualpipe"] == "it has 2 replicas of the model, and in PyTorch's runtime a stage is on one rank"
    with pytest.raises(ScheduleError, match=r"dualpipe cannot be written as PyTorch's schedule CSV: it has 2 replicas"):
        dumps(BUILT["dualpipe"])


def test_more_that_pytorch_would_run_wrong() -> None:
    out_of_order = assemble("odd", line(1), [numbered(F, (1, 0)) + BW * 2], 2)
    assert "out of order" in str(refusal(out_of_order))
    idle = assemble("idle", Placement(2, ((0,),)), [F + BW, EMPTY], 1)
    assert refusal(idle) == "rank 1 holds no stage, and PyTorch's runtime needs one on each rank"


def test_letters_are_pytorchs() -> None:
    assert dumps(build("1f1b", 2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert "1F0,1I0,1F1,1I1,1W0," in dumps(build("zb-h1", 2, 4))
    assert "OVERLAP_F_B" in dumps(BUILT["dualpipev"])


def test_idle_steps_and_messages_are_left_out() -> None:
    text = "0F0,0SEND_F0,0F1,,1UNSHARD,0B0,0B1\n,1RECV_F0,1F0,1B0,1F1,1B1,1REDUCE_GRAD\n"
    assert loads(text, "1f1b") == build("1f1b", 2, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x.csv: is empty; a row of actions for each rank is needed, such as 0F0,0F1,0B0,0B1"),
        ("\n\n", "x.csv: holds no action; expected such as 0F0"),
        (
            "0F0,0X1\n",
            "x.csv: row 1, cell 2: '0X1' is no action; expected stage, F, I, B or W, micro-batch, such as 2F0",
        ),
        ("0F0,0F\n", "x.csv: row 1, cell 2: '0F' is no action"),
        ("0F0,0B0\n0F1,0B1\n", "x.csv: row 2, cell 1: 0F1: stage 0 is on rank 0 already"),
        ("0F0,0B0\n2F0,2B0\n", "x.csv: stage 1 is on no rank, though stage 2 is there"),
        ("0F0,(0F1)OVERLAP_F_B\n", "x.csv: row 1, cell 2: (0F1)OVERLAP_F_B: overlaps 1 actions; two are needed"),
        ("0F0,99999999F0\n", "x.csv: row 1, cell 2: 99999999F0: stages and micro-batches below 1,000,000 are needed"),
    ],
)
def test_a_wrong_file(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        loads(text, "s", "x.csv")
    assert str(caught.value).startswith(message)
