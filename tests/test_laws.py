"""Laws that hold for every registered schedule at every size it allows."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

import stageloom as sl
from grid import MICROBATCHES, RANKS, choices, schedules, sizes
from stageloom.op import Kind
from stageloom.schedule import Schedule
from stageloom.schedules import Case, Record, find, records

ALL = pytest.mark.parametrize("record", records(), ids=lambda record: record.name)

# Times of F, B, W: equal ones, and unequal ones of every relation that a promise's conditions speak of.
TIMES = [(1, 1, 1), (2, 1, 1), (1, 1, 0.5), (1, 2, 1), (1, 0.5, 0.5), (3, 2, 1), (1, 1, 2)]


def rank_orders(schedule: Schedule) -> list[list[sl.Op]]:
    return [list(schedule.ops(rank)) for rank in range(schedule.ranks)]


@ALL
def test_every_part_of_every_microbatch_is_done_once_on_its_rank(record: Record) -> None:
    for schedule in schedules(record):
        done: Counter[tuple[Kind, int, int, int]] = Counter()
        for rank, ops in enumerate(rank_orders(schedule)):
            for op in ops:
                path = schedule.path_of[op.microbatch]
                assert schedule.placement.paths[path][op.stage] == rank
                for part in {Kind.F: "F", Kind.B: "B", Kind.W: "W", Kind.BW: "BW"}[op.kind]:
                    done[Kind[part], op.stage, op.microbatch, op.slice] += 1
        assert set(done.values()) == {1}
        assert len(done) == 3 * schedule.stages * schedule.microbatches * schedule.slices


@ALL
def test_is_sound_and_runs(record: Record) -> None:
    for schedule in schedules(record):
        assert sl.problems(schedule) == []
        timeline = sl.simulate(schedule)
        assert np.isfinite(timeline.end).all()


@ALL
def test_text_and_json_round_trip(record: Record) -> None:
    for schedule in schedules(record):
        assert sl.loads(sl.dumps(schedule)) == schedule
        assert sl.from_json(json.loads(json.dumps(sl.to_json(schedule)))) == schedule


@ALL
def test_bubble_promise_is_exact_where_it_says_so(record: Record) -> None:
    """(cost - work) equals the paper's formula wherever the record's conditions hold, and they hold somewhere."""
    promise = record.bubble
    exact = 0
    for ranks, microbatches, options in sizes(record):
        schedule = record(ranks, microbatches, **options)
        for forward, backward, weight in TIMES:
            case = Case(
                ranks, microbatches, schedule.chunks, forward, backward, weight, options=record.option_values(options)
            )
            if not promise.holds(case):
                continue
            exact += 1
            metrics = sl.measure(sl.simulate(schedule, sl.Costs(F=forward, B=backward, W=weight)))
            assert metrics.bubble_time == pytest.approx(promise.value(case), abs=1e-9 * metrics.cost), case
    assert exact >= 5


@ALL
def test_peak_activations_promise_is_exact_where_it_says_so(record: Record) -> None:
    promise = record.activations
    exact = 0
    for ranks, microbatches, options in sizes(record):
        schedule = record(ranks, microbatches, **options)
        for w_share in (0.5, 0.3):
            case = Case(ranks, microbatches, schedule.chunks, w_share=w_share, options=record.option_values(options))
            if not promise.holds(case):
                continue
            exact += 1
            metrics = sl.measure(sl.simulate(schedule, sl.Costs(w_share=w_share)))
            assert metrics.peak_activations == pytest.approx(promise.value(case)), case
    assert exact >= 5


@ALL
def test_a_refusal_names_a_nearest_size_that_can_be_built(record: Record) -> None:
    for options in choices(record):
        for ranks in RANKS:
            for microbatches in MICROBATCHES:
                refused = record.refusal(ranks, microbatches, **options)
                if refused is None:
                    continue
                with pytest.raises(sl.ConstraintError, match=re.escape(refused.reason)):
                    record(ranks, microbatches, **options)
                near = [int(text) for text in re.findall(r"\d+", refused.remedy.split("nearest:")[1])]
                assert near
                for number in near:
                    if "minibatch" in refused.remedy:
                        assert record.refusal(ranks, microbatches, **options | {"minibatch": number}) is None
                    elif "P = " in refused.remedy:
                        enough = max(2 * number, microbatches + microbatches % 2)
                        assert record.refusal(number, enough, **options) is None
                    else:
                        assert record.refusal(ranks, number, **options) is None


@ALL
def test_bubble_never_negative_and_work_is_what_the_costs_say(record: Record) -> None:
    for schedule in schedules(record):
        metrics = sl.measure(sl.simulate(schedule, sl.Costs(F=2, B=3, W=1)))
        assert metrics.work == pytest.approx(schedule.microbatches * 6.0)
        assert metrics.bubble_time >= -1e-9
        assert metrics.makespan >= metrics.cost - 1e-9
        assert metrics.schedule_loss + metrics.imbalance_loss == pytest.approx(metrics.bubble_time)
        idle = metrics.makespan * metrics.ranks - metrics.work * metrics.ranks
        assert sum(metrics.idle_by_cause.values()) == pytest.approx(idle, abs=1e-6)


@ALL
def test_critical_path_is_a_chain_from_start_to_end(record: Record) -> None:
    for ranks, microbatches in ((2, 4), (4, 8)):
        if record.refusal(ranks, microbatches) is not None:
            continue
        timeline = sl.simulate(record(ranks, microbatches), sl.Costs(F=1, B=1.3, W=0.6, latency=0.17))
        steps = sl.critical_path(timeline)
        assert steps[0].start == 0
        assert steps[-1].end == pytest.approx(timeline.end.max())
        for before, after in pairwise(steps):
            assert after.start == pytest.approx(before.end)


def test_names_and_aliases_lead_to_one_record_each() -> None:
    names = [name for record in records() for name in (record.name, *record.aliases)]
    assert len(set(names)) == len(names)
    for record in records():
        for name in (record.name, *record.aliases, record.name.upper(), record.name.replace("-", "_")):
            assert find(name) is record


def test_all_published_schedules_are_there() -> None:
    assert {record.name for record in records()} == {
        "1f1b", "breadth-first", "chimera", "dualpipe", "dualpipev", "eager-1f1b", "gpipe", "hanayo",
        "interleaved-1f1b", "interleaved-zb", "naive", "pipedream", "pipedream-2bw", "seq1f1b", "v-half", "v-min",
        "v-zb", "zb-1p", "zb-2p", "zb-greedy", "zb-h1", "zb-h2", "zb-v",
    }  # fmt: skip


def test_every_record_states_its_source_and_its_promises() -> None:
    for record in records():
        assert "arXiv" in record.citation or "arXiv" in record.title, record.name
        assert record.summary
        assert record.bubble.exact


@pytest.mark.parametrize("plain_ranks", [1, 4])
def test_latency_one_rank_costs_nothing_and_never_helps(plain_ranks: int) -> None:
    for record in records():
        if record.refusal(plain_ranks, 8) is not None:
            continue
        schedule = record(plain_ranks, 8)
        without, with_latency = (sl.measure(sl.simulate(schedule, sl.Costs(latency=x))).makespan for x in (0, 0.25))
        assert with_latency == without if plain_ranks == 1 else with_latency >= without
