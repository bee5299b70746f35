"""Breadth-first pipeline: v chunks a rank; all micro-batches go through a chunk before the next one starts.

Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, arXiv 2211.05953, figure 4d: a chunk's parameters are gathered
and its gradients reduced once a step, which suits sharded data parallelism. GPipe's memory, 1F1B-I's bubble.
"""

from stageloom.placement import loop
from stageloom.schedule import Schedule, assemble
from stageloom.schedules._record import CHUNKS, Option, Promise, Record
from stageloom.tape import BW, F, join, numbered


def build(ranks: int, microbatches: int, chunks: int = 2, order: str = "reverse") -> Schedule:
    forwards = join(*(F.on(chunk=c) * microbatches for c in range(chunks)))
    if order == "in-order":
        backwards = join(*(BW.on(chunk=c) * microbatches for c in reversed(range(chunks))))
    else:
        last_first = range(microbatches - 1, -1, -1)
        backwards = join(*(numbered(BW.on(chunk=c), last_first) for c in reversed(range(chunks))))
    return assemble("breadth-first", loop(ranks, chunks), [forwards + backwards] * ranks, microbatches)


record = Record(
    name="breadth-first",
    title="Breadth-first",
    citation="Lamy-Poirier, arXiv 2211.05953, figure 4d",
    summary="v chunks a rank, a chunk at a time for all micro-batches: 1F1B-I's bubble, all activations held",
    build=build,
    aliases=("bfs", "looped-bfs"),
    options=(CHUNKS, Option("order", "reverse", "order of the backwards", choices=("reverse", "in-order"))),
    bubble=Promise(
        "(P-1)(F+B+W)/v",
        lambda c: (c.ranks - 1) * (c.F + c.B + c.W) / c.chunks,
        "equal stages, no latency, M >= P",
        lambda c: c.latency == 0 and c.microbatches >= c.ranks,
    ),
    activations=Promise("M", lambda c: [float(c.microbatches)] * c.ranks, "always", lambda c: True),
)
