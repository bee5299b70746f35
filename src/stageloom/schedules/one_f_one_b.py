"""1F1B: after a warm-up of P - r forwards, rank r runs one backward and one forward in turn.

Sources: PipeDream-Flush in Narayanan et al., arXiv 2006.09503; DAPPLE, arXiv 2007.01045, section 3; the
non-interleaved schedule of Megatron-LM, arXiv 2104.04473, figure 4 (top).
"""

from stageloom.placement import line
from stageloom.schedule import Schedule, assemble
from stageloom.schedules._record import Promise, Record
from stageloom.tape import BW, F, Tape, join


def tape(microbatches: int, warmup: int) -> Tape:
    """1F1B with `warmup` forwards ahead of the first backward."""
    warmup = min(warmup, microbatches)
    return join(F * warmup, (BW + F) * (microbatches - warmup), BW * warmup)


def build(ranks: int, microbatches: int) -> Schedule:
    return assemble("1f1b", line(ranks), [tape(microbatches, ranks - r) for r in range(ranks)], microbatches)


record = Record(
    name="1f1b",
    title="1F1B (PipeDream-Flush, DAPPLE)",
    citation="arXiv 2006.09503; arXiv 2007.01045; arXiv 2104.04473, figure 4",
    summary="backward at once after forward: GPipe's bubble with at most P micro-batches held",
    build=build,
    aliases=("pipedream-flush", "dapple"),
    bubble=Promise(
        "(P-1)(F+B+W)",
        lambda c: (c.ranks - 1) * (c.F + c.B + c.W),
        "equal stages, no latency",
        lambda c: c.latency == 0,
    ),
    activations=Promise(
        "min(P-r, M)",
        lambda c: [float(min(c.ranks - r, c.microbatches)) for r in range(c.ranks)],
        "always",
        lambda c: True,
    ),
)
