"""Overlapped pairs on real processes, with the gradients of one: experts on several ranks, the user's own function."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import stageloom as sl
from pair_tasks import refused_pair, train_moe, train_own, whole_moe, whole_own
from stageloom.execute.workers import Failure, Pool
from stageloom.placement import Placement
from stageloom.schedule import Schedule
from stageloom.search import pose, search_pairs

pytestmark = pytest.mark.torch
TOLERANCE = 1e-10
HEAD = "stageloom schedule 1\nname: by-hand\n"
PAIRS = "interleaved at its all-to-alls"
HOOK = "run by its overlapped_forward_backward"

# pairs that hold a B, one of them written the other way round; both ops of a pair on one stage
SPLIT = f"""{HEAD}ranks: 2
microbatches: 4
path: 0 1
rank 0: F0 F1 F2&B0 W0 B1&F3 W1 B2 W2 BW3
rank 1: F0 F1&B0 W0 F2&B1 W1 F3&B2 W2 BW3
"""
ONE = f"{HEAD}ranks: 1\nmicrobatches: 2\npath: 0 0\n"
ONE_BW = ONE + "rank 0: F0@0 F0@1 F1@0&BW0@1 F1@1&BW0@0 BW1@1 BW1@0\n"
SLICED = """F0@0 F0.1@0 F0@1 F0.1@1 F1@0&BW0.1@1 F1.1@0&BW0@1 BW0.1@0 BW0@0
F1@1 F1.1@1 BW1.1@1 BW1@1 BW1.1@0 BW1@0""".replace("\n", " ")
ONE_B = ONE + "rank 0: F0@0 F0@1 F1@0&B0@1 F1@1&B0@0 W0@0 W0@1 BW1@1 BW1@0\n"


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4, timeout=60) as started:
        yield started


# --------------------------------------------------------------------------------------------------------------- parts


def check_moe(pool: Pool, schedule: Schedule, spread: int, layers: int = 1, **options: Any) -> list[dict[str, Any]]:
    """Every member's loss; the gradients of its own experts; those of all other parameters added up over members."""
    losses, gradients = whole_moe(schedule, spread, layers, options.get("steps", 1))
    results = pool.run(train_moe, schedule, spread, layers, options, size=schedule.ranks * spread)
    paths = range(len(schedule.placement.paths))
    for result in results:
        assert result["losses"] == pytest.approx([losses[result["member"]]] * len(result["losses"]), abs=TOLERANCE)
    for stage, wanted in enumerate(gradients):
        for name, whole in wanted.items():
            shares = whole.chunk(spread) if name.startswith(("up", "down")) else None
            for path in paths:
                found = [
                    (r["member"], r["gradients"][path, stage][name]) for r in results if (path, stage) in r["gradients"]
                ]
                assert len(found) == spread
                if shares is None:
                    total = sum(gradient for _, gradient in found)
                    assert torch.allclose(total, whole, rtol=0, atol=TOLERANCE), f"{name} of stage {stage}"
                    continue
                for member, gradient in found:
                    close = torch.allclose(gradient, shares[member], rtol=0, atol=TOLERANCE)
                    assert close, f"{name} of stage {stage}, member {member}"
    return results


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "spread", "layers"),
    [
        ("dualpipe", 2, 6, 2, 1),
        ("dualpipe", 2, 5 + 1, 2, 2),
        ("dualpipe", 2, 6, 1, 2),
        ("dualpipev", 2, 5, 2, 1),
        ("dualpipev", 2, 6, 2, 2),
        ("dualpipev", 1, 3, 2, 2),
        ("dualpipev", 1, 4, 4, 1),
    ],
)
def test_experts_on_several_ranks(
    name: str, ranks: int, microbatches: int, spread: int, layers: int, pool: Pool
) -> None:
    schedule = sl.build(name, ranks, microbatches)
    results = check_moe(pool, schedule, spread, layers, steps=2)
    assert {how for result in results for how in result["overlaps"].values()} == {PAIRS}


@pytest.mark.parametrize("placement", [sl.two_way(2), sl.zigzag(2, 2)])
def test_an_order_that_the_optimiser_found(placement: Placement, pool: Pool) -> None:
    problem = pose(placement, 6, sl.Costs(overlap_fraction=0.67), limit=2.5)
    schedule = search_pairs(problem, seconds=0.2).schedule("found")
    assert schedule.pair.any()
    results = check_moe(pool, schedule, 2)
    assert {how for result in results for how in result["overlaps"].values()} == {PAIRS}


