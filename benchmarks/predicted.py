"""Predicted against measured: emulated ranks under every schedule, and two ranks that really compute.

For a machine that does nothing else. Emulated ranks wait for as long as their ops take, so what is measured beside the
prediction is the interpreter: its order, its messages and its own time. The two ranks that compute train a language
model on a core each, and are predicted from what `stageloom profile` measures before.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

import numpy as np
import torch.distributed as dist

import stageloom as sl
from benchmarks.report import Table, Value
from stageloom.costs import Costs
from stageloom.errors import ConstraintError
from stageloom.execute.emulate import default_scale, emulate
from stageloom.execute.language import Config, bytes_of_library, language_model, next_byte_loss
from stageloom.execute.measure import timeline_of
from stageloom.execute.pipeline import Pipeline
from stageloom.execute.profiling import measure as measure_stages
from stageloom.execute.training import Work, data_of, optimizer_of, stages_of
from stageloom.execute.workers import Pool, Seat
from stageloom.metrics import Metrics, measure
from stageloom.schedule import Schedule
from stageloom.simulate import simulate

MAKESPAN: Final = 0.03  # how far an emulated run may be from its prediction, as a part of it
BUSY: Final = 0.02  # and the utilisation of any of its ranks
COMPUTED: Final = 0.08  # how far the makespan of ranks that compute may be
APART: Final = 0.005  # makespans this close to one another have no order
LONGER: Final = 2.0  # ops than by default: ranks that share a core hold up one another when they wake at once
TRIES: Final = 3  # other programs only ever add time: a run that misses is repeated so often
MICROBATCHES: Final = (16, 32)
SIXTEEN: Final = ("1f1b", "zb-h1", "interleaved-1f1b", "zb-v", "dualpipe")
# a step of some seconds, ops of some tens of milliseconds
MODEL: Final = Config(layers=6, width=256, heads=4, context=128)
SIZE: Final = 4
STEPS: Final = 5
ROUNDS: Final = 3
FINEST: Final = "zb-v"
REAL: Final = (
    ("gpipe", 8),
    ("1f1b", 8),
    ("1f1b", 16),
    ("zb-h1", 8),
    ("zb-v", 8),
    ("interleaved-1f1b", 8),
    ("dualpipe", 8),
)


@dataclass(frozen=True)
class Pair:
    """A run's numbers, predicted and measured, and how often it was run."""

    predicted: Metrics
    measured: Metrics
    tries: int = 1

    @property
    def longer(self) -> float:
        return self.measured.makespan / self.predicted.makespan - 1

    @property
    def apart(self) -> float:
        both = self.measured.utilization_per_rank, self.predicted.utilization_per_rank
        return float(np.abs(np.subtract(*both)).max())

    @property
    def kept(self) -> bool:
        return abs(self.longer) <= MAKESPAN and self.apart <= BUSY


def emulated(pool: Pool, schedule: Schedule, costs: Costs) -> Pair:
    """An emulated run of the pool's ranks; the quickest, where it had to be repeated."""
    predicted = measure(simulate(schedule, costs))
    scale = LONGER * default_scale(schedule, costs)
    runs: list[Pair] = []
    while len(runs) < TRIES and not (runs and runs[-1].kept):
        spans = pool.run(emulate, schedule, costs, scale, size=schedule.ranks)
        timeline = timeline_of(schedule, spans, costs, unit_seconds=scale)
        runs.append(Pair(predicted, measure(timeline), len(runs) + 1))
    return replace(min(runs, key=lambda run: run.longer), tries=len(runs))


def schedules(ranks: int, microbatches: int, only: Sequence[str] = ()) -> Iterator[Schedule]:
    """All registered schedules that these sizes allow."""
    for record in sl.records():
        if only and record.name not in only:
            continue
        try:
            yield record(ranks, microbatches)
        except ConstraintError:
            continue


def out_of_order(pairs: Sequence[Pair]) -> int:
    """How many of the pairs of schedules are in another order than predicted."""
    wrong = 0
    for one, other in combinations(pairs, 2):
        wanted = one.predicted.makespan / other.predicted.makespan - 1
        found = one.measured.makespan / other.measured.makespan - 1
        wrong += abs(wanted) > APART and wanted * found < 0
    return wrong


