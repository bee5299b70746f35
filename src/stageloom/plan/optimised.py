"""Orders searched for the best layouts, within the memory that their weights leave."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

from stageloom.errors import InputError
from stageloom.placement import line, zigzag
from stageloom.plan.cost import stage_costs
from stageloom.plan.floors import Setup, items
from stageloom.plan.forms import Form, forms
from stageloom.plan.layout import Layout
from stageloom.plan.memory import FRAGMENTS
from stageloom.plan.score import Scored, predicted, score
from stageloom.plan.space import Cut
from stageloom.plan.spreading import laid_out

LAYOUTS: Final = 2
"""How many of the best layouts get orders of their own."""

Where = Literal["line", "v"]
PLAIN: Final[dict[Where, str]] = {"line": "1f1b", "v": "v-min"}
"""A schedule with this placement, whose prediction tells what weights and buffers leave."""


def orders(setup: Setup, scored: list[Scored], seconds: float) -> list[Scored]:
    """Orders for the best layouts that fit, one stage a rank and in a V; `seconds` of effort for all together.

    A layout that leaves no room for any order is left out.
    """
    if setup.measured is not None:
        raise InputError("optimised orders are searched for the model's own costs; leave the profile or them out")
    found: list[Scored] = []
    cuts = list(_cuts(scored))[:LAYOUTS]
    for cut in cuts:
        for where in PLAIN:
            one = _order(setup, cut, where, seconds / len(cuts) / len(PLAIN))
            found += [] if one is None else [one]
    return found


def _cuts(scored: list[Scored]) -> Iterable[Cut]:
    """The cuts of those that fit and have a pipeline, the best first, each once."""
    seen: dict[Cut, None] = {}
    for one in scored:
        at = one.layout
        if one.fits and at.pipeline > 1:
            seen[Cut(at.tensor, at.pipeline, at.data, at.expert, at.microbatch, at.recompute)] = None
    return seen


def _order(setup: Setup, cut: Cut, where: Where, seconds: float) -> Scored | None:
    from stageloom.search import pose, search

    chunks = 2 if where == "v" else 1
    if cut.pipeline * chunks > len(setup.model.layers):
        return None
    placement = zigzag(cut.pipeline, 2) if where == "v" else line(cut.pipeline)
    layout = setup.layout(cut, chunks, laid_out(items(setup, cut).work, placement))
    costs = stage_costs(setup.model, setup.cluster, setup.training, layout, setup.constants, setup.software)
    try:
        room = _room(setup, layout, where)
        problem = pose(placement, layout.microbatches(setup.training), costs, limit_bytes=room)
        outcome = search(problem, seconds=max(seconds, 0.1), seed=0)
    except InputError:  # nothing can run within what the weights leave
        return None
    form = Form(
        name="optimised",
        options=(("placement", where),),
        chunks=chunks,
        paths=1,
        split=True,
        paired=False,
        searched=True,
        synchronous=True,
        slices=1,
    )
    order = outcome.schedule(form.label)
    return score(setup, layout, form, order)


def _room(setup: Setup, layout: Layout, where: Where) -> list[float]:
    """Bytes of activations that each rank may hold. Raises InputError where one may hold none."""
    form = forms((PLAIN[where],), ())[0]
    limit = setup.cluster.gpu.memory
    room: list[float] = []
    for rank in predicted(setup, layout, form).memory:
        fixed = rank.context + rank.parameters + rank.gradients + rank.optimizer + rank.buffers
        room.append((limit - fixed) / (1.0 + FRAGMENTS) - rank.working)
    if min(room) <= 0:
        raise InputError("the weights leave no room")
    return room
