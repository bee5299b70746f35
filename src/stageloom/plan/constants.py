"""What is reached of the hardware's nominal figures: few numbers, fitted once, used for every model and cluster.

The table is `data/plan_constants.json`: for each number its value, unit, meaning and the data that it was fitted on.
`benchmarks/fit_planning.py` writes it. The fitted ones come from A100s; shares and times are taken over to other GPUs
as they are, unless `constants_for` knows better.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Constants:
    """Shares of nominal figures, and times in seconds.

    product_share, product_share_fp8, product_share_blocks: of the peak, by a large matrix product in 16 bits, in 8 bits
    that are scaled by tensor, and by block; product_tiles: tiles of 128 x 128 results of depth 4096 at which a product
    reaches half of that. memory_share: of the memory's bandwidth, by kernels that only move data; score_share: by
    softmax and dropout of attention's scores (exponentials, sums, random numbers). attention_forward,
    attention_backward: of the peak, by fused attention. kernel: what each kernel adds for starting and draining.
    host_forward, host_backward: the host's time to launch a layer's kernels; host_collective: more for each
    tensor-parallel collective; host_softmax: more where the softmax falls back to several kernels; host_head: for head
    and loss. inside_share, network_share: of a link's bandwidth; exchange_share: of either, by all-to-alls; collective:
    start of a collective. message: what a message between stages takes beside its bytes. step: once a step.
    """

    product_share: float
    product_share_fp8: float
    product_share_blocks: float
    product_tiles: float
    memory_share: float
    score_share: float
    attention_forward: float
    attention_backward: float
    kernel: float
    host_forward: float
    host_backward: float
    host_collective: float
    host_softmax: float
    host_head: float
    inside_share: float
    network_share: float
    exchange_share: float
    collective: float
    message: float
    step: float


@cache
def fitted() -> Constants:
    """The table's constants."""
    table = json.loads((files("stageloom") / "data" / "plan_constants.json").read_text(encoding="utf-8"))
    return Constants(**{field.name: float(table["constants"][field.name]["value"]) for field in fields(Constants)})
