"""A training job from YAML or from flags, and whether it agrees with the model and the cluster.

The keys, with what those left out mean:

    sequence: 4096          # needed
    global_batch: 15360     # needed; sequences, not tokens
    microbatch: 1           # left out: the search chooses
    dtype: bf16             # fp16, fp8
    optimizer: adam         # adam-bf16, sgd
    gradients: fp32         # bf16
    zero: 1                 # 0 to 3
    recompute: none         # selective, full, or a list with one of them for each layer
    sequence_parallel: true
    communication_share: 0  # of the GPU's multiprocessors
    tokens: 14.8T           # how many the run is to see; left out: no target
    scaling: tensor         # block; of 8-bit inputs
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, cast

from stageloom.errors import InputError
from stageloom.files import read_mapping, short
from stageloom.plan.cluster import Cluster
from stageloom.plan.fields import Fields, at, fields
from stageloom.plan.model import Model
from stageloom.plan.quantities import TOKENS
from stageloom.plan.training import (
    DTYPES,
    OPTIMIZERS,
    RECOMPUTES,
    SCALINGS,
    Dtype,
    Optimizer,
    Recompute,
    Scaling,
    Training,
)


def load_training(path: str | Path, **override: Any) -> Training:
    """The job that a YAML or JSON file describes; `override` replaces keys, None leaves them alone.

    Raises InputError naming the file, the key, its value and what would be right.
    """
    if os.path.isdir(path):
        raise InputError(f"{path}: is a folder; a training job's YAML file is needed")
    return training_from(read_mapping(path, "sequence: 4096"), str(path), **override)


def training_from(data: dict[str, Any], place: str, **override: Any) -> Training:
    """The job a mapping describes. Raises InputError with `place`, key and value."""
    job = fields({**data, **{key: value for key, value in override.items() if value is not None}}, place)
    values: dict[str, Any] = {
        "sequence": job.whole("sequence", most=100_000_000),
        "global_batch": job.whole("global_batch", most=10**13),
        "microbatch": job.maybe_whole("microbatch"),
        "dtype": cast("Dtype", job.choice("dtype", DTYPES, "bf16")),
        "optimizer": cast("Optimizer", job.choice("optimizer", OPTIMIZERS, "adam")),
        "gradients": cast("Literal['fp32', 'bf16']", job.choice("gradients", ("fp32", "bf16"), "fp32")),
        "zero": job.whole("zero", 1, least=0, most=3),
        "recompute": _recompute(job),
        "sequence_parallel": job.truth("sequence_parallel", True),
        "communication_share": job.number("communication_share", 0.0, least=0.0, most=1.0),
        "tokens": job.amount("tokens", TOKENS) if job.has("tokens") else None,
        "scaling": cast("Scaling", job.choice("scaling", SCALINGS, "tensor")),
    }
    job.done()
    with at(place):
        return Training(**values)


def _recompute(job: Fields) -> Recompute | tuple[Recompute, ...]:
    if not isinstance(job.data.get("recompute"), list):
        return cast("Recompute", job.choice("recompute", RECOMPUTES, "none"))
    chosen = job.list("recompute")
    for value in chosen:
        if value not in RECOMPUTES:
            raise job.wrong(
                "recompute", f"a list of {', '.join(RECOMPUTES)} is needed, and {short(value)} is none of them"
            )
    return tuple(chosen)


def agree(training: Training, model: Model, cluster: Cluster | None = None) -> None:
    """Whether a job, a model and a cluster go together. Raises InputError saying which two do not, and what would."""
    if model.context is not None and training.sequence > model.context:
        raise InputError(
            f"sequence: {training.sequence:,}; {model.name} has a context of {model.context:,} tokens: shorten the "
            "sequence, or give the model a longer context"
        )
    if isinstance(training.recompute, tuple) and len(training.recompute) != len(model.layers):
        raise InputError(
            f"recompute: a list of {len(training.recompute)}; {model.name} has {len(model.layers)} layers, "
            "so as many entries are needed"
        )
    if cluster is not None and training.dtype not in cluster.gpu.peak:
        able = f"{', '.join(cluster.gpu.peak)} alone" if cluster.gpu.peak else "no type that is the same in all of them"
        raise InputError(f"dtype: {training.dtype}; {cluster.gpu.name} has fast products for {able}")
