"""Arguments of Megatron-LM's `pretrain_gpt.py`.

Source of names and constraints: github.com/NVIDIA/Megatron-LM at d98e8a6 (August 2026), megatron/training/arguments.py,
core/transformer/transformer_config.py and pipeline_parallel_layer_layout.py, core/pipeline_parallel/schedules.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Final

from stageloom.plan.launch.job import Job, Launch, comments, recomputed, refuse
from stageloom.plan.model import Attention, Experts, Layer

FRAMEWORK: Final = "Megatron-LM"
SCHEDULES: Final = ("1f1b", "interleaved-1f1b")


def refusal(job: Job) -> str | None:
    """Why Megatron-LM cannot run the job as it is planned; None where it can."""
    return _schedule_refusal(job) or _layout_refusal(job) or _model_refusal(job) or _optimizer_refusal(job)


def _schedule_refusal(job: Job) -> str | None:
    pipeline, chunks = job.layout.pipeline, job.layout.chunks
    if pipeline > 1 and job.schedule not in SCHEDULES:
        return f"of pipeline schedules it has 1f1b and interleaved-1f1b alone, not {job.schedule}"
    if job.schedule == "1f1b" and chunks > 1:
        return f"1f1b has one chunk a rank, not {chunks}"
    if job.schedule == "interleaved-1f1b" and chunks > 1 and job.microbatches % pipeline:
        return (
            f"its interleaved schedule takes micro-batches in groups of as many as there are pipeline ranks, and "
            f"{job.microbatches} are no multiple of {pipeline}"
        )
    return None


def _layout_refusal(job: Job) -> str | None:
    at = job.layout
    sizes = sorted({group.gpus_per_node for group in job.cluster.groups})
    if len(sizes) > 1:
        return f"it starts as many processes on each node, and the cluster has nodes of {' and '.join(map(str, sizes))}"
    if isinstance(at.recompute, tuple) and len(set(at.recompute)) > 1:
        return "it recomputes all layers alike, and the plan some of them"
    if at.tensor * at.data % at.expert:
        return f"experts over {at.expert} GPUs do not divide tensor {at.tensor} x data {at.data}"
    if at.tensor > 1 and not at.sequence_parallel and any(layer.experts is not None for layer in job.model.layers):
        return "with experts its tensor parallelism is sequence parallel always"
    if at.chunks > 1 and at.pipeline == 1:
        return f"it cuts a rank's layers into chunks only in a pipeline, and here are {at.chunks} chunks on one rank"
    return None


def _model_refusal(job: Job) -> str | None:
    layers = job.model.layers
    attention = {layer.attention for layer in layers}
    if len(attention) > 1:
        return "its layers have one kind of attention, and the model's differ"
    one = layers[0]
    if any(layer.parallel for layer in layers):
        return "its layers have attention and MLP one after the other, and the model's side by side"
    if one.norms != 2:
        return f"its layers have two norms, and the model's {one.norms}"
    if one.attention.qk_norm == "all":
        return "its norms on queries and keys are for one head's width, and the model's for all heads'"
    kinds = {layer.experts for layer in layers if layer.experts is not None}
    if len(kinds) > 1 or len({layer.mlp for layer in layers if layer.mlp is not None}) > 1:
        return "its MLPs are all of one width and its experts too, and the model's differ"
    mlp = next((layer.mlp for layer in layers if layer.mlp is not None), None)
    if mlp is not None and mlp.bias != one.attention.output_bias:
        return "it has biases on both MLP and attention's output, or on neither"
    if job.model.head_bias:
        return "its head has no bias, and the model's has"
    return None


def _optimizer_refusal(job: Job) -> str | None:
    if job.training.optimizer == "adam-bf16" and job.layout.zero == 0:
        return "its Adam keeps moments in 16 bits only where they are sharded; plan with ZeRO 1, or with adam"
    return None


def launch(job: Job) -> Launch:
    """The command that runs the job. Raises InputError with the reason where Megatron-LM cannot (see `refusal`)."""
    refuse(FRAMEWORK, job, refusal(job))
    nodes, per_node = job.cluster.nodes, job.cluster.gpus_per_node
    lines = [f"torchrun --nproc-per-node {per_node} --nnodes {nodes} pretrain_gpt.py"]
    lines += [" ".join(shlex.quote(word) for word in words) for words in arguments(job)]
    notes = tuple(_notes(job))
    text = comments(notes) + _environment(job) + " \\\n    ".join(lines) + "\n"
    return Launch(FRAMEWORK, "megatron.sh", text, notes)


def _environment(job: Job) -> str:
    """One hardware queue, so that tensor-parallel collectives start in order; Megatron-FSDP wants more than one."""
    return "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" if job.layout.tensor > 1 and job.layout.zero < 2 else ""


def arguments(job: Job) -> list[tuple[str, ...]]:
    """The arguments, each with its values, model first."""
    return [*_model(job), *_training(job), *_parallel(job)]


def _model(job: Job) -> Iterator[tuple[str, ...]]:
    model, layer = job.model, job.model.layers[0]
    yield "--num-layers", str(len(model.layers))
    yield "--hidden-size", str(model.hidden)
    yield from _attention(layer.attention)
    yield from _mlps(job)
    yield "--normalization", "LayerNorm" if layer.norm_bias else "RMSNorm"
    yield "--position-embedding-type", "learned_absolute" if model.positions else "rope"
    yield "--max-position-embeddings", str(max(job.training.sequence, model.positions))
    if not layer.attention.output_bias:
        yield ("--disable-bias-linear",)
        if layer.attention.bias:
            yield ("--add-qkv-bias",)
    if not model.tied:
        yield ("--untie-embeddings-and-output-weights",)
    yield "--vocab-size", str(model.vocabulary)
    # Left out they are 0.1, and the plan's times and memory know of no masks.
    yield "--attention-dropout", "0"
    yield "--hidden-dropout", "0"
    if model.predicted:
        yield "--mtp-num-layers", str(model.predicted)


def _attention(a: Attention) -> Iterator[tuple[str, ...]]:
    yield "--num-attention-heads", str(a.heads)
    if a.latent is not None:
        yield ("--multi-latent-attention",)
        if a.latent.query_rank is not None:
            yield "--q-lora-rank", str(a.latent.query_rank)
        yield "--kv-lora-rank", str(a.latent.kv_rank)
        yield "--qk-head-dim", str(a.latent.nope_width)
        yield "--qk-pos-emb-head-dim", str(a.latent.rope_width)
        yield "--v-head-dim", str(a.value_width)
        yield ("--qk-layernorm",)
        return
    if a.kv_heads != a.heads:
        yield ("--group-query-attention",)
        yield "--num-query-groups", str(a.kv_heads)
    yield "--kv-channels", str(a.head_width)
    if a.qk_norm == "head":
        yield ("--qk-layernorm",)
    if a.window is not None:
        yield "--window-size", f"{a.window - 1},0"


def _mlps(job: Job) -> Iterator[tuple[str, ...]]:
    layers = job.model.layers
    mlp = next((layer.mlp for layer in layers if layer.mlp is not None), None)
    experts = next((layer.experts for layer in layers if layer.experts is not None), None)
    yield "--ffn-hidden-size", str(mlp.width if mlp is not None else experts.width if experts is not None else 0)
    if (mlp is not None and mlp.gated) or (experts is not None and experts.gated):
        yield ("--swiglu",)
    if experts is not None:
        yield from _experts(experts, layers)


def _experts(experts: Experts, layers: tuple[Layer, ...]) -> Iterator[tuple[str, ...]]:
    yield "--num-experts", str(experts.count)
    yield "--moe-router-topk", str(experts.per_token)
    yield "--moe-ffn-hidden-size", str(experts.width)
    yield "--moe-layer-freq", _frequency([int(layer.experts is not None) for layer in layers])
    if experts.shared:
        yield "--moe-shared-expert-intermediate-size", str(experts.shared * experts.shared_width)
        if experts.shared_gate:
            yield ("--moe-shared-expert-gate",)
    if experts.groups > 1:
        yield "--moe-router-num-groups", str(experts.groups)
        yield "--moe-router-group-topk", str(experts.groups_per_token)
    yield "--moe-token-dispatcher-type", "alltoall"
    yield ("--moe-grouped-gemm",)


def _frequency(sparse: list[int]) -> str:
    """Which layers have experts, as Megatron-LM reads it: `([0]*3+[1]*58)`."""
    runs: list[list[int]] = []
    for value in sparse:
        if runs and runs[-1][0] == value:
            runs[-1][1] += 1
        else:
            runs.append([value, 1])
    return "(" + "+".join(f"[{value}]*{count}" for value, count in runs) + ")"


def _training(job: Job) -> Iterator[tuple[str, ...]]:
    training, at = job.training, job.layout
    yield "--seq-length", str(training.sequence)
    yield "--micro-batch-size", str(at.microbatch)
    yield "--global-batch-size", str(training.global_batch)
    if training.tokens is not None:
        yield "--train-samples", str(round(training.tokens / training.sequence))
    yield ("--fp16",) if training.dtype == "fp16" else ("--bf16",)
    if training.dtype == "fp8":
        yield "--fp8-format", "hybrid"
        # Of its recipes the default, delayed scaling, does not go together with selective recomputation.
        yield "--fp8-recipe", "blockwise" if training.scaling == "block" else "tensorwise"
    yield "--optimizer", "sgd" if training.optimizer == "sgd" else "adam"
    if training.optimizer == "adam-bf16":
        yield ("--use-precision-aware-optimizer",)
        yield "--exp-avg-dtype", "bf16"
        yield "--exp-avg-sq-dtype", "bf16"
    if training.gradients == "bf16":
        yield ("--grad-reduce-in-bf16",)


def _parallel(job: Job) -> Iterator[tuple[str, ...]]:
    at = job.layout
    yield "--tensor-model-parallel-size", str(at.tensor)
    if at.tensor > 1 and at.sequence_parallel:
        yield ("--sequence-parallel",)
    yield "--pipeline-model-parallel-size", str(at.pipeline)
    if at.pipeline * at.chunks > 1 and not job.even:
        yield "--pipeline-model-parallel-layout", layer_layout(at.layers, job.model.predicted)
    elif at.chunks > 1:
        yield "--num-virtual-stages-per-pipeline-rank", str(at.chunks)
    if any(layer.experts is not None for layer in job.model.layers):
        yield "--expert-model-parallel-size", str(at.expert)
        yield "--expert-tensor-parallel-size", "1"
    if at.zero:
        yield ("--use-distributed-optimizer",)
        yield ("--overlap-grad-reduce",)
        yield ("--overlap-param-gather",)
    if at.zero > 1:
        yield ("--use-megatron-fsdp",)
        yield "--data-parallel-sharding-strategy", "optim_grads" if at.zero == 2 else "optim_grads_params"
        yield "--ckpt-format", "fsdp_dtensor"
    recompute = recomputed(job)
    if recompute != "none":
        yield "--recompute-granularity", recompute
    if recompute == "selective":
        yield "--recompute-modules", *_modules(job)
    if recompute == "full":
        yield "--recompute-method", "uniform"
        yield "--recompute-num-layers", "1"


def _modules(job: Job) -> list[str]:
    """What it has of the plan's selective recomputation: outputs of norms and of activations, and the queries, keys
    and values of latent attention. Left out, it is attention's core, which fused attention makes again anyway."""
    layers = job.model.layers
    found = ["layernorm"]
    found += ["moe_act"] * any(layer.experts is not None for layer in layers)
    found += ["mlp"] * any(layer.mlp is not None for layer in layers)
    return found + ["mla_up_proj"] * (layers[0].attention.latent is not None)


