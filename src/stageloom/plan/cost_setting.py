"""What a layer's time depends on beside the layer, and the three passes that it is counted in."""

from __future__ import annotations

from dataclasses import dataclass

from stageloom.plan.constants import Constants
from stageloom.plan.cost_work import Machine
from stageloom.plan.software import Software


@dataclass(frozen=True, slots=True)
class Setting:
    """What a layer's time depends on beside the layer. microbatch: in sequences; tensor, expert, sequence_parallel as
    in `Layout`. rotary: positions are turned into queries and keys."""

    on: Machine
    constants: Constants
    software: Software
    hidden: int
    sequence: int
    microbatch: int
    tensor: int
    expert: int
    sequence_parallel: bool
    rotary: bool

    @property
    def tokens(self) -> int:
        return self.sequence * self.microbatch

    @property
    def cut(self) -> int:
        """Over how many GPUs norms and residuals are cut along the sequence."""
        return self.tensor if self.sequence_parallel else 1


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of the three passes: F, the gradient of the input, the gradient of the weights."""

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0

    def __add__(self, other: Pass) -> Pass:
        return Pass(self.forward + other.forward, self.backward + other.backward, self.weight + other.weight)

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.weight
