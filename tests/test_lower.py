"""Programs: every message sent and received once, in one order on both sides; and faults put in are found."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from oracle import plain
from random_schedules import random_schedule, schedule_of
from stageloom.errors import ScheduleError
from stageloom.lower import Code, Program, lower, problems
from stageloom.schedule import dumps
from stageloom.schedules import build, records
from verdicts import sound


def lines(program: Program, rank: int) -> list[str]:
    return [str(instruction) for instruction in program.instructions(rank)]


def executes(program: Program) -> bool:
    """Runs the ranks' lists, each strictly in order: receives wait and take the front of the queue, sends never wait.

    An op must find its messages received, a send its op done, and the queue's front must be the message wanted.
    """
    schedule = program.schedule
    todo = [deque(range(int(low), int(high))) for low, high in zip(program.offsets, program.offsets[1:], strict=False)]
    queues: dict[tuple[int, int], deque[int]] = defaultdict(deque)
    here: set[tuple[int, int]] = set()
    moved = True
    while moved:
        moved = False
        for rank, mine in enumerate(todo):
            while mine:
                at = mine[0]
                code, row, peer = int(program.code[at]), int(program.row[at]), int(program.peer[at])
                if code == Code.RECV:
                    if not queues[peer, rank]:
                        break
                    assert queues[peer, rank].popleft() == row
                    here.add((rank, row))
                elif code == Code.SEND:
                    assert (rank, row) in here
                    queues[rank, peer].append(row)
                elif code < Code.SEND:
                    source = int(schedule.links.source[row])
                    assert source < 0 or (rank, source) in here
                    here.add((rank, row))
                mine.popleft()
                moved = True
    return not any(todo) and not any(queues.values())


def test_1f1b_on_two_ranks() -> None:
    program = lower(build("1f1b", 2, 2))
    assert lines(program, 0) == [
        "F0@0",
        "send F0@0 to 1",
        "F1@0",
        "send F1@0 to 1",
        "receive BW0@1 from 1",
        "BW0@0",
        "receive BW1@1 from 1",
        "BW1@0",
    ]
    streams = [instruction.stream for instruction in program.instructions(1)]
    assert streams == ["receive", "compute", "compute", "send"] * 2


def test_receives_move_up_where_messages_are_not_used_in_the_order_sent() -> None:
    """Rank 1 wants F1@0 first, but F0@0 was sent first: both are received before F1@1."""
    one = [((0, 0, 0, 0),), ((0, 0, 1, 0),), ((3, 0, 0, 0),), ((3, 0, 1, 0),)]
    two = [((0, 1, 1, 0),), ((0, 1, 0, 0),), ((3, 1, 0, 0),), ((3, 1, 1, 0),)]
    program = lower(schedule_of([one, two], build("1f1b", 2, 2).placement, [0, 0]))
    assert lines(program, 1)[:4] == ["receive F0@0 from 0", "receive F1@0 from 0", "F1@1", "F0@1"]


def test_a_hand_over_on_one_rank_is_no_message() -> None:
    program = lower(build("zb-v", 1, 3))
    assert set(program.code.tolist()) <= {Code.F, Code.B, Code.W, Code.BW}


def test_a_stage_of_two_ranks_is_reduced_once_on_each_after_its_last_weight_gradient() -> None:
    program = lower(build("dualpipe", 4, 8))
    for rank in range(4):
        mine = list(program.instructions(rank))
        reduced = [instruction.op.stage for instruction in mine if instruction.code is Code.REDUCE]
        assert sorted(reduced) == sorted({rank, 3 - rank})
        for at, instruction in enumerate(mine):
            if instruction.code is Code.REDUCE:
                stage = instruction.op.stage
                assert not any(i.code in (Code.W, Code.BW) and i.op.stage == stage for i in mine[at:])
    assert program.holders(0) == (0, 3)
    assert Code.REDUCE not in lower(build("1f1b", 4, 8)).code


@pytest.mark.parametrize("record", [r for r in records() if r.synchronous], ids=lambda record: record.name)
def test_data_parallel_reduces_and_gathers_every_stage_once(record: Any) -> None:
    """Each rank gathers a stage before its first op there, one op ahead, and reduces it after its last W or BW."""
    for ranks, microbatches in ((1, 1), (2, 4), (4, 8)):
        if record.refusal(ranks, microbatches) is not None:
            continue
        schedule = record(ranks, microbatches)
        program = lower(schedule, data_parallel=True, sharded=range(schedule.stages))
        assert problems(program) == []
        assert executes(program)
        for rank in range(ranks):
            mine = list(program.instructions(rank))
            for stage in sorted({op.stage for op in schedule.ops(rank)}):
                own = [at for at, i in enumerate(mine) if i.code < Code.SEND and i.op.stage == stage]
                weights = [at for at in own if mine[at].code in (Code.W, Code.BW)]
                (gather,) = (at for at, i in enumerate(mine) if i.code is Code.GATHER and i.op.stage == stage)
                (reduce,) = (at for at, i in enumerate(mine) if i.code is Code.REDUCE and i.op.stage == stage)
                assert gather < own[0] <= weights[-1] < reduce
                between = [i for i in mine[gather : own[0]] if i.code < Code.SEND]
                assert len(between) == (1 if any(i.code < Code.SEND for i in mine[:gather]) else len(between))
                # at once: before anything that is not ahead of the next op
                later = [i for i in mine[weights[-1] + 1 : reduce] if i.code < Code.SEND]
                assert len(later) <= 1
        plain = [i for i in program.instructions(0) if i.code not in (Code.GATHER, Code.REDUCE)]
        assert plain == [i for i in lower(schedule).instructions(0) if i.code is not Code.REDUCE]


def test_what_is_shared_out_is_gathered_where_it_runs() -> None:
    program = lower(build("interleaved-1f1b", 2, 2), data_parallel=True, sharded=[0, 3])
    assert [line for line in lines(program, 0) if "@" in line and line.split()[0] in ("gather", "reduce")] == [
        "gather @0",
        "reduce @2",
        "reduce @0",
    ]
    assert lines(program, 1)[:2] == ["receive F0@0 from 0", "F0@1"]
    assert next(i.stream for i in program.instructions(0)) == "gather"


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_asynchronous_schedules_reduce_before_each_update(name: str) -> None:
    schedule = build(name, 2, 4)
    program = lower(schedule, data_parallel=True)
    assert problems(program) == []
    for rank in range(2):
        found = lines(program, rank)
        for at, line in enumerate(found):
            if line.startswith("reduce"):
                backward = next(line for line in reversed(found[:at]) if line[0] in "BFW")
                assert backward.startswith("BW")
                assert (int(backward[2]) + 1) % schedule.update_every == 0
        assert sum(line.startswith("reduce") for line in found) == 4 // schedule.update_every
    everything = list(range(len(program)))
    reduce = next(at for at in of_code(program, Code.REDUCE) if program.rank[at] == 1)
    assert codes(taking(program, everything[:reduce] + everything[reduce + 1 :])) == {"unmatched"}
    following = next(at for at in everything[reduce:] if program.code[at] < Code.SEND)
    late = everything.copy()
    late.insert(following, late.pop(reduce))
    assert [str(f) for f in problems(taking(program, late))] == [
        f"rank 1: reduce @1 stands after {program.instruction(following)}"
    ]
    with pytest.raises(ScheduleError, match="runs on copies of older weights"):
        lower(schedule, sharded=[0])
    two = replace(build("dualpipe", 2, 4), update_every=1)
    with pytest.raises(ScheduleError, match="replicas on two paths would differ"):
        lower(two)


def test_a_replica_without_micro_batches_takes_part_in_the_reduction() -> None:
    items = [[((0, 0, 0, 0),), ((3, 0, 0, 0),)], [((0, 1, 0, 0),), ((3, 1, 0, 0),)]]
    program = lower(schedule_of(items, build("chimera", 2, 2).placement, [0]))
    assert [int((program.code[program.rank == rank] == Code.REDUCE).sum()) for rank in (0, 1)] == [2, 2]
    assert problems(program) == []


def test_a_schedule_that_cannot_run_is_not_lowered() -> None:
    schedule = build("1f1b", 2, 2)
    with pytest.raises(ScheduleError, match="cannot be lowered"):
        lower(replace(schedule, kind=np.roll(schedule.kind, 1)))


@pytest.mark.parametrize("record", records(), ids=lambda record: record.name)
def test_published_schedules_become_programs_that_run(record: Any) -> None:
    for ranks, microbatches in ((1, 1), (2, 4), (3, 6), (4, 8), (4, 9)):
        if record.refusal(ranks, microbatches) is None:
            program = lower(record(ranks, microbatches))
            assert problems(program) == []
            assert executes(program)


@pytest.mark.parametrize("part", range(4))
def test_random_schedules_become_programs_that_run(part: int) -> None:
    for seed in range(part * 100, part * 100 + 100):
        schedule = random_schedule(Random(seed))
        assert sound(schedule)
        program = lower(schedule)
        told = f"seed {seed}\n{dumps(schedule)}"
        assert problems(program) == [], told
        assert executes(program), told
        messages = sum(
            int(schedule.rank[s]) != int(schedule.rank[r]) for r, s in enumerate(schedule.links.source) if s >= 0
        )
        assert np.bincount(program.code, minlength=7)[Code.SEND :].tolist()[:2] == [messages, messages], told


def test_pairs_stay_together() -> None:
    for seed in range(100):
        schedule = random_schedule(Random(seed))
        program = lower(schedule)
        place = {int(row): at for at, (code, row) in enumerate(zip(program.code, program.row, strict=True)) if code < 4}
        assert all(place[row + 1] == place[row] + 1 for row in np.flatnonzero(schedule.pair).tolist())
        assert [len(items) for items in plain(schedule).items]


# ------------------------------------------------------------------------------------------------- faults put in


def taking(program: Program, order: list[int]) -> Program:
    """The same program with these instructions, still rank by rank."""
    columns = {name: getattr(program, name)[order] for name in ("code", "row", "use", "peer")}
    counts = np.bincount(program.rank[order], minlength=program.schedule.ranks)
    return replace(program, offsets=np.concatenate(([0], np.cumsum(counts))), **columns)


def codes(program: Program) -> set[str]:
    return {fault.code for fault in problems(program)}


def of_code(program: Program, code: Code) -> list[int]:
    return np.flatnonzero(program.code == code).tolist()


@pytest.mark.parametrize(("name", "ranks", "microbatches"), [("1f1b", 3, 4), ("zb-v", 2, 3), ("dualpipe", 2, 4)])
@pytest.mark.parametrize("beside", [False, True])
def test_any_instruction_left_out_or_done_twice_is_found(
    name: str, ranks: int, microbatches: int, beside: bool
) -> None:
    program = lower(build(name, ranks, microbatches), data_parallel=beside, sharded=[0, 1] if beside else ())
    for at in range(len(program)):
        everything = list(range(len(program)))
        fault = "ops" if program.code[at] < Code.SEND else "unmatched"
        assert fault in codes(taking(program, everything[:at] + everything[at + 1 :]))
        assert fault in codes(taking(program, everything[: at + 1] + everything[at:]))


@pytest.mark.parametrize(("name", "ranks", "microbatches"), [("1f1b", 3, 4), ("zb-v", 2, 3), ("dualpipe", 2, 4)])
def test_any_two_instructions_swapped_are_found_or_harmless(name: str, ranks: int, microbatches: int) -> None:
    program = lower(build(name, ranks, microbatches))
    verdicts = []
    for one in range(len(program)):
        for two in range(one + 1, len(program)):
            if program.rank[one] != program.rank[two]:
                break
            order = list(range(len(program)))
            order[one], order[two] = order[two], order[one]
            changed = taking(program, order)
            verdicts.append(runs(changed))
            assert (problems(changed) == []) is verdicts[-1], [lines(changed, rank) for rank in range(ranks)]
    assert 0 < sum(verdicts) < len(verdicts) / 2


def runs(program: Program) -> bool:
    """Does it compute the schedule's ops in order, run to its end, and reduce in one order, after the gradients?"""
    orders = []
    for rank in range(program.schedule.ranks):
        mine = list(program.instructions(rank))
        computed = [i.op for i in mine if i.code < Code.SEND]
        if computed != list(program.schedule.ops(rank)):
            return False
        orders.append([i.op.stage for i in mine if i.code is Code.REDUCE])
        for at, each in enumerate(mine):
            weights = [i.op.stage for i in mine[at:] if i.code in (Code.W, Code.BW)]
            if each.code is Code.REDUCE and each.op.stage in weights:
                return False
    # on two ranks both hold both stages, so that their orders must be the same
    if orders[0] and any(order != orders[0] for order in orders):
        return False
    try:
        return executes(program) and _pairs_receive_first(program)
    except AssertionError:
        return False


