"""Where stages live: one or more paths of ranks through the model.

`paths[path][stage] = rank`. One stage a rank is the path (0, 1, .. P-1). v chunks a rank are one path that visits every
rank v times, in a loop (interleaved) or in a zigzag (V, waves). Two paths over the same ranks are two replicas of the
weights (Chimera, DualPipe); each micro-batch then belongs to one path.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stageloom.errors import InputError


@dataclass(frozen=True)
class Placement:
    """`ranks` devices and the paths over them. Every path has the same number of stages (they are replicas).

    Raises InputError where a path names a rank that is not there, is empty, or differs in length from the first.
    """

    ranks: int
    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise InputError(f"placement: ranks = {self.ranks}; at least 1 is needed")
        if not self.paths or not self.paths[0]:
            raise InputError("placement: no path; at least one path with one stage is needed")
        for number, path in enumerate(self.paths):
            if len(path) != len(self.paths[0]):
                raise InputError(
                    f"placement: path {number} has {len(path)} stages and path 0 has {len(self.paths[0])}; "
                    "paths are replicas of one model, so they need the same number of stages"
                )
            for stage, rank in enumerate(path):
                if rank != int(rank) or not 0 <= rank < self.ranks:
                    raise InputError(
                        f"placement: path {number} puts stage {stage} on rank {rank}; ranks are 0 to {self.ranks - 1}"
                    )

    @property
    def stages(self) -> int:
        return len(self.paths[0])

    @cached_property
    def table(self) -> NDArray[np.int32]:
        """`table[path, stage]` = rank."""
        return np.array(self.paths, dtype=np.int32)

    @cached_property
    def chunks(self) -> int:
        """The most stages that one path puts on one rank (v)."""
        return max(int(np.bincount(row, minlength=self.ranks).max()) for row in self.table)

    @cached_property
    def stages_of(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """`stages_of[rank][path][chunk]` = stage: the stages of a rank in the order its path meets them."""
        found: list[list[list[int]]] = [[[] for _ in self.paths] for _ in range(self.ranks)]
        for number, path in enumerate(self.paths):
            for stage, rank in enumerate(path):
                found[rank][number].append(stage)
        return tuple(tuple(tuple(stages) for stages in of_rank) for of_rank in found)


def line(ranks: int) -> Placement:
    """One stage a rank."""
    return Placement(ranks, (tuple(range(ranks)),))


def loop(ranks: int, chunks: int) -> Placement:
    """`chunks` stages a rank, stage s on rank s mod P (Megatron-LM's interleaving, arXiv 2104.04473 figure 4)."""
    return Placement(ranks, (tuple(range(ranks)) * chunks,))


def zigzag(ranks: int, legs: int) -> Placement:
    """There and back again `legs` times: 2 legs are a V (arXiv 2405.15362), 2W are Hanayo's W waves (2308.15762)."""
    there = tuple(range(ranks))
    return Placement(ranks, (sum((there if leg % 2 == 0 else there[::-1] for leg in range(legs)), ()),))


def two_way(ranks: int) -> Placement:
    """Two replicas of the model in opposite directions (Chimera, arXiv 2107.06925; DualPipe, 2412.19437)."""
    there = tuple(range(ranks))
    return Placement(ranks, (there, there[::-1]))
