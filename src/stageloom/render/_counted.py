"""A timeline in the terminal with ops narrower than a cell: along a line the symbols keep the shares of time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from rich.style import Style
from rich.text import Text

from stageloom.render._looks import IDLE, Look, idle_style, op_cell, pair_cell
from stageloom.render._slots import UPPER, WHOLE, Slots
from stageloom.simulate import Timeline

Floats = NDArray[np.float64]
SEEN: Final = 1e-6  # the share of a cell from which on its symbol may stand there


def counted(
    timeline: Timeline, drawn: Slots, looks: Sequence[Look], cell: float, cells: int, coloured: bool
) -> list[Text]:
    """One line a rank. A symbol: ops of one look, overlapped pairs of one look together, or idle time."""
    edges = np.arange(cells + 1, dtype=np.float64) * np.float64(cell)
    # A pair counts once, under the class of its upper op, moved behind the classes of single ops.
    classes = np.where(drawn.half == WHOLE, drawn.paint, drawn.paint + len(looks))
    of_class = [op_cell(look, coloured) for look in looks]
    of_class += [
        pair_cell(look, looks[other], coloured) for look, other in zip(looks, _partners(drawn, len(looks)), strict=True)
    ]
    symbols = [*dict.fromkeys(of_class), (IDLE, idle_style(coloured))]
    shown = drawn.half <= UPPER
    share = np.zeros((len(symbols), timeline.schedule.ranks, cells))
    for index, symbol in enumerate(of_class):
        for rank, rows in _by_rank(drawn.rank, np.flatnonzero(shown & (classes == index))):
            share[symbols.index(symbol), rank] += _time_in_cells(drawn.start[rows], drawn.end[rows], edges)
    share /= cell
    share[-1] = 1 - share.sum(axis=0)
    return [_line(row, symbols) for row in spread(share)]


def note(drawn: Slots, cell: float, draws: str) -> str:
    """What the legend says of the lines; `draws`: the option that draws every op, "" for none."""
    shown = drawn.half <= UPPER
    mean = float((drawn.end - drawn.start)[shown].sum()) / max(int((drawn.end > drawn.start).sum()), 1)
    ops = cell / mean
    amount = f"one column is about {ops:.2g} ops" if ops >= 1.05 else "some ops are narrower than a column"
    return f"{amount}: shares are right, single ops are not" + (f"; {draws} draws all" if draws else "")


def spread(share: Floats) -> NDArray[np.intp]:
    """A class for every cell: `share[class, rank, cell]` -> `[rank, cell]`.

    The class that is owed most takes the cell, among those that have a part of it. What is over is carried along the
    line, so that a class takes as many cells of any stretch as its time asks for, to within one or two.
    """
    classes, ranks, cells = share.shape
    owed = np.zeros((classes, ranks))
    chosen = np.empty((ranks, cells), dtype=np.intp)
    every = np.arange(ranks, dtype=np.intp)
    for at in range(cells):
        owed += share[..., at]
        chosen[:, at] = np.where(share[..., at] > SEEN, owed, -np.inf).argmax(axis=0)
        owed[chosen[:, at], every] -= 1
    return chosen


def _line(chosen: NDArray[np.intp], symbols: Sequence[tuple[str, Style]]) -> Text:
    line = Text()
    change = np.flatnonzero(np.append(True, chosen[1:] != chosen[:-1]))
    for at, count in zip(change.tolist(), np.diff(np.append(change, len(chosen))).tolist(), strict=True):
        letter, style = symbols[int(chosen[at])]
        line.append(letter * count, style)
    return line


def _by_rank(rank: NDArray[np.int32], rows: NDArray[np.intp]) -> list[tuple[int, NDArray[np.intp]]]:
    if not len(rows):
        return []
    parts = np.split(rows, np.flatnonzero(np.diff(rank[rows])) + 1)
    return [(int(rank[part[0]]), part) for part in parts]


def _time_in_cells(start: Floats, end: Floats, edges: Floats) -> Floats:
    """How long intervals that follow one another cover each cell."""
    times = np.stack((start, end), axis=1).ravel()
    covered = np.cumsum(end - start)
    so_far = np.stack((covered - (end - start), covered), axis=1).ravel()
    return np.diff(np.interp(edges, times, so_far, left=0.0, right=float(covered[-1])))


def _partners(drawn: Slots, count: int) -> list[int]:
    """For each class of upper ops, the class that is mostly below it (its own where there are no pairs)."""
    upper, lower = drawn.half == UPPER, drawn.half > UPPER
    counts = np.zeros((count, count), dtype=np.int64)
    np.add.at(counts, (drawn.paint[upper], drawn.paint[lower]), 1)
    return [int(row.argmax()) if row.any() else index for index, row in enumerate(counts)]