def emulated_table(ranks: int, sizes: Sequence[int], only: Sequence[str] = ()) -> Table:
    """Every schedule at every number of micro-batches."""
    rows: list[tuple[Value, ...]] = []
    told: list[str] = []
    with Pool(ranks, timeout=300) as pool:
        for microbatches in sizes:
            pairs: list[Pair] = []
            for schedule in schedules(ranks, microbatches, only):
                pair = emulated(pool, schedule, Costs())
                pairs.append(pair)
                rows.append(
                    (
                        schedule.name,
                        microbatches,
                        pair.predicted.makespan,
                        pair.measured.makespan,
                        100 * pair.longer,
                        100 * pair.apart,
                        "yes" if pair.kept else "no",
                        pair.tries,
                    )
                )
            count = len(pairs) * (len(pairs) - 1) // 2
            told.append(f"{microbatches} micro-batches: {out_of_order(pairs)} of {count} in another order")
    columns = ("schedule", "micro-batches", "predicted", "measured", "off by, %", "utilisation off by, points", "kept",
               "tries")  # fmt: skip
    return Table(
        f"Predicted against measured: {ranks} emulated ranks",
        f"F = B = W = 1. Kept: makespan within {100 * MAKESPAN:g} %, utilisation of every rank within {100 * BUSY:g} "
        f"points; a run that misses is repeated, up to {TRIES} times in all, as other programs only ever add time. "
        f"Pairs of schedules whose predictions differ by more than {100 * APART:g} %: {'; '.join(told)}.",
        columns,
        tuple(rows),
    )


def computed_table() -> Table:
    """Two ranks that train: each schedule predicted from a profile of itself, and from one of the finest cut."""
    rows: list[tuple[Value, ...]] = []
    with Pool(2, timeout=300) as pool:
        for name, microbatches in REAL:
            schedule = sl.build(name, 2, microbatches)
            rounds = [computed(pool, schedule) for _ in range(ROUNDS)]
            off = sorted(taken / own - 1 for own, _, taken in rounds)
            typical = statistics.median(off)
            rows.append(
                (
                    name,
                    microbatches,
                    statistics.median(own for own, _, _ in rounds),
                    statistics.median(taken for _, _, taken in rounds),
                    100 * typical,
                    f"{100 * off[0]:+.1f} to {100 * off[-1]:+.1f}",
                    "yes" if abs(typical) <= COMPUTED else "no",
                    100 * statistics.median(taken / other - 1 for _, other, taken in rounds),
                )
            )
    columns = ("schedule", "micro-batches", "predicted, ms", "measured, ms", "off by, %", "in all rounds", "kept",
               f"off from a profile of {FINEST}, %")  # fmt: skip
    return Table(
        "Predicted against measured: two ranks that compute, a core each",
        f"A language model of {MODEL.layers} blocks of width {MODEL.width}, micro-batches of {SIZE} sequences of "
        f"{MODEL.context} bytes. {ROUNDS} rounds, each a profile, the median step of {STEPS} after a first one, and a "
        f"profile again; medians over the rounds. Kept: within {100 * COMPUTED:g} % of the prediction from `stageloom "
        f"profile` of the same schedule; last column: from a profile of {FINEST}, whose four stages are joined where "
        f"there are two.",
        columns,
        tuple(rows),
    )


def computed(pool: Pool, schedule: Schedule) -> tuple[float, float, float]:
    """Makespans in ms: predicted from profiles of the schedule before and after, from one of the finest cut, measured.

    A machine that others share is not as quick at the end of a round as at its beginning.
    """
    before, other = (profiled(pool, each) for each in (schedule, sl.build(FINEST, 2, 8)))
    spans = zip(*pool.run(trained, Work(schedule, MODEL, size=SIZE)), strict=True)
    timelines = [timeline_of(schedule, of_ranks, Costs(unit="ms")) for of_ranks in spans]
    typical = statistics.median(measure(timeline).makespan for timeline in timelines)
    after = profiled(pool, schedule)
    first, finest, last = (measure(simulate(schedule, costs)).makespan for costs in (before, other, after))
    return (first + last) / 2, finest, typical


def profiled(pool: Pool, schedule: Schedule) -> Costs:
    """What `stageloom profile` measures."""
    return pool.run(measure_stages, Work(schedule, MODEL, size=SIZE), None, 3, False)[0].costs


def trained(seat: Seat, work: Work) -> list[dict[int, tuple[float, float]]]:
    """When this rank's ops ran in each of some training steps, as `training.train` makes them."""
    stages = stages_of(work, seat.rank, language_model(work.config, work.seed))
    pipeline = Pipeline(work.schedule, stages, next_byte_loss, group=seat.group)
    optimizer = optimizer_of(work)(pipeline.parameters())
    data = bytes_of_library(work.data_bytes)
    spans: list[dict[int, tuple[float, float]]] = []
    for step in range(1 + STEPS):
        inputs, targets = data_of(work, data, step)
        dist.barrier(seat.group)
        spans.append(pipeline.step(inputs, targets).run.spans)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return spans[1:]


def tables() -> Iterator[Table]:
    """All of it: a quarter of an hour or more."""
    yield computed_table()
    yield emulated_table(8, MICROBATCHES)
    yield emulated_table(16, (32,), SIXTEEN)
