"""Interleaved zero bubble: interleaved 1F1B with the backward split in B and W; on rank r, W runs r steps behind B.

Source: the interleaving of arXiv 2104.04473 with the split and lag of ZB-H1 (arXiv 2401.10241, figure 2), as PyTorch's
pipelining runs it. With one chunk it is ZB-H1. Warm-up (P-1-r) + (v-1)g forwards, g the group of `_loop`.
"""

from stageloom.placement import loop
from stageloom.schedule import Schedule, assemble
from stageloom.schedules._loop import group_size, walk
from stageloom.schedules._record import CHUNKS, Case, Promise, Record
from stageloom.tape import B, F, Tape, W, alternate


def build(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    group = group_size(ranks, microbatches)
    order = list(range(chunks))
    forwards = walk(F, order, microbatches, group)
    backwards = walk(B, order[::-1], microbatches, group)
    total = len(forwards)
    tapes: list[Tape] = []
    for rank in range(ranks):
        warmup = min(ranks - 1 - rank + (chunks - 1) * group, total)
        lag = min(rank, total)
        # Step j is F (while any remain), B, and W once j has reached the lag.
        steady = total - warmup
        early, late = min(lag, steady), max(lag, steady)
        tape = forwards[:warmup] + alternate(forwards[warmup : warmup + early], backwards[:early])
        if lag < steady:
            tape += alternate(forwards[warmup + early :], backwards[early:late], W * (late - early))
        else:
            tape += backwards[early:late]
        tapes.append(tape + alternate(backwards[late:], W * (total - late)) + W * lag)
    return assemble("interleaved-zb", loop(ranks, chunks), tapes, microbatches)


def _peak(c: Case) -> list[float]:
    """Chunks in flight after the warm-up, and one W part for every step of the lag."""
    in_flight = [c.ranks - r + (c.chunks - 1) * c.ranks for r in range(c.ranks)]
    return [(count + r * c.w_share) / c.chunks for r, count in enumerate(in_flight)]


record = Record(
    name="interleaved-zb",
    title="Interleaved zero bubble",
    citation="arXiv 2104.04473 with the split of arXiv 2401.10241",
    summary="v chunks a rank in a loop with split backward: ZB-H1's bubble divided by v",
    build=build,
    aliases=("zb1p-i", "interleaved-zero-bubble", "izb"),
    options=(CHUNKS,),
    bubble=Promise(
        "(P-1)(F+B-W)/v",
        lambda c: (c.ranks - 1) * (c.F + c.B - c.W) / c.chunks,
        "equal stages, no latency, W <= F, M >= P",
        lambda c: c.latency == 0 and c.W <= c.F and c.microbatches >= c.ranks,
    ),
    activations=Promise(
        "(vP - r + r w_share)/v",
        _peak,
        "M a multiple of P, M >= 2P",
        lambda c: c.microbatches % c.ranks == 0 and c.microbatches >= 2 * c.ranks,
    ),
)
