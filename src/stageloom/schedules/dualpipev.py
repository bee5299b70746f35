"""DualPipeV: DualPipe cut in half and folded: two chunks a rank in a V on one copy of the parameters.

Source: DeepSeek-V3, arXiv 2412.19437, for DualPipe, and the "cut in half" description of DualPipeV that DeepSeek
published with it; the steps are DualPipe's with the two chunks in place of the two directions.
"""

from stageloom.placement import zigzag
from stageloom.schedule import Schedule, assemble
from stageloom.schedules._record import Case, Promise, Record, Refusal
from stageloom.schedules.dualpipe import Words, balanced, steps
from stageloom.tape import BW, B, F, Tape

WORDS = Words((F.on(chunk=0), B.on(chunk=0), BW.on(chunk=0)), (F.on(chunk=1), B.on(chunk=1), BW.on(chunk=1)))


def build(ranks: int, microbatches: int) -> Schedule:
    tapes: list[Tape] = []
    for rank in range(ranks):
        pairs = microbatches - 2 * ranks + rank + 1
        tapes.append(steps(WORDS, ranks - 1 - rank, rank + 1, pairs, rank == ranks - 1))
    return assemble("dualpipev", zigzag(ranks, 2), tapes, microbatches)


def limits(ranks: int, microbatches: int) -> Refusal | None:
    least = 2 * ranks
    if microbatches >= least:
        return None
    return Refusal(f"M = {microbatches} on P = {ranks}; it needs at least M = 2P", f"nearest: M = {least}")


def _bubble(c: Case) -> float:
    """DualPipe's formula for a pipeline of 2P stages, in chunk times (half of a rank's)."""
    return (c.ranks - 1) * (c.paired + c.B + c.W - 3 * c.W) / 2


record = Record(
    name="dualpipev",
    title="DualPipeV",
    citation="arXiv 2412.19437, cut in half",
    summary="DualPipe folded into a V: the same overlap on half the devices with one copy of the parameters",
    build=build,
    limits=limits,
    aliases=("dual-pipe-v",),
    bubble=Promise(
        "(P-1)(F&B + B - 3W)/2, B the full backward",
        _bubble,
        "equal stages, no latency, F = B, W <= F, pair = F + B + W",
        balanced,
    ),
    activations=Promise("P + 1/2", lambda c: [c.ranks + 0.5] * c.ranks, "always", lambda c: True),
)
