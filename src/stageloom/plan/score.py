"""One candidate of the search, predicted: a layout with a schedule, and the figures that plans are compared by."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from stageloom.plan.floors import Setup, costs_with_measured
from stageloom.plan.forms import Form
from stageloom.plan.layout import Layout
from stageloom.plan.predict import Prediction, found_order, predict
from stageloom.schedule import Schedule
from stageloom.schedules import find


@dataclass(frozen=True, slots=True)
class Scored:
    """A predicted plan. Seconds of a step, bytes of the fullest GPU with what no allocator sees; shares as in
    `Prediction`. fits: within the GPU's memory. order: a schedule that no name makes (an optimised one)."""

    layout: Layout
    form: Form
    microbatches: int
    seconds: float
    memory: float
    fits: bool
    mfu: float
    bubble: float
    exposed: float
    tokens_per_second: float
    parts: dict[str, float]
    order: Schedule | None = field(default=None, compare=False, repr=False)

    @property
    def schedule(self) -> str:
        return self.form.label

    @property
    def place(self) -> tuple[Any, ...]:
        """Sorts the faster first; of equally fast ones the simpler, then the one that holds less."""
        at = self.layout
        return (
            float(f"{self.seconds:.9g}"),
            self.form.complexity,
            float(f"{self.memory:.9g}"),
            (at.tensor, at.pipeline, at.expert, at.chunks, at.microbatch, str(at.recompute)),
            self.schedule,
        )


def predicted(setup: Setup, layout: Layout, form: Form, order: Schedule | None = None) -> Prediction:
    """The whole prediction of a candidate, its timeline included."""
    order = built(setup, layout, form) if order is None else order
    return predict(
        setup.model,
        setup.cluster,
        setup.training,
        layout,
        order,
        setup.constants,
        setup.software,
        measured=setup.measured,
    )


def score(setup: Setup, layout: Layout, form: Form, order: Schedule | None = None) -> Scored:
    """A candidate's figures."""
    found = predicted(setup, layout, form, order)
    return Scored(
        layout=layout,
        form=form,
        microbatches=layout.microbatches(setup.training),
        seconds=found.seconds,
        memory=found.peak_memory,
        fits=found.peak_memory <= setup.cluster.gpu.memory,
        mfu=found.mfu,
        bubble=found.bubble,
        exposed=found.exposed,
        tokens_per_second=found.tokens_per_second,
        parts=found.parts,
        order=order,
    )


def built(setup: Setup, layout: Layout, form: Form) -> Schedule:
    """The schedule of a candidate, by its label; a searched one is searched for the candidate's costs."""
    ranks, microbatches = layout.pipeline, layout.microbatches(setup.training)
    if not form.searched:
        return fixed_order(form, ranks, microbatches)
    costs = costs_with_measured(setup, layout, form)
    return found_order(form.name, ranks, microbatches, costs, **form.all_options)


@lru_cache(maxsize=96)
def fixed_order(form: Form, ranks: int, microbatches: int) -> Schedule:
    """A schedule that does not depend on costs, by its label."""
    return replace(find(form.name)(ranks, microbatches, **form.all_options), name=form.label)
