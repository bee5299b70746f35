"""The validator: one test a kind of problem, texts as a user reads them, and garbage of every sort."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stageloom.errors import InputError, ScheduleError
from stageloom.schedule import Schedule, loads
from stageloom.schedules import build, records
from stageloom.simulate import simulate
from stageloom.validate import Problem, explain, problems


def schedule(*tapes: str, microbatches: int = 2, more: str = "") -> Schedule:
    """One stage a rank unless `more` gives the paths."""
    path = "" if "path:" in more else "path: " + " ".join(str(rank) for rank in range(len(tapes))) + "\n"
    head = f"stageloom schedule 1\nname: test\nranks: {len(tapes)}\nmicrobatches: {microbatches}\n{path}{more}"
    return loads(head + "".join(f"rank {rank}: {tape}\n" for rank, tape in enumerate(tapes)))


def codes(found: list[Problem]) -> list[str]:
    return [problem.code for problem in found]


def only(found: list[Problem], code: str) -> Problem:
    assert codes(found) == [code], [str(problem) for problem in found]
    return found[0]


# ------------------------------------------------------------------------------------------------- sound schedules


@pytest.mark.parametrize("record", records(), ids=lambda record: record.name)
def test_published_schedules_have_no_problems(record: Any) -> None:
    for ranks, microbatches in ((1, 1), (2, 4), (4, 8), (4, 9), (8, 16)):
        if record.refusal(ranks, microbatches) is None:
            assert problems(record(ranks, microbatches)) == []


@pytest.mark.parametrize(("name", "meets"), [("gpipe", True), ("naive", True), ("1f1b", False), ("zb-h1", False)])
def test_unbuffered_sends_deadlock_what_sends_both_ways_at_once(name: str, meets: bool) -> None:
    assert (problems(build(name, 4, 8), sends="blocking") == []) is meets


def test_queues_are_enough_where_each_pair_of_ranks_has_one_stream() -> None:
    for name in ("gpipe", "1f1b", "zb-h1", "zb-h2", "dualpipe"):
        assert problems(build(name, 4, 8), sends="fifo") == []


# ------------------------------------------------------------------------------------------- one rank at a time


def test_missing_parts_are_counted_stage_by_stage() -> None:
    found = problems(schedule("F0 F1 BW0", "F0 BW0 F1", microbatches=20))
    assert [str(problem) for problem in found] == [
        "rank 0: stage 0: no F of micro-batches 2, 3, 4, 5, 6, 7, 8, 9 and 10 more",
        "rank 0: stage 0: no B and no W of micro-batches 1, 2, 3, 4, 5, 6, 7, 8 and 11 more",
        "rank 1: stage 1: no F of micro-batches 2, 3, 4, 5, 6, 7, 8, 9 and 10 more",
        "rank 1: stage 1: no B and no W of micro-batches 1, 2, 3, 4, 5, 6, 7, 8 and 11 more",
    ]


def test_a_missing_slice_is_named() -> None:
    found = problems(schedule("F0.0 F0.1 BW0.1", microbatches=1, more="slices: 2 batch\n"))
    assert str(only(found, "missing")) == "rank 0: stage 0: no B and no W of slice 0.0"


def test_an_op_done_twice() -> None:
    found = problems(schedule("F0 B0 BW0", microbatches=1))
    assert str(only(found, "double")) == (
        "rank 0, position 2 (BW0@0): does B a second time; B0@0 at position 1 has done it"
    )


@pytest.mark.parametrize(
    ("op", "what"),
    [("F5", "no micro-batch 5; the last is 1"), ("F0@3", "no stage 3; the last is 0"), ("F0.2", "no slice 2")],
)
def test_a_place_that_does_not_exist(op: str, what: str) -> None:
    assert what in str(only(problems(schedule(f"F0 BW0 F1 BW1 {op}")), "unknown"))


def test_an_op_on_a_rank_that_does_not_hold_its_stage() -> None:
    found = problems(schedule("F0 BW0 W0@1", "F0 B0", microbatches=1))
    assert str(only(found, "misplaced")) == "rank 0, position 2 (W0@1): belongs on rank 1, which holds stage 1"


def test_an_op_before_what_it_waits_for() -> None:
    found = problems(schedule("F0 W0 B0", microbatches=1))
    assert str(only(found, "order")) == "rank 0, position 1 (W0@0): no B0@0 before it; it stands later, at position 2"


def test_a_weight_gradient_without_its_backward() -> None:
    found = problems(schedule("F0 F1 BW0 W1"))
    assert codes(found) == ["missing", "orphan"]
    assert str(found[1]).startswith("rank 0, position 3 (W1@0): no B1@0 before it; it stands nowhere")


def test_order_on_one_rank_counts_messages_that_stay_there_and_slices() -> None:
    found = problems(schedule("F0@1 F0@0 BW0@1 BW0@0", microbatches=1, more="path: 0 0\n"))
    assert only(found, "order").op == "F0@1"
    found = problems(schedule("F0.0 F0.1 BW0.0 BW0.1", microbatches=1, more="slices: 2 sequence\n"))
    assert only(found, "order").message == "no B0.1@0 before it; it stands later, at position 3"
    assert problems(schedule("F0.0 F0.1 BW0.0 BW0.1", microbatches=1, more="slices: 2 batch\n")) == []


# ------------------------------------------------------------------------------------------------------------ pairs


def test_an_op_overlapped_with_what_it_waits_for() -> None:
    assert only(problems(schedule("F0&BW0", microbatches=1)), "pair-self").op == "BW0@0"


def test_pair_marks_without_a_partner_and_in_a_chain() -> None:
    sound = schedule("F0 F1 BW0 BW1")
    marks = {"pair-open": [False, False, False, True], "pair-chain": [True, True, False, False]}
    for code, pair in marks.items():
        only(problems(replace(sound, pair=np.array(pair))), code)


def test_a_pair_that_waits_for_itself_through_another_rank() -> None:
    found = problems(schedule("F1 F0&BW1 BW0", "F0 F1 BW0 BW1"))
    problem = only(found, "pair-cycle")
    assert str(problem) == (
        "rank 0, position 1 (F0@0): never starts: it is overlapped with BW1@0, which waits (message) for BW1@1 on "
        "rank 1, which waits (order) for F0@1, which waits (message) for F0@0"
    )


# -------------------------------------------------------------------------------------------------------- deadlocks

DEADLOCK = ("F0 BW0 F1 BW1", "F0 F1 BW0 BW1")


def test_a_deadlock_is_spelled_out() -> None:
    problem = only(problems(schedule(*DEADLOCK)), "deadlock")
    assert str(problem) == (
        "rank 0, position 2 (F1@0): never starts: it waits (order) for BW0@0, which waits (message) for BW0@1 on "
        "rank 1, which waits (order) for F1@1, which waits (message) for F1@0"
    )
    with pytest.raises(ScheduleError, match="never starts"):
        simulate(schedule(*DEADLOCK))


def test_deadlocks_apart_are_told_apart() -> None:
    later = [tape.replace("0", "2").replace("1", "3") for tape in DEADLOCK]
    both = [f"{first} {second}" for first, second in zip(DEADLOCK, later, strict=True)]
    found = problems(schedule(*both, microbatches=4))
    assert codes(found) == ["deadlock", "deadlock"]
    assert [problem.op for problem in found] == ["F1@0", "F3@0"]


def test_all_problems_come_at_once() -> None:
    found = problems(schedule("F0 BW0 F1 W1 F7 F0@1", "F1 F0 BW0 BW1 BW1"))
    expected = ["missing", "deadlock", "orphan", "unknown", "double", "misplaced", "double"]
    assert sorted(codes(found)) == sorted(expected)


# --------------------------------------------------------------------------------------------------------- versions

STASHED = ("F0^0 F1^0 BW0^0 F2^1 BW1^0 BW2^1",)


def test_weight_versions_of_a_stage() -> None:
    assert problems(schedule(*STASHED, microbatches=3, more="asynchronous: 1\n")) == []
    torn = STASHED[0].replace("BW1^0", "BW1^1")
    problem = only(problems(schedule(torn, microbatches=3, more="asynchronous: 1\n")), "version")
    assert str(problem) == (
        "rank 0, position 4 (BW1@0): uses weight version 1, but F1@0 used 0; "
        "all ops of a micro-batch on a stage need one version"
    )
    back = "F0^0 BW0^0 F1^1 F2^0 BW1^1 BW2^0"
    problem = only(problems(schedule(back, microbatches=3, more="asynchronous: 1\n")), "version")
    assert "after F1@0 at position 2 used 1; versions of a stage only go forward" in str(problem)
    problem = only(problems(schedule("F0^0 BW0^0 F1^1 BW1^1", more="asynchronous: 2\n")), "version")
    assert str(problem) == (
        "rank 0, position 2 (F1@0): uses weight version 1 before it is there; the stage has made 0 updates by then, "
        "one every 2 micro-batches"
    )
    both = "F0^0 BW0^0&F1^1 BW1^1"
    assert codes(problems(schedule(both, more="asynchronous: 1\n"))) == ["version"]


# ------------------------------------------------------------------------------------------------------------- links


def test_a_queue_read_out_of_turn_names_both_orders() -> None:
    found = problems(schedule("F0 F1 BW0 BW1", "F1 F0 BW0 BW1"), sends="fifo")
    problem = only(found, "fifo")
    assert str(problem) == (
        "rank 1, position 0 (F1@1): takes message 0 of the channel from rank 0 to rank 1 out of turn: it is sent in "
        "the order F0@0, F1@0 and used in the order F1@0, F0@0"
    )
    assert problems(schedule("F0 F1 BW0 BW1", "F1 F0 BW0 BW1")) == []


def test_unbuffered_sends_that_never_meet() -> None:
    found = problems(schedule("F0 F1 BW0 BW1", "F0 BW0 F1 BW1"), sends="blocking")
    assert str(only(found, "rendezvous")) == (
        "rank 0, position 1 (F1@0): no send is buffered, and rank 0's send of F1@0 waits until rank 1 receives it, "
        "which rank 1 does after its send of BW0@1; rank 1's send of BW0@1 waits until rank 0 receives it, which rank "
        "0 does after its send of F1@0"
    )


def test_an_unknown_kind_of_link_is_refused() -> None:
    with pytest.raises(InputError, match="buffered, fifo, blocking"):
        problems(build("gpipe", 2, 2), sends="async")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------ explanation


def test_problems_are_shown_on_the_schedule() -> None:
    bad = schedule(*DEADLOCK)
    assert explain(bad, problems(bad)) == (
        "test: 1 problem\n"
        "\n"
        "rank 0: F0 BW0 F1 BW1\n"
        "           ^^^ ^^\n"
        "rank 1: F0 F1 BW0 BW1\n"
        "           ^^ ^^^\n"
        "    position 2 (F1@0): never starts: it waits (order) for BW0@0, which waits (message) for BW0@1 on\n"
        "      rank 1, which waits (order) for F1@1, which waits (message) for F1@0"
    )


def test_a_long_rank_is_shown_around_the_place_and_several_problems_one_by_one() -> None:
    tape = " ".join(f"F{n} BW{n}" for n in range(200)).replace("F100 BW100", "BW100 F100").replace("F20 BW20", "F20")
    bad = schedule(tape, microbatches=200)
    text = explain(bad, problems(bad), width=60)
    assert "200: " not in text
    assert max(map(len, text.splitlines())) <= 60
    line, caret = next((a, b) for a, b in zip(text.splitlines(), text.splitlines()[1:], strict=False) if "^" in b)
    start, end = caret.index("^"), caret.rindex("^") + 1
    assert line[start:end] == "BW100 F100"
    assert line.startswith("rank 0: .. ")
    assert line.endswith(" ..")
    assert "no B and no W of micro-batch 20" in text


def test_a_pair_and_a_sound_schedule_are_shown() -> None:
    bad = schedule("F0 F1&BW1 BW0")
    assert "rank 0: F0 F1&BW1 BW0\n           ^^ ^^^" in explain(bad, problems(bad))
    assert explain(build("1f1b", 2, 2), []) == "1f1b: no problems"


# --------------------------------------------------------------------------------------------------- size and form


def test_columns_that_do_not_fit_together_are_refused_before_they_are_read() -> None:
    sound = build("1f1b", 2, 2)
    wrong = [
        replace(sound, offsets=sound.offsets[:-1]),
        replace(sound, offsets=np.array([0, 99, 8])),
        replace(sound, stage=sound.stage[:-1]),
        replace(sound, kind=sound.kind + np.int8(4)),
        replace(sound, path_of=np.array([0, 1], dtype=np.int8)),
        replace(sound, microbatches=0, path_of=sound.path_of[:0]),
    ]
    for each in wrong:
        assert set(codes(problems(each))) == {"malformed"}
        assert explain(each, problems(each))


def test_a_huge_empty_schedule_is_told_quickly() -> None:
    began = time.perf_counter()
    found = problems(schedule("F0", microbatches=10_000_000))
    assert time.perf_counter() - began < 5
    assert "9999991 more" in str(found[0])


def test_a_large_sound_schedule_costs_milliseconds() -> None:
    large = build("1f1b", 64, 512)
    problems(large)
    best = 1.0
    for _ in range(5):
        fresh = replace(large)
        began = time.perf_counter()
        assert problems(fresh) == []
        best = min(best, time.perf_counter() - began)
    assert best < 0.05  # 2 ms on a quiet machine


def test_a_large_wrong_schedule_is_listed_in_seconds() -> None:
    large = build("1f1b", 64, 128)
    began = time.perf_counter()
    assert "missing" in codes(problems(replace(large, kind=np.where(large.kind == 3, 1, large.kind).astype(np.int8))))
    backwards = large.microbatch.copy()
    backwards[large.rank == 5] = backwards[large.rank == 5][::-1]
    assert problems(replace(large, microbatch=backwards))
    assert time.perf_counter() - began < 30
