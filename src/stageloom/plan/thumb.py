"""Rules of thumb beside the numbers: which of them the best plan breaks, and what keeping them would cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from stageloom.plan.cluster import Cluster
from stageloom.plan.score import Scored
from stageloom.plan.space import Space


@dataclass(frozen=True, slots=True)
class Rule:
    """says: the rule, and where it is from; keeps: whether a plan keeps it; applies: whether it has a say; found: what
    a plan does instead; kept: the part of a space that keeps it, where that is a size; gain: what breaking it is good
    for, where it makes a plan faster; spares: it has no say where nothing that keeps it fits."""

    says: str
    applies: Callable[[Scored, Cluster], bool]
    keeps: Callable[[Scored, Cluster], bool]
    found: Callable[[Scored, Cluster], str]
    kept: Callable[[Space, Cluster], Space] | None = None
    gain: str = ""
    spares: bool = False


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A rule that the best plan breaks. slower: of the fastest simulated plan that keeps it, over the best, less 1;
    None where none of those simulated does. text: all of it in words."""

    rule: str
    slower: float | None
    text: str


RULES: Final = (
    Rule(
        "at least four micro-batches a stage, M >= 4P (GPipe, arXiv 1811.06965, section 3)",
        lambda one, on: one.layout.pipeline > 1,
        lambda one, on: one.microbatches >= 4 * one.layout.pipeline,
        lambda one, on: f"M = {one.microbatches} for P = {one.layout.pipeline}, and {100 * one.bubble:.1f} % of bubble",
    ),
    Rule(
        "tensor parallelism inside a node only (arXiv 2104.04473, takeaway 1)",
        lambda one, on: True,
        lambda one, on: one.layout.tensor <= on.gpus_per_node,
        lambda one, on: f"tensor {one.layout.tensor} over nodes of {on.gpus_per_node}",
    ),
    Rule(
        "tensor parallelism up to the node's size before pipeline stages (arXiv 2104.04473, takeaway 1)",
        lambda one, on: one.layout.pipeline > 1,
        lambda one, on: one.layout.tensor >= on.gpus_per_node,
        lambda one, on: (
            f"tensor {one.layout.tensor} of the node's {on.gpus_per_node}, with {one.layout.pipeline} stages"
        ),
        lambda space, on: replace(space, tensor=on.gpus_per_node, data=None),
    ),
    Rule(
        "micro-batches of one sequence, for the smallest bubble",
        lambda one, on: one.layout.pipeline > 1,
        lambda one, on: one.layout.microbatch == 1,
        lambda one, on: f"micro-batches of {one.layout.microbatch}",
        lambda space, on: replace(space, microbatch=1),
        gain=", whose products run closer to the peak",
    ),
    Rule(
        "recompute nothing where that is not needed to fit",
        lambda one, on: True,
        lambda one, on: one.layout.recompute == "none",
        lambda one, on: f"recomputing {_word(one)}",
        lambda space, on: replace(space, recompute=("none",)),
        gain=", which makes room for what is faster",
        spares=True,
    ),
)


def disagreements(
    best: Scored,
    others: Iterable[Scored],
    cluster: Cluster,
    best_of: Callable[[Callable[[Space], Space]], Scored | None],
) -> tuple[Disagreement, ...]:
    """The rules that the best plan breaks, and the formula for the bubble where it is off.

    best_of: the best plan of a part of the space, for rules that none of `others` keeps.
    """
    fitting = [one for one in others if one.fits]
    found: list[Disagreement] = []
    for rule in RULES:
        if not rule.applies(best, cluster) or rule.keeps(best, cluster):
            continue
        keeping = [one.seconds for one in fitting if rule.keeps(one, cluster)]
        if not keeping and rule.kept is not None:
            one = best_of(_part(rule.kept, cluster))
            keeping = [] if one is None else [one.seconds]
        slower = min(keeping) / best.seconds - 1 if keeping else None
        if slower is None and rule.spares:
            continue
        # What is slower than keeping the rule was asked for, and is not there for any gain.
        gain = rule.gain if slower is not None and slower >= 0 else ""
        if slower is not None:
            longer = f"{100 * slower:.1f} % longer"
            if slower < 0:
                longer = f"{-100 * slower:.1f} % less, and was not allowed"
            cost = f"the best plan found that keeps it takes {longer}"
        else:
            cost = (
                "no plan that is possible keeps it and fits"
                if rule.kept
                else "none that was simulated and fits keeps it"
            )
        found.append(Disagreement(rule.says, slower, f"{rule.says}: here {rule.found(best, cluster)}{gain}; {cost}"))
    found += _formula(best)
    return tuple(found)


def _word(one: Scored) -> str:
    return one.layout.recompute if isinstance(one.layout.recompute, str) else "some layers"


def _part(kept: Callable[[Space, Cluster], Space], cluster: Cluster) -> Callable[[Space], Space]:
    return lambda space: kept(space, cluster)


def _formula(best: Scored) -> list[Disagreement]:
    """(P - 1) / (M + P - 1), the bubble of 1F1B with equal stages, beside what was simulated."""
    ranks, many = best.layout.pipeline, best.microbatches
    said = (ranks - 1) / (many + ranks - 1)
    if abs(said - best.bubble) < 0.01:
        return []
    rule = "the bubble is (P - 1) / (M + P - 1)"
    text = f"{rule}: that is {100 * said:.1f} %, and {best.schedule} on these stages has {100 * best.bubble:.1f} %"
    return [Disagreement(rule, None, text)]
