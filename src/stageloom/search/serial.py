"""The order that holds the least: one micro-batch after another, all of its way before the next begins."""

from __future__ import annotations

import numpy as np

from stageloom.search.problem import Ints, Problem


def serial(problem: Problem) -> Ints:
    """Every rank's ops, a micro-batch at a time. It runs within every limit that lets one micro-batch pass, so that a
    search has an order to start from where everything else is shut out."""
    stages, places = problem.stages, problem.places
    words: list[list[list[int]]] = []  # by rank and path: the classes of one micro-batch
    for rank in range(problem.ranks):
        words.append([])
        for path in range(places // stages):
            here = [place for place in range(path * stages, (path + 1) * stages) if problem.rank[place] == rank]
            word = list(here)
            for place in reversed(here):
                word += [places + place] if problem.fused[place] else [places + place, 2 * places + place]
            words[-1].append(word)
    parts: list[Ints] = []
    for of_rank in words:
        width = max(len(word) for word in of_rank)
        table = np.full((len(of_rank), width), -1, dtype=np.int32)
        for path, word in enumerate(of_rank):
            table[path, : len(word)] = word
        rows = table[problem.path_of].reshape(-1)
        parts.append(rows[rows >= 0])
    return np.concatenate(parts)
