"""Launch files: parsed back, they say the plan they were made from; what a framework cannot run is refused by name."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest

from stageloom import build
from stageloom.errors import InputError
from stageloom.plan import Training, gpt, load_cluster, load_model
from stageloom.plan.launch import Job, megatron, torch_csv, torchtitan
from stageloom.plan.model import Attention, Experts, Latent, Layer, Mlp, Model, total_parameters

DATA: Final = Path(__file__).parent / "data" / "plan"
NAMES: Final[dict[str, dict[str, Any]]] = json.loads((DATA / "megatron_arguments.json").read_text())["arguments"]
KEYS: Final[dict[str, list[str]]] = json.loads((DATA / "torchtitan_keys.json").read_text())["tables"]


@dataclass(frozen=True)
class Layout:
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    chunks: int = 1
    microbatch: int = 1
    zero: int = 1
    recompute: Any = "none"
    sequence_parallel: bool = True
    layers: tuple[int, ...] = ()


def job(model: str | Path | Model, schedule: str, batch: int = 128, **layout: Any) -> Job:
    """A job of this model, with layers as even as they get, the first stages fewer."""
    model = model if isinstance(model, Model) else load_model(model)
    at = Layout(**layout)
    stages, count = at.pipeline * at.chunks, len(model.layers)
    if not at.layers:
        at = replace(at, layers=tuple(count * (n + 1) // stages - count * n // stages for n in range(stages)))
    training = Training(min(model.context or 4096, 4096), batch, microbatch=at.microbatch, tokens=1e12)
    return Job(model, load_cluster(f"h800x{at.tensor * at.pipeline * at.data}"), training, at, schedule)


JOBS: Final = {
    "gpt3": job("gpt3-175b", "interleaved-1f1b", 1536, tensor=8, pipeline=8, data=2, chunks=3, recompute="full"),
    "llama-dense": job("llama3-70b", "1f1b", tensor=8, pipeline=4, data=4, zero=1, recompute="selective"),
    "llama-alone": job("llama3-8b", "1f1b", data=8, zero=3),
    "llama-uneven": job("llama3-405b", "interleaved-1f1b", 256, tensor=8, pipeline=16, data=2, chunks=4, zero=0),
    "mixtral": job("mixtral-8x7b", "1f1b", pipeline=4, data=8, expert=8, microbatch=2),
    "deepseek": job("deepseek-v3", "1f1b", 15360, pipeline=16, data=128, expert=64),
    "neat": job(DATA / "configs" / "qwen3-30b-a3b.json", "interleaved-1f1b", pipeline=4, data=4, chunks=2, expert=4),
    "qwen-bias": job(load_model(DATA / "configs" / "qwen2.5-7b.json"), "1f1b", pipeline=4, data=2, tensor=4),
}


def arguments(text: str) -> argparse.Namespace:
    """What Megatron-LM's parser would make of the command: the names, kinds and choices are those of its own parser."""
    command = shlex.split(text.replace("\\\n", " "), comments=True)
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    for name, rule in NAMES.items():
        if rule["kind"] == "flag":
            parser.add_argument(name, action="store_true")
        else:
            parser.add_argument(
                name,
                type={"int": int, "float": float}.get(rule["kind"], str),
                nargs=rule.get("nargs"),
                choices=rule.get("choices"),
            )
    return parser.parse_args(command[command.index("pretrain_gpt.py") + 1 :])


