"""How a model is trained: sequence, batch, precision, what is sharded, what is recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from stageloom.errors import InputError

Dtype = Literal["bf16", "fp16", "fp8"]
Recompute = Literal["none", "selective", "full"]
Optimizer = Literal["adam", "adam-bf16", "sgd"]
Scaling = Literal["tensor", "block"]

DTYPES: Final = get_args(Dtype)
RECOMPUTES: Final = get_args(Recompute)
SCALINGS: Final = get_args(Scaling)
OPTIMIZERS: Final[dict[str, int]] = {"adam": 12, "adam-bf16": 8, "sgd": 8}
"""Bytes of state a parameter, the FP32 master copy included: two FP32 moments, two BF16 ones (DeepSeek-V3, section
3.3.3), one FP32.
"""

MOST_SEQUENCES: Final = 1_000_000
"""More sequences in one step than anybody trains with: whoever gives more means tokens."""


@dataclass(frozen=True, slots=True)
class Training:
    """One training job.

    sequence: tokens in a sequence; global_batch: SEQUENCES in a step, over all GPUs; microbatch: sequences in a
    micro-batch, None where the search chooses. dtype: of matrix products and of the parameters they read. optimizer:
    see `OPTIMIZERS`; gradients: type in which they are summed. zero: 0 nothing sharded over data-parallel ranks, 1
    optimiser state, 2 and gradients, 3 and parameters. recompute: nothing; the attention core ("selective", arXiv
    2205.05198); whole layers ("full"); or one of these a layer of the model. sequence_parallel: norms and residuals
    cut along the sequence over the tensor-parallel ranks. communication_share: share of the GPU's multiprocessors
    that all-to-alls take (DeepSeek-V3: 20 of 132). tokens: how many the run is to see, None without a target. scaling:
    of 8-bit inputs, one factor a tensor (Transformer Engine's delayed and current scaling) or one a block of some 128
    values (DeepSeek-V3), which takes longer.
    Raises InputError naming the field, its value and what would be right.
    """

    sequence: int
    global_batch: int
    microbatch: int | None = None
    dtype: Dtype = "bf16"
    optimizer: Optimizer = "adam"
    gradients: Literal["fp32", "bf16"] = "fp32"
    zero: int = 1
    recompute: Recompute | tuple[Recompute, ...] = "none"
    sequence_parallel: bool = True
    communication_share: float = 0.0
    tokens: float | None = None
    scaling: Scaling = "tensor"

    def __post_init__(self) -> None:
        for key, value in (("sequence", self.sequence), ("global_batch", self.global_batch)):
            if value < 1:
                raise InputError(f"{key}: {value}; a whole number of at least 1 is needed")
        if self.global_batch > MOST_SEQUENCES:
            raise InputError(self._too_many())
        if self.microbatch is not None and self.microbatch < 1:
            raise InputError(
                f"microbatch: {self.microbatch}; a whole number of at least 1 is needed, or none to search"
            )
        if self.microbatch is not None and self.global_batch % self.microbatch:
            below = self.global_batch // self.microbatch * self.microbatch
            near = " or ".join(str(n) for n in (below, below + self.microbatch) if n)
            raise InputError(
                f"global_batch: {self.global_batch} sequences cannot be cut into micro-batches of {self.microbatch}; "
                f"nearest: {near}"
            )
        if self.zero not in (0, 1, 2, 3):
            raise InputError(f"zero: {self.zero}; a stage of ZeRO is needed: 0, 1, 2 or 3")
        if not 0 <= self.communication_share < 1:
            raise InputError(f"communication_share: {self.communication_share}; a share from 0 to below 1 is needed")
        if self.scaling != "tensor" and self.dtype != "fp8":
            raise InputError(f"scaling: {self.scaling}; only dtype fp8 scales its inputs, and this is {self.dtype}")
        if self.tokens is not None and not self.tokens >= self.step_tokens:
            raise InputError(f"tokens: {self.tokens:g} are fewer than the {self.step_tokens:,} of one step")

    def _too_many(self) -> str:
        meant = self.global_batch // self.sequence
        hint = f"; {self.global_batch:,} tokens would be {meant:,} sequences of {self.sequence}" if meant else ""
        return f"global_batch: {self.global_batch:,}; it counts sequences, at most {MOST_SEQUENCES:,}{hint}"

    @property
    def step_tokens(self) -> int:
        """Tokens in one step."""
        return self.sequence * self.global_batch