def _pairs_receive_first(program: Program) -> bool:
    place = {int(row): at for at, (code, row) in enumerate(zip(program.code, program.row, strict=True)) if code < 4}
    received = {int(program.use[at]): at for at in of_code(program, Code.RECV)}
    pairs = np.flatnonzero(program.schedule.pair).tolist()
    return all(received.get(row + 1, -1) < place[row] for row in pairs)


def test_each_kind_of_fault_has_its_message() -> None:
    program = lower(build("1f1b", 2, 2))
    everything = list(range(len(program)))

    def moved(at: int, to: int) -> Program:
        rest = everything[:at] + everything[at + 1 :]
        return taking(program, [*rest[:to], at, *rest[to:]])

    receive = of_code(program, Code.RECV)
    assert codes(moved(receive[0], receive[0] + 1)) == {"early"}
    # rank 0 receives BW0@1 before it sends anything
    circle = problems(moved(receive[0], 0))
    assert [fault.code for fault in circle] == ["circle"]
    assert str(circle[0]) == (
        "rank 0: receive BW0@1 from 1 waits for its send, on rank 1 behind receive F0@0 from 0, "
        "which waits for its send, on rank 0 behind receive BW0@1 from 1"
    )
    swapped = everything.copy()
    sends = of_code(program, Code.SEND)[:2]
    swapped[sends[0]], swapped[sends[1]] = sends[1], sends[0]
    assert {"order", "early"} <= codes(taking(program, swapped))
    order = next(fault for fault in problems(taking(program, swapped)) if fault.code == "order")
    assert "sent F1@0, F0@0, received F0@0, F1@0" in str(order)


