"""What the validator and lowering must say of a schedule, decided by the oracle and by counting."""

from __future__ import annotations

from collections import Counter, deque
from itertools import pairwise

from oracle import BW, PARTS, B, F, Part, Prices, W, Work, needs, plain, run


def whole(work: Work) -> bool:
    """Is every part done exactly once, on the rank that holds its stage?"""
    wanted = Counter(
        (part, stage, microbatch, cut)
        for part in (F, B, W)
        for stage in range(work.stages)
        for microbatch in range(len(work.path_of))
        for cut in range(work.slices)
    )
    done: Counter[Part] = Counter()
    for rank, items in enumerate(work.items):
        for kind, *place in (op for item in items for op in item):
            for part in PARTS[kind]:
                done[(part, *place)] += 1
                if (part, *place) not in wanted or work.home(place[0], place[1]) != rank:
                    return False
    return done == wanted


def pairs_are_pairs(schedule) -> bool:
    """No mark on a rank's last op and none on the second op of a pair."""
    for low, high in zip(schedule.offsets[:-1].tolist(), schedule.offsets[1:].tolist(), strict=True):
        marks = [False, *schedule.pair[low:high].tolist()]
        if marks[-1] or any(one and two for one, two in pairwise(marks)):
            return False
    return True


def versions_fit(work: Work) -> bool:
    """One version for all ops of a micro-batch on a stage, forwards of a stage never use an older one than before, and
    with one path none that its finished weight gradients have not made."""
    if work.versions is None:
        return True
    used: dict[tuple[int, int], set[int]] = {}
    for rank, items in enumerate(work.items):
        newest: dict[tuple[int, int], int] = {}
        gradients: Counter[int] = Counter()
        for number, item in enumerate(items):
            for at, (kind, stage, microbatch, _) in enumerate(item):
                version = work.versions[rank, number, at]
                used.setdefault((stage, microbatch), set()).add(version)
                if kind == F:
                    key = stage, work.path_of[microbatch]
                    if version < newest.get(key, version):
                        return False
                    newest[key] = version
                    if len(work.paths) == 1 and version * work.update_every * work.slices > gradients[stage]:
                        return False
            gradients.update(stage for kind, stage, _, _ in item if kind in (W, BW))
    return all(len(versions) == 1 for versions in used.values())


def sound(schedule) -> bool:
    """What the validator must say of a schedule whose messages are buffered."""
    work = plain(schedule)
    if not whole(work) or not pairs_are_pairs(schedule) or not versions_fit(work):
        return False
    return run(work, Prices([[1.0] * work.stages] * 4)) is not None


def messages(work: Work) -> list[tuple[int, int, Part, int, int]]:
    """(from rank, to rank, part, item that sends, item that receives), in the order in which receivers want them."""
    sent = {
        (part, *op[1:]): (rank, number)
        for rank, items in enumerate(work.items)
        for number, item in enumerate(items)
        for op in item
        for part in PARTS[op[0]]
    }
    found = []
    for rank, items in enumerate(work.items):
        for number, item in enumerate(items):
            for op in item:
                for part in needs(work, op):
                    source, at = sent[part]
                    if source != rank:
                        found.append((source, rank, part, at, number))
    return found


def in_turn(work: Work) -> bool:
    """With one queue for each directed pair of ranks: is the message in front always the one that is wanted next?"""
    queues: dict[tuple[int, int], deque[Part]] = {}
    by_sender = {(source, target, part): None for source, target, part, _, _ in messages(work)}
    for rank, items in enumerate(work.items):
        for op in (op for item in items for op in item):
            for part in PARTS[op[0]]:
                for source, target, what in by_sender:
                    if (source, what) == (rank, (part, *op[1:])):
                        queues.setdefault((source, target), deque()).append(what)
    return all(queues[source, target].popleft() == part for source, target, part, _, _ in messages(work))


def meets(work: Work) -> bool:
    """Unbuffered sends: does every rank, receiving before each item and sending after it, get to its end?"""
    todo: list[deque[tuple[str, object]]] = [deque() for _ in work.items]
    table = messages(work)
    for rank, items in enumerate(work.items):
        for number, item in enumerate(items):
            todo[rank].extend(("recv", part) for _, target, part, _, at in table if (target, at) == (rank, number))
            todo[rank].append(("compute", item))
            for op in item:
                mine = [(part, *op[1:]) for part in PARTS[op[0]]]
                todo[rank].extend(("send", part) for source, _, part, _, _ in table if source == rank and part in mine)
    moved = True
    while moved:
        moved = False
        for queue in todo:
            if queue and queue[0][0] == "compute":
                queue.popleft()
                moved = True
        for one in todo:
            for two in todo:
                if one and two and one[0][0] == "send" and two[0] == ("recv", one[0][1]):
                    one.popleft()
                    two.popleft()
                    moved = True
    return not any(todo)
