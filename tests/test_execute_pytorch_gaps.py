"""What PyTorch's runtime (2.13) gets wrong or refuses, each with the right value from ours; theirs is run beside it.

A test of theirs fails as soon as PyTorch mends what it shows; then the statement about it has to go. Cases with tests
of their own elsewhere: frozen, empty and compiled stages, dropout, hooks, several modes (test_execute_features.py);
arithmetic and memory of B and W (test_execute_split.py); M < P at every size (test_execute_matrix.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gap_tasks as tasks
import stageloom as sl
from stageloom.execute.workers import Pool
from stageloom.lower import Code, Program, lower
from stageloom.lower import problems as faults
from stageloom.schedule import Schedule

pytestmark = pytest.mark.torch
SPLITS = ("deferred", "graph", "fused")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2, timeout=60) as started:
        yield started


def written(*ranks: str, microbatches: int, path: str) -> Schedule:
    head = f"stageloom schedule 1\nname: by hand\nranks: {len(ranks)}\nmicrobatches: {microbatches}\npath: {path}\n"
    return sl.loads(head + "".join(f"rank {rank}: {ops}\n" for rank, ops in enumerate(ranks)))


def on_one_rank(*, halves: bool) -> Schedule:
    """Three stages on one rank, where an error of PyTorch's leaves no other waiting; backwards whole or in halves."""
    whole = "F{m}@0 F{m}@1 F{m}@2 BW{m}@2 BW{m}@1 BW{m}@0"
    split = "F{m}@0 F{m}@1 F{m}@2 B{m}@2 B{m}@1 W{m}@2 B{m}@0 W{m}@1 W{m}@0"
    return written(" ".join((split if halves else whole).format(m=m) for m in range(3)), microbatches=3, path="0 0 0")


def error(result: list[dict[str, Any]], case: str, schedule: Schedule, steps: int = 1) -> float:
    """How far the gradients of all ranks are from one process's, at most."""
    _, expected = tasks.whole(case, schedule.stages, schedule.microbatches, steps)
    worst = 0.0
    for own in result:
        for stage, gradients in own["gradients"].items():
            assert gradients.keys() == expected[stage].keys()
            worst = max([worst, *(float((g - expected[stage][name]).abs().max()) for name, g in gradients.items())])
    return worst


def check_ours(pool: Pool, schedule: Schedule, case: str, steps: int = 1, **options: Any) -> list[dict[str, Any]]:
    results = pool.run(tasks.ours, schedule, case, steps, options, size=schedule.ranks)
    losses, _ = tasks.whole(case, schedule.stages, schedule.microbatches, steps)
    assert error(results, case, schedule, steps) <= 1e-10
    for result in results:
        assert result["losses"] == pytest.approx(losses, rel=0, abs=1e-10)
    return results


def run_theirs(pool: Pool, schedule: Schedule, case: str, steps: int = 1, change: Any = None) -> list[dict[str, Any]]:
    return pool.run(tasks.theirs, schedule, case, steps, change, size=schedule.ranks)


def test_where_nothing_is_special_both_are_right(pool: Pool) -> None:
    """The measure by which theirs are found wrong below."""
    for schedule in (sl.build("1f1b", 2, 4), on_one_rank(halves=True), on_one_rank(halves=False)):
        check_ours(pool, schedule, "plain")
        theirs = run_theirs(pool, schedule, "plain")
        assert error(theirs, "plain", schedule) <= 1e-10


# ----------------------------------------------------------------------------------------------------- orders, messages


def test_a_last_stage_that_forwards_out_of_order(pool: Pool) -> None:
    """Theirs takes the n-th loss for that of micro-batch n: a wrong gradient, and no word of it."""
    schedule = written("F0 F1 F2 F3 B2 B0 W2 B3 B1 W0 W1 W3", "F2 F0 F3 F1 BW2 BW0 BW3 BW1", microbatches=4, path="0 1")
    check_ours(pool, schedule, "plain")
    theirs = run_theirs(pool, schedule, "plain")
    assert [each["error"] for each in theirs] == [None, None]
    assert error(theirs, "plain", schedule) > 1e-3


