"""What processes do in test_execute_checkpoint.py: save and load checkpoints, with something that goes wrong."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import stageloom as sl
import toy
from stageloom.errors import RankError
from stageloom.execute.checkpoint import Checkpoint
from stageloom.execute.pipeline import Pipeline
from stageloom.execute.training import train
from stageloom.execute.workers import doing

ENDLESS = resource.RLIM_INFINITY


class Once(nn.ModuleDict):
    """A stage under the name that it has in the whole model."""

    def forward(self, x: Tensor) -> Tensor:
        (only,) = self.values()
        return only(x)


def pipeline_of(rank: int, group: Any, ranks: int) -> tuple[Pipeline, torch.optim.Optimizer]:
    schedule = sl.build("1f1b", ranks, ranks)
    own = {n: Once({f"layer{n}": toy.stage(n)}) for n in schedule.placement.stages_of[rank][0]}
    pipeline = Pipeline(schedule, own, toy.loss, group=group, on_task=doing)
    return pipeline, torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)


def fill(pipeline: Pipeline, optimizer: torch.optim.Optimizer, number: float) -> None:
    """Weights and momenta that show which step they are of."""
    for parameter in pipeline.parameters():
        parameter.data.fill_(number)
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, number + 0.5)


def numbers(pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> list[float]:
    """All numbers that are in the weights, then in the momenta; two, if all is of one step."""
    weights = {float(x) for p in pipeline.parameters() for x in p.detach().flatten()}
    momenta = {float(x) for p in pipeline.parameters() for x in optimizer.state[p]["momentum_buffer"].flatten()}
    return sorted(weights) + sorted(momenta)


# -------------------------------------------------------------------------------------------------- failures of a rank


def fail(seat: Any, folder: str, victim: int, how: str) -> dict[str, Any]:
    """The error of a save that fails on rank `victim`, and what the next ones then do."""
    pipeline, optimizer = pipeline_of(seat.rank, seat.group, seat.size)
    kept = Checkpoint(folder, seat.group)
    fill(pipeline, optimizer, 1.0)
    kept.save(1, pipeline, optimizer)
    fill(pipeline, optimizer, 2.0)
    said: dict[str, Any] = {}
    undo = FAULTS[how]() if victim in (seat.rank, -1) else _nothing
    try:
        kept.save(2, pipeline, optimizer)
    except RankError as error:
        said = {"message": str(error), "rank": error.rank, "here": error.here}
    finally:
        undo()
    dist.barrier(seat.group)
    said["folder"] = sorted(path.name for path in Path(folder).iterdir())
    dist.barrier(seat.group)
    said["step"] = kept.load(pipeline, optimizer)
    said["numbers"] = numbers(pipeline, optimizer)
    fill(pipeline, optimizer, 3.0)
    kept.save(3, pipeline, optimizer)
    said["after"] = sorted(path.name for path in Path(folder).iterdir())
    return said


def fail_to_the_end(seat: Any, folder: str, victim: int) -> None:
    """A save that fails on rank `victim`, and nobody catches it."""
    pipeline, optimizer = pipeline_of(seat.rank, seat.group, seat.size)
    fill(pipeline, optimizer, 1.0)
    doing("checkpoint")
    if seat.rank == victim:
        _limit()
    Checkpoint(folder, seat.group).save(1, pipeline, optimizer)


def _nothing() -> None:
    pass


def _limit() -> Callable[[], None]:
    """The system refuses to write more than the first bytes of a file."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, ENDLESS))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (ENDLESS, ENDLESS))


def _refuse(name: str, number: int) -> Callable[[], Callable[[], None]]:
    """A call of the system that fails, as it does on a file system that finds out late that it is full."""

    def start() -> Callable[[], None]:
        real = getattr(os, name)

        def refused(*_: Any, **__: Any) -> None:
            raise OSError(number, os.strerror(number))

        setattr(os, name, refused)
        return lambda: setattr(os, name, real)

    return start


FAULTS: dict[str, Callable[[], Callable[[], None]]] = {
    "limit": _limit,
    "fsync": _refuse("fsync", errno.ENOSPC),
    "rename": _refuse("rename", errno.EDQUOT),
    "replace": _refuse("replace", errno.EDQUOT),
}