def layers_of(args: argparse.Namespace) -> tuple[int, ...]:
    """Layers on each stage, from the layout string or evenly."""
    text = args.pipeline_model_parallel_layout
    if text is None:
        stages = args.pipeline_model_parallel_size * (args.num_virtual_stages_per_pipeline_rank or 1)
        assert args.num_layers % stages == 0
        return (args.num_layers // stages,) * stages
    plain = re.sub(r"(.)\*(\d+)", lambda found: found[1] * int(found[2]), text)
    stages = plain.split("|")
    assert stages[0].startswith("E")
    assert stages[-1].endswith("m" * (args.mtp_num_layers or 0) + "L")
    return tuple(stage.count("t") for stage in stages)


def model_of(args: argparse.Namespace, name: str) -> Model:
    """The model that the arguments describe."""
    bias = not args.disable_bias_linear
    heads = args.num_attention_heads
    latent = None
    if args.multi_latent_attention:
        latent = Latent(args.q_lora_rank, args.kv_lora_rank, args.qk_pos_emb_head_dim, args.qk_head_dim)
    width = args.kv_channels if latent is None else latent.nope_width + latent.rope_width
    attention = Attention(
        heads,
        args.num_query_groups if args.group_query_attention else heads,
        width,
        width if latent is None else args.v_head_dim,
        bias=bias or args.add_qkv_bias,
        output_bias=bias,
        latent=latent,
        qk_norm="head" if args.qk_layernorm and latent is None else "none",
    )
    norm_bias = args.normalization == "LayerNorm"
    dense = Layer(attention, Mlp(args.ffn_hidden_size, args.swiglu, bias), None, norm_bias)
    layers = [dense] * args.num_layers
    if args.num_experts is not None:
        shared = args.moe_shared_expert_intermediate_size or 0
        experts = Experts(
            args.num_experts,
            args.moe_router_topk,
            args.moe_ffn_hidden_size,
            args.swiglu,
            shared // args.moe_ffn_hidden_size,
            args.moe_ffn_hidden_size if shared else 0,
            args.moe_router_num_groups or 1,
            args.moe_router_group_topk or 1,
        )
        pattern = eval(args.moe_layer_freq, {"__builtins__": {}})  # a Python list expression, as Megatron-LM reads it
        layers = [Layer(attention, None, experts, norm_bias) if sparse else dense for sparse in pattern]
    learned = args.position_embedding_type == "learned_absolute"
    return Model(
        name,
        args.hidden_size,
        args.vocab_size,
        tuple(layers),
        positions=args.max_position_embeddings if learned else 0,
        tied=not args.untie_embeddings_and_output_weights,
        predicted=args.mtp_num_layers or 0,
        norm_bias=norm_bias,
    )


@pytest.mark.parametrize("name", JOBS)
def test_megatrons_arguments_say_the_plan(name: str) -> None:
    plan = JOBS[name]
    launched = megatron.launch(plan)
    args = arguments(launched.text)
    at = plan.layout
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (at.tensor, at.pipeline)
    assert (args.micro_batch_size, args.global_batch_size) == (at.microbatch, plan.training.global_batch)
    assert (args.expert_model_parallel_size or 1) == at.expert
    assert args.sequence_parallel == (at.tensor > 1)
    assert args.use_distributed_optimizer == (at.zero > 0)
    assert args.use_megatron_fsdp == (at.zero > 1)
    assert (args.recompute_granularity or "none") == at.recompute
    assert args.seq_length == plan.training.sequence
    assert args.train_samples * args.seq_length == pytest.approx(plan.training.tokens, rel=1e-6)
    assert layers_of(args) == at.layers
    model = model_of(args, plan.model.name)
    assert model.layers == plan.model.layers
    assert total_parameters(model) == total_parameters(plan.model)
    assert (model.tied, model.predicted) == (plan.model.tied, plan.model.predicted)
    # Megatron-LM's own default is 0.1, and plans know of no dropout.
    assert (args.attention_dropout, args.hidden_dropout) == (0.0, 0.0)
    # Megatron-LM refuses tensor parallelism without it, and its FSDP with it.
    assert launched.text.startswith("".join(f"# {note}\n" for note in launched.notes))
    assert ("export CUDA_DEVICE_MAX_CONNECTIONS=1\n" in launched.text) == (at.tensor > 1 and at.zero < 2)
    nodes = re.search(r"^torchrun --nproc-per-node (\d+) --nnodes (\d+) ", launched.text, re.MULTILINE)
    assert nodes is not None
    assert int(nodes[1]) * int(nodes[2]) == plan.cluster.gpus


def test_megatrons_layout_string() -> None:
    assert megatron.layer_layout((1, 2, 2, 1), predicted=1) == "Et*1|t*2|t*2|t*1mL"
    assert megatron.layer_layout((0, 3)) == "E|t*3L"


MEGATRON_REFUSES: Final = [
    (job("deepseek-v3", "dualpipe", 240, pipeline=8), "it has 1f1b and interleaved-1f1b alone, not dualpipe"),
    (job("llama3-8b", "zb-h1", pipeline=4, data=2), "it has 1f1b and interleaved-1f1b alone, not zb-h1"),
    (job("llama3-8b", "interleaved-1f1b", 12, pipeline=8, chunks=2), "12 are no multiple of 8"),
    (job("llama3-8b", "1f1b", pipeline=4, chunks=2, data=2), "1f1b has one chunk a rank, not 2"),
    (job("llama3-8b", "1f1b", data=8, recompute=("full",) * 16 + ("none",) * 16), "it recomputes all layers alike"),
    (job(load_model(DATA / "configs" / "gpt-neox-20b.json"), "1f1b", pipeline=4, data=2), "the model's side by side"),
    (job(load_model(DATA / "configs" / "phi-1.json"), "1f1b", data=8), "the model's side by side"),
    (job("mixtral-8x7b", "1f1b", tensor=2, data=4, sequence_parallel=False), "with experts its tensor parallelism is"),
    (job("mixtral-8x7b", "1f1b", data=4, expert=8), "experts over 8 GPUs do not divide tensor 1 x data 4"),
]  # fmt: skip


def test_megatrons_moments_in_16_bits_are_sharded() -> None:
    plan = JOBS["llama-uneven"]
    plan = replace(plan, training=replace(plan.training, optimizer="adam-bf16"))
    with pytest.raises(InputError, match=r"its Adam keeps moments in 16 bits only where they are sharded"):
        megatron.launch(plan)
    args = arguments(megatron.launch(replace(plan, layout=replace(plan.layout, zero=1))).text)  # type: ignore[type-var]
    assert args.use_precision_aware_optimizer
    assert args.use_distributed_optimizer


@pytest.mark.parametrize(
    ("name", "modules", "notes"),
    [
        ("llama-dense", ["layernorm", "mlp"], ["whole dense MLPs"]),
        ("mixtral", ["layernorm", "moe_act"], ["attention's input norm, which"]),
        ("deepseek", ["layernorm", "moe_act", "mlp", "mla_up_proj"], ["whole dense MLPs", "of shared experts'"]),
    ],
)
def test_megatrons_selective_recomputation_is_the_plans_as_far_as_it_goes(
    name: str, modules: list[str], notes: list[str]
) -> None:
    """Unnamed, it would be attention's core, of which fused attention keeps nothing; and its fp8 by delayed scaling
    refuses norms."""
    plan = JOBS[name]
    plan = replace(
        plan,
        layout=replace(plan.layout, recompute="selective"),  # type: ignore[type-var]
        training=replace(plan.training, dtype="fp8"),
    )
    launched = megatron.launch(plan)
    args = arguments(launched.text)
    assert (args.recompute_granularity, args.recompute_modules) == ("selective", modules)
    assert (args.fp8_format, args.fp8_recipe) == ("hybrid", "tensorwise")
    blocks = replace(plan, training=replace(plan.training, scaling="block"))
    assert arguments(megatron.launch(blocks).text).fp8_recipe == "blockwise"
    said = [note for note in launched.notes if note.startswith("Megatron-LM makes") or "recomputes" in note]
    assert len(said) == len(notes)
    assert all(part in note for part, note in zip(notes, said, strict=True)), said


def test_what_megatron_leaves_to_the_user() -> None:
    """The plan knows neither the rotary base nor the router's ways; both are Megatron-LM's defaults unless given."""
    for name, rotary, router in (("llama-dense", True, False), ("mixtral", True, True), ("gpt3", False, False)):
        notes = " ".join(megatron.launch(JOBS[name]).notes)
        assert ("--rotary-" in notes) == rotary
        assert ("--moe-router-" in notes) == router
        assert ("--rdzv-endpoint" in notes) == (JOBS[name].cluster.nodes > 1)
    assert "--rdzv-endpoint" not in " ".join(megatron.launch(JOBS["llama-alone"]).notes)


@pytest.mark.parametrize(("plan", "reason"), MEGATRON_REFUSES, ids=[reason[:50] for _, reason in MEGATRON_REFUSES])
def test_what_megatron_cannot_run(plan: Job, reason: str) -> None:
    with pytest.raises(InputError) as caught:
        megatron.launch(plan)
    assert str(caught.value).startswith(f"Megatron-LM cannot run {plan.model.name} with {plan.schedule}: ")
    assert str(caught.value).endswith(reason) or reason in str(caught.value)


TITAN: Final = {
    name: JOBS[name] for name in ("llama-dense", "llama-alone", "llama-uneven", "deepseek", "neat")
} | {
    "folded": job("llama3-8b", "zb-v", 64, pipeline=4, data=2, chunks=2),
    "dualpipev": job("llama3-70b", "dualpipev", 64, tensor=2, pipeline=4, data=2, chunks=2, zero=3),
}  # fmt: skip


@pytest.mark.parametrize("name", TITAN)
def test_torchtitans_toml_says_the_plan(name: str) -> None:
    plan = TITAN[name]
    launched = torchtitan.launch(plan)
    assert all(f"\n# {note}\n" in launched.text for note in launched.notes)
    at, tables = plan.layout, tomllib.loads(launched.text)
    for table, values in tables.items():
        assert set(values) <= set(KEYS[table]), f"[{table}] has keys that torchtitan does not know"
    degrees = tables["parallelism"]
    assert degrees["tensor_parallel_degree"] == at.tensor
    assert degrees["pipeline_parallel_degree"] == at.pipeline
    assert degrees["data_parallel_replicate_degree"] * degrees["data_parallel_shard_degree"] == at.data
    assert (degrees["data_parallel_replicate_degree"] == at.data) == (at.zero == 0)
    assert degrees["expert_parallel_degree"] == at.expert
    training = tables["training"]
    assert (training["global_batch_size"], training["seq_len"]) == (plan.training.global_batch, plan.training.sequence)
    assert training["steps"] * plan.training.step_tokens == pytest.approx(plan.training.tokens, rel=1e-2)
    if at.pipeline > 1:
        # torchtitan works the number of micro-batches out of these, and accumulates gradients over what is left
        assert training["local_batch_size"] // degrees["pipeline_parallel_microbatch_size"] == plan.microbatches
        assert training["local_batch_size"] * at.data == training["global_batch_size"]
        stages = degrees["module_fqns_per_model_part"]
        assert tuple(sum(part.startswith("layers.") for part in stage) for stage in stages) == at.layers
        parts = [part for stage in stages for part in stage]
        count = len(plan.model.layers)
        assert parts == ["tok_embeddings", *(f"layers.{n}" for n in range(count)), "norm", "output"]
    assert torchtitan.flavor(plan.model) == (tables["model"]["name"], tables["model"]["flavor"])


@pytest.mark.torch
@pytest.mark.parametrize("name", torchtitan.SCHEDULES)
def test_torchtitans_schedules_are_pytorchs(name: str) -> None:
    schedules: Any = pytest.importorskip("torch.distributed.pipelining.schedules")
    assert schedules.get_schedule_class(torchtitan.SCHEDULES[name]).__name__ == f"Schedule{torchtitan.SCHEDULES[name]}"


def test_a_schedule_without_a_name_goes_to_torchtitan_by_csv() -> None:
    plan = job("llama3-8b", "zb-h1", 16, pipeline=4, data=2)
    schedule = build("zb-h1", ranks=4, microbatches=8)
    with pytest.raises(
        InputError, match=r"torchtitan cannot run llama3-8b with zb-h1: it has no schedule of this name"
    ):
        torchtitan.launch(plan)
    file = torch_csv.launch(plan, schedule)
    toml = tomllib.loads(torchtitan.launch(plan, csv=file.file, folded=torch_csv.folded(schedule.placement)).text)
    assert toml["parallelism"]["pipeline_parallel_schedule_csv"] == "schedule.csv"
    assert file.text.startswith("0F0,0F1,0F2,0F3,")


def test_folded_stages_are_told_from_looped_ones() -> None:
    assert torch_csv.folded(build("zb-v", ranks=4, microbatches=8).placement)
    assert not torch_csv.folded(build("interleaved-1f1b", ranks=4, microbatches=8).placement)


BLOCKS: Final = replace(job("llama3-8b", "1f1b", data=8), training=Training(8192, 8, 1, dtype="fp8", scaling="block"))
TITAN_REFUSES: Final = [
    (BLOCKS, "its fp8 has a factor for each tensor, not for each block"),
    (job("gpt3-175b", "1f1b", pipeline=8), "it ships no model of these sizes; it has llama3 8B"),
    (job("llama3-8b", "dualpipe", pipeline=4, data=2), "it has no schedule of this name (1f1b, gpipe"),
    (job("llama3-8b", "zb-v", 64, pipeline=4, data=2, chunks=1), "zb-v has two chunks a rank, not 1"),
    (job("llama3-8b", "1f1b", tensor=8, sequence_parallel=False), "its tensor parallelism is sequence parallel always"),
    (job("llama3-8b", "1f1b", data=8, recompute=("full",) * 16 + ("none",) * 16), "it recomputes all layers alike"),
    (job("deepseek-v3", "1f1b", data=64, expert=64, zero=0), "tensor 1 x sharded data 1, and 64 does not divide that"),
]


@pytest.mark.parametrize(("plan", "reason"), TITAN_REFUSES, ids=[reason[:50] for _, reason in TITAN_REFUSES])
def test_what_torchtitan_cannot_run(plan: Job, reason: str) -> None:
    with pytest.raises(InputError) as caught:
        torchtitan.launch(plan)
    assert reason in str(caught.value)


def test_what_pytorch_cannot_run() -> None:
    plan = job("deepseek-v3", "dualpipe", 16, pipeline=4, data=1)
    with pytest.raises(
        InputError, match=r"PyTorch cannot run deepseek-v3 with dualpipe: it has 2 replicas of the model"
    ):
        torch_csv.launch(plan, build("dualpipe", ranks=4, microbatches=16))
    other = job("llama3-8b", "1f1b", 16, pipeline=4, data=2)
    with pytest.raises(InputError, match=r"has 16 micro-batches, and the plan 8"):
        torch_csv.launch(other, build("1f1b", ranks=4, microbatches=16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": 3}, r"tensor 1 x pipeline 4 x data 3 is 12 GPUs; h800x8 has 8"),
        (
            {"layers": (8, 8, 8, 7)},
            r"layers: 31 on 4 stages; llama3-8b has 32, to lie on pipeline 4 x chunks 1 = 4 stages",
        ),
        ({"layers": (16, 16)}, r"layers: 32 on 2 stages"),
        ({"microbatch": 3}, r"global_batch: 128 sequences are no multiple of data 2 x micro-batch 3"),
    ],
)
def test_a_job_whose_numbers_do_not_fit(change: dict[str, Any], message: str) -> None:
    sound = job("llama3-8b", "1f1b", pipeline=4, data=2)
    with pytest.raises(InputError, match=re.escape(message)):
        Job(sound.model, sound.cluster, sound.training, replace(sound.layout, **change), "1f1b")  # type: ignore[type-var]


def test_gpt_has_no_flavor() -> None:
    assert torchtitan.flavor(gpt(1024, 16, 24)) is None
