"""Chimera: two 1F1B pipelines in opposite directions over two replicas fill each other's bubbles.

Source: Li and Hoefler, arXiv 2107.06925, figures 3 and 8, table 2. On a grid of equal slots, stage s of either
direction runs its n-th forward in slot s + 2n and its n-th backward in slot 2P-1-s + 2n; with an even number of ranks
the two directions then never meet. Units of P micro-batches follow one another without a gap (direct concatenation).
"doubling" puts two micro-batches into every forward slot, so that slots are equal where a backward takes two forwards;
"halving" does the same with forwards of whole micro-batches and backwards of halves (cut along the batch).
"""

import numpy as np
from numpy.typing import NDArray

from stageloom.placement import two_way
from stageloom.schedule import Schedule, assemble
from stageloom.schedules._record import Case, Option, Promise, Record, Refusal, even_ranks
from stageloom.tape import BW, F, Tape, in_slots


def build(ranks: int, microbatches: int, concatenation: str = "direct") -> Schedule:
    doubled = concatenation != "direct"
    slices = 2 if concatenation == "halving" else 1
    # What one unit holds, and how many ops fill one forward slot.
    per_slot = 2 if doubled else 1
    unit = ranks * per_slot // slices
    period = (3 if doubled else 2) * ranks
    path_of = (np.arange(microbatches) % unit * 2 // unit).astype(np.int8)
    tapes: list[Tape] = []
    for rank in range(ranks):
        entries: list[tuple[Tape, NDArray[np.int64]]] = []
        for path, stage in enumerate((rank, ranks - 1 - rank)):
            # Ops of this direction count n = 0, 1, ..; every unit brings ranks/2 forward slots of `per_slot` ops.
            n = np.arange(int((path_of == path).sum()) * slices)
            of_unit, n = divmod(n, ranks // 2 * per_slot)
            entries.append((F.on(path=path), of_unit * period + stage + 2 * (n // per_slot)))
            entries.append((BW.on(path=path), of_unit * period + 2 * ranks - 1 - stage + 2 * n))
        tapes.append(in_slots(*entries))
    return assemble("chimera", two_way(ranks), tapes, microbatches, slices=slices, cut="batch", path_of=path_of)


def limits(ranks: int, microbatches: int, concatenation: str = "direct") -> Refusal | None:
    return even_ranks(ranks)


def _balanced(c: Case) -> bool:
    """Are all slots equally long?"""
    return c.F == c.B + c.W if c.options["concatenation"] == "direct" else 2 * c.F == c.B + c.W


def _whole_units(c: Case) -> bool:
    return c.microbatches % (2 * c.ranks if c.options["concatenation"] == "doubling" else c.ranks) == 0


def _bubble(c: Case) -> float:
    step = {"direct": 1.0, "doubling": 1.5, "halving": 0.75}[c.options["concatenation"]]
    return (c.ranks - 2) * step * c.F


def _peak(c: Case) -> list[float]:
    return [c.ranks / 2 + 1 + min(r, c.ranks - 1 - r) for r in range(c.ranks)]


record = Record(
    name="chimera",
    title="Chimera",
    citation="Li and Hoefler, arXiv 2107.06925, figures 3 and 8",
    summary="two directions over two replicas: half of 1F1B's bubble, two copies of the parameters",
    build=build,
    limits=limits,
    options=(
        Option(
            "concatenation", "direct", "how units of P micro-batches follow", choices=("direct", "doubling", "halving")
        ),
    ),
    variants=({}, {"concatenation": "doubling"}),
    bubble=Promise(
        "(P-2)F; 3/2 of it with doubling, 3/4 with halving",
        _bubble,
        "equal stages, no latency, F = B+W (2F = B+W with doubling and halving), M a multiple of P (2P with doubling)",
        lambda c: c.latency == 0 and _balanced(c) and _whole_units(c),
    ),
    activations=Promise(
        "P/2+1 at the ends to P in the middle",
        _peak,
        "M = P, F = B+W",
        lambda c: c.microbatches == c.ranks and c.options["concatenation"] == "direct",
    ),
)
