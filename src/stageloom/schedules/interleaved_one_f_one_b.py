"""Interleaved 1F1B: every rank holds v chunks of the model in a loop; 1F1B over chunks, v times less bubble.

Source: Narayanan et al., Megatron-LM, arXiv 2104.04473, section 2.2 and figure 4 (bottom); its bubble is
(P-1)(F+B+W)/v. Warm-up 2(P-1-r) + (v-1)g forwards, g the group of `_loop`.
"""

from stageloom.placement import loop
from stageloom.schedule import Schedule, assemble
from stageloom.schedules._loop import group_size, walk
from stageloom.schedules._record import CHUNKS, Case, Promise, Record
from stageloom.tape import BW, F, Tape, alternate


def build(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    group = group_size(ranks, microbatches)
    order = list(range(chunks))
    forwards = walk(F, order, microbatches, group)
    backwards = walk(BW, order[::-1], microbatches, group)
    tapes: list[Tape] = []
    for rank in range(ranks):
        warmup = min(2 * (ranks - 1 - rank) + (chunks - 1) * group, len(forwards))
        steady = len(forwards) - warmup
        tapes.append(forwards[:warmup] + alternate(forwards[warmup:], backwards[:steady]) + backwards[steady:])
    return assemble("interleaved-1f1b", loop(ranks, chunks), tapes, microbatches)


def _peak(c: Case) -> list[float]:
    return [(2 * (c.ranks - 1 - r) + (c.chunks - 1) * c.ranks + 1) / c.chunks for r in range(c.ranks)]


record = Record(
    name="interleaved-1f1b",
    title="Interleaved 1F1B (Megatron-LM)",
    citation="Narayanan et al., arXiv 2104.04473, figure 4",
    summary="v chunks a rank in a loop: 1F1B's bubble divided by v, for more activations and v times the messages",
    build=build,
    aliases=("1f1b-i", "interleaved"),
    options=(CHUNKS,),
    bubble=Promise(
        "(P-1)(F+B+W)/v",
        lambda c: (c.ranks - 1) * (c.F + c.B + c.W) / c.chunks,
        "equal stages, no latency, M >= P",
        lambda c: c.latency == 0 and c.microbatches >= c.ranks,
    ),
    activations=Promise(
        "(2(P-1-r) + (v-1)P + 1)/v",
        _peak,
        "M a multiple of P, M >= 2P",
        lambda c: c.microbatches % c.ranks == 0 and c.microbatches >= 2 * c.ranks,
    ),
)