def load_damaged(seat: Any, folder: str, how: str) -> tuple[str, str]:
    """The error of a load from a checkpoint that cannot be read, and what else was said of it on standard error."""
    pipeline, optimizer = pipeline_of(seat.rank, seat.group, seat.size)
    kept = Checkpoint(folder, seat.group)
    fill(pipeline, optimizer, 1.0)
    kept.save(1, pipeline, optimizer)
    if seat.rank == 0:
        path = Path(folder) / "step-00000001"
        if how == "cut":
            with open(path / "__1_0.distcp", "r+b") as file:
                file.truncate(100)
        elif how == "garbled":
            (path / "__1_0.distcp").write_bytes(b"x" * (path / "__1_0.distcp").stat().st_size)
        elif how == "garbled metadata":
            (path / ".metadata").write_text("no pickle")
        elif how == "missing":
            (path / "__1_0.distcp").unlink()
        elif how == "metadata":
            (path / ".metadata").unlink()
    dist.barrier(seat.group)
    if how == "model":
        pipeline.modules[0, seat.rank].extra = nn.Linear(2, 2)  # type: ignore[assignment]
    if how == "shape" and seat.rank == 1:
        layer: Any = pipeline.modules[0, 1].layer1.first
        layer.weight.data = layer.weight.data[:3]
        optimizer.state.clear()
    if how == "optimizer":
        optimizer = torch.optim.Adam(pipeline.parameters())  # type: ignore[assignment]
    with redirect_stderr(io.StringIO()) as said:
        try:
            kept.load(pipeline, optimizer)
        except RankError as error:
            return str(error), said.getvalue()
    return "went through", said.getvalue()


def go_on(seat: Any, *arguments: Any) -> tuple[list[float], str]:
    """Losses of `stageloom run`'s task, and what it says on standard error."""
    with redirect_stderr(io.StringIO()) as said:
        return train(seat, *arguments, False).losses, said.getvalue()


# ------------------------------------------------------------------------------------------------- kills at every call

CALLS = {"open", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir", "close", "write"}
SOME_WRITES = 97  # of the many writes into a file, every 97th


def in_a_child(act: Callable[[Any], None]) -> int:
    """Run `act` with a group of its own in a forked process; how that ended, as os.waitpid has it."""
    child = os.fork()
    if child == 0:
        try:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            act(dist.group.WORLD)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def kill_at_every_call(folder: Path, step: int, calls: set[str]) -> list[dict[str, Any]]:
    """Save a checkpoint of this step after one of step 1, and be killed before the n-th of these calls, n = 0, 1, ..,
    until none is left: what can be loaded then, and what is left after one more save."""
    folder.mkdir()
    base, report = folder / "base", folder / "report"

    def first(group: Any) -> None:
        pipeline, optimizer = pipeline_of(0, group, 1)
        fill(pipeline, optimizer, 1.0)
        Checkpoint(str(base), group).save(1, pipeline, optimizer)

    assert in_a_child(first) == 0
    found: list[dict[str, Any]] = []

    def look_back_and_save(group: Any) -> None:
        if found:
            report.write_text(json.dumps(look(folder / f"at {len(found) - 1}", group)))
        if not found or found[-1]["killed"]:
            save_until_killed(folder / f"at {len(found)}", step, calls, len(found), group)

    while True:
        shutil.copytree(base, folder / f"at {len(found)}")
        ended = in_a_child(look_back_and_save)
        assert ended in (0, signal.SIGKILL), ended
        if found:
            found[-1] |= json.loads(report.read_text())
        if found and not found[-1]["killed"]:
            return found
        found.append({"killed": ended == signal.SIGKILL})


def save_until_killed(place: Path, step: int, calls: set[str], left: int, group: Any) -> None:
    pipeline, optimizer = pipeline_of(0, group, 1)
    fill(pipeline, optimizer, 2.0)
    writes = 0

    def see(_: Any, event: str, called: Any) -> None:
        nonlocal left, writes
        name = getattr(called, "__name__", "") if event == "c_call" else ""
        writes += name == "write"
        if name == "write" and writes % SOME_WRITES:
            return
        if name in calls and not isinstance(called.__self__, str):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(see)
    Checkpoint(str(place), group).save(step, pipeline, optimizer)
    sys.setprofile(None)


def look(place: Path, group: Any) -> dict[str, Any]:
    """What is left in a folder, what is loaded from it, and what is left after one more save."""
    pipeline, optimizer = pipeline_of(0, group, 1)
    kept = Checkpoint(str(place), group)
    left = sorted(path.name for path in place.iterdir())
    step = kept.load(pipeline, optimizer)
    read = numbers(pipeline, optimizer)
    kept.save(3, pipeline, optimizer)
    after = sorted(path.name for path in place.iterdir())
    return {"left": left, "step": step, "numbers": read, "after": after}


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.optim.SGD(toy.stage(0).parameters(), lr=0.1)  # imports what would be imported in every child
    place = Path(sys.argv[1])
    another = kill_at_every_call(place / "another", 2, CALLS)
    again = kill_at_every_call(place / "again", 1, CALLS - {"open", "close", "fsync", "write", "mkdir"})
    print(json.dumps({"another": another, "again": again}))