def left_out(program: Program, at: int) -> Program:
    keep = np.arange(len(program)) != at
    columns = {name: getattr(program, name)[keep] for name in ("code", "row", "use", "peer")}
    counts = np.bincount(program.rank[keep], minlength=program.schedule.ranks)
    return replace(program, offsets=np.concatenate(([0], np.cumsum(counts))), **columns)


def test_a_reduction_left_out(pool: Pool) -> None:
    """Ours come from lowering; a program without one is refused. Theirs runs, and its gradients are M times as big."""
    program = lower(sl.build("dualpipe", 2, 4))
    assert faults(program) == []
    reductions = np.flatnonzero(program.code == Code.REDUCE).tolist()
    assert len(reductions) == 4
    for at in reductions:
        found = [str(fault) for fault in faults(left_out(program, at))]
        stage = int(program.schedule.stage[program.row[at]])
        assert f"rank {program.rank[at]}: reduces stage {stage} 0 times; 1 needed" in found
    check_ours(pool, program.schedule, "plain")
    schedule = sl.build("1f1b", 2, 4)
    theirs = run_theirs(pool, schedule, "plain", 1, tasks.without_reductions)
    assert [each["error"] for each in theirs] == [None, None]
    assert error(theirs, "plain", schedule) > 1e-3


def test_receives_in_another_order_than_sends(pool: Pool) -> None:
    """Ours are refused; theirs computes on the activations of another micro-batch."""
    schedule = sl.build("gpipe", 2, 4)
    program = lower(schedule)
    receives = [at for at in np.flatnonzero(program.code == Code.RECV).tolist() if program.rank[at] == 1]
    swapped = {name: getattr(program, name).copy() for name in ("row", "use")}
    for column in swapped.values():
        column[receives[:2]] = column[receives[1::-1]]
    found = [str(fault) for fault in faults(replace(program, **swapped))]
    assert any("rank 1: receives from rank 0 in another order than they are sent" in fault for fault in found)
    check_ours(pool, schedule, "plain")
    theirs = run_theirs(pool, schedule, "plain", 1, tasks.first_receives_swapped)
    assert [each["error"] for each in theirs] == [None, None]
    assert error(theirs, "plain", schedule) > 1e-3


def test_fewer_micro_batches_than_ranks(pool: Pool) -> None:
    check_ours(pool, sl.build("1f1b", 2, 1), "plain", 2)
    for message in pool.run(tasks.refused_by_class, "Schedule1F1B", 1):
        assert "must be greater than or equal to the number of stages (2)" in message


# --------------------------------------------------------------------------------------------------- what stages return


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("case", ["transposed", "passing", "chunked", "split"])
def test_outputs_that_are_views(case: str, split: str, pool: Pool) -> None:
    """Of what was computed, of the input, or several of one tensor: x.chunk(2), x.split((2, 8, 1))."""
    for schedule in (sl.build("zb-v", 2, 3), sl.build("interleaved-1f1b", 2, 4), on_one_rank(halves=True)):
        check_ours(pool, schedule, case, 2, split=split)


@pytest.mark.parametrize("case", ["transposed", "passing", "chunked", "split"])
def test_theirs_refuses_views_where_backwards_are_split(case: str, pool: Pool) -> None:
    assert error(run_theirs(pool, on_one_rank(halves=False), case), case, on_one_rank(halves=False)) <= 1e-10
    [theirs] = run_theirs(pool, on_one_rank(halves=True), case)
    assert "Can't detach views in-place" in theirs["error"]


def test_theirs_refuses_to_send_what_is_not_contiguous(pool: Pool) -> None:
    for theirs in run_theirs(pool, sl.build("gpipe", 2, 4), "transposed"):
        assert "has to be contiguous" in theirs["error"]


