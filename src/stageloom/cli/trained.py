"""What `run` says of a training that has ended."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stageloom.cli.columns import Column
from stageloom.cli.measured import draw, print_measured
from stageloom.cli.words import console, share, time
from stageloom.metrics import measure
from stageloom.op import KIND_NAMES
from stageloom.schedule import Schedule
from stageloom.simulate import simulate

if TYPE_CHECKING:
    from stageloom.execute.training import Trained


def tell_of_interrupt(checkpoint: Path | None) -> None:
    """What Ctrl-C has left, in one line; steps that were done stand above it."""
    from stageloom.execute.checkpoint import newest

    step = None if checkpoint is None else newest(checkpoint)
    kept = f"the last checkpoint is of step {step}; go on from it with --resume" if step else "no checkpoint was kept"
    print(f"interrupted; {kept}", file=sys.stderr, flush=True)


def show(schedule: Schedule, trained: Sequence[Trained], svg: Path | None, *, as_json: bool) -> dict[str, float]:
    """Losses, and the last step beside what the simulator makes of the mean times of its ops: both its makespans."""
    from stageloom.execute.measure import measured_costs, timeline_of
    from stageloom.execute.stragglers import straggler

    spans = [rank.spans for rank in trained]
    found = measured_costs(schedule, spans)
    measured, predicted = timeline_of(schedule, spans, found), simulate(schedule, found)
    if svg is not None:
        draw(measured, predicted, svg)
    makespans = {"predicted": measure(predicted).makespan, "measured": measure(measured).makespan}
    assert found.seconds is not None
    makespans = {name: length * found.seconds for name, length in makespans.items()}
    if as_json:
        return makespans
    first, out = trained[0], console()
    if len(first.losses) == 1:
        out.print(f"loss {first.losses[0]:.4f}; the one step took {time(first.seconds[0] * 1e3)} ms")
    else:
        mean = sum(first.seconds[1:]) / len(first.seconds[1:])
        out.print(f"loss {first.losses[0]:.4f} -> {first.losses[-1]:.4f}; {time(mean * 1e3)} ms a step after the first")
    loads = [rank.load for rank in trained if rank.load is not None]
    shares = [*(share(load.busy) for load in loads), share(sum(load.busy for load in loads) / len(loads))]
    more = [Column("of whole\nsteps", shares)]
    for kind, name in enumerate(KIND_NAMES):
        each = [load.each(kind) for load in loads]
        if any(seconds is not None for seconds in each):
            cells = ["-" if seconds is None else time(1e3 * seconds) for seconds in each]
            more.append(Column(f"ms\nof {name}", [*cells, ""], spare=1))
    print_measured(measured, predicted, "the last step; predicted from the mean times of its ops", svg, out, more)
    slow = straggler(loads)
    if slow is not None:
        out.print(f"slowest: {slow}", soft_wrap=True)
    return makespans


def report(rank: Trained) -> dict[str, Any]:
    """A rank's results as JSON; seconds of its ops by kind."""
    data = {key: part for key, part in asdict(rank).items() if key not in ("spans", "load", "began")}
    if rank.load is None:
        return data
    each = {name: rank.load.each(kind) for kind, name in enumerate(KIND_NAMES)}
    return data | {"op_seconds": {name: seconds for name, seconds in each.items() if seconds is not None}}
