"""Random numbers (dropout) of a stage: from a seed and a place alone, and the same when a forward is run again."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaks unknown types)
from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

States = tuple[Tensor, Any]
"""torch's random state of main memory, and of an accelerator (None where there is none)."""


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
    """torch's random numbers from a seed within the block, and as they were after it, on the CPU and on `device`.

    Without a seed they run on as they are; with `keep`, a second block draws what the first drew.
    """

    def __init__(self, seed: int | None, keep: bool, device: torch.device) -> None:
        self.seed = seed
        self.keep = keep
        self.device = device
        self.start: States | None = None
        self.outside: States | None = None

    def __enter__(self) -> None:
        if self.seed is not None:
            self.outside = states(self.device)
            _seed(self.seed, self.device)
        elif self.start is not None:
            self.outside = states(self.device)
            restore(self.start, self.device)
        elif self.keep:
            self.start = states(self.device)

    def __exit__(self, *_: object) -> None:
        if self.outside is not None:
            restore(self.outside, self.device)
            self.outside = None


def states(device: torch.device) -> States:
    """The random states as they are."""
    return torch.get_rng_state(), _module(device).get_rng_state(device) if device.type != "cpu" else None


def restore(kept: States, device: torch.device) -> None:
    """Set the random states to what `states` gave."""
    torch.set_rng_state(kept[0])
    if kept[1] is not None:
        _module(device).set_rng_state(kept[1], device)


@contextmanager
def undisturbed(device: torch.device) -> Generator[None]:
    """What is drawn within the block changes no random numbers after it."""
    kept = states(device)
    try:
        yield
    finally:
        restore(kept, device)


def _seed(seed: int, device: torch.device) -> None:
    # torch.manual_seed would seed every accelerator of the machine, and only one is put back
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        _module(device).manual_seed(seed)


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)