@pytest.mark.parametrize("split", SPLITS)
def test_a_stage_that_writes_into_its_input(split: str, pool: Pool) -> None:
    """Which is a view of what the stage before has computed, and on the same rank the very memory."""
    for schedule in (sl.build("zb-v", 2, 3), on_one_rank(halves=True), on_one_rank(halves=False)):
        check_ours(pool, schedule, "in place", 2, split=split)


def test_theirs_refuses_a_stage_that_writes_into_its_input(pool: Pool) -> None:
    for halves in (False, True):
        [theirs] = run_theirs(pool, on_one_rank(halves=halves), "in place")
        assert "a leaf Variable that requires grad is being used in an in-place operation" in theirs["error"]


# ------------------------------------------------------------------------------------------------- inside of the stages


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_checkpointed_activations_are_computed_again_once(name: str, pool: Pool) -> None:
    """In B; W needs no forward. (Mode "graph", autograd's own split, needs one, and so do theirs; it is opt-in.)"""
    schedule = sl.build(name, 2, 4)
    for split in ("auto", "deferred"):
        for result in check_ours(pool, schedule, "checkpointed", split=split):
            assert set(result["calls"].values()) == {2 * 4}


def test_theirs_computes_checkpointed_activations_more_often(pool: Pool) -> None:
    [ours] = check_ours(pool, on_one_rank(halves=True), "checkpointed")
    [theirs] = run_theirs(pool, on_one_rank(halves=True), "checkpointed")
    assert error([theirs], "checkpointed", on_one_rank(halves=True)) <= 1e-10
    assert ours["calls"] == {0: 6, 1: 6, 2: 6}
    # three forwards, each up to three times more for its backward, and two to look at shapes beforehand
    assert min(theirs["calls"][stage] for stage in (1, 2)) >= 3 + 3 * 3 + 1


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("split", ["auto", "deferred", "fused"])
def test_a_custom_function_whose_backward_runs_once(split: str, name: str, pool: Pool) -> None:
    """It frees what it has used, and is the one function that both the input's and a weight's gradient come from."""
    check_ours(pool, sl.build(name, 2, 4), "custom", 2, split=split)


def test_theirs_runs_the_backward_of_a_custom_function_twice(pool: Pool) -> None:
    [theirs] = run_theirs(pool, on_one_rank(halves=True), "custom")
    assert theirs["error"] == "IndexError: pop from empty list"
    check_ours(pool, on_one_rank(halves=True), "custom")


def test_batch_norms_count_each_micro_batch_once(pool: Pool) -> None:
    """Theirs runs the first micro-batch once more, to look at shapes, and leaves that in the statistics."""
    [ours] = check_ours(pool, on_one_rank(halves=False), "normed")
    [theirs] = run_theirs(pool, on_one_rank(halves=False), "normed")
    assert ours["seen"] == [3, 3, 3]
    assert theirs["seen"] == [4, 4, 4]


# ------------------------------------------------------------------------------------------------------- between stages


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipe"])
def test_gradients_add_up_over_steps(name: str, pool: Pool) -> None:
    """Theirs divides all there is in `.grad` by M after each step, what came from earlier steps included."""
    schedule = sl.build(name, 2, 4)
    check_ours(pool, schedule, "plain", 3)
    if name != "dualpipe":
        assert error(run_theirs(pool, schedule, "plain", 1), "plain", schedule) <= 1e-10
        assert error(run_theirs(pool, schedule, "plain", 2), "plain", schedule, 2) > 1e-3


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "dualpipe"])
def test_weights_that_stages_share(name: str, pool: Pool) -> None:
    """Theirs leaves each stage its own share of the gradient, so that the copies drift apart."""
    schedule = sl.build(name, 2, 4)
    check_ours(pool, schedule, "tied", 2)
    if name != "dualpipe":
        theirs = run_theirs(pool, schedule, "tied")
        assert [each["error"] for each in theirs] == [None, None]
        assert error(theirs, "tied", schedule) > 1e-3