@pytest.mark.parametrize(("name", "split"), [("1f1b", "auto"), ("zb-h1", "deferred"), ("zb-v", "graph")])
def test_parts_without_pairs_run_through(name: str, split: str, pool: Pool) -> None:
    """Where nothing is overlapped the stage's own forward runs, its all-to-alls differentiated as any function."""
    for result in check_moe(pool, sl.build(name, 2, 4), 2, 2, split=split):
        assert result["overlaps"] == {}
        assert result["evaluated"] == pytest.approx(result["losses"][0], abs=TOLERANCE)


@pytest.mark.parametrize("split", ["deferred", "graph", "fused"])
def test_parts_in_every_mode_with_hooks_and_recomputation(split: str, pool: Pool) -> None:
    schedule = sl.build("dualpipev", 2, 5)
    for result in check_moe(pool, schedule, 2, 2, split=split, hooks=True, check_finite=True):
        # the router is used on both sides of an all-to-all, and its hook still fires once a micro-batch
        assert set(result["fired"].values()) == {schedule.microbatches}
        assert result["modes"] == {split}
    check_moe(pool, schedule, 2, 1, split=split, recompute=[0, 2, 3])
    for result in check_moe(pool, sl.loads(SPLIT), 2, 2, split=split, hooks=True):
        assert set(result["fired"].values()) == {4}
        assert set(result["overlaps"].values()) == {PAIRS}


def pairs_in(log: list[str]) -> list[tuple[str, list[str]]]:
    """What happened in each pair: its name, and its events up to the next op."""
    found: list[tuple[str, list[str]]] = []
    for at, event in enumerate(log):
        if event.startswith("op ") and "&" in event:
            rest = log[at + 1 :]
            until = next((end for end, later in enumerate(rest) if later.startswith("op ")), len(rest))
            found.append((event.removeprefix("op "), rest[:until]))
    return found


@pytest.mark.parametrize(("name", "microbatches"), [("dualpipe", 6), ("dualpipev", 5)])
def test_all_to_alls_run_while_the_other_micro_batch_computes(name: str, microbatches: int, pool: Pool) -> None:
    """The order of events, on each rank and in each pair: what an all-to-all has under it is the other's compute."""
    results = check_moe(pool, sl.build(name, 2, microbatches), 2, 1)
    for result in results:
        pairs = pairs_in(result["log"])
        assert len(pairs) == len([key for key in result["log"] if "&" in key]) > 0
        for pair, events in pairs:
            forward, backward = pair.split("&")
            ahead, behind = forward.split("@")[1], backward.split("@")[1]
            first = int(events[1].removeprefix("start ").removeprefix("weights "))
            assert events == [
                f"B combine 0 @{behind}",
                f"start {first}",  # combine's backward ...
                "weights",
                f"F attention 0 @{ahead}",  # ... is under way meanwhile
                f"start {first + 1}",  # dispatch ...
                f"wait {first}",
                f"B experts 0 @{behind}",  # ... meanwhile
                f"start {first + 2}",  # dispatch's backward ...
                "weights",
                f"wait {first + 1}",
                f"F experts 0 @{ahead}",  # ... meanwhile
                f"start {first + 3}",  # combine ...
                f"wait {first + 2}",
                # ... while the backward of attention runs (stage 0's mark sees no gradient: its input has none)
                *([] if behind == "0" else [f"B attention 0 @{behind}"]),
                "weights",
                f"wait {first + 3}",
                f"F combine 0 @{ahead}",
            ], pair


