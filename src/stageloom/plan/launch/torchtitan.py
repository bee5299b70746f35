"""torchtitan's TOML, and PyTorch's schedule CSV beside it for the schedules that torchtitan has no name for.

Source of names: github.com/pytorch/torchtitan at v0.2.2, torchtitan/config/job_config.py,
distributed/pipeline_parallel.py and models/*/__init__.py. Since February 2026 torchtitan is configured in Python; the
keys of [parallelism] are there the fields of `ParallelismConfig`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from stageloom.plan.launch.job import Job, Launch, comments, recomputed, refuse
from stageloom.plan.model import Model

FRAMEWORK: Final = "torchtitan"
LOOPED: Final = "Interleaved1F1B"
FOLDED: Final = "ZBVZeroBubble"
SCHEDULES: Final = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved-1f1b": LOOPED,
    "breadth-first": "LoopedBFS",
    "interleaved-zb": "InterleavedZeroBubble",
    "zb-v": FOLDED,
    "dualpipev": "DualPipeV",
}
"""Our schedules by PyTorch's names; others go by a CSV, on stages that lie as those of Interleaved1F1B or
ZBVZeroBubble do.
"""

FLAVORS: Final = {
    ("llama3", "8B"): (4096, 32, 32, 8, 14336, 0),
    ("llama3", "70B"): (8192, 80, 64, 8, 28672, 0),
    ("llama3", "405B"): (16384, 126, 128, 8, 53248, 0),
    ("qwen3", "8B"): (4096, 36, 32, 8, 12288, 0),
    ("qwen3", "14B"): (5120, 40, 40, 8, 17408, 0),
    ("qwen3", "32B"): (5120, 64, 64, 8, 25600, 0),
    ("qwen3", "30B-A3B"): (2048, 48, 32, 4, 768, 128),
    ("qwen3", "235B-A22B"): (4096, 94, 64, 4, 1536, 128),
    ("deepseek_v3", "16B"): (2048, 27, 16, 16, 1408, 64),
    ("deepseek_v3", "236B"): (5120, 60, 128, 128, 1536, 160),
    ("deepseek_v3", "671B"): (7168, 61, 128, 128, 2048, 256),
}
"""Models that torchtitan ships: hidden, layers, heads, key-value heads, width of the MLP or of an expert, experts."""


def flavor(model: Model) -> tuple[str, str] | None:
    """The name and flavor under which torchtitan ships a model of these sizes; None where it does not."""
    last = model.layers[-1]
    if last.norm_bias or last.attention.bias or last.attention.output_bias or last.norms != 2 or last.parallel:
        return None
    family = "deepseek_v3" if last.attention.latent else "qwen3" if last.attention.qk_norm == "head" else "llama3"
    width = last.experts.width if last.experts else last.mlp.width if last.mlp else 0
    sizes = (
        model.hidden,
        len(model.layers),
        last.attention.heads,
        last.attention.kv_heads,
        width,
        last.experts.count if last.experts else 0,
    )
    return next((key for key, value in FLAVORS.items() if key[0] == family and value == sizes), None)


def refusal(job: Job, csv: str | None = None, folded: bool = False) -> str | None:
    """Why torchtitan cannot run the job as it is planned; None where it can. csv: the file with the schedule, if
    any.
    """
    at = job.layout
    if flavor(job.model) is None:
        shipped = ", ".join(f"{name} {size}" for name, size in FLAVORS)
        return f"it ships no model of these sizes; it has {shipped}"
    if at.pipeline > 1 and csv is None and job.schedule not in SCHEDULES:
        return f"it has no schedule of this name ({', '.join(SCHEDULES)}), and no schedule CSV was given"
    if at.pipeline > 1 and csv is None and job.schedule in ("zb-v", "dualpipev") and at.chunks != 2:
        return f"{job.schedule} has two chunks a rank, not {at.chunks}"
    if csv is not None and folded and at.chunks != 2:
        return f"of folded placements it knows the V of two chunks a rank, not of {at.chunks}"
    if isinstance(at.recompute, tuple) and len(set(at.recompute)) > 1:
        return "it recomputes all layers alike, and the plan some of them"
    if job.training.dtype == "fp16":
        return "it trains in bf16 or fp8, not in fp16"
    if job.training.scaling == "block":
        return "its fp8 has a factor for each tensor, not for each block"
    if at.tensor > 1 and not at.sequence_parallel:
        return "its tensor parallelism is sequence parallel always"
    shards = 1 if at.zero == 0 else at.data
    if at.tensor * shards % at.expert:
        return (
            f"it spreads experts over tensor {at.tensor} x sharded data {shards}, and {at.expert} does not divide that"
        )
    return None


def launch(job: Job, csv: str | None = None, folded: bool = False) -> Launch:
    """The TOML. csv: the path of a schedule CSV that it points to; folded: whether that schedule's stages lie in a V.

    Raises InputError with the reason where torchtitan cannot run the job (see `refusal`).
    """
    refuse(FRAMEWORK, job, refusal(job, csv, folded))
    notes = tuple(_notes(job))
    text = "# torchtitan up to v0.2.2; run with --job.config-file and the right NGPU\n" + comments(notes)
    for table, values in settings(job, csv, folded).items():
        text += f"\n[{table}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in values.items())
    return Launch(FRAMEWORK, "torchtitan.toml", text, notes)


def settings(job: Job, csv: str | None = None, folded: bool = False) -> dict[str, dict[str, Any]]:
    """The TOML's tables."""
    name, size = flavor(job.model) or ("", "")
    at, training = job.layout, job.training
    recompute = recomputed(job)
    replicas = at.data if at.zero == 0 else 1  # FSDP shards over the rest
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": replicas,
        "data_parallel_shard_degree": at.data // replicas,
        "fsdp_reshard_after_forward": "always" if at.zero == 3 else "never",
        "tensor_parallel_degree": at.tensor,
        "expert_parallel_degree": at.expert,
        "expert_tensor_parallel_degree": 1,
        "pipeline_parallel_degree": at.pipeline,
    }
    if at.pipeline > 1:
        parallelism |= {
            "pipeline_parallel_schedule": _schedule(job, csv, folded),
            "pipeline_parallel_microbatch_size": at.microbatch,
            "module_fqns_per_model_part": modules(at.layers),
        }
    if csv is not None and at.pipeline > 1:
        parallelism["pipeline_parallel_schedule_csv"] = csv
    tables: dict[str, dict[str, Any]] = {
        "model": {"name": name, "flavor": size},
        "training": {
            "seq_len": training.sequence,
            "local_batch_size": training.global_batch // at.data if at.pipeline > 1 else at.microbatch,
            "global_batch_size": training.global_batch,
            "mixed_precision_param": "bfloat16",
        },
        "parallelism": parallelism,
        "activation_checkpoint": {"mode": recompute},
    }
    if training.dtype == "fp8":
        tables["model"]["converters"] = ["quantize.linear.float8"]
    if training.tokens is not None:
        tables["training"]["steps"] = round(training.tokens / training.step_tokens)
    return tables


