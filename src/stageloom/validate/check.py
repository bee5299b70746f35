"""`problems`: a few passes over the columns where the schedule is sound, the full list where it is not."""

from __future__ import annotations

from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from stageloom import _kernel
from stageloom.errors import InputError
from stageloom.schedule import Schedule
from stageloom.validate.local import Doers, local_problems
from stageloom.validate.messages import between_ranks, fifo_problems, in_order, rendezvous
from stageloom.validate.problem import Problem
from stageloom.validate.versions import version_problems, versions_agree
from stageloom.validate.waiting import deadlocks, rendezvous_deadlocks

Sends = Literal["buffered", "fifo", "blocking"]
SENDS: Final[tuple[str, ...]] = get_args(Sends)
"""What a link does with messages that are not wanted yet.

"buffered" keeps them, and hands them out in any order. "fifo" keeps them in one queue for each directed pair of ranks;
receives are posted in the order in which the receiver's ops stand. "blocking" keeps nothing: a rank receives right
before an op, computes, and sends right after, and a send ends only when its receive is posted.
"""


def problems(schedule: Schedule, *, sends: Sends = "buffered") -> list[Problem]:
    """All problems of a schedule, in the order of ranks and positions; an empty list where it runs to its end."""
    if sends not in SENDS:
        raise InputError(f"sends = {sends!r}; expected one of {', '.join(SENDS)}")
    broken = _malformed(schedule)
    if broken:
        return [Problem("malformed", None, None, None, f"{schedule.name}: {text}") for text in broken]
    found = _of_links(schedule, sends) if _sound(schedule) else _all_problems(schedule, sends)
    return sorted(found, key=_place)


def sound_on_ranks(schedule: Schedule) -> bool:
    """Is every part done once, at its place, after what it waits for on its own rank? (Ranks may still deadlock.)"""
    if _malformed(schedule):
        return False
    parts = 3 * schedule.stages * schedule.microbatches * schedule.slices
    if parts > 2 * len(schedule):  # an op does two parts at most; asked first, as the table of parts may be huge
        return False
    return schedule.links.faults == 0


def _sound(schedule: Schedule) -> bool:
    """Without a loop over ops in Python: is there nothing to report where messages are kept until they are wanted?"""
    if not sound_on_ranks(schedule):
        return False
    return _runs(schedule.offsets, schedule.links.source, schedule.pair) and versions_agree(schedule)


def _of_links(schedule: Schedule, sends: Sends) -> list[Problem]:
    """What stricter links make of a schedule that is sound otherwise."""
    if sends == "buffered":
        return []
    sender, receiver = between_ranks(schedule)
    if sends == "fifo":
        return [] if in_order(schedule, sender, receiver) else fifo_problems(schedule, sender, receiver)
    events = rendezvous(schedule, sender, receiver)
    if _runs(events.offsets, events.source, np.zeros(len(events.source), dtype=np.bool_)):
        return []
    return rendezvous_deadlocks(schedule, events)


def _runs(offsets: NDArray[np.int64], source: NDArray[np.int32], pair: NDArray[np.bool_]) -> bool:
    """Does every row run, where it waits for the row before it on its rank and for `source`?"""
    rows = len(source)
    nothing = np.zeros(rows)
    start, end, waiter = np.empty(rows), np.full(rows, -1.0), np.full(rows, -1, dtype=np.int32)
    longest_path = _kernel.longest_path.pick(rows)
    return int(longest_path(offsets, source, nothing, nothing, pair, start, end, waiter)) == rows


def _all_problems(schedule: Schedule, sends: Sends) -> list[Problem]:
    """The plain, slow way, which makes sense of any order, however wrong."""
    doers = Doers(schedule)
    found = local_problems(schedule, doers)
    if schedule.version is not None:
        found += version_problems(schedule, doers)
    sender, receiver = doers.between_ranks()
    circles = deadlocks(schedule, sender, receiver)
    found += circles
    if sends == "fifo":
        found += fifo_problems(schedule, sender, receiver)
    if sends == "blocking" and not circles:  # ranks that wait in a circle for messages do so for receives as well
        found += rendezvous_deadlocks(schedule, rendezvous(schedule, sender, receiver))
    return found


def _place(problem: Problem) -> tuple[int, int]:
    return (
        -1 if problem.rank is None else problem.rank,
        -1 if problem.position is None else problem.position,
    )


def _malformed(schedule: Schedule) -> list[str]:
    """Columns that the kernels must not be given. A schedule from `assemble`, text or JSON never has them."""
    offsets, rows = schedule.offsets, len(schedule)
    found: list[str] = []
    if len(offsets) != schedule.ranks + 1 or offsets[0] != 0 or offsets[-1] != rows or (np.diff(offsets) < 0).any():
        found.append(f"offsets must be {schedule.ranks + 1} ascending numbers from 0 to {rows}, the number of rows")
    for name in ("stage", "microbatch", "slice", "pair", "version"):
        column = getattr(schedule, name)
        if column is not None and len(column) != rows:
            found.append(f"column {name} has {len(column)} rows and column kind has {rows}")
    if rows and not 0 <= int(schedule.kind.min()) <= int(schedule.kind.max()) <= 3:
        found.append("column kind holds a number outside 0 to 3 (F, B, W, BW)")
    if (schedule.version is None) != (schedule.update_every < 1):
        found.append("version and update_every belong together: an asynchronous schedule has both, any other neither")
    path_of, paths = schedule.path_of, len(schedule.placement.paths)
    if schedule.microbatches < 1 or schedule.slices < 1:
        found.append(f"{schedule.microbatches} micro-batches of {schedule.slices} slices; at least 1 of each is needed")
    elif len(path_of) != schedule.microbatches or not 0 <= int(path_of.min()) <= int(path_of.max()) < paths:
        found.append(
            f"path_of must name a path from 0 to {paths - 1} for each of {schedule.microbatches} micro-batches"
        )
    return found