@pytest.mark.parametrize(("name", "microbatches"), [("dualpipe", 6), ("dualpipev", 5)])
def test_experts_over_a_dimension_of_a_mesh(name: str, microbatches: int, pool: Pool) -> None:
    """The mesh sums what the members share and takes the mean over all of them; experts are each member's own."""
    schedule, spread = sl.build(name, 2, microbatches), 2
    losses, gradients = whole_moe(schedule, spread, 1, 1)
    for result in pool.run(train_moe, schedule, spread, 1, {"mesh": True}, size=4):
        assert result["losses"] == pytest.approx([sum(losses) / spread], abs=TOLERANCE)
        assert set(result["overlaps"].values()) == {PAIRS}
        for (_, stage), found in result["gradients"].items():
            for parameter, gradient in found.items():
                whole = gradients[stage][parameter] / spread
                wanted = whole.chunk(spread)[result["member"]] if parameter.startswith(("up", "down")) else whole
                assert torch.allclose(gradient, wanted, rtol=0, atol=TOLERANCE), f"{parameter} of stage {stage}"


def test_a_pair_of_unequal_length_and_stages_without_parts(pool: Pool) -> None:
    """Stages of one and of three layers take turns as long as both have some; a plain stage takes none."""
    results = pool.run(train_moe, sl.build("dualpipev", 2, 4), 2, [1, 3, 2, 0], {}, size=4)
    losses, gradients = whole_moe(sl.build("dualpipev", 2, 4), 2, [1, 3, 2, 0], 1)
    for result in results:
        assert result["losses"] == pytest.approx([losses[result["member"]]], abs=TOLERANCE)
        for (_, stage), found in result["gradients"].items():
            for name, gradient in found.items():
                assert gradient.shape == gradients[stage][name].shape or name.startswith(("up", "down"))
    middle = [result for result in results if (0, 1) in result["overlaps"]]
    assert all(result["overlaps"][0, 1] == PAIRS for result in middle)
    outer = [result for result in results if (0, 3) in result["overlaps"]]
    assert outer
    for result in outer:
        assert result["overlaps"][0, 3] == (
            "one op after the other: stage 3 has neither overlapped_forward_backward nor overlapped_parts"
        )


# --------------------------------------------------------------------------------------------------- the own function


def check_own(pool: Pool, schedule: Schedule, make: str, tolerance: float = TOLERANCE, **options: Any) -> list[Any]:
    loss, gradients = whole_own(schedule, make, options.get("bf16", False), **(options.get("kwargs") or {}))
    results = pool.run(train_own, schedule, make, options, size=schedule.ranks)
    for result in results:
        assert result["loss"] == pytest.approx(loss, abs=tolerance)
        assert result["evaluated"] == pytest.approx(loss, abs=tolerance)
        for (_, stage), found in result["gradients"].items():
            for name, wanted in gradients[stage].items():
                assert torch.allclose(found[name], wanted, rtol=0, atol=tolerance), f"{name} of stage {stage}"
    pairs = [
        int(schedule.pair[low:high].sum()) for low, high in zip(schedule.offsets, schedule.offsets[1:], strict=False)
    ]
    assert [result["calls"] for result in results] == pairs
    assert {how for result in results for how in result["overlaps"].values()} == {HOOK}
    return results


@pytest.mark.parametrize(("name", "ranks", "microbatches"), [("dualpipe", 4, 8), ("dualpipev", 2, 5)])
@pytest.mark.parametrize("make", ["own", "twice", "instances"])
def test_an_own_function(name: str, ranks: int, microbatches: int, make: str, pool: Pool) -> None:
    check_own(pool, sl.build(name, ranks, microbatches), make, check_finite=True)


@pytest.mark.parametrize("split", ["deferred", "graph", "fused"])
def test_an_own_function_in_every_mode_with_recomputation(split: str, pool: Pool) -> None:
    check_own(pool, sl.build("dualpipev", 2, 5), "own", split=split)
    check_own(pool, sl.build("dualpipev", 2, 5), "own", split=split, recompute=[0, 1, 2])
    if split != "graph":
        check_own(pool, sl.loads(SPLIT), "own", split=split)
        check_own(pool, sl.loads(SPLIT), "twice", split=split, recompute=[0, 1])


def test_pairs_of_slices_of_a_batch(pool: Pool) -> None:
    text = ONE.replace("path", "slices: 2 batch\npath") + f"rank 0: {SLICED}\n"
    check_own(pool, sl.loads(text), "own")


def test_an_own_function_with_keyword_arguments(pool: Pool) -> None:
    check_own(pool, sl.build("dualpipe", 2, 6), "own", kwargs={"factor": 1.5})


