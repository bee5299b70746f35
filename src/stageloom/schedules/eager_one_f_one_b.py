"""Eager 1F1B: 1F1B with nearly twice the warm-up, so that messages hide behind the forwards run ahead.

Source: DAPPLE, arXiv 2007.01045, section 4 (policy PB: min(2(S-i)-1, D) warm-up forwards on stage i).
"""

from stageloom.placement import line
from stageloom.schedule import Schedule, assemble
from stageloom.schedules._record import Promise, Record
from stageloom.schedules.one_f_one_b import tape


def build(ranks: int, microbatches: int) -> Schedule:
    tapes = [tape(microbatches, 2 * (ranks - r) - 1) for r in range(ranks)]
    return assemble("eager-1f1b", line(ranks), tapes, microbatches)


record = Record(
    name="eager-1f1b",
    title="Eager 1F1B (DAPPLE's deeper warm-up)",
    citation="arXiv 2007.01045, section 4, policy PB",
    summary="1F1B with 2(P-r)-1 warm-up forwards: hides latency for nearly twice the activations",
    build=build,
    aliases=("dapple-pb",),
    bubble=Promise(
        "(P-1)(F+B+W)",
        lambda c: (c.ranks - 1) * (c.F + c.B + c.W),
        "equal stages, no latency",
        lambda c: c.latency == 0,
    ),
    activations=Promise(
        "min(2(P-r)-1, M)",
        lambda c: [float(min(2 * (c.ranks - r) - 1, c.microbatches)) for r in range(c.ranks)],
        "always",
        lambda c: True,
    ),
)
