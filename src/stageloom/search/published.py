"""Records of the published searches: `stageloom.schedules` knows them by name once this module is imported."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from stageloom.costs import Costs
from stageloom.schedule import Schedule
from stageloom.schedules import Case, Option, Promise, Record, Refusal, add, fraction_of
from stageloom.search import building_block
from stageloom.search.zero_bubble import zero_bubble

ZERO_BUBBLE: Final = "Qi et al., arXiv 2401.10241, section 3.1"
V_SHAPED: Final = "Qi et al., arXiv 2405.15362"


def _equal(case: Case) -> bool:
    return case.latency == 0 and case.F == case.B == case.W


def _greedy(name: str, ranks: int, microbatches: int, *, costs: Costs, memory: Any) -> Schedule:
    return zero_bubble(ranks, microbatches, costs, fraction_of(f"{name}: memory", memory), name)


def _room(ranks: int, microbatches: int, *, memory: Any) -> Refusal | None:
    if fraction_of("memory", memory) * ranks >= 1:
        return None
    return Refusal(
        f"memory = {memory} of 1F1B's is less than one micro-batch on {ranks} ranks", f"at least 1/{ranks} is needed"
    )


def _block(name: str, block: building_block.Block, ranks: int, microbatches: int) -> Schedule:
    return building_block.repeated(block, ranks, microbatches, name)


def _zero_bubble(times: int, title: str, bubble: Promise, activations: Promise) -> Record:
    return Record(
        name=f"zb-{times}p",
        title=title,
        citation=ZERO_BUBBLE,
        summary=f"searched: the least cost that the zero-bubble greedy finds within {times}x 1F1B's memory",
        build=partial(_greedy, f"zb-{times}p", memory=times),
        aliases=(f"zb{times}p",),
        bubble=bubble,
        activations=activations,
        searched=True,
    )


def _steady_h1(c: Case) -> float:
    return (c.ranks - 1) * (c.F + c.B - c.W)


ZB_1P: Final = _zero_bubble(
    1,
    "ZB-1p",
    Promise(
        "(P-1)(F+B-W), as ZB-H1's",
        _steady_h1,
        "equal stages, no latency, F = B = W, M >= P",
        lambda c: _equal(c) and c.microbatches >= c.ranks,
    ),
    Promise(
        "at most P; P - r + r w_share for equal times",
        lambda c: [c.ranks - r + r * c.w_share for r in range(c.ranks)],
        "searched at equal times, M >= 2P",
        lambda c: c.microbatches >= 2 * c.ranks,
    ),
)
ZB_2P: Final = _zero_bubble(
    2,
    "ZB-2p",
    Promise(
        "0", lambda c: 0.0, "equal stages, no latency, F = B = W, M >= 2P",
        lambda c: _equal(c) and c.microbatches >= 2 * c.ranks,
    ),
    Promise("at most 2P", lambda c: [2.0 * c.ranks] * c.ranks,
            "searched at equal times with w_share = 1/2, M >= 4P >= 8",
            lambda c: c.microbatches >= 4 * c.ranks > 4 and c.w_share == 0.5),
)  # fmt: skip
ZB_GREEDY: Final = Record(
    name="zb-greedy",
    title="ZB-greedy",
    citation=ZERO_BUBBLE,
    summary="searched: the zero-bubble greedy within any limit of memory (ZB-1p and ZB-2p are its limits 1 and 2)",
    build=partial(_greedy, "zb-greedy"),
    options=(Option("memory", "1.5", "what a rank may hold, as a multiple of 1F1B's P micro-batches", fraction=True),),
    limits=_room,
    bubble=Promise(
        "(P-1)(F+B-W) at 1, less with more, 0 at 2",
        lambda c: _steady_h1(c) if c.options["memory"] == "1" else 0.0,
        "equal stages, no latency, F = B = W, M >= 2P, memory = 1 or 2",
        lambda c: _equal(c) and c.microbatches >= 2 * c.ranks and c.options["memory"] in ("1", "2"),
    ),
    activations=Promise(
        "at most memory P",
        lambda c: [c.ranks - r + r * c.w_share for r in range(c.ranks)],
        "searched at equal times, memory = 1, M >= 2P",
        lambda c: c.microbatches >= 2 * c.ranks and c.options["memory"] == "1",
    ),
    searched=True,
)


def _v(name: str, title: str, block: building_block.Block, summary: str, bubble: Promise, peak: Promise) -> Record:
    return Record(
        name=name,
        title=title,
        citation=V_SHAPED,
        summary=summary,
        build=partial(_block, name, block),
        aliases=(name.replace("-", ""),),
        bubble=bubble,
        activations=peak,
    )


V_MIN: Final = _v(
    "v-min",
    "V-Min",
    building_block.v_min,
    "a V of two chunks a rank, its building block the shortest: a third of 1F1B's memory",
    Promise(
        "(4P-5) F/2; (4P-7) F/2 where 3 divides P",
        lambda c: (4 * c.ranks - (7 if c.ranks % 3 == 0 else 5)) * c.F / 2,
        "equal stages, no latency, F = B = W, P >= 2, M > P",
        lambda c: _equal(c) and c.microbatches > c.ranks >= 2,
    ),
    Promise(
        "floor((P+4)/3) at most",
        lambda c: [float((c.ranks + 4) // 3)] * c.ranks,
        "3 divides P, M >= 2P",
        lambda c: c.ranks % 3 == 0 and c.microbatches >= 2 * c.ranks,
    ),
)
V_HALF: Final = _v(
    "v-half",
    "V-Half",
    building_block.v_half,
    "a V of two chunks a rank, its building block of middle length: half of 1F1B's memory",
    Promise(
        "(3P-7) F/2; (3P-4) F/2 for an odd P",
        lambda c: (3 * c.ranks - (4 if c.ranks % 2 else 7)) * c.F / 2,
        "equal stages, no latency, F = B = W, P >= 3, M >= 2P",
        lambda c: _equal(c) and c.ranks >= 3 and c.microbatches >= 2 * c.ranks,
    ),
    Promise(
        "floor((P+2)/2) at most",
        lambda c: [float((c.ranks + 2) // 2)] * c.ranks,
        "an even P, M >= 2P",
        lambda c: c.ranks % 2 == 0 and c.microbatches >= 2 * c.ranks,
    ),
)
V_ZB: Final = _v(
    "v-zb",
    "V-ZB",
    building_block.v_zb,
    "a V of two chunks a rank, its building block the longest: no steady bubble within 1F1B's memory",
    Promise(
        "0", lambda c: 0.0, "equal stages, no latency, F = B = W, M >= 2P",
        lambda c: _equal(c) and c.microbatches >= 2 * c.ranks,
    ),
    Promise("P on every rank", lambda c: [float(c.ranks)] * c.ranks, "M >= 2P",
            lambda c: c.microbatches >= 2 * c.ranks),
)  # fmt: skip

SEARCHES: Final = (ZB_1P, ZB_2P, ZB_GREEDY, V_MIN, V_HALF, V_ZB)
add(*SEARCHES)
