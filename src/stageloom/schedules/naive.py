"""Naive model parallelism: one micro-batch at a time goes through all stages and back; one rank works at a time.

Source: the baseline of GPipe (arXiv 1811.06965, figure 2b).
"""

from stageloom.placement import line
from stageloom.schedule import Schedule, assemble
from stageloom.schedules._record import Promise, Record
from stageloom.tape import BW, F


def build(ranks: int, microbatches: int) -> Schedule:
    return assemble("naive", line(ranks), [(F + BW) * microbatches] * ranks, microbatches)


record = Record(
    name="naive",
    title="Naive model parallelism",
    citation="baseline of GPipe, arXiv 1811.06965, figure 2b",
    summary="one micro-batch at a time, forward through all ranks and back: utilisation 1/P",
    build=build,
    aliases=("model-parallel",),
    bubble=Promise(
        "M (P-1)(F+B+W)",
        lambda c: c.microbatches * (c.ranks - 1) * (c.F + c.B + c.W),
        "equal stages, no latency",
        lambda c: c.latency == 0,
    ),
    activations=Promise("1", lambda c: [1.0] * c.ranks, "always", lambda c: True),
)
