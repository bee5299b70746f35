"""GPipe: all forwards, then all backwards, the last micro-batch first.

Source: Huang et al., GPipe, arXiv 1811.06965, figure 2c and section 2.3 (bubble (K-1)/(M+K-1)).
"""

from stageloom.placement import line
from stageloom.schedule import Schedule, assemble
from stageloom.schedules._record import Option, Promise, Record
from stageloom.tape import BW, F, numbered


def build(ranks: int, microbatches: int, order: str = "reverse") -> Schedule:
    backwards = BW * microbatches if order == "in-order" else numbered(BW, range(microbatches - 1, -1, -1))
    return assemble("gpipe", line(ranks), [F * microbatches + backwards] * ranks, microbatches)


record = Record(
    name="gpipe",
    title="GPipe",
    citation="Huang et al., arXiv 1811.06965, figure 2c",
    summary="all forwards, then all backwards; every micro-batch's activations are held at once",
    build=build,
    options=(Option("order", "reverse", "order of the backwards", choices=("reverse", "in-order")),),
    bubble=Promise(
        "(P-1)(F+B+W)",
        lambda c: (c.ranks - 1) * (c.F + c.B + c.W),
        "equal stages, no latency",
        lambda c: c.latency == 0,
    ),
    activations=Promise("M", lambda c: [float(c.microbatches)] * c.ranks, "always", lambda c: True),
)
