"""Every small change to a published schedule is found, or harmless: the oracle then runs it to its end.

All swaps of two ops of a rank (all neighbours and a choice of others, where it is long), all single ops left out, all
done twice (next to one another, and at the rank's end), all pair marks set and taken away; of all schedules, small.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from oracle import plain
from stageloom.schedule import Schedule, dumps
from stageloom.schedules import Record, records
from stageloom.validate import problems
from verdicts import in_turn, meets, sound

COLUMNS = ("kind", "stage", "microbatch", "slice", "version")
SMALL = 50  # rows: schedules above are changed in fewer places


def small(record: Record) -> Iterator[Schedule]:
    """The schedule at two to four ranks, each with the fewest micro-batches that can be built, from P on."""
    for ranks in (2, 3, 4):
        for microbatches in range(ranks, 4 * ranks + 1):
            if record.refusal(ranks, microbatches) is None:
                yield record(ranks, microbatches)
                break


def taking(schedule: Schedule, rows: list[int], of_rank: int) -> Schedule:
    """The same schedule with these rows on one rank, in this order."""
    low, high = int(schedule.offsets[of_rank]), int(schedule.offsets[of_rank + 1])
    order = np.concatenate((np.arange(low), np.array(rows, dtype=np.int64), np.arange(high, len(schedule))))
    columns = {name: getattr(schedule, name)[order] for name in COLUMNS if getattr(schedule, name) is not None}
    offsets = schedule.offsets.copy()
    offsets[of_rank + 1 :] += len(rows) - (high - low)
    return replace(schedule, offsets=offsets, pair=schedule.pair[order], **columns)


def mutants(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    step = 1 + len(schedule) // SMALL
    for rank in range(schedule.ranks):
        rows = list(range(int(schedule.offsets[rank]), int(schedule.offsets[rank + 1])))
        places = range(0, len(rows), step)
        neighbours = [(at, at + 1) for at in range(len(rows) - 1)]
        for one, two in sorted({*neighbours, *combinations(places, 2)}):
            order = rows.copy()
            order[one], order[two] = order[two], order[one]
            swapped = taking(schedule, order, rank)
            yield f"rank {rank}: {one} and {two} swapped", replace(swapped, pair=schedule.pair)  # marks stay in place
        for at in range(len(rows)):
            yield f"rank {rank}: {at} left out", taking(schedule, rows[:at] + rows[at + 1 :], rank)
            yield f"rank {rank}: {at} twice", taking(schedule, rows[: at + 1] + rows[at:], rank)
            yield f"rank {rank}: {at} again at the end", taking(schedule, [*rows, rows[at]], rank)
            pair = schedule.pair.copy()
            pair[rows[at]] = not pair[rows[at]]
            yield f"rank {rank}: {at} pair mark turned", replace(schedule, pair=pair)


@pytest.mark.parametrize("record", records(), ids=lambda record: record.name)
def test_a_changed_schedule_is_found_or_harmless(record: Record) -> None:
    verdicts: Counter[bool] = Counter()
    for schedule in small(record):
        assert problems(schedule) == []
        assert sound(schedule)
        for what, mutant in mutants(schedule):
            found = problems(mutant)
            harmless = sound(mutant)
            told = f"{what}: {[str(problem) for problem in found]}\n{dumps(mutant)}"
            assert (not found) == harmless, told
            verdicts[harmless] += 1
    assert verdicts[False] > verdicts[True]


@pytest.mark.parametrize("record", records(), ids=lambda record: record.name)
def test_queues_and_unbuffered_sends_agree_with_the_oracle(record: Record) -> None:
    """A sound schedule and its harmless neighbours, under the two stricter kinds of links."""
    schedule = next(small(record))
    for what, mutant in [("as it is", schedule), *mutants(schedule)]:
        if problems(mutant):
            continue
        work = plain(mutant)
        told = f"{what}\n{dumps(mutant)}"
        assert (not problems(mutant, sends="fifo")) == in_turn(work), told
        assert (not problems(mutant, sends="blocking")) == meets(work), told
