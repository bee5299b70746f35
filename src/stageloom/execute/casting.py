"""Autocast on and off within a block: backwards run without, and forwards as they were meant to."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaks unknown types)
from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

AS_IT_IS: AbstractContextManager[None] = nullcontext()


def no_autocast(device: str) -> AbstractContextManager[Any]:
    """Autocast off for a type of device: a backward has the dtypes of its forward already. Costs nothing where it is
    off anyway."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else AS_IT_IS


class Casting:
    """What autocast is set to at the moment, for a forward that runs where it is off. `on()` is a block of it."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.enabled = torch.is_autocast_enabled(device)
        self.dtype = torch.get_autocast_dtype(device)
        self.cached = torch.is_autocast_cache_enabled()

    def on(self) -> AbstractContextManager[Any]:
        """Autocast as it was."""
        if not self.enabled:
            return no_autocast(self.device)
        return torch.autocast(self.device, dtype=self.dtype, enabled=True, cache_enabled=self.cached)
