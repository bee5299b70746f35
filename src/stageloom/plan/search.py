"""The search: every layout with every schedule that fits it, the promising ones first, until no other can be better.

Best first by a floor of the step's time. A cut (tensor, pipeline, data, expert, micro-batch, recomputation) enters
with a floor that holds for any schedule; when its turn comes it opens into its schedules with floors of their own; when
a schedule's turn comes, it is simulated. What is left when the next floor lies above the best step, and `slack` beyond
it, cannot be better. Batches have a fixed size, so that the result does not depend on how many processes there are.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from stageloom.costs import Costs
from stageloom.errors import InputError
from stageloom.plan.cluster import Cluster
from stageloom.plan.constants import Constants
from stageloom.plan.crew import Crew
from stageloom.plan.floors import Setup, cut_floor, items, set_up, stage_sums, time_floor
from stageloom.plan.floors_memory import cut_memory_floor, memory_floor
from stageloom.plan.forms import Form, forms
from stageloom.plan.layout import Layout, spread
from stageloom.plan.load_training import agree
from stageloom.plan.model import Model
from stageloom.plan.score import Scored
from stageloom.plan.software import MODERN, Software
from stageloom.plan.space import Cut, Refusal, Space, chunk_counts, cuts
from stageloom.plan.spreading import laid_out
from stageloom.plan.training import Training
from stageloom.plan.verdicts import Verdict, Verdicts

BATCH: Final = 8
"""Candidates that are simulated before the best is looked at again."""

SLACK: Final = 0.05


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a search is: cuts that were opened of all there are, candidates simulated, the best step so far and the
    floor of what comes next, in seconds."""

    opened: int
    cuts: int
    simulated: int
    best: float | None
    floor: float


@dataclass(frozen=True)
class Found:
    """What a search found. scored: all that was simulated, best first, those that do not fit among them. front: of
    those that fit, within `slack` of the best, each the fastest for its memory, fastest first. by_layout, by_schedule:
    why classes lost. cuts: how many there were; dropped: candidates by what dropped them."""

    best: Scored
    scored: tuple[Scored, ...]
    front: tuple[Scored, ...]
    by_layout: tuple[Verdict, ...]
    by_schedule: tuple[Verdict, ...]
    cuts: int
    dropped: dict[str, int]
    slack: float

    @property
    def fitting(self) -> list[Scored]:
        return [each for each in self.scored if each.fits]


@dataclass(order=True, slots=True)
class _Open:
    """A cut, or a candidate (with a form and its layers), waiting for its turn."""

    floor: float
    rank: tuple[Any, ...]
    cut: Cut = field(compare=False)
    form: Form | None = field(default=None, compare=False)
    layers: tuple[int, ...] = field(default=(), compare=False)
    memory: float = field(default=0.0, compare=False)


def prepare(setup: Setup, space: Space) -> list[Cut]:
    """The cuts of a search. Raises InputError or Refusal where what it is about does not go together."""
    agree(setup.training, setup.model, setup.cluster)
    chosen = cuts(setup.model, setup.cluster, setup.training, space)
    if setup.measured is not None:
        if setup.measured.unit is None:
            raise InputError("the profile states no unit of time; add `unit: ms` (or s, us) to it")
        if len({(cut.tensor, cut.pipeline, cut.microbatch) for cut in chosen}) > 1:
            raise InputError(
                "a profile holds for one layout; fix tensor, pipeline and microbatch as they were when it was made"
            )
        chosen = [cut for cut in chosen if cut.recompute == space.recompute[0]]
    return chosen


def search(
    model: Model,
    cluster: Cluster,
    training: Training,
    space: Space | None = None,
    constants: Constants | None = None,
    software: Software = MODERN,
    *,
    measured: Costs | None = None,
    slack: float = SLACK,
    workers: int = 1,
    progress: Callable[[Progress], None] | None = None,
) -> Found:
    """The fastest plan that fits, and what it was chosen from.

    measured: costs of a profile, which replace those of the model (tensor, pipeline and microbatch have to be fixed).
    slack: how far beyond the best step candidates are still told apart, for the front and the alternatives: of those
    within it, only what is no better in time and in memory than another is left out. workers: processes; with more
    than one, a script has to guard its start with `if __name__ == "__main__"`. Raises Refusal where no plan is
    possible: of reason "memory" where none fits, with no figures (see `shortage`).
    """
    setup = set_up(model, cluster, training, constants, software, measured)
    return searched(setup, Space() if space is None else space, slack=slack, workers=workers, progress=progress)


def searched(
    setup: Setup,
    space: Space,
    *,
    slack: float = SLACK,
    workers: int = 1,
    progress: Callable[[Progress], None] | None = None,
) -> Found:
    """As `search`."""
    run = _Run(setup, space, prepare(setup, space), slack)
    with Crew(setup, min(workers, BATCH)) as crew:
        while (batch := run.next()) is not None:
            run.take(crew.scores(batch))
            if progress is not None:
                progress(run.state())
        for one in run.optimised():
            run.take([one])
    return run.found()


