"""The algebra: then, repeat, overlapped with; and how micro-batches number themselves."""

from __future__ import annotations

import numpy as np
import pytest

from stageloom import (
    BW,
    EMPTY,
    B,
    F,
    InputError,
    Placement,
    ScheduleError,
    Tape,
    W,
    alternate,
    assemble,
    in_slots,
    line,
    numbered,
    two_way,
    zigzag,
)
from stageloom.schedule import Schedule, tokens


def one_rank(tape: Tape, microbatches: int) -> str:
    return " ".join(tokens(assemble("t", line(1), [tape], microbatches), 0))


def test_then_and_repeat() -> None:
    assert one_rank(F * 2 + (BW + F) * 2 + BW * 2, 4) == "F0 F1 BW0 F2 BW1 F3 BW2 BW3"


def test_repeat_none_is_empty() -> None:
    assert len((F + BW) * 0) == 0
    assert one_rank(EMPTY + F + BW, 1) == "F0 BW0"


def test_w_takes_the_oldest_split_backward() -> None:
    assert one_rank(F * 3 + B * 3 + W * 3, 3) == "F0 F1 F2 B0 B1 B2 W0 W1 W2"
    assert one_rank(F * 2 + B + BW + W, 2) == "F0 F1 B0 BW1 W0"


def test_w_of_a_chunk_takes_that_chunks_oldest() -> None:
    tape = F + F.on(chunk=1) + B.on(chunk=1) + B + W.on(chunk=0) + W
    assert " ".join(tokens(assemble("t", zigzag(1, 2), [tape], 1), 0)) == "F0@0 F0@1 B0@1 B0@0 W0@0 W0@1"


def test_overlapped_pair_and_its_precedence() -> None:
    schedule = assemble("t", line(1), [F + ((F & BW) + (F & BW)) + BW], 3)
    assert tokens(schedule, 0) == ["F0", "F1&BW0", "F2&BW1", "BW2"]


def test_a_word_prints_as_it_is_written() -> None:
    assert repr(F * 2 + ((BW & F) + B) + W) == "F*2 + (BW & F) + B + W"
    assert repr(F.on(chunk=1) * 3 + F.on(path=1) + W.on(chunk=0) + numbered(BW, [3])) == "F[1]*3 + F[1,0] + W[0] + BW:3"
    assert repr(EMPTY) == "EMPTY"


def test_only_one_op_can_be_overlapped_with_one() -> None:
    with pytest.raises(InputError, match="one op with one op, not 2 with 1"):
        _ = (F + F) & BW


def test_explicit_numbers() -> None:
    assert one_rank(F * 3 + numbered(BW, [2, 1, 0]), 3) == "F0 F1 F2 BW2 BW1 BW0"


def test_numbers_survive_the_algebra() -> None:
    tape = (numbered(F, [1, 0]) + numbered(BW, [0, 1]))[0:4] * 1
    assert one_rank(tape, 2) == "F1 F0 BW0 BW1"
    assert one_rank(alternate(numbered(F, [1, 0]), numbered(BW, [1, 0])), 2) == "F1 BW1 F0 BW0"


def test_two_paths_number_on_their_own() -> None:
    f0, f1 = F.on(path=0), F.on(path=1)
    b0, b1 = BW.on(path=0), BW.on(path=1)
    schedule = assemble("t", two_way(1), [f0 + f1 + b1 + b0 + f0 + f1 + b0 + b1], 4)
    # micro-batches 0, 1 take path 0; 2, 3 take path 1
    assert tokens(schedule, 0) == ["F0", "F2", "BW2", "BW0", "F1", "F3", "BW1", "BW3"]


def test_slices_run_forward_in_order_and_backward_in_reverse() -> None:
    schedule = assemble("t", line(1), [F * 4 + BW * 4], 2, slices=2, cut="sequence")
    assert tokens(schedule, 0) == ["F0.0", "F0.1", "F1.0", "F1.1", "BW0.1", "BW0.0", "BW1.1", "BW1.0"]
    schedule = assemble("t", line(1), [F * 2 + BW * 2], 1, slices=2, cut="batch")
    assert tokens(schedule, 0) == ["F0.0", "F0.1", "BW0.0", "BW0.1"]


def test_in_slots_orders_by_time() -> None:
    tape = in_slots((F, np.array([0, 1, 4])), (BW, np.array([2, 3, 5])))
    assert one_rank(tape, 3) == "F0 F1 BW0 BW1 F2 BW2"


@pytest.mark.parametrize(
    ("tape", "microbatches", "message"),
    [
        (F + W, 1, r"position 1: W finds no split backward"),
        (F + BW + W, 1, r"position 2: W finds no split backward"),
        (F * 2 + BW, 1, r"position 1: F of path 0, chunk 0: there are no more micro-batches"),
        (F.on(chunk=1) + BW, 1, r"the placement gives this rank no such chunk"),
        (F.on(path=1) + BW, 1, r"the placement gives this rank no such chunk"),
        (numbered(F, [7]), 1, r"no more micro-batches"),
    ],
)
def test_a_word_that_cannot_be_numbered_says_where(tape: Tape, microbatches: int, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        assemble("t", line(1), [tape], microbatches)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: F * -1, "cannot be repeated -1 times"),
        (lambda: F * 1.5, "cannot be repeated 1.5 times; a whole number"),
        (lambda: F.on(path=31), "path 31"),
        (lambda: F.on(chunk=-1), "chunk -1"),
        (lambda: numbered(F + F, [0]), "one op"),
        (lambda: alternate(F, F * 2), "one length"),
        (lambda: assemble("t", line(2), [F], 1), "1 tapes for 2 ranks"),
        (lambda: assemble("t", line(1), [F], 0), "0 micro-batches"),
        (lambda: Placement(0, ((0,),)), "ranks = 0"),
        (lambda: Placement(1, ()), "no path"),
        (lambda: Placement(1, ((0, 1),)), "stage 1 on rank 1"),
        (lambda: Placement(2, ((0, 1), (1,))), "path 1 has 1 stages"),
    ],
)
def test_wrong_use_is_named(make: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()  # type: ignore[operator]


def test_a_published_schedule_is_a_few_lines() -> None:
    """The README's claim: 1F1B written in the algebra, for 4 ranks and 6 micro-batches."""

    def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
        tapes = []
        for rank in range(ranks):
            warmup = min(ranks - rank, microbatches)
            tapes.append(F * warmup + (BW + F) * (microbatches - warmup) + BW * warmup)
        return assemble("mine", line(ranks), tapes, microbatches)

    assert tokens(one_f_one_b(4, 6), 3) == [f"{kind}{n}" for n in range(6) for kind in ("F", "BW")]
