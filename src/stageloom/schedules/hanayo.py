"""Hanayo: one copy of the weights, its chunks folded in W waves over the ranks; micro-batches surf down and up.

Source: Liu et al., Hanayo, arXiv 2308.15762, figures 4 to 6: Chimera's second direction becomes the second half of
the same model. On a grid of equal slots, stage s of S = 2WP runs its n-th forward in slot s + 2n and its n-th backward
in slot 2S-1-s + 2n; units of P micro-batches tile without a gap. Where a backward takes longer than a forward the slots
are unequal and every further unit adds some idle time, as in Chimera's direct concatenation.
"""

import numpy as np
from numpy.typing import NDArray

from stageloom.placement import zigzag
from stageloom.schedule import Schedule, assemble
from stageloom.schedules._record import Case, Option, Promise, Record
from stageloom.tape import BW, F, Tape, in_slots


def build(ranks: int, microbatches: int, waves: int = 1) -> Schedule:
    placement = zigzag(ranks, 2 * waves)
    stages = placement.stages
    of_unit, n = divmod(np.arange(microbatches), ranks)
    base = of_unit * 2 * stages + 2 * n
    tapes: list[Tape] = []
    for rank in range(ranks):
        entries: list[tuple[Tape, NDArray[np.int64]]] = []
        for chunk, stage in enumerate(placement.stages_of[rank][0]):
            entries.append((F.on(chunk=chunk), base + stage))
            entries.append((BW.on(chunk=chunk), base + 2 * stages - 1 - stage))
        tapes.append(in_slots(*entries))
    return assemble("hanayo", placement, tapes, microbatches)


def _bubble(c: Case) -> float:
    """2(P-1) slots of a chunk's F."""
    return 2 * (c.ranks - 1) * c.F / (2 * c.options["waves"])


record = Record(
    name="hanayo",
    title="Hanayo (waves)",
    citation="Liu et al., arXiv 2308.15762, figures 4 to 6",
    summary="waves over one copy of the weights: Chimera's bubble without its replica, less with more waves",
    build=build,
    aliases=("wave", "waves"),
    options=(Option("waves", 1, "waves (W): each rank holds 2W chunks", least=1),),
    variants=({}, {"waves": 2}),
    bubble=Promise(
        "(P-1)F/W",
        _bubble,
        "equal stages, no latency, F = B+W, M a multiple of P",
        lambda c: c.latency == 0 and c.F == c.B + c.W and c.microbatches % c.ranks == 0,
    ),
    activations=Promise(
        "P - (P-1-r)/2W",
        lambda c: [c.ranks - (c.ranks - 1 - r) / (2 * c.options["waves"]) for r in range(c.ranks)],
        "M >= P",
        lambda c: c.microbatches >= c.ranks,
    ),
)
