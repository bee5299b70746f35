"""ZB-V: two chunks a rank in a V with split backward: no bubble at F = B = W within 1F1B's memory.

Source: Qi et al., arXiv 2401.10241, section 6 and figure 8 (ZB-V). The first and the
last stage share rank 0, so a micro-batch's backward starts where its forward ends, and all ranks hold the same.
"""

from stageloom.placement import zigzag
from stageloom.schedule import Schedule, assemble, keep_first
from stageloom.schedules._record import Case, Promise, Record
from stageloom.tape import B, F, Tape, W, join

F0, F1 = F.on(chunk=0), F.on(chunk=1)
B0, B1 = B.on(chunk=0), B.on(chunk=1)
W0, W1 = W.on(chunk=0), W.on(chunk=1)
BW0, FBW1 = B0 + W0, F1 + B1 + W1  # a backward, split, of chunk 0; a forward and a backward of chunk 1


def tape(ranks: int, microbatches: int, rank: int) -> Tape:
    """Rank r's order for at least 2P - 1 micro-batches."""
    behind = ranks - rank
    return join(
        F0 * (2 * behind - 1),
        (F1 + F0) * rank,
        FBW1 * behind,
        (F0 + BW0 + FBW1) * (microbatches - 2 * ranks + 1 + rank),
        (BW0 + FBW1) * (behind - 1),
        (B0 + B1) * rank,
        BW0 * behind,
        W1 * rank,
        W0 * rank,
    )


def build(ranks: int, microbatches: int) -> Schedule:
    """Fewer than 2P - 1 micro-batches run the order of 2P - 1 without the micro-batches that are not there."""
    enough = max(microbatches, 2 * ranks - 1)
    tapes = [tape(ranks, enough, rank) for rank in range(ranks)]
    return keep_first(assemble("zb-v", zigzag(ranks, 2), tapes, enough), microbatches)


def _bubble(c: Case) -> float:
    """Nothing from M = 2P-1 on; with fewer micro-batches two chunk passes for each one missing (observed)."""
    return max(0, 4 * c.ranks - 2 - 2 * c.microbatches) * c.F / 2


record = Record(
    name="zb-v",
    title="ZB-V",
    citation="Qi et al., arXiv 2401.10241, figure 8",
    summary="a V of two chunks a rank with split backward: no steady bubble within 1F1B's memory",
    build=build,
    aliases=("zbv",),
    bubble=Promise(
        "max(0, 2P-1-M) F",
        _bubble,
        "equal stages, no latency, F = B = W",
        lambda c: c.latency == 0 and c.F == c.B == c.W,
    ),
    activations=Promise(
        "P on every rank", lambda c: [float(c.ranks)] * c.ranks, "M >= 2P", lambda c: c.microbatches >= 2 * c.ranks
    ),
)
