"""How a training framework runs a layer and a step: practices, not speeds, so nothing here is fitted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal


@dataclass(frozen=True, slots=True)
class Software:
    """What a framework does.

    attention: one fused kernel that never writes the scores (FlashAttention), or "unfused": products, softmax and
    dropout that write and read them. dropout: there are dropouts, which read, write and keep masks. tensor_overlap:
    in backwards, tensor-parallel collectives run beside products that do not wait for them. fused_accumulation: the
    product for a weight gradient adds to the sum itself, rather than a kernel after it. gradient_overlap: gradients
    are reduced across data-parallel ranks while the last backward runs. waits_for_messages: the host waits for every
    message between stages, so that the GPU has nothing queued when it is there. scattered_messages: each
    tensor-parallel rank sends its part of a message over the network, and they gather it beyond ("scatter/gather",
    arXiv 2104.04473, section 4.1). rolling_steps: no rank waits for the others before it updates its parameters and
    starts the next step, so that one step's drain is the next one's warm-up (the zero-bubble paper's optimiser with
    post-validation, arXiv 2401.10241, section 4).
    """

    name: str
    attention: Literal["fused", "unfused"] = "fused"
    dropout: bool = False
    tensor_overlap: bool = True
    fused_accumulation: bool = True
    gradient_overlap: bool = True
    waits_for_messages: bool = False
    scattered_messages: bool = True
    rolling_steps: bool = False


MODERN: Final = Software("modern")
"""Megatron Core, torchtitan and their kin from 2024 on."""

MEGATRON_DEEPSPEED: Final = Software(
    "Megatron-DeepSpeed",
    attention="unfused",
    dropout=True,
    tensor_overlap=False,
    fused_accumulation=False,
    gradient_overlap=False,
    waits_for_messages=True,
)
"""microsoft/Megatron-DeepSpeed as vTrain (arXiv 2312.12391) measured it; DeepSpeed's pipeline engine sends activations
in parts wherever there is tensor parallelism (`is_pipe_partitioned`)."""

MEGATRON_2021: Final = replace(MEGATRON_DEEPSPEED, name="Megatron-LM, 2021")
"""Megatron-LM of arXiv 2104.04473."""

MEGATRON_2022: Final = Software(
    "Megatron-LM, 2022", attention="unfused", dropout=True, gradient_overlap=False, waits_for_messages=True
)
"""Megatron-LM of arXiv 2205.05198, which introduces the overlap of its section 4.2.2; the zero-bubble paper's 1F1B
and interleaved 1F1B run on its successor."""

ZERO_BUBBLE: Final = Software(
    "zero bubble, 2023", attention="unfused", dropout=True, gradient_overlap=False, rolling_steps=True
)
"""The zero-bubble paper's own runtime (arXiv 2401.10241): messages beside compute."""
