"""Devices, process groups of edges and ties, random states, clocks: on the CPU, and on CUDA where there is some."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

import stageloom as sl
from device_tasks import refused, train
from stageloom.execute.casting import Casting, no_autocast
from stageloom.execute.chance import Random, seed_of, undisturbed
from stageloom.execute.devices import Clock
from stageloom.execute.workers import Pool
from stageloom.schedule import Schedule
from toy import reference

pytestmark = pytest.mark.torch
DEVICES = ["cpu"] + (["cuda:0"] if torch.cuda.is_available() else [])


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4, timeout=60) as started:
        yield started


def neighbours(schedule: Schedule, rank: int) -> tuple[set[int], set[int]]:
    """Ranks that this one sends to and receives from, by the placement alone."""
    to: set[int] = set()
    for path in schedule.placement.paths:
        for here, there in pairwise(path):
            if here != there:
                to |= {there} if here == rank else {here} if there == rank else set()  # activations, gradients
    return to, to


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-v", "dualpipe", "chimera"])
def test_a_group_a_directed_edge(name: str, device: str, pool: Pool) -> None:
    """What NCCL needs, over Gloo: the same losses and gradients, and a group for every edge and no other."""
    schedule = sl.build(name, 4, 8)
    losses, gradients, _ = reference(schedule.stages, 8, 1)
    results = pool.run(train, schedule, device, {"edge_groups": True}, [])
    for rank, result in enumerate(results):
        to, source = neighbours(schedule, rank)
        assert (set(result["to"]), set(result["from"])) == (to, source)
        assert result["losses"] == pytest.approx(losses * 2, abs=1e-10)
        assert result["evaluated"] == pytest.approx(losses[0], abs=1e-10)
        for (_, stage), found in result["gradients"].items():
            for parameter, gradient in found.items():
                assert torch.allclose(gradient, 3 * gradients[stage][parameter], rtol=0, atol=1e-10)


@pytest.mark.parametrize("device", DEVICES)
def test_one_group_for_all_where_the_backend_matches_by_pair(device: str, pool: Pool) -> None:
    for result in pool.run(train, sl.build("1f1b", 2, 4), device, {}, [], size=2):
        assert (result["to"], result["from"]) == ([], [])
        assert result["device"] == (device, "cpu", "cpu")  # Gloo sends from main memory


@pytest.mark.parametrize("edges", [False, True])
def test_ties_across_pairs_of_ranks(edges: bool, pool: Pool) -> None:
    """Ranks that are in different numbers of groups, and have made different numbers before, still meet in the same."""
    tied = [[(0, "first.weight"), (1, "first.weight")], [(1, "second.weight"), (2, "second.weight")]]
    tied += [[(1, "memory.weight"), (2, "memory.weight"), (3, "memory.weight")]]
    results = pool.run(train, sl.build("1f1b", 4, 4), None, {"tied": tied, "edge_groups": edges}, [0, 2, 1, 0])
    for group in tied:
        found = [results[stage]["gradients"][0, stage][name] for stage, name in group]
        for other in found[1:]:
            assert torch.equal(found[0], other)
    assert len({result["losses"][0] for result in results}) == 1


def test_spans_are_seconds_in_the_order_of_the_tape(pool: Pool) -> None:
    schedule = sl.build("dualpipev", 2, 4)
    for rank, result in enumerate(pool.run(train, schedule, None, {}, [], size=2)):
        rows = range(int(schedule.offsets[rank]), int(schedule.offsets[rank + 1]))
        assert sorted(result["spans"]) == list(rows)
        spans = [result["spans"][row] for row in rows]
        assert all(began <= ended for began, ended in spans)
        for row, ((_, ended), (begins, _)) in zip(rows, pairwise(spans), strict=False):
            assert schedule.pair[row] or ended <= begins


REFUSED = {
    "nowhere": "device: 'nowhere' is no device",
    "number": "device: 3.5 is no device",
    "kind": "device: cuda:99 is not available here",
    "cuda asked": "device: xpu is not available here",
    "meta": "device: tensors of the meta device have no values",
    "meta stage": "norm.weight is on the meta device and has no values",
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_devices_are_refused(case: str, pool: Pool) -> None:
    for message in pool.run(refused, sl.build("1f1b", 2, 2), case, size=2):
        assert REFUSED[case] in message
        assert "\n" not in message


# --------------------------------------------------------------------------------------------- random numbers, clocks


@pytest.mark.parametrize("name", DEVICES)
def test_random_numbers_of_a_place(name: str) -> None:
    device = torch.device(name)

    def draw() -> list[float]:
        return [*torch.rand(2).tolist(), *torch.rand(2, device=device).tolist()]

    torch.manual_seed(seed_of(1, 2, 3))
    expected = draw()
    torch.manual_seed(7)
    before = draw()
    torch.manual_seed(7)
    chance = Random(seed_of(1, 2, 3), keep=False, device=device)
    for _ in range(2):
        with chance:
            assert draw() == expected
    assert draw() == before  # outside, numbers run on as if nothing had been drawn
    torch.manual_seed(7)
    kept = Random(None, keep=True, device=device)
    with kept:
        first = draw()
    following = draw()
    with kept:
        assert draw() == first  # drawn again
    torch.manual_seed(7)
    assert first == before == draw()
    assert following == draw()
    torch.manual_seed(7)
    with undisturbed(device):
        draw()
    assert draw() == before


@pytest.mark.parametrize("name", DEVICES)
def test_autocast_within_no_autocast(name: str) -> None:
    kind = torch.device(name).type
    x, w = torch.ones(2, 2, device=name), torch.ones(2, 2, device=name)
    with torch.autocast(kind, dtype=torch.bfloat16):
        casting = Casting(kind)
        with no_autocast(kind):
            assert (x @ w).dtype == torch.float32
            with casting.on():
                assert (x @ w).dtype == torch.bfloat16
            assert (x @ w).dtype == torch.float32
        assert (x @ w).dtype == torch.bfloat16
    off = Casting(kind)
    with torch.autocast(kind, dtype=torch.bfloat16), off.on():
        assert (x @ w).dtype == torch.float32


@pytest.mark.parametrize("name", DEVICES)
def test_a_clock_tells_seconds_of_the_machine(name: str) -> None:
    import time

    clock = Clock(torch.device(name))
    for _ in range(2):
        earliest = time.perf_counter()
        clock.begin()
        began = clock.now()
        torch.ones(100, 100, device=name) @ torch.ones(100, 100, device=name)
        ended = clock.now()
        start, end = clock.seconds({3: (began, ended)})[3]
        assert earliest <= start <= end <= time.perf_counter()
