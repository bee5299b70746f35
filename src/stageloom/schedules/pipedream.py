"""PipeDream: 1F1B without a flush; every micro-batch is a mini-batch of its own and weights change under way.

Source: Harlap et al., PipeDream, arXiv 1806.03377, section 3.3 (weight stashing): a forward uses the newest weights of
its stage, and its backward the same version, so stage r stashes up to P - r versions. Gradients are not those of
synchronous training. `version` is the number of updates that a stage had made.
"""

from dataclasses import replace

import numpy as np

from stageloom.op import Kind
from stageloom.placement import line
from stageloom.schedule import Schedule, assemble
from stageloom.schedules._record import Promise, Record
from stageloom.schedules.one_f_one_b import record as one_f_one_b
from stageloom.schedules.one_f_one_b import tape


def build(ranks: int, microbatches: int) -> Schedule:
    tapes = [tape(microbatches, ranks - rank) for rank in range(ranks)]
    schedule = assemble("pipedream", line(ranks), tapes, microbatches)
    # Stage r updates after each of its backwards: its n-th forward has seen n - (P - r) + 1 of them (none in warm-up).
    version = np.maximum(schedule.microbatch - (ranks - schedule.stage) + 1, 0)
    return replace(schedule, version=version.astype(np.int32), update_every=1)


def updates(schedule: Schedule, rank: int) -> list[int]:
    """For each forward of a rank, how many updates it had made by then: the definition that `version` must equal."""
    done = 0
    seen: list[int] = []
    for op in schedule.ops(rank):
        if op.kind is Kind.F:
            seen.append(done)
        else:
            done += 1
    return seen


record = Record(
    name="pipedream",
    title="PipeDream (asynchronous)",
    citation="Harlap et al., arXiv 1806.03377, figure 4",
    summary="no flush: no bubble after warm-up, up to P weight versions, gradients of stale weights",
    build=build,
    synchronous=False,
    bubble=Promise(
        "(P-1)(F+B+W) in all, in the first fill and the last drain only",
        lambda c: (c.ranks - 1) * (c.F + c.B + c.W),
        "equal stages, no latency",
        lambda c: c.latency == 0,
    ),
    activations=one_f_one_b.activations,
)