@pytest.mark.parametrize("make", ["dropping", "single"])
def test_pairs_draw_and_cast_as_ops_one_after_the_other(make: str, pool: Pool) -> None:
    """With dropout under a seed, and under autocast: the function changes nothing against the same run without it."""
    options = {"seed": 5} if make == "dropping" else {"bf16": True}
    for recompute in ([], [0, 3]):
        ways = [
            pool.run(
                train_own, sl.build("dualpipev", 2, 5), make, options | {"plain": plain, "recompute": recompute}, size=2
            )
            for plain in (False, True)
        ]
        for one, other in zip(*ways, strict=True):
            assert one["calls"] > 0 == other["calls"]
            assert one["loss"] == other["loss"]
            for key, found in one["gradients"].items():
                for name, gradient in found.items():
                    assert torch.allclose(gradient, other["gradients"][key][name], rtol=0, atol=1e-12), name


REFUSALS = {
    "arguments": "stage 0: overlapped_forward_backward: too many positional arguments; expected a classmethod",
    "no function": "stage 0: overlapped_forward_backward is a int",
    "instance method": "is a method of an instance; make it a classmethod",
    "no pair": "stage 0, micro-batch 1: overlapped_forward_backward returned a Tensor; expected the pair",
    "dtype": "outputs0 is float32[4, 12, 6]; the forward of module0 gives float64[4, 12, 6]",
    "shape": "outputs0 is float64[1, 12, 6]; the forward of module0 gives float64[4, 12, 6]",
    "structure": "outputs0 is ('tuple', 'tensor', 'tensor'); the forward of module0 gives tensor",
    "loss before the end": "stage 0, micro-batch 1: overlapped_forward_backward: loss0 is a Tensor; expected None",
    "other loss": "stage 1, micro-batch 1: overlapped_forward_backward: loss0 has to be what criterion0 returned",
    "other labels": "criterion0 has to be called as criterion0(*outputs0, *labels0)",
    "criterion twice": "(it was 2 times)",
    "no backward": "stage 1, micro-batch 0: overlapped_forward_backward: no backward has been run from loss1",
    "no backward of outputs": "stage 0, micro-batch 0: overlapped_forward_backward: no backward has been run from out",
    "cut graph": "the backward gave no gradient for tensor 0 of module1's inputs; run it to its end",
    "kwargs": "takes no kwargs0, and the step was given kwargs",
    "parts no method": "overlapped_parts is a list; expected a method",
    "parts no list": "overlapped_parts() gave 3",
    "parts none": "overlapped_parts() gave []",
    "parts open": "stage 0: part 0 is the last and returned an AllToAll",
    "parts rows": "stage 0, part 0: AllToAll: x has shape [4, 12, 6]; expected 1 rows",
    "parts ranks": "AllToAll: sent is [2, 2]; expected a number of rows for 1 ranks",
    "parts arrive": "without a group as many rows arrive as are sent, not [1]",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_wrong_is_told_so(case: str, pool: Pool) -> None:
    [message] = pool.run(refused_pair, sl.loads(ONE_BW), case, {}, size=1)
    assert REFUSALS[case] in message
    assert "\n" not in message


IMPOSSIBLE: list[tuple[str, dict[str, Any], str]] = [
    (ONE_B, {"split": "graph"}, "stage 1: overlapped_forward_backward: split mode 'graph' cannot do a B"),
    (ONE_BW.replace("rank 0", "asynchronous: 1\nrank 0"), {"optimizer": torch.optim.SGD}, "on copies of the weights"),
    (ONE.replace("path", "slices: 2 sequence\npath") + f"rank 0: {SLICED}\n", {}, "no place for the carry"),
]


@pytest.mark.parametrize(("text", "options", "expected"), IMPOSSIBLE)
def test_what_cannot_be_is_refused_before_it_runs(
    text: str, options: dict[str, Any], expected: str, pool: Pool
) -> None:
    [message] = pool.run(refused_pair, sl.loads(text), "right", options, size=1)
    assert "overlapped_forward_backward" in message
    assert expected in message


def test_a_failure_in_a_pair_names_both_ops(pool: Pool) -> None:
    with pytest.raises(Failure, match=r"F1@0&BW0@1") as caught:
        pool.run(refused_pair, sl.loads(ONE_BW), "raises", {}, size=1)
    assert "ZeroDivisionError" in str(caught.value)
