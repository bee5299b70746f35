"""One time for all ranks: what the clocks of other hosts are ahead of the first rank's.

Processes of one host read the same clock (`time.perf_counter`). Those of several hosts do not: each rank asks the first
one for its time, many times, and takes the answer that came back quickest. The answer was given somewhere between
question and return, so the error is at most half of that time.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch.distributed leaks unknown types)
from __future__ import annotations

import platform
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

ROUNDS: Final = 30


class Offset(NamedTuple):
    """This rank's clock minus the first rank's, in seconds, and how far off that may be."""

    seconds: float
    error: float

    def aligned(self, spans: Mapping[int, tuple[float, float]]) -> dict[int, tuple[float, float]]:
        """Spans of this rank in the first rank's time."""
        return {row: (began - self.seconds, ended - self.seconds) for row, (began, ended) in spans.items()}


def offset(group: dist.ProcessGroup, *, clock: Callable[[], float] = time.perf_counter, ask: bool = False) -> Offset:
    """How far this rank's clock is ahead of the first one's. All ranks call it.

    Nobody is asked, and all is 0, where the ranks are on one host; `ask` has them ask all the same.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    hosts: list[Any] = [None] * size
    dist.all_gather_object(hosts, _host(), group=group)
    if len(set(hosts)) == 1 and not ask:
        return Offset(0.0, 0.0)
    found = Offset(0.0, 0.0)
    for asking in range(1, size):
        if rank == 0:
            _answer(group, asking, clock)
        elif rank == asking:
            found = _ask(group, clock)
    return found


def _answer(group: dist.ProcessGroup, asking: int, clock: Callable[[], float]) -> None:
    told = torch.zeros(1, dtype=torch.float64)
    for _ in range(ROUNDS):
        dist.recv(told, group=group, group_src=asking)
        told[0] = clock()
        dist.send(told, group=group, group_dst=asking)


def _ask(group: dist.ProcessGroup, clock: Callable[[], float]) -> Offset:
    told = torch.zeros(1, dtype=torch.float64)
    answers: list[Offset] = []
    for _ in range(ROUNDS):
        asked = clock()
        dist.send(told, group=group, group_dst=0)
        dist.recv(told, group=group, group_src=0)
        back = clock()
        answers.append(Offset((asked + back) / 2 - float(told), (back - asked) / 2))
    return min(answers, key=lambda answer: answer.error)


def _host() -> str:
    """The same for all processes that share a clock."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/time').readlink()}"
    except OSError:
        return f"{platform.node()} {uuid.getnode()}"
