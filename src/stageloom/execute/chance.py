"""Random numbers (dropout) of a stage: from a seed and a place alone, and the same when a forward is run again."""

# pyright: reportUnknownMemberType=false
# (torch leaks unknown types)
from __future__ import annotations

import torch
from torch import Tensor


def seed_of(seed: int, stage: int, microbatch: int, part: int = 0) -> int:
    """The seed of torch's random numbers for one slice of a micro-batch on a stage, in a step with this `seed`."""
    mixed = seed & (2**64 - 1)
    for number in (stage, microbatch, part):
        # constants of splitmix64: neighbouring places get unrelated seeds
        mixed = (mixed + (number + 1) * 0x9E3779B97F4A7C15) & (2**64 - 1)
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        mixed ^= mixed >> 31
    return mixed & (2**63 - 1)


class Random:
    """torch's random numbers from a seed within the block, and as they were after it.

    Without a seed they run on as they are; with `keep`, a second block draws what the first drew.
    """

    def __init__(self, seed: int | None, keep: bool) -> None:
        self.seed = seed
        self.keep = keep
        self.start: Tensor | None = None
        self.outside: Tensor | None = None

    def __enter__(self) -> None:
        if self.seed is not None:
            self.outside = torch.get_rng_state()
            torch.manual_seed(self.seed)
        elif self.start is not None:
            self.outside = torch.get_rng_state()
            torch.set_rng_state(self.start)
        elif self.keep:
            self.start = torch.get_rng_state()

    def __exit__(self, *_: object) -> None:
        if self.outside is not None:
            torch.set_rng_state(self.outside)
            self.outside = None
