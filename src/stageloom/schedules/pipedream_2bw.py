"""PipeDream-2BW: 1F1B without a flush, gradients accumulated over a mini-batch, two weight versions at most.

Source: Narayanan et al., PipeDream-2BW, arXiv 2006.09503, section 3.1: micro-batch k (from 1) of mini-batches of m uses
weight version max(floor((k-1)/m) - 1, 0), the same on every stage; m must be at least P. The update is
W(t+1) = W(t) - v grad f(W(t-1)): gradients are one mini-batch late.
"""

from dataclasses import replace

import numpy as np

from stageloom.placement import line
from stageloom.schedule import Schedule, assemble
from stageloom.schedules._record import Option, Promise, Record, Refusal
from stageloom.schedules.one_f_one_b import record as one_f_one_b
from stageloom.schedules.one_f_one_b import tape


def build(ranks: int, microbatches: int, minibatch: int = 0) -> Schedule:
    per_minibatch = minibatch or ranks
    tapes = [tape(microbatches, ranks - rank) for rank in range(ranks)]
    schedule = assemble("pipedream-2bw", line(ranks), tapes, microbatches)
    version = np.maximum(schedule.microbatch // per_minibatch - 1, 0)
    return replace(schedule, version=version.astype(np.int32), update_every=per_minibatch)


def limits(ranks: int, microbatches: int, minibatch: int = 0) -> Refusal | None:
    if minibatch == 0 or minibatch >= ranks:
        return None
    return Refusal(
        f"minibatch = {minibatch} on P = {ranks}; two weight versions suffice only from P on",
        f"nearest: minibatch = {ranks}",
    )


record = Record(
    name="pipedream-2bw",
    title="PipeDream-2BW (asynchronous)",
    citation="Narayanan et al., arXiv 2006.09503, figure 3",
    summary="no flush: no bubble after warm-up, two weight versions, gradients one mini-batch late",
    build=build,
    limits=limits,
    synchronous=False,
    options=(Option("minibatch", 0, "micro-batches of one weight update (0: as many as ranks)", least=0),),
    bubble=Promise(
        "(P-1)(F+B+W) in all, in the first fill and the last drain only",
        lambda c: (c.ranks - 1) * (c.F + c.B + c.W),
        "equal stages, no latency",
        lambda c: c.latency == 0,
    ),
    activations=one_f_one_b.activations,
)
