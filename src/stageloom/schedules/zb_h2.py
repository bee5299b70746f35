"""ZB-H2: ZB-H1 with 2(P-r)-1 warm-up forwards, which fill the bubble before the first B; about twice the memory.

Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, figure 3 and tables 1 and 2.
"""

from stageloom.placement import line
from stageloom.schedule import Schedule, assemble
from stageloom.schedules._record import Case, Promise, Record
from stageloom.schedules._split import split_tape


def build(ranks: int, microbatches: int) -> Schedule:
    tapes = [split_tape(microbatches, 2 * (ranks - r) - 1, 2 * r) for r in range(ranks)]
    return assemble("zb-h2", line(ranks), tapes, microbatches)


def _fills(c: Case) -> bool:
    small = c.W <= c.F and 2 * c.W <= c.F + c.B
    return c.latency == 0 and small and c.microbatches >= 2 * c.ranks - 1


def _peak(c: Case) -> list[float]:
    return [2 * (c.ranks - r) - 1 + 2 * r * c.w_share for r in range(c.ranks)]


record = Record(
    name="zb-h2",
    title="ZB-H2",
    citation="Qi et al., arXiv 2401.10241, figure 3",
    summary="no bubble at F = B = W where consecutive steps overlap, for 2P-1 micro-batches of activations",
    build=build,
    bubble=Promise(
        "(P-1)(F+B-2W)",
        lambda c: (c.ranks - 1) * (c.F + c.B - 2 * c.W),
        "equal stages, no latency, W <= F, 2W <= F+B, M >= 2P-1",
        _fills,
    ),
    activations=Promise("2(P-r)-1 + 2r w_share", _peak, "M >= 4P", lambda c: c.microbatches >= 4 * c.ranks),
)