def layer_layout(layers: tuple[int, ...], predicted: int = 0) -> str:
    """The layout string of these layers a stage: E embedding, t a layer, m multi-token prediction, L loss, | between
    stages.
    """
    stages = [f"t*{count}" if count else "" for count in layers]
    stages[0] = "E" + stages[0]
    stages[-1] += "m" * predicted + "L"
    return "|".join(stages)


def _notes(job: Job) -> Iterator[str]:
    yield "add what the plan does not decide: data, tokenizer, learning rate, checkpoints"
    if job.cluster.nodes > 1:
        yield "tell torchrun on each node where to meet: --rdzv-backend, --rdzv-endpoint, or --node-rank, --master-addr"
    if not job.model.positions:
        yield "the rotary base and the norms' epsilon are the model's own: --rotary-... arguments, --norm-epsilon"
    if any(layer.experts is not None for layer in job.model.layers):
        yield "the router's score function, scaling and balancing are the model's own: --moe-router-... arguments"
    padded = 128 * job.layout.tensor
    if job.model.vocabulary % padded:
        yield f"Megatron-LM pads the vocabulary to a multiple of {padded}"
    if job.layout.zero > 1:
        yield "ZeRO stages 2 and 3 are Megatron-FSDP, which wants CUDA_DEVICE_MAX_CONNECTIONS unset"
    yield from _recompute_notes(job)
    if job.training.communication_share:
        yield "the share of multiprocessors for all-to-alls is for the dispatcher to set (DeepEP, say)"


def _recompute_notes(job: Job) -> Iterator[str]:
    if recomputed(job) != "selective":
        return
    layers = job.model.layers
    if any(layer.mlp is not None for layer in layers):
        yield (
            "Megatron-LM makes whole dense MLPs again, not the outputs of their activations alone: less memory than "
            "planned, and more time"
        )
    sparse = next((layer for layer in layers if layer.experts is not None), None)
    if sparse is not None and sparse.experts is not None:
        kept = ["attention's input norm"] * (sparse.attention.latent is None)
        kept += ["shared experts' activations"] * (sparse.experts.shared > 0)
        if kept:
            yield f"Megatron-LM keeps outputs of {' and '.join(kept)}, which the plan recomputes: leave memory for them"
