"""Circles in a graph of waits: one short circle out of every group of nodes that wait for one another."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final, NamedTuple

TRIES: Final = 16
"""Places in a group from which its shortest circle is looked for."""


class Step(NamedTuple):
    """A node waits for node `to`. `why` is "order" or what goes between ranks, `own` and `met` the rows concerned."""

    to: int
    why: str
    own: int
    met: int


def circles(steps: list[list[Step]]) -> list[list[Step]]:
    """One circle for every group, with few steps other than order; its last step is none of order.

    `steps[node]` are the waits of a node. Order alone must have no circle.
    """
    found: list[list[Step]] = []
    for group in _groups(steps):
        inside = set(group)
        crossing = [node for node in group if any(s.why != "order" and s.to in inside for s in steps[node])]
        tries = [_shortest(steps, inside, node) for node in sorted(crossing)[:TRIES]]
        best = min(tries, key=lambda circle: (sum(step.why != "order" for step in circle), len(circle)))
        turn = 1 + max(at for at, step in enumerate(best) if step.why != "order")
        found.append(best[turn:] + best[:turn])
    return found


def _shortest(steps: list[list[Step]], inside: set[int], start: int) -> list[Step]:
    """The circle through `start` with the fewest steps between ranks, then the fewest steps (Dijkstra)."""
    best: dict[int, tuple[int, int]] = {}
    came: dict[int, tuple[int, Step]] = {}
    queue: list[tuple[tuple[int, int], int]] = [((0, 0), start)]
    while queue:
        cost, node = heappop(queue)
        if cost > best.get(node, cost):
            continue
        if node == start and came.get(start):
            break
        for step in steps[node]:
            reached = cost[0] + (step.why != "order"), cost[1] + 1
            if step.to in inside and (step.to not in best or reached < best[step.to]):
                best[step.to] = reached
                came[step.to] = node, step
                heappush(queue, (reached, step.to))
    circle: list[Step] = []
    node = start
    while not circle or node != start:
        node, step = came[node]
        circle.append(step)
    return circle[::-1]


def _groups(steps: list[list[Step]]) -> list[list[int]]:
    """Sets of two or more nodes that all wait for one another (Tarjan's algorithm for components, no recursion)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    stacked: set[int] = set()
    found: list[list[int]] = []
    for root in range(len(steps)):
        if root in index:
            continue
        work = [(root, 0)]
        while work:
            node, at = work.pop()
            if at == 0:
                index[node] = low[node] = len(index)
                stack.append(node)
                stacked.add(node)
            elif steps[node][at - 1].to in stacked:
                low[node] = min(low[node], low[steps[node][at - 1].to])
            if at < len(steps[node]):
                work.append((node, at + 1))
                if steps[node][at].to not in index:
                    work.append((steps[node][at].to, 0))
                continue
            if low[node] < index[node]:
                continue
            group: list[int] = []
            while not group or group[-1] != node:
                group.append(stack.pop())
                stacked.discard(group[-1])
            if len(group) > 1:
                found.append(group)
    return found
