"""The fast simulator against the slow one, and the kernels' two forms against each other."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from oracle import Prices, Work, peaks, plain, run
from random_schedules import random_costs, random_schedule, schedule_of
from stageloom import _kernel
from stageloom.costs import Costs
from stageloom.errors import ScheduleError
from stageloom.metrics import measure
from stageloom.placement import line
from stageloom.rules import MESSAGE_FROM, MESSAGE_PART
from stageloom.schedule import Schedule, dumps
from stageloom.schedules import Case, find
from stageloom.simulate import simulate
from stageloom.validate import problems
from verdicts import sound

PARTS = 16
EACH = 250


def prices_of(schedule: Schedule, costs: Costs) -> Prices:
    """The costs as plain numbers, worked out from what `Costs` says of its fields."""

    def pieces(value: Any) -> list[float]:
        # a number is a whole rank's, shared by the stages that one path puts on it; these lists are one a stage
        return list(value) if isinstance(value, list) else [value * schedule.ranks / schedule.stages] * schedule.stages

    forward, backward, weight = pieces(costs.F), pieces(costs.B), pieces(costs.W)
    both = [b + w for b, w in zip(backward, weight, strict=True)] if costs.BW is None else pieces(costs.BW)
    latency, transfer = {}, {}
    for source in range(schedule.ranks):
        for target in range(schedule.ranks):
            if source == target:
                continue
            late, rate = costs.latency, costs.bandwidth
            for link in costs.links:
                if (link.source, link.target) == (source, target):
                    late = late if link.latency is None else link.latency
                    rate = rate if link.bandwidth is None else link.bandwidth
            latency[source, target] = late
            transfer[source, target] = 0.0 if rate is None else costs.message_bytes / rate
    overlap = 1.0 if costs.overlap_fraction is None else costs.overlap_fraction
    if costs.overlap_time is not None:  # given only beside plain numbers, for a rank's forward and full backward
        overlap = costs.overlap_time / (costs.F + (costs.B + costs.W if costs.BW is None else costs.BW))
    return Prices(
        time=[forward, backward, weight, both],
        latency=latency,
        transfer=transfer,
        overlap=overlap,
        overhead=costs.overhead,
        factor=dict(costs.stragglers),
        occupancy=costs.occupancy,
        blocking=costs.blocking,
    )


def by_row(work: Work, times: dict[tuple[int, int], tuple[float, float]]) -> np.ndarray:
    """(start, end) a row, from (start, end) an item."""
    items = [
        (rank, number, len(item)) for rank, of_rank in enumerate(work.items) for number, item in enumerate(of_rank)
    ]
    return np.array([times[rank, number] for rank, number, width in items for _ in range(width)]).reshape(-1, 2)


def assert_same(schedule: Schedule, costs: Costs, told: str) -> None:
    told = f"{told}\n{costs!r}\n{dumps(schedule)}"
    work = plain(schedule)
    times = run(work, prices_of(schedule, costs))
    assert times is not None, told
    timeline = simulate(schedule, costs)
    got = np.stack((timeline.start, timeline.end), axis=1)
    np.testing.assert_allclose(got, by_row(work, times), rtol=1e-9, atol=1e-9, err_msg=told)
    for w_share in (0.0, 0.6, 1.7):
        size = schedule.ranks / schedule.stages
        held = peaks(work, Prices([], activation=[size] * schedule.stages, w_share=w_share))
        assert measure(replace(timeline, costs=Costs(w_share=w_share))).peak_activations == pytest.approx(held), told


@pytest.mark.parametrize("part", range(PARTS))
def test_simulator_and_oracle_agree_on_random_schedules_and_costs(part: int) -> None:
    for seed in range(part * EACH, (part + 1) * EACH):
        random = Random(seed)
        schedule = random_schedule(random)
        assert problems(schedule) == [], f"seed {seed}\n{dumps(schedule)}"
        assert_same(schedule, random_costs(random, schedule), f"seed {seed}")


@pytest.mark.parametrize("part", range(4))
def test_simulator_and_oracle_agree_on_which_orders_deadlock(part: int) -> None:
    deadlocks = 0
    for seed in range(part * EACH, (part + 1) * EACH):
        random = Random(seed)
        schedule = shuffled(random, random_schedule(random))
        if sound(schedule):
            assert_same(schedule, random_costs(random, schedule), f"seed {seed}")
            continue
        deadlocks += 1
        with pytest.raises(ScheduleError) as caught:
            simulate(schedule, random_costs(random, schedule))
        assert caught.value.problems
    assert EACH // 10 < deadlocks < EACH - EACH // 10


def shuffled(random: Random, schedule: Schedule) -> Schedule:
    """Two neighbouring items of a rank swapped, once or twice."""
    work = plain(schedule)
    for _ in range(random.randint(1, 2)):
        items = random.choice(work.items)
        if len(items) > 1:
            at = random.randrange(len(items) - 1)
            items[at], items[at + 1] = items[at + 1], items[at]
    return schedule_of(work.items, schedule.placement, work.path_of, schedule.slices, schedule.cut)


def test_a_deadlock_ends_the_oracle_with_nothing() -> None:
    items = [[((0, 0, 0, 0),), ((3, 0, 0, 0),), ((0, 0, 1, 0),), ((3, 0, 1, 0),)], []]
    items[1] = [((0, 1, 1, 0),), ((3, 1, 1, 0),), ((0, 1, 0, 0),), ((3, 1, 0, 0),)]
    schedule = schedule_of(items, line(2), [0, 0])
    assert run(plain(schedule), Prices([[1.0, 1.0]] * 4)) is None


def test_the_oracle_by_hand() -> None:
    """Two ranks, one micro-batch, latency 1/2: F 0-1, message, F 1.5-2.5, BW 2.5-4.5, message, BW 5-7."""
    schedule = find("naive")(2, 1)
    prices = Prices([[1.0] * 2] * 3 + [[2.0] * 2], latency={(0, 1): 0.5, (1, 0): 0.5})
    assert run(plain(schedule), prices) == {(0, 0): (0, 1), (1, 0): (1.5, 2.5), (1, 1): (2.5, 4.5), (0, 1): (5, 7)}


@pytest.mark.parametrize(("name", "microbatches"), [("1f1b", 9), ("gpipe", 5), ("zb-h1", 12), ("zb-h2", 16)])
@pytest.mark.parametrize("w_share", [0.0, 0.5, 1.0])
def test_the_oracles_peaks_are_those_the_papers_promise(name: str, microbatches: int, w_share: float) -> None:
    record = find(name)
    case = Case(4, microbatches, w_share=w_share)
    assert record.activations is not None
    assert record.activations.holds(case)
    prices = Prices([[1.0] * 4] * 4, activation=[1.0] * 4, w_share=w_share)
    assert peaks(plain(record(4, microbatches)), prices) == pytest.approx(record.activations.value(case))


# ------------------------------------------------------------------------------------- plain and compiled kernels


def test_both_forms_of_link_and_longest_path_agree() -> None:
    for seed in range(150):
        random = Random(seed)
        schedule = random_schedule(random)
        if seed % 2:
            schedule = shuffled(random, schedule)
        forms = [_link_and_run(schedule, form) for form in ("plain", "compiled")]
        for one, two in zip(*forms, strict=True):
            np.testing.assert_array_equal(one, two, err_msg=f"seed {seed}\n{dumps(schedule)}")


def _link_and_run(schedule: Schedule, form: str) -> list[Any]:
    rows = len(schedule)
    source = np.empty(rows, dtype=np.int32)
    table = np.full((3, schedule.stages, schedule.microbatches, schedule.slices), -1, dtype=np.int32)
    columns = (schedule.kind, schedule.stage, schedule.microbatch, schedule.slice, schedule.pair)
    faults = getattr(_kernel.link, form)(
        schedule.offsets,
        *columns,
        schedule.placement.table,
        schedule.path_of,
        MESSAGE_FROM,
        MESSAGE_PART,
        schedule.sequence,
        table,
        source,
    )
    start, end, waiter = np.zeros(rows), np.full(rows, -1.0), np.full(rows, -1, dtype=np.int32)
    delay, duration = np.linspace(0, 1, rows), np.linspace(1, 2, rows)
    longest_path = getattr(_kernel.longest_path, form)
    ran = longest_path(schedule.offsets, source, delay, duration, schedule.pair, start, end, waiter)
    ran_links, *times = _run_links(schedule, source, form)
    return [faults, table, source, ran, start, end, ran_links, *times]


def _run_links(schedule: Schedule, source: np.ndarray, form: str) -> list[Any]:
    rows, ranks = len(schedule), schedule.ranks
    random = np.random.default_rng(rows)
    link = np.full(rows, -1, dtype=np.int64)
    for row, sender in enumerate(source.tolist()):
        if sender >= 0 and schedule.rank[sender] != schedule.rank[row]:
            link[sender] = int(schedule.rank[sender]) * ranks + int(schedule.rank[row])
    start, end, arrive = np.zeros(rows), np.full(rows, -1.0), np.zeros(rows)
    waiter = np.full(rows, -1, dtype=np.int32)
    ran = getattr(_kernel.longest_path_links, form)(
        schedule.offsets,
        source,
        link,
        random.random(rows),
        random.random(rows),
        ranks * ranks,
        True,
        bool(rows % 2),
        random.random(rows),
        schedule.pair,
        start,
        end,
        arrive,
        waiter,
    )
    return [ran, start, end, arrive]


def test_both_forms_of_number_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [("dualpipe", 4, 8), ("zb-v", 4, 6), ("gpipe", 3, 4), ("interleaved-1f1b", 2, 4), ("seq1f1b", 3, 4)]
    for name, ranks, microbatches in sizes:
        built = []
        for form in ("plain", "compiled"):
            function = getattr(_kernel.number, form)
            monkeypatch.setattr(_kernel.Kernel, "pick", lambda self, ops, form=form: getattr(self, form))
            assert function is not None
            built.append(find(name)(ranks, microbatches))
        assert built[0] == built[1]