def test_reductions_in_two_orders_are_found() -> None:
    program = lower(build("dualpipe", 2, 4))
    reduces = [at for at in of_code(program, Code.REDUCE) if program.rank[at] == 0]
    order = list(range(len(program)))
    first = order.pop(reduces[0])
    order.insert(reduces[1], first)
    assert codes(taking(program, order)) == {"order"}


def test_a_missing_reduction_or_gather_is_refused_by_name() -> None:
    """Without it a data parallel rank would train on its own data, or on a shard of the weights."""
    program = lower(build("zb-h1", 2, 3), data_parallel=True, sharded=[1])
    everything = list(range(len(program)))
    reduce = next(at for at in of_code(program, Code.REDUCE) if program.rank[at] == 0)
    (gather,) = of_code(program, Code.GATHER)
    for at, message in (
        (reduce, "rank 0: reduces stage 0 0 times; 1 needed"),
        (gather, "rank 1: gathers stage 1 0 times; 1 needed"),
    ):
        found = problems(taking(program, everything[:at] + everything[at + 1 :]))
        assert [(fault.code, str(fault)) for fault in found] == [("unmatched", message)]
    # a program for a single process a stage is none for data parallel
    alone = replace(lower(build("zb-h1", 2, 3)), data_parallel=True)
    assert [fault.code for fault in problems(alone)] == ["unmatched"] * 2


def test_an_early_reduction_and_a_late_gather_are_found() -> None:
    program = lower(build("zb-h1", 2, 3), data_parallel=True, sharded=[0])
    everything = list(range(len(program)))
    (gather,) = of_code(program, Code.GATHER)
    first = next(at for at in everything if program.rank[at] == 0 and program.code[at] == Code.F)
    late = everything.copy()
    late.insert(first, late.pop(gather))
    assert [str(fault) for fault in problems(taking(program, late))] == ["rank 0: gathers stage 0 after F0@0"]
    reduce = next(at for at in of_code(program, Code.REDUCE) if program.rank[at] == 0)
    last = max(at for at in everything[:reduce] if program.code[at] in (Code.W, Code.BW))
    early = everything.copy()
    early.insert(last, early.pop(reduce))
    assert codes(taking(program, early)) == {"early"}
    moved = replace(program, sharded=frozenset())
    assert [str(fault) for fault in problems(moved)] == ["rank 0: gathers stage 0 1 times; 0 needed"]
