"""Under torchrun the processes that it has started are the ranks: on one node and on two, in health and in failure."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import stageloom as sl
from stageloom.errors import InputError
from stageloom.execute.joining import Invitation, invitation, join, told
from stageloom.execute.language import Config
from stageloom.execute.training import Work, train
from stageloom.execute.workers import Pool

pytestmark = pytest.mark.torch
LONGEST = 180  # seconds
JOINED = str(Path(__file__).parent / "joined.py")
RUN = ["-m", "stageloom", "run", "1f1b", "-m", "4", "--steps", "2"]
SMALL = ["--layers", "2", "--width", "16", "--context", "16", "--size", "2", "--seed", "3"]


def torchrun(*arguments: str) -> subprocess.Popen[str]:
    """`torchrun ARGUMENTS`, on the loopback interface."""
    loops = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"GLOO_SOCKET_IFNAME": loops.pop()} if loops else {}
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment | {"OMP_NUM_THREADS": "1"}
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, list[str]]:
    """(exit status, standard output, our messages on standard error)."""
    try:
        out, err = process.communicate(timeout=LONGEST)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, out, re.findall(r"^error: .*$", err, re.MULTILINE)


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def test_two_nodes_train_as_local_processes_do() -> None:
    port = free_port()
    nodes = [
        torchrun(
            *("--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(node)),
            *("--master-addr", "127.0.0.1", "--master-port", port, *RUN, *SMALL),
        )
        for node in range(2)
    ]
    (status, out, errors), second = ended(nodes[0]), ended(nodes[1])
    assert (status, errors) == (0, [])
    assert second == (0, "", [])  # only the first rank speaks
    schedule = sl.build("1f1b", 2, 4)
    config = Config(layers=2, width=16, heads=2, context=16)
    with Pool(2) as pool:
        local = pool.run(train, Work(schedule, config, size=2, seed=3, steps=2), None, 10, False, False)
    steps = re.findall(r"^step (\d)/2  loss (\d\.\d+)  \d+ ms  busy \d+ \d+ %", out, re.MULTILINE)
    assert steps == [(str(step + 1), f"{loss:.4f}") for step, loss in enumerate(local[0].losses)]
    assert out.count("1f1b: 2 processes, 4 micro-batches; the last step") == 1


def test_as_many_processes_as_ranks_are_needed() -> None:
    status, out, errors = ended(torchrun("--nproc-per-node", "2", *RUN, "-p", "3"))
    assert status != 0
    assert out == ""
    assert errors == [
        "error: 1f1b has 3 ranks, and the launcher has started 2 processes (WORLD_SIZE): start 3, "
        "or use a schedule for 2"
    ]


@pytest.mark.parametrize(
    ("how", "victim", "timeout", "message"),
    [
        ("raise", 1, 60, r"rank 1 failed at \S.*: ValueError: no such shape"),
        (
            "kill",
            1,
            60,
            r"rank 1 is gone.*: rank 0 was at (receive gradients for \d@0 from|send activations for \d@1 to) rank 1",
        ),
        ("hang", 0, 8, r"rank 0 gave no sign for 8 s at \S.*: joined.py:\d+: time.sleep\(600\)"),
    ],
)
def test_one_message_names_rank_op_and_cause(how: str, victim: int, timeout: float, message: str) -> None:
    process = torchrun("--nproc-per-node", "2", JOINED, how, str(victim), str(timeout))
    status, out, errors = ended(process)
    assert status != 0
    assert out == ""
    assert len(errors) == 1, errors
    assert re.fullmatch(f"error: {message}", errors[0])


def test_what_a_launcher_says() -> None:
    said = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert invitation({}) is None
    assert invitation({"WORLD_SIZE": "4"}) is None
    assert invitation(said) == Invitation(3, 4, 3, 4)
    assert invitation(said | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}) == Invitation(3, 4, 1, 2)
    with pytest.raises(InputError, match="but not MASTER_PORT"):
        invitation({key: value for key, value in said.items() if key != "MASTER_PORT"})
    for wrong, message in (
        ({"RANK": "5"}, "RANK is 5 and WORLD_SIZE 4: ranks go from 0 to WORLD_SIZE - 1"),
        ({"WORLD_SIZE": "0"}, "RANK is 3 and WORLD_SIZE 0"),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK is 2 and LOCAL_WORLD_SIZE 2"),
    ):
        with pytest.raises(InputError, match=message):
            invitation(said | wrong)
    with pytest.raises(InputError, match="RANK is 'x'"):
        invitation(said | {"RANK": "x"})
    with pytest.raises(InputError, match="timeout must be above 0"):
        join(Invitation(0, 1, 0, 1), print, timeout=0)


@pytest.mark.parametrize(
    ("verb", "of_first", "of_second", "message"),
    [
        ("run", "--steps 2", "--steps 4", "--steps is 4 on rank 1 and 2 on rank 0; start all ranks with the same"),
        ("verify", "{tmp}/0.loom", "{tmp}/1.loom", "SCHEDULE is .*1.loom on rank 1 and .*0.loom on rank 0"),
    ],
)
def test_ranks_that_were_started_differently_do_not_train(
    verb: str, of_first: str, of_second: str, message: str, tmp_path: Path
) -> None:
    for name, schedule in (("0", "1f1b"), ("1", "gpipe")):
        (tmp_path / f"{name}.loom").write_text(sl.dumps(sl.build(schedule, 2, 4)))
    if verb == "run":
        of_first, of_second = (f"1f1b -p 2 -m 4 {flags}" for flags in (of_first, of_second))
    port = free_port()
    nodes = [
        torchrun(
            *("--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(node)),
            *("--master-addr", "127.0.0.1", "--master-port", port, "-m", "stageloom", verb),
            *flags.format(tmp=tmp_path).split(),
            *("--layers", "2", "--width", "16", "--context", "16", "--size", "2"),
        )
        for node, flags in enumerate((of_first, of_second))
    ]
    (status, out, errors), (other, _, more) = ended(nodes[0]), ended(nodes[1])
    assert status != 0
    assert other != 0
    assert out == ""
    assert len(errors + more) == 1
    assert re.match(f"error: {message}", (errors + more)[0])


def test_what_the_ranks_of_a_task_are_given_is_told_apart() -> None:
    """By flag, by argument, and by what a file held: the same name may stand for other schedules."""
    config = Config(layers=2, width=16, heads=2, context=16)
    one, other = (Work(sl.build(name, 2, 4), config, rate=0.1) for name in ("1f1b", "gpipe"))
    first, second = (told(train, (work, None, 10, False, True), {"--steps": 2}) for work in (one, other))
    assert next(iter(first)) == "--steps"
    assert (first["work.rate"], first["every"], first["work.config.width"]) == ("0.1", "10", "16")
    apart = [name for name in first if first[name] != second[name]]
    assert {"work.schedule.name", "work.schedule.kind"} <= set(apart)
    assert all(name.startswith("work.schedule.") for name in apart)


def test_one_node_shows_one_line_that_is_written_anew() -> None:
    """In a terminal: a bar with loss and utilisation; the cursor is back at the end."""
    import pty

    main, terminal = pty.openpty()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *RUN, *SMALL, "-p", "2"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=terminal, stderr=terminal, stdin=terminal, env=environment) as process:
        os.close(terminal)
        shown = b""
        try:
            while part := os.read(main, 4096):
                shown += part
        except OSError:  # Linux: the other end is closed
            pass
        assert process.wait(LONGEST) == 0
    os.close(main)
    text = shown.decode()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert re.search(r"2/2 \S+ loss \d\.\d+  \d+ ms  busy \d+ \d+ %", plain), plain
    assert "step 1/2" not in plain
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")
    assert "1f1b, measured: 2 ranks" in plain