class _Run:
    """The state of a search."""

    def __init__(self, setup: Setup, space: Space, chosen: list[Cut], slack: float) -> None:
        self.setup, self.space, self.slack = setup, space, slack
        self.limit = setup.cluster.gpu.memory
        self.cuts = len(chosen)
        self.opened = 0
        self.forms: dict[tuple[int, ...], list[Form]] = {}
        self.scored: list[Scored] = []
        self.best: Scored | None = None
        self.verdicts = Verdicts()
        self.dropped: Counter[str] = Counter()
        self.heap: list[_Open] = []
        pairs = any(form.paired for form in self._forms(2))
        for cut in chosen:
            floor = cut_floor(setup, cut, self._microbatches(cut), pairs=pairs)
            self.heap.append(_Open(floor, self._rank(cut, None), cut))
        heapq.heapify(self.heap)

    # ------------------------------------------------------------------ candidates

    def next(self) -> list[tuple[Layout, Form]] | None:
        """The next candidates to simulate; None where none can be better any more."""
        batch: list[tuple[Layout, Form]] = []
        while self.heap and len(batch) < BATCH and self.heap[0].floor <= self._threshold():
            one = heapq.heappop(self.heap)
            if one.form is None:
                self._open(one.cut)
                continue
            layout = self.setup.layout(one.cut, one.form.chunks, one.layers)
            one.memory = memory_floor(self.setup, layout, one.form, self.limit)
            if one.memory > self.limit:
                self.dropped["memory"] += 1
                self.verdicts.short(one.cut, one.form, one.memory)
            elif self._beaten(one):
                self._drop(one, "beaten in time and memory")
            else:
                batch.append((layout, one.form))
        return batch or None

    def _threshold(self) -> float:
        return float("inf") if self.best is None else self.best.seconds * (1.0 + self.slack)

    def _beaten(self, one: _Open) -> bool:
        """Another fits that cannot be worse in time or in memory."""
        return any(each.fits and each.seconds <= one.floor and each.memory <= one.memory for each in self.scored)

    def _open(self, cut: Cut) -> None:
        """Put a cut's schedules among those that wait."""
        self.opened += 1
        least = cut_memory_floor(self.setup, cut)
        if least > self.limit:
            self.dropped["memory"] += 1
            self.verdicts.short(cut, None, least)
            return
        for form in self._forms(cut.pipeline):
            refused = form.refusal(cut.pipeline, self._microbatches(cut))
            if refused is not None:
                self.dropped["cannot be built"] += 1
                self.verdicts.refused(form, refused)
                continue
            layers = self._layers(cut, form)
            sums = stage_sums(self.setup, cut, form, layers)
            floor = time_floor(sums, form, cut.pipeline, self._microbatches(cut))
            heapq.heappush(self.heap, _Open(floor, self._rank(cut, form), cut, form, layers))

    def _layers(self, cut: Cut, form: Form) -> tuple[int, ...]:
        stages = cut.pipeline * form.chunks
        if self.setup.measured is not None:
            return spread(len(self.setup.model.layers), stages)
        return laid_out(items(self.setup, cut).work, form.placement(cut.pipeline))

    def _forms(self, pipeline: int) -> list[Form]:
        layers = len(self.setup.model.layers)
        counts = chunk_counts(layers, pipeline, self.space)
        key = (pipeline == 1, layers // pipeline, *counts)
        if key not in self.forms:
            names, stale = self.space.schedules, self.space.asynchronous
            of_depth = [form for form in forms(names, counts, asynchronous=stale) if form.chunks * pipeline <= layers]
            if pipeline == 1 and any(form.name == "1f1b" for form in of_depth):
                of_depth = [form for form in of_depth if form.alone]
            self.forms[key] = of_depth
        return self.forms[key]

    def _microbatches(self, cut: Cut) -> int:
        return self.setup.training.global_batch // (cut.data * cut.microbatch)

    @staticmethod
    def _rank(cut: Cut, form: Form | None) -> tuple[Any, ...]:
        """Tells equal floors apart, the same way every time."""
        sizes = (cut.pipeline, cut.tensor, cut.expert, cut.microbatch, str(cut.recompute))
        return (form is not None, *sizes, *(() if form is None else (form.complexity, form.label, form.chunks)))

    # ------------------------------------------------------------------ results

    def take(self, scores: list[Scored]) -> None:
        for one in scores:
            self.scored.append(one)
            self.verdicts.scored(one)
            if not one.fits:
                self.dropped["memory"] += 1
            elif self.best is None or one.place < self.best.place:
                self.best = one

    def _drop(self, one: _Open, why: str) -> None:
        self.dropped[why] += 1
        self.verdicts.slow(one.cut, one.form, one.floor)

    def optimised(self) -> list[Scored]:
        if not self.space.optimised or self.best is None:
            return []
        from stageloom.plan.optimised import orders

        return orders(self.setup, sorted(self.scored, key=lambda each: each.place), self.space.optimised)

    def state(self) -> Progress:
        floor = self.heap[0].floor if self.heap else self._threshold()
        best = None if self.best is None else self.best.seconds
        return Progress(self.opened, self.cuts, len(self.scored), best, floor)

    def found(self) -> Found:
        if self.best is None:
            raise Refusal("memory", self.verdicts.why_nothing(self.setup))
        for one in self.heap:
            self._drop(one, "slower by its floor")
        ordered = tuple(sorted(self.scored, key=lambda each: each.place))
        return Found(
            best=ordered[[each.fits for each in ordered].index(True)],
            scored=ordered,
            front=tuple(one for one in front(ordered) if one.seconds <= self._threshold()),
            by_layout=self.verdicts.by_layout(self.setup),
            by_schedule=self.verdicts.by_schedule(self.setup),
            cuts=self.cuts,
            dropped=dict(self.dropped),
            slack=self.slack,
        )


def front(scored: tuple[Scored, ...]) -> tuple[Scored, ...]:
    """Of plans that fit, sorted fastest first, those that hold less than every faster one."""
    kept: list[Scored] = []
    for one in scored:
        if one.fits and (not kept or one.memory < kept[-1].memory * (1 - 1e-9)):
            kept.append(one)
    return tuple(kept)