def _schedule(job: Job, csv: str | None, folded: bool) -> str:
    if csv is None:
        return SCHEDULES[job.schedule]
    return FOLDED if folded else LOOPED if job.layout.chunks > 1 else "1F1B"


def modules(layers: tuple[int, ...]) -> list[list[str]]:
    """The modules of each stage by torchtitan's names."""
    found: list[list[str]] = []
    first = 0
    for count in layers:
        found.append([f"layers.{index}" for index in range(first, first + count)])
        first += count
    found[0].insert(0, "tok_embeddings")
    found[-1] += ["norm", "output"]
    return found


def _toml(value: object) -> str:
    """A value as TOML writes it; JSON's texts, numbers, truths and lists are TOML's too."""
    return json.dumps(value, ensure_ascii=False)


def _notes(job: Job) -> Iterator[str]:
    yield "add what the plan does not decide: data, tokenizer, learning rate, checkpoints"
    if job.layout.zero == 1:
        yield "torchtitan has no ZeRO stage 1: gradients are sharded too (stage 2)"
    if job.model.predicted:
        yield "torchtitan trains this model without its multi-token prediction"
    if job.training.optimizer != "adam":
        yield f"torchtitan's optimiser is AdamW; {job.training.optimizer} is not set"
    if job.layout.recompute == "selective":
        yield "torchtitan's selective recomputation keeps other activations (selective_ac_option) than the plan's"
