"""Where messages are received and gradients reduced, so that no rank waits for another in a circle.

Receives. Messages of one directed pair of ranks travel in one queue, so they are received in the order sent. A receive
stands right before the op that uses it, or earlier: before the first op that uses any message sent after it in its
queue. Why this has no circle: a sound schedule has a total order of all ops in which every op comes after those it
waits for. Let u be the op that message m is received before. m or a message sent after m is for u, so m's sender comes
before u in that order. Hence the receive can be put right before u, after all it waits for, and the order still holds.

Reductions. A stage that several ranks hold (two paths), or every stage under data parallel, gets one reduction on each
rank that holds it, after the last weight gradient of the stage there. The holders of two stages must reduce them in one
order, or the reduce streams wait in a circle; so all ranks go by one order of stages: that in which their last weight
gradients end, every op taking 1. Data parallel ranks run the same program, so that the order holds among them too. An
asynchronous schedule reduces under data parallel before each of its updates, at once after the backward that ends it.

Gathers. A stage whose weights lie in shards is gathered once a step: one op before its first on the rank, so that the
gather runs under that op or under the wait for the first message. Its reduction gives every rank its shard again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from stageloom import _kernel
from stageloom.errors import ScheduleError
from stageloom.lower.program import Code, Program, Rows
from stageloom.op import Kind
from stageloom.schedule import Schedule


def lower(schedule: Schedule, *, data_parallel: bool = False, sharded: Collection[int] = ()) -> Program:
    """The program of a schedule. Raises ScheduleError for one that cannot run (`validate.problems` says why).

    data_parallel: every stage is held by other processes too, which train on other data, and its gradients have to be
    summed with theirs. sharded: stages whose weights those processes share out among them.
    Raises ScheduleError for an asynchronous schedule with sharded stages, as it runs on copies of older weights, or
    with replicas on two paths, as these would update apart.
    """
    if not schedule.synchronous and len(schedule.placement.paths) > 1:
        raise ScheduleError(f"{schedule.name}: updates weights under way, so that replicas on two paths would differ")
    if not schedule.synchronous and sharded:
        raise ScheduleError(f"{schedule.name}: runs on copies of older weights, so that none can lie in shards")
    end = _unit_times(schedule)
    rows = np.arange(len(schedule))
    source = schedule.links.source
    receiver = np.flatnonzero(source >= 0)
    receiver = receiver[schedule.rank[source[receiver]] != schedule.rank[receiver]]
    sender = source[receiver].astype(np.int64)
    # In a pair both receives come before both ops, both sends after; a pair is sorted by its first row.
    lead = rows - np.concatenate(([False], schedule.pair))[: len(rows)]
    if schedule.synchronous:
        reduce_row, reduce_rank, reduce_lead, turn = _reductions(schedule, lead, end, data_parallel)
    else:
        reduce_row, reduce_rank, reduce_lead, turn = _updates(schedule, lead, data_parallel)
    gather_row, gather_lead = _gathers(schedule, lead, sharded)

    counts = [len(gather_row), len(receiver), len(rows), len(sender), len(reduce_row)]
    _, receives, ops, sends, _ = (
        slice(stop - count, stop) for stop, count in zip(np.cumsum(counts), counts, strict=True)
    )
    row = np.concatenate((gather_row, sender, rows, sender, reduce_row))
    on = schedule.rank
    rank = np.concatenate((on[gather_row], on[receiver], on, on[sender], reduce_rank))
    received = _posted_before(schedule, sender, receiver, lead)
    before = np.concatenate((gather_lead, received, lead, lead[sender], reduce_lead))
    code = np.repeat(np.array([Code.GATHER, Code.RECV, 0, Code.SEND, Code.REDUCE], dtype=np.int8), counts)
    code[ops] = schedule.kind
    use = np.full(len(row), -1, dtype=np.int64)
    use[receives] = receiver
    peer = np.full(len(row), -1, dtype=np.int32)
    peer[receives], peer[sends] = on[sender], on[receiver]

    within = np.concatenate((gather_row, sender, rows, sender, turn))
    order = np.lexsort((within, np.repeat(np.arange(5), counts), before, rank))
    offsets = np.zeros(schedule.ranks + 1, dtype=np.int64)
    np.cumsum(np.bincount(rank, minlength=schedule.ranks), out=offsets[1:])
    columns = (offsets, code[order], row[order], use[order], peer[order])
    return Program(schedule, *columns, data_parallel=data_parallel, sharded=frozenset(sharded))


def _unit_times(schedule: Schedule) -> NDArray[np.float64]:
    """When every op ends if each takes 1 and messages nothing."""
    count = len(schedule)
    start, end = np.empty(count), np.full(count, -1.0)
    waiter = np.full(count, -1, dtype=np.int32)
    longest_path = _kernel.longest_path.pick(count)
    source = schedule.links.source
    if schedule.links.faults or count > longest_path(
        schedule.offsets, source, np.zeros(count), np.ones(count), schedule.pair, start, end, waiter
    ):
        raise ScheduleError(
            f"{schedule.name}: cannot be lowered, as it cannot run; stageloom.validate.problems says why"
        )
    return end


def _posted_before(schedule: Schedule, sender: Rows, receiver: Rows, lead: Rows) -> Rows:
    """For each message the op before which it is received: the first that uses it or one sent later in its queue."""
    queue = schedule.rank[sender].astype(np.int64) * schedule.ranks + schedule.rank[receiver]
    order = np.lexsort((sender, queue))[::-1]
    # Later queues come first in this order and their rows are shifted up, so that one minimum serves all queues.
    shift = queue[order] * len(schedule)
    before = np.empty(len(sender), dtype=np.int64)
    before[order] = np.minimum.accumulate(lead[receiver][order] + shift) - shift
    return before


def _reductions(
    schedule: Schedule, lead: Rows, end: NDArray[np.float64], data_parallel: bool
) -> tuple[Rows, Rows, Rows, Rows]:
    """(row, rank, pair it comes after, turn) of every reduction, by rank and turn."""
    table = schedule.placement.table.T
    shared = [stage for stage, ranks in enumerate(table) if data_parallel or len(set(ranks.tolist())) > 1]
    last = np.full((schedule.ranks, schedule.stages), -1, dtype=np.int64)
    weights = np.flatnonzero((schedule.kind == Kind.W) | (schedule.kind == Kind.BW))
    np.maximum.at(last, (schedule.rank[weights], schedule.stage[weights]), weights)
    done = {stage: max(float(end[row]) for row in last[:, stage] if row >= 0) for stage in shared}
    found: list[tuple[int, int, int, int]] = []
    for rank in range(schedule.ranks):
        after = int(schedule.offsets[rank])
        for turn, stage in enumerate(sorted(shared, key=lambda stage: (done[stage], stage))):
            if rank in schedule.placement.table[:, stage]:
                row = int(last[rank, stage])
                after = max(after, int(lead[row])) if row >= 0 else after  # no earlier than the one before it
                found.append((row if row >= 0 else int(last[:, stage].max()), rank, after, turn))
    row, rank, after, turn = np.array(found, dtype=np.int64).reshape(-1, 4).T
    return row, rank, after, turn


def _updates(schedule: Schedule, lead: Rows, data_parallel: bool) -> tuple[Rows, Rows, Rows, Rows]:
    """The same for the reductions of an asynchronous schedule, before each update of each stage."""
    weights = np.flatnonzero((schedule.kind == Kind.W) | (schedule.kind == Kind.BW))
    ended: Counter[int] = Counter()
    rows: list[int] = []
    for row in weights.tolist() if data_parallel else ():
        stage = int(schedule.stage[row])
        ended[stage] += 1
        if ended[stage] % schedule.update_every == 0:
            rows.append(row)
    row = np.array(rows, dtype=np.int64)
    return row, schedule.rank[row].astype(np.int64), lead[row], row


def _gathers(schedule: Schedule, lead: Rows, sharded: Collection[int]) -> tuple[Rows, Rows]:
    """(row, op it comes before) of every gather: the first op of a sharded stage on a rank, and the op before that."""
    rows = np.flatnonzero(np.isin(schedule.stage, np.array(sorted(sharded), dtype=np.int64)))
    places = schedule.rank[rows].astype(np.int64) * schedule.stages + schedule.stage[rows]
    first = np.sort(rows[np.unique(places, return_index=True)[1]])
    previous = np.maximum(lead[first] - 1, schedule.offsets[schedule.rank[first]])
    return first, lead[previous]
