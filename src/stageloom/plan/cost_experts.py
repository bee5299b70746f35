"""Dispatch and combine: the all-to-alls of a mixture of experts.

A token's vector goes once to each node that holds one of its experts, over the network, and from there to the experts'
GPUs over the links inside the node; both run at once and the slower one counts (DeepSeek-V3, arXiv 2412.19437, section
3.2.2). Experts are taken to be chosen evenly.
"""

from __future__ import annotations

from dataclasses import dataclass

from stageloom.plan.cost_work import Machine, members_on_node
from stageloom.plan.model import Experts


@dataclass(frozen=True, slots=True)
class Exchange:
    """Bytes that one GPU sends for one token and one byte an element of the vector: over the network, and inside."""

    between: float
    inside: float


def exchange(on: Machine, experts: Experts, hidden: int, ranks: int) -> Exchange:
    """How often a token's vector is sent, where `ranks` neighbouring GPUs share the experts."""
    if ranks < 2:
        return Exchange(0.0, 0.0)
    here = members_on_node(on, ranks, 1)
    nodes = ranks // here
    chosen = experts.per_token
    reached = nodes * (1.0 - (1.0 - 1.0 / nodes) ** chosen)  # nodes that hold at least one of them, evenly drawn
    if experts.groups > 1:
        # A group of experts stands on nodes / groups nodes, or several on one.
        limit = experts.groups_per_token * max(1.0, nodes / experts.groups)
        reached = min(reached, limit, float(nodes))
    gpus = here * (1.0 - (1.0 - 1.0 / here) ** (chosen / reached))  # of one node
    return Exchange(hidden * reached * (nodes - 1) / nodes, hidden * reached * gpus * (here - 1) / here)


def all_to_all(on: Machine, sent: Exchange, tokens: float, width: float) -> float:
    """Seconds to dispatch, or to combine, `tokens` tokens of `width` bytes an element."""
    if not sent.between and not sent.inside:
        return 0.0
    latency = on.between_latency if sent.between else on.inside_latency
    return (
        tokens * width * max(sent.between / on.exchange_between, sent.inside / on.exchange_inside) + on.start + latency
    )
