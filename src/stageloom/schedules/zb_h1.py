"""ZB-H1: the backward is split in B and W; on rank r, W runs r steps behind B, so B's arrive upstream earlier.

Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, figure 2 and tables 1 and 2.
"""

from stageloom.placement import line
from stageloom.schedule import Schedule, assemble
from stageloom.schedules._record import Case, Promise, Record
from stageloom.schedules._split import split_tape


def build(ranks: int, microbatches: int) -> Schedule:
    tapes = [split_tape(microbatches, ranks - r, r) for r in range(ranks)]
    return assemble("zb-h1", line(ranks), tapes, microbatches)


def _peak(c: Case) -> list[float]:
    return [c.ranks - r + r * c.w_share for r in range(c.ranks)]


record = Record(
    name="zb-h1",
    title="ZB-H1",
    citation="Qi et al., arXiv 2401.10241, figure 2",
    summary="split backward, W fills the cool-down: a third of 1F1B's bubble at its memory",
    build=build,
    bubble=Promise(
        "(P-1)(F+B-W)",
        lambda c: (c.ranks - 1) * (c.F + c.B - c.W),
        "equal stages, no latency, W <= F, M >= P",
        lambda c: c.latency == 0 and c.W <= c.F and c.microbatches >= c.ranks,
    ),
    activations=Promise("(P-r) + r w_share", _peak, "M >= 2P", lambda c: c.microbatches >= 2 * c.ranks),
)
