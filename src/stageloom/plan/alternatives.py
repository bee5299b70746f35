"""What else there is beside the best plan: other schedules in its layout, layouts one step away, and why they lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from stageloom.errors import InputError
from stageloom.plan.floors import Setup, items
from stageloom.plan.forms import Form, forms
from stageloom.plan.layout import spread
from stageloom.plan.score import Scored, score
from stageloom.plan.space import Cut, Space, chunk_counts, cuts
from stageloom.plan.spreading import laid_out

NEAREST: Final = 5


@dataclass(frozen=True, slots=True)
class Alternative:
    """A plan that lost. slower: its step over the best one's, less 1. why: what costs it the most."""

    plan: Scored
    slower: float
    why: str


def cut_of(one: Scored) -> Cut:
    """The layout without what the schedule asks of it."""
    at = one.layout
    return Cut(at.tensor, at.pipeline, at.data, at.expert, at.microbatch, at.recompute)


def schedules_on(setup: Setup, cut: Cut, space: Space) -> tuple[Scored, ...]:
    """Every schedule in one layout, the fastest first, whether it fits or not; 1F1B is among them in any case."""
    layers = len(setup.model.layers)
    tried = forms(space.schedules, chunk_counts(layers, cut.pipeline, space), asynchronous=space.asynchronous)
    tried += forms(("1f1b",), ())
    if cut.pipeline == 1:
        tried = [form for form in tried if form.alone]
    found = (try_form(setup, cut, form) for form in dict.fromkeys(tried))
    return tuple(sorted((one for one in found if one is not None), key=lambda one: one.place))


def try_form(setup: Setup, cut: Cut, form: Form) -> Scored | None:
    """A schedule in a layout, None where it cannot be built there."""
    microbatches = setup.training.global_batch // (cut.data * cut.microbatch)
    stages = cut.pipeline * form.chunks
    if stages > len(setup.model.layers) or form.refusal(cut.pipeline, microbatches) is not None:
        return None
    if setup.measured is not None:
        layers = spread(len(setup.model.layers), stages)
    else:
        layers = laid_out(items(setup, cut).work, form.placement(cut.pipeline))
    try:
        return score(setup, setup.layout(cut, form.chunks, layers), form)
    except InputError:
        return None


def neighbours(setup: Setup, best: Scored, space: Space) -> tuple[Scored, ...]:
    """Layouts one step away from the best one (a size doubled or halved, another recomputation), with its schedule."""
    if best.order is not None or setup.measured is not None:
        return ()
    allowed = set(cuts(setup.model, setup.cluster, setup.training, space))
    near = (cut for cut in _near(cut_of(best), space) if cut in allowed and (cut.pipeline > 1 or best.form.alone))
    found = (try_form(setup, cut, best.form) for cut in near)
    return tuple(sorted((one for one in found if one is not None), key=lambda one: one.place))


def _near(cut: Cut, space: Space) -> Iterator[Cut]:
    yield from (replace(cut, recompute=word) for word in space.recompute if word != cut.recompute)
    for key in ("microbatch", "expert"):
        value = getattr(cut, key)
        yield replace(cut, **{key: 2 * value})
        if value % 2 == 0:
            yield replace(cut, **{key: value // 2})
    for one, other in (("tensor", "pipeline"), ("tensor", "data"), ("pipeline", "data")):
        for more, less in ((one, other), (other, one)):
            if getattr(cut, less) % 2 == 0:
                yield replace(cut, **{more: 2 * getattr(cut, more), less: getattr(cut, less) // 2})


def nearest(best: Scored, others: Iterable[Scored]) -> tuple[Alternative, ...]:
    """The five nearest that fit, each of another schedule, depth, tensor or expert parallelism."""
    seen = {_class(best)}
    found: list[Alternative] = []
    for one in sorted(others, key=lambda each: each.place):
        if one.fits and _class(one) not in seen and len(found) < NEAREST:
            seen.add(_class(one))
            found.append(Alternative(one, one.seconds / best.seconds - 1, why(one, best)))
    return tuple(found)


def _class(one: Scored) -> tuple[object, ...]:
    at = one.layout
    return one.schedule, at.tensor, at.pipeline, at.expert


def too_large(best: Scored, others: Iterable[Scored]) -> Scored | None:
    """The fastest that was simulated, would be faster than the best, and does not fit."""
    return min((one for one in others if not one.fits and one.seconds < best.seconds), key=_place, default=None)


def _place(one: Scored) -> tuple[object, ...]:
    return one.place


WORDS: Final = {
    "compute": "its passes take {} longer",
    "collectives": "it waits {} longer for collectives",
    "idle": "ranks stand idle {} longer",
    "gradients": "reducing gradients takes {} longer",
    "tied embedding": "the tied embedding takes {} longer",
    "optimizer": "the optimiser takes {} longer",
    "step": "what is done once a step takes {} longer",
}


def why(one: Scored, best: Scored) -> str:
    """What costs a plan the most against the best, and what it gains in turn."""
    if one.seconds <= best.seconds * (1 + 1e-9):
        return "as fast, and no simpler"
    gains = {key: one.parts[key] - best.parts[key] for key in best.parts}
    worst = max(gains, key=lambda key: gains[key])
    text = WORDS[worst].format(f"{gains[worst]:.3g} s")
    if worst == "idle" and one.bubble > best.bubble + 0.0005:
        text += f" (bubble {100 * one.bubble:.1f} % instead of {100 * best.bubble:.1f} %)"
    gained = min(gains, key=lambda key: gains[key])
    if gains[gained] < -0.1 * gains[worst]:
        text += f"; {gained} {-gains[gained]:.3g} s less"
    return text
