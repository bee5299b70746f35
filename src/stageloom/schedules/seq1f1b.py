"""Seq1F1B: 1F1B whose micro-batches are cut along the sequence, so that a slice is the unit that travels.

Source: Sun et al., Seq1F1B, arXiv 2406.03488, section 3.2 and figure 2: forwards run the slices of a micro-batch in
order, backwards in the reverse order (attention needs earlier keys and values); s - 1 more warm-up ops than 1F1B.
"""

from stageloom.placement import line
from stageloom.schedule import Schedule, assemble
from stageloom.schedules._record import Case, Option, Promise, Record
from stageloom.schedules.one_f_one_b import tape


def build(ranks: int, microbatches: int, slices: int = 4) -> Schedule:
    ops = microbatches * slices
    tapes = [tape(ops, min(ranks - rank - 1 + slices, ops)) for rank in range(ranks)]
    return assemble("seq1f1b", line(ranks), tapes, microbatches, slices=slices, cut="sequence")


def _peak(c: Case) -> list[float]:
    slices = c.options["slices"]
    return [min(c.ranks - r - 1 + slices, c.microbatches * slices) / slices for r in range(c.ranks)]


record = Record(
    name="seq1f1b",
    title="Seq1F1B",
    citation="Sun et al., arXiv 2406.03488, figure 2",
    summary="micro-batches cut along the sequence: bubble and activations down by about the number of slices",
    build=build,
    options=(Option("slices", 4, "slices of a micro-batch (s)", least=1),),
    bubble=Promise(
        "(P-1)(F+B+W)/s",
        lambda c: (c.ranks - 1) * (c.F + c.B + c.W) / c.options["slices"],
        "equal stages and slices, no latency",
        lambda c: c.latency == 0,
    ),
    activations=Promise("min(P-r-1+s, sM)/s", _peak, "always", lambda c: True),
)
