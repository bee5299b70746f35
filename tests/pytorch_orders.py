"""PyTorch's own orders: everything here that is private to `torch.distributed.pipelining`, and its letters.

A schedule class of PyTorch works out the order of all ranks in its constructor, from a few attributes of the stages it
is given; so an order can be had without processes, tensors or a model. Three things are read besides: what
`Schedule1F1B` runs (its loop, with a stage that only takes notes), and the functions with which PyTorch validates,
lowers and simulates an order, which the benchmarks time.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch.distributed.pipelining import schedules

from stageloom.op import Kind

torch_schedules: Any = schedules  # private names and untyped functions from here on

# PyTorch writes "B" for a full backward and "I" for the input gradient only; we write BW and B.
KINDS: Final = {
    torch_schedules.F: Kind.F,
    torch_schedules.B: Kind.BW,
    torch_schedules.I: Kind.B,
    torch_schedules.W: Kind.W,
}
ONE_STAGE: Final = ("ScheduleGPipe", "Schedule1F1B")

logging.getLogger("torch.distributed.pipelining").setLevel(logging.ERROR)


@dataclass(frozen=True)
class Order:
    """The order of one rank: rows of (kind, stage, micro-batch), and which rows are overlapped with the next one."""

    ops: NDArray[np.int64]
    pair: NDArray[np.bool_]


def actions(schedule: str, ranks: int, microbatches: int, chunks: int = 1) -> dict[int, list[Any]]:
    """PyTorch's actions of every rank, without its idle steps. Raises what the class raises where it refuses."""
    cls = getattr(torch_schedules, schedule)
    stage = SimpleNamespace(
        group_rank=0,
        group_size=ranks,
        num_stages=ranks * chunks,
        stage_index=0,
        is_first=True,
        is_last=ranks * chunks == 1,
        has_backward=True,
        submod=None,
        stage_index_to_group_rank=None,
    )
    if schedule in ONE_STAGE:
        order = cls(stage, microbatches).pipeline_order
    else:
        # The class goes on to add sends and receives, which takes long and is not looked at here.
        plain = type(cls.__name__, (cls,), {"_prepare_schedule_with_comms": _nothing})
        order = plain([stage] * chunks, microbatches).pipeline_order
    return {rank: [action for action in row if action is not None] for rank, row in order.items()}


def orders(schedule: str, ranks: int, microbatches: int, chunks: int = 1) -> list[Order]:
    """The same in our kinds: the order of every rank. Reductions of gradients are left out."""
    found = actions(schedule, ranks, microbatches, chunks)
    return [_order(found[rank]) for rank in range(ranks)]


def _order(row: list[Any]) -> Order:
    ops: list[tuple[int, int, int]] = []
    pair: list[bool] = []
    for action in row:
        parts = action.sub_actions or (action,)
        for place, part in enumerate(parts):
            if part.computation_type in KINDS:
                ops.append((KINDS[part.computation_type], part.stage_index, part.microbatch_index))
                pair.append(place + 1 < len(parts))
    return Order(np.array(ops, dtype=np.int64).reshape(-1, 3), np.array(pair, dtype=np.bool_))


def _nothing(*_: Any, **__: Any) -> list[Any]:
    return []


def executed_1f1b(rank: int, ranks: int, microbatches: int) -> Order:
    """What `Schedule1F1B` runs on a rank, as noted by a stage that computes nothing and sends nothing."""
    ops: list[tuple[int, int, int]] = []

    def forward(number: int, *_: Any, **__: Any) -> None:
        ops.append((Kind.F, rank, number))

    def backward(number: int, *_: Any, **__: Any) -> None:
        ops.append((Kind.BW, rank, number))

    stage = SimpleNamespace(
        num_stages=ranks,
        stage_index=rank,
        is_first=rank == 0,
        is_last=rank == ranks - 1,
        has_backward=True,
        get_fwd_recv_ops=_nothing,
        get_fwd_send_ops=_nothing,
        get_bwd_recv_ops=_nothing,
        get_bwd_send_ops=_nothing,
        perform_reduce_grad=_nothing,
        forward_one_chunk=forward,
        backward_one_chunk=backward,
    )
    schedule = torch_schedules.Schedule1F1B(stage, microbatches)
    schedule._initialize_stage = _nothing
    schedule._step_microbatches()
    return Order(np.array(ops, dtype=np.int64).reshape(-1, 3), np.zeros(len(ops), dtype=np.bool_))


def mended_1f1b(ranks: int, microbatches: int) -> dict[int, list[Any]]:
    """`actions` of Schedule1F1B with the last rank as it is run, not as it is drawn (see the tests)."""
    action, last = torch_schedules._Action, ranks - 1
    found = actions("Schedule1F1B", ranks, microbatches)
    letters = {Kind.F: torch_schedules.F, Kind.BW: torch_schedules.B}
    found[last] = [
        action(last, letters[Kind(kind)], number)
        for kind, _, number in executed_1f1b(last, ranks, microbatches).ops.tolist()
    ]
    return computing(found)


def computing(found: dict[int, list[Any]]) -> dict[int, list[Any]]:
    """`actions` without the reductions of gradients, which PyTorch's simulation does not know."""
    return {rank: [each for each in row if each.computation_type in KINDS] for rank, row in found.items()}


def check_as_pytorch(found: dict[int, list[Any]], ranks: int, microbatches: int, chunks: int) -> int:
    """PyTorch's own way from an order to a run without devices: validate, add sends and receives, simulate.

    Returns the simulated steps. The simulation counts steps of equal length; sends and receives are steps as well.
    """
    stages = ranks * chunks
    rank_of = torch_schedules._validate_schedule(found, ranks, stages, microbatches)
    copies = {rank: list(row) for rank, row in found.items()}  # the next call empties what it is given
    lowered = torch_schedules._add_send_recv(copies, rank_of.__getitem__, stages)
    simulated = torch_schedules._simulate_comms_compute(lowered, rank_of.__getitem__, stages)
    return max(map(len, simulated.values()))
