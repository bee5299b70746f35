"""Our orders are PyTorch's own, op for op, on a grid of sizes; every difference has a name and a test here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from tests.pytorch_orders import Order, executed_1f1b, orders

from stageloom.schedule import Schedule
from stageloom.schedules import build, find

pytestmark = pytest.mark.torch

RANKS = range(1, 9)
MICROBATCHES = (1, 2, 3, 4, 5, 7, 8, 10, 12, 15, 16, 20, 21, 32, 40)


def never(ranks: int, microbatches: int) -> bool:
    return False


def fewer_than_ranks(ranks: int, microbatches: int) -> bool:
    return microbatches < ranks


def uneven_rounds(ranks: int, microbatches: int) -> bool:
    """PyTorch runs M // P rounds of equal length; Megatron-LM's rule, which is ours, also allows a shorter last one."""
    return microbatches % max(1, microbatches // ranks) != 0


@dataclass(frozen=True)
class Twin:
    """A schedule that both have. `only_ours`: sizes that PyTorch refuses and we build."""

    ours: str
    theirs: str
    chunks: tuple[int, ...] = (1,)
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    only_ours: Callable[[int, int], bool] = never

    def build(self, ranks: int, microbatches: int, chunks: int) -> Schedule:
        takes_chunks = any(option.name == "chunks" for option in find(self.ours).options)
        more = {"chunks": chunks} if takes_chunks else {}
        return build(self.ours, ranks, microbatches, **self.options, **more)


ONE_F_ONE_B = Twin("1f1b", "Schedule1F1B", only_ours=fewer_than_ranks)
TWINS = (
    # GPipe's paper runs the backwards last micro-batch first; PyTorch runs them in order, which we have as an option.
    Twin("gpipe", "ScheduleGPipe", options={"order": "in-order"}),
    Twin("breadth-first", "ScheduleLoopedBFS", (1, 2, 3, 4)),
    Twin("interleaved-1f1b", "ScheduleInterleaved1F1B", (1, 2, 3, 4), only_ours=uneven_rounds),
    Twin("interleaved-zb", "ScheduleInterleavedZeroBubble", (1, 2, 3, 4), only_ours=uneven_rounds),
    Twin("zb-v", "ScheduleZBVZeroBubble", (2,)),
    Twin("dualpipev", "ScheduleDualPipeV", (2,)),
)
SIZES = [(ranks, microbatches) for ranks in RANKS for microbatches in MICROBATCHES]


def our_order(schedule: Schedule, rank: int) -> Order:
    rows = slice(int(schedule.offsets[rank]), int(schedule.offsets[rank + 1]))
    columns = (schedule.kind[rows], schedule.stage[rows], schedule.microbatch[rows])
    return Order(np.column_stack(columns).astype(np.int64), schedule.pair[rows])


def first_difference(ours: Order, theirs: Order) -> str | None:
    """None where the orders are equal, else the first place at which they are not."""
    if len(ours.ops) != len(theirs.ops):
        return f"{len(ours.ops)} ops and {len(theirs.ops)}"
    differ = np.flatnonzero((ours.ops != theirs.ops).any(axis=1) | (ours.pair != theirs.pair))
    if not len(differ):
        return None
    at = int(differ[0])
    each = (f"{order.ops[at].tolist()}{' paired' * bool(order.pair[at])}" for order in (ours, theirs))
    return f"position {at}: {' and '.join(each)}"


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.ours)
def test_orders_are_pytorchs(twin: Twin) -> None:
    compared = 0
    for ranks, microbatches in SIZES:
        if twin.only_ours(ranks, microbatches) or find(twin.ours).refusal(ranks, microbatches):
            continue
        for chunks in twin.chunks:
            schedule = twin.build(ranks, microbatches, chunks)
            for rank, theirs in enumerate(orders(twin.theirs, ranks, microbatches, chunks)):
                difference = first_difference(our_order(schedule, rank), theirs)
                assert difference is None, f"{twin.ours} {ranks}x{microbatches}x{chunks}, rank {rank}: {difference}"
                compared += 1
    assert compared >= 100


@pytest.mark.parametrize("twin", [ONE_F_ONE_B, *TWINS], ids=lambda twin: twin.ours)
def test_refusals_are_pytorchs_but_for_those_named(twin: Twin) -> None:
    for ranks, microbatches in SIZES:
        for chunks in twin.chunks:
            we_refuse = find(twin.ours).refusal(ranks, microbatches) is not None
            if we_refuse or twin.only_ours(ranks, microbatches):
                assert we_refuse != twin.only_ours(ranks, microbatches)
                with pytest.raises(ValueError, match="icrobatch"):
                    orders(twin.theirs, ranks, microbatches, chunks)
            if not we_refuse:
                twin.build(ranks, microbatches, chunks)


def test_1f1b_is_what_pytorch_runs() -> None:
    for ranks, microbatches in SIZES:
        if fewer_than_ranks(ranks, microbatches):
            continue
        schedule = build("1f1b", ranks, microbatches)
        for rank in range(ranks):
            difference = first_difference(our_order(schedule, rank), executed_1f1b(rank, ranks, microbatches))
            assert difference is None, f"1f1b {ranks}x{microbatches}, rank {rank}: {difference}"


def test_1f1b_is_what_pytorch_draws_but_for_its_last_rank() -> None:
    """PyTorch states 1F1B twice: a loop that it runs, and an order that it draws, which has drifted on the last rank.

    The drawing counts forwards up before the first one of the steady phase. That is right after a warm-up; the last
    rank has none, so there it draws F1 .. F(M) for F0 .. F(M-1). When this fails, PyTorch has mended it: then move
    1f1b up to the twins.
    """
    for ranks, microbatches in SIZES:
        if fewer_than_ranks(ranks, microbatches):
            continue
        schedule = build("1f1b", ranks, microbatches)
        *others, last = orders("Schedule1F1B", ranks, microbatches)
        for rank, theirs in enumerate(others):
            difference = first_difference(our_order(schedule, rank), theirs)
            assert difference is None, f"1f1b {ranks}x{microbatches}, rank {rank}: {difference}"
        drawn = our_order(schedule, ranks - 1)
        drawn.ops[drawn.ops[:, 0] == 0, 2] += 1
        assert first_difference(drawn, last) is None
