"""Wrong models, clusters and training jobs: one message each, that names the file, the key, its value and what would
be right.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest

from stageloom.errors import InputError
from stageloom.plan import Training, load_cluster, load_model, load_training
from stageloom.plan.load_training import agree

MISSING: Final = object()
LLAMA: Final = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
DEEPSEEK: Final = json.loads((Path(__file__).parent / "data" / "plan" / "configs" / "deepseek-v3.json").read_text())
QWEN: Final = json.loads((Path(__file__).parent / "data" / "plan" / "configs" / "qwen3-30b-a3b.json").read_text())
SHORT: Final = "hidden: 4096\nlayers: 32\nheads: 32\nmlp: 14336\nvocabulary: 128256\n"
BOMB: Final = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 8)}]\n" for before, name in pairwise("abcdefghij")
)
"""A tenth of a kilobyte a line, and a list of a billion entries."""
HUGE: Final = "1" + "0" * 400
"""A number that no float holds."""
JOB: Final = "sequence: 4096\nglobal_batch: 15360\n"

# A sound config.json, what is changed in it, and the message; one that ends in … goes on with a list.
CONFIGS: Final[list[tuple[dict[str, Any], dict[str, Any], str]]] = [
    (LLAMA, {"hidden_size": MISSING}, "hidden_size is missing; a whole number from 1 to 1,000,000,000 is needed"),
    (LLAMA, {"hidden_size": 0}, "hidden_size: 0; a whole number from 1 to 1,000,000,000 is needed"),
    (LLAMA, {"hidden_size": -4096}, "hidden_size: -4096; a whole number from 1 to 1,000,000,000 is needed"),
    (LLAMA, {"hidden_size": "4096"}, "hidden_size: '4096'; a whole number from 1 to 1,000,000,000 is needed"),
    (LLAMA, {"hidden_size": 4096.5}, "hidden_size: 4096.5; a whole number from 1 to 1,000,000,000 is needed"),
    (
        LLAMA,
        {"hidden_size": 1000000000000000},
        "hidden_size: 1000000000000000; a whole number from 1 to 1,000,000,000 is needed",
    ),
    (LLAMA, {"num_attention_heads": 33}, "num_attention_heads: 33; a divisor of hidden_size = 4096 is needed"),
    (LLAMA, {"num_key_value_heads": 5}, "num_key_value_heads: 5; a divisor of num_attention_heads = 32 is needed"),
    (LLAMA, {"num_key_value_heads": 64}, "num_key_value_heads: 64; a whole number from 1 to 32 is needed"),
    (LLAMA, {"num_hidden_layers": True}, "num_hidden_layers: True; a whole number from 1 to 2,000 is needed"),
    (LLAMA, {"num_hidden_layers": 1000000}, "num_hidden_layers: 1000000; a whole number from 1 to 2,000 is needed"),
    (LLAMA, {"vocab_size": None}, "vocab_size is missing; a whole number from 1 to 1,000,000,000 is needed"),
    (
        LLAMA,
        {"architectures": ["MambaForCausalLM"]},
        "architectures: 'MambaForCausalLM' is not known; known: GPT2LMHeadModel, …",
    ),
    (
        LLAMA,
        {"architectures": ["BertForMaskedLM"]},
        "architectures: 'BertForMaskedLM' is not known; known: GPT2LMHeadModel, …",
    ),
    (LLAMA, {"architectures": []}, 'architectures: []; a list of one name is needed, such as ["LlamaForCausalLM"]'),
    (
        LLAMA,
        {"architectures": "LlamaForCausalLM"},
        "architectures: 'LlamaForCausalLM'; a list of one name is needed, such as [\"LlamaForCausalLM\"]",
    ),
    (
        LLAMA,
        {"architectures": MISSING, "model_type": "bert"},
        "model_type: 'bert' is not known; known: gpt2, gpt_neox, …",
    ),
    (LLAMA, {"tie_word_embeddings": "yes"}, "tie_word_embeddings: 'yes'; true or false is needed"),
    (
        DEEPSEEK,
        {"q_lora_rank": MISSING},
        "q_lora_rank is missing; a whole number is needed, or null for queries as they are",
    ),
    (DEEPSEEK, {"num_experts_per_tok": 300}, "num_experts_per_tok: 300; a whole number from 1 to 256 is needed"),
    (DEEPSEEK, {"n_group": 7}, "n_group: 7; a divisor of n_routed_experts = 256 is needed"),
    (DEEPSEEK, {"topk_group": 9}, "topk_group: 9; a whole number from 1 to 8 is needed"),
    (DEEPSEEK, {"n_group": 64, "topk_group": 1}, "topk_group: 1; enough groups of 4 for 8 experts a token are needed"),
    (
        DEEPSEEK,
        {"moe_intermediate_size": MISSING},
        "moe_intermediate_size is missing; a whole number from 1 to 1,000,000,000 is needed",
    ),
    (
        DEEPSEEK,
        {"first_k_dense_replace": -1},
        "first_k_dense_replace: -1; a whole number from 0 to 1,000,000,000 is needed",
    ),
    (
        DEEPSEEK,
        {"num_nextn_predict_layers": 100},
        "num_nextn_predict_layers: 100; a whole number from 0 to 61 is needed",
    ),
    (
        QWEN,
        {"mlp_only_layers": ["0"]},
        "mlp_only_layers: ['0']; a list of layers' numbers is needed, such as [0, 1]",
    ),
    (
        QWEN,
        {"mlp_only_layers": [0.5]},
        "mlp_only_layers: [0.5]; a list of layers' numbers is needed, such as [0, 1]",
    ),
]

# File name, content, and the message.
FILES: Final[list[tuple[Callable[[Path], object], str, str | bytes, str]]] = [
    (
        load_model,
        "config.json",
        "{not json",
        "line 1, column 2: is not JSON: Expecting property name enclosed in double quotes",
    ),
    (load_model, "config.json", "[1, 2]", "holds no mapping; expected lines of `key: value`, such as `hidden: 4096`"),
    (load_model, "config.json", '{"hidden_size": 1, "hidden_size": 2}', "key 'hidden_size' is said twice"),
    (load_model, "config.json", b"\x80\x02PK\x00\xff", "byte 0 is not UTF-8 text; a YAML or JSON file is needed"),
    (load_model, "config.json", "", "line 1, column 1: is not JSON: Expecting value"),
    (
        load_model,
        "m.yaml",
        "layers: 32\nheads: 32\nmlp: 14336\nvocabulary: 128256\n",
        "hidden is missing; a whole number from 1 to 1,000,000,000 is needed",
    ),
    (
        load_model,
        "m.yaml",
        "hidden: 4096\nlayers: 32\nheads: 30\nmlp: 14336\nvocabulary: 128256\n",
        "heads: 30; a divisor of hidden = 4096 is needed, or a head_width",
    ),
    (load_model, "m.yaml", SHORT + "kv_heads: 6\n", "kv_heads: 6; a divisor of heads = 32 is needed"),
    (
        load_model,
        "m.yaml",
        SHORT + "hiden: 1\n",
        "hiden: unknown key; did you mean hidden? known keys: style, hidden, …",
    ),
    (load_model, "m.yaml", SHORT + "style: bert\n", "style: 'bert'; one of llama, gpt is needed"),
    (
        load_model,
        "m.yaml",
        "hidden: 4096\nlayers: 32\nheads: 32\nvocabulary: 128256\n",
        "mlp is missing; a whole number from 1 to 1,000,000,000 is needed",
    ),
    (load_model, "m.yaml", SHORT + "bias: some\n", "bias: 'some'; true, false or qkv is needed"),
    (
        load_model,
        "m.yaml",
        SHORT + "positions: learned\n",
        "context is missing; a whole number from 1 to 1,000,000,000 is needed",
    ),
    (load_model, "m.yaml", SHORT + "experts: 8\n", "experts: 8; a mapping of keys to values is needed"),
    (
        load_model,
        "m.yaml",
        SHORT + "experts: {count: 8, per_token: 9, width: 10}\n",
        "experts: per_token: 9; a whole number from 1 to 8 is needed",
    ),
    (
        load_model,
        "m.yaml",
        SHORT + "experts: {count: 8, per_token: 2}\n",
        "experts: width is missing; a whole number from 1 to 1,000,000,000 is needed",
    ),
    (
        load_model,
        "m.yaml",
        SHORT + "experts: {count: 8, per_token: 2, width: 14336, groups: 3}\n",
        "experts: groups: 3; a divisor of count = 8 is needed",
    ),
    (
        load_model,
        "m.yaml",
        SHORT + "experts: {count: 8, per_token: 2, width: 14336, shared_width: 10}\n",
        "experts: shared_width: 10 without shared experts; shared is needed",
    ),
    (
        load_model,
        "m.yaml",
        SHORT + "experts: {count: 8, per_token: 2, width: 14336, dense_layers: 32}\n",
        "experts: dense_layers: 32; a whole number from 0 to 31 is needed",
    ),
    (
        load_model,
        "m.yaml",
        SHORT + "latent: {kv_rank: 512, rope_width: 64}\n",
        "latent: nope_width is missing; a whole number from 1 to 1,000,000,000 is needed",
    ),
    (
        load_model,
        "m.yaml",
        SHORT + "latent: {kv_rank: 512, rope_width: 64, nope_width: 128}\nhead_width: 128\n",
        "head_width: 128; 192, as latent has it, is needed",
    ),
    (
        load_model,
        "m.yaml",
        SHORT + "experts: {count: 8, per_token: 2, width: 14336, shared: 2, shared_width: 0}\n",
        "experts: shared_width: 0; a whole number from 1 to 1,000,000,000 is needed",
    ),
    (load_model, "m.yaml", "base: &b {a: 1}\n<<: *b\n", "line 2: merges (`<<`) are not read; write out the keys …"),
    (load_model, "m.yaml", BOMB + "hidden: *j\n", "hidden: [[[[...], [...], [...], [...], [...], [...], …"),
    (load_model, "m.yaml", "hidden: 4096\n" + " " * 1_000_000, "has 1,000,013 characters; at most 1,000,000 of YAML …"),
    (load_model, "m.yaml", SHORT + "heads: 16\n", "line 6: key 'heads' is said twice"),
    (load_model, "m.yaml", "hidden: [4096\n", "line 2: is not YAML: expected ',' or ']', but got '<stream end>'"),
    (
        load_model,
        "m.yaml",
        "hidden: 4096\nlayers: 32k\nheads: 32\nmlp: 14336\nvocabulary: 128256\n",
        "layers: '32k'; a whole number from 1 to 2,000 is needed",
    ),
    (
        load_cluster,
        "c.yaml",
        "node: h800\n",
        "nodes and gpus are missing; the number of nodes or of gpus is needed, one of them",
    ),
    (
        load_cluster,
        "c.yaml",
        "node: h800\nnodes: 2\ngpus: 16\n",
        "nodes and gpus are both given; the number of nodes or of gpus is needed, one of them",
    ),
    (
        load_cluster,
        "c.yaml",
        "node: h800\ngpus: 2050\n",
        "gpus: 2050 GPUs do not fill nodes of 8; nearest: 2048 or 2056",
    ),
    (load_cluster, "c.yaml", "node: h800\nnodes: 0\n", "nodes: 0; a whole number from 1 to 1,250,000 is needed"),
    (
        load_cluster,
        "c.yaml",
        "node: h900\nnodes: 2\n",
        "node: 'h900'; one of a100-80g, b200, h100, h200, h800, mi300x is needed",
    ),
    (
        load_cluster,
        "c.yaml",
        "node: h800\nnodes: 2\ngpu: {memory: 80}\n",
        "gpu: memory: 80 is 80 bytes; an amount of memory from 1e+08 to 1e+14 bytes is needed, such as 80 GB",
    ),
    (
        load_cluster,
        "c.yaml",
        "node: h800\nnodes: 2\ngpu: {memory: 80 GBs}\n",
        "gpu: memory: '80 GBs': GBs is no unit of an amount of memory; write it as 80 GB",
    ),
    (
        load_cluster,
        "c.yaml",
        "node: h800\nnodes: 2\ngpu: {memory: 80 TFLOP/s}\n",
        "gpu: memory: '80 TFLOP/s': TFLOP/s is no unit of an amount of memory; write it as 80 GB",
    ),
    (
        load_cluster,
        "c.yaml",
        "node: h800\nnodes: 2\nbetween: {bandwidth: 400}\n",
        "between: bandwidth: 400 is 400 bytes/s; "
        "a bandwidth from 1e+06 to 1e+15 bytes/s is needed, such as 50 GB/s or 400 Gb/s",
    ),
    (
        load_cluster,
        "c.yaml",
        "node: h800\nnodes: 2\nbetween: {bandwidth: 400 Gb}\n",
        "between: bandwidth: '400 Gb': Gb is no unit of a bandwidth; write it as 50 GB/s or 400 Gb/s",
    ),
    (
        load_cluster,
        "c.yaml",
        "node: h800\nnodes: 2\nbetween: {latency: 5}\n",
        "between: latency: 5 is 5 seconds; a time from 0 to 1 seconds is needed, such as 3.3 us or 3.3e-6",
    ),
    (
        load_cluster,
        "c.yaml",
        "node: h800\nnodes: 2\nbetween: {latency: -1 us}\n",
        "between: latency: '-1 us' is -1e-06 seconds; a time from 0 to 1 seconds is needed, such as 3.3 us or 3.3e-6",
    ),
    (
        load_cluster,
        "c.yaml",
        "node: h800\nnodes: 2\ngpu: {peak: {bf16: 989}}\n",
        "gpu: peak: bf16: 989 is 989 flop/s; "
        "a speed of arithmetic from 1e+09 to 1e+18 flop/s is needed, such as 989 TFLOP/s",
    ),
    (
        load_cluster,
        "c.yaml",
        "node: h800\nnodes: 2\ngpu: {peak: {}}\n",
        "gpu: peak: is empty; a speed for at least one of bf16, fp16, fp8, fp32 is needed",
    ),
    (
        load_cluster,
        "c.yaml",
        "node: h800\nnodes: 2\ngpu: {peak: {int8: 989e12}}\n",
        "gpu: peak: int8: unknown key; known keys: bf16, fp16, …",
    ),
    (
        load_cluster,
        "c.yaml",
        "node: h800\nnodes: 2\noversubscription: 0.5\n",
        "oversubscription: 0.5; a number from 1 to 100 is needed",
    ),
    (
        load_cluster,
        "c.yaml",
        f"node: h800\nnodes: 2\noversubscription: {HUGE}\n",
        f"oversubscription: {HUGE[:60]}...; a number from 1 to 100 is needed",
    ),
    (
        load_cluster,
        "c.yaml",
        f"node: h800\nnodes: 2\nbetween: {{latency: -{HUGE}}}\n",
        f"between: latency: -{HUGE[:59]}... is -inf seconds; a time from 0 to 1 seconds is needed, such as …",
    ),
    (
        load_cluster,
        "c.yaml",
        f"node: h800\nnodes: 2\ngpu: {{memory: {HUGE}}}\n",
        f"gpu: memory: {HUGE[:60]}... is inf bytes; an amount of memory from …",
    ),
    (
        load_cluster,
        "c.yaml",
        "node: h800\nnodes: 2\ngpu: {peak: {bf16: 989 TFLOP/s, fp8: 3958 TFLOP/s}}\n",
        "gpu: peak: fp8: '3958 TFLOP/s'; no more than twice what bf16 has is needed: the peak without sparsity",
    ),
    (
        load_cluster,
        "c.yaml",
        "node: h800\nnodes: 2\nbandwith: 1\n",
        "bandwith: unknown key; known keys: name, source, …",
    ),
    (load_cluster, "c.yaml", "groups: []\n", "groups: []; a list of at least one entry is needed"),
    (
        load_cluster,
        "c.yaml",
        "groups:\n  - {node: h100, nodes: 2}\n  - {node: a100-80g}\n",
        "groups.1: nodes and gpus are missing; the number of nodes or of gpus is needed, one of them",
    ),
    (load_cluster, "c.yaml", "groups:\n  - h100\n", "groups.0: 'h100'; a mapping of keys to values is needed"),
    (
        load_cluster,
        "c.yaml",
        "nodes: 2\n",
        "node is missing; a preset (a100-80g, b200, h100, h200, h800, mi300x) or a mapping is needed",
    ),
    (
        load_cluster,
        "c.yaml",
        "node: h800\nnodes: 2\ninside: fast\n",
        "inside: 'fast'; a mapping of keys to values is needed",
    ),
    (
        load_cluster,
        "c.yaml",
        "node: h800\nnodes: 2\nlatency: .nan\n",
        "latency: unknown key; known keys: name, source, …",
    ),
    (
        load_cluster,
        "c.yaml",
        "node: h800\nnodes: 2\nbetween: {latency: .nan}\n",
        "between: latency: nan is nan seconds; a time from 0 to 1 seconds is needed, such as 3.3 us or 3.3e-6",
    ),
    (
        load_training,
        "t.yaml",
        "global_batch: 15360\n",
        "sequence is missing; a whole number from 1 to 100,000,000 is needed",
    ),
    (
        load_training,
        "t.yaml",
        "sequence: 4096\nglobal_batch: 62914560\n",
        "global_batch: 62,914,560; "
        "it counts sequences, at most 1,000,000; 62,914,560 tokens would be 15,360 sequences of 4096",
    ),
    (
        load_training,
        "t.yaml",
        "sequence: 0\nglobal_batch: 15360\n",
        "sequence: 0; a whole number from 1 to 100,000,000 is needed",
    ),
    (
        load_training,
        "t.yaml",
        "sequence: 4k\nglobal_batch: 15360\n",
        "sequence: '4k'; a whole number from 1 to 100,000,000 is needed",
    ),
    (
        load_training,
        "t.yaml",
        JOB + "microbatch: 7\n",
        "global_batch: 15360 sequences cannot be cut into micro-batches of 7; nearest: 15358 or 15365",
    ),
    (
        load_training,
        "t.yaml",
        JOB + "microbatch: 0\n",
        "microbatch: 0; a whole number from 1 to 1,000,000,000 is needed",
    ),
    (
        load_training,
        "t.yaml",
        JOB + "microbatch: 20000\n",
        "global_batch: 15360 sequences cannot be cut into micro-batches of 20000; nearest: 20000",
    ),
    (load_training, "t.yaml", JOB + "dtype: int8\n", "dtype: 'int8'; one of bf16, fp16, fp8 is needed"),
    (load_training, "t.yaml", JOB + "scaling: row\n", "scaling: 'row'; one of tensor, block is needed"),
    (
        load_training,
        "t.yaml",
        JOB + "scaling: block\n",
        "scaling: block; only dtype fp8 scales its inputs, and this is bf16",
    ),
    (load_training, "t.yaml", JOB + "optimizer: adamw\n", "optimizer: 'adamw'; one of adam, adam-bf16, sgd is needed"),
    (load_training, "t.yaml", JOB + "zero: 4\n", "zero: 4; a whole number from 0 to 3 is needed"),
    (load_training, "t.yaml", JOB + "recompute: some\n", "recompute: 'some'; one of none, selective, full is needed"),
    (
        load_training,
        "t.yaml",
        JOB + "recompute: [full, half]\n",
        "recompute: ['full', 'half']; a list of none, selective, full is needed, and 'half' is none of them",
    ),
    (load_training, "t.yaml", JOB + "sequence_parallel: yes\n", "sequence_parallel: 'yes'; true or false is needed"),
    (
        load_training,
        "t.yaml",
        JOB + "communication_share: 20\n",
        "communication_share: 20; a number from 0 to 1 is needed",
    ),
    (
        load_training,
        "t.yaml",
        JOB + "communication_share: 1\n",
        "communication_share: 1.0; a share from 0 to below 1 is needed",
    ),
    (
        load_training,
        "t.yaml",
        JOB + "tokens: 14.8X\n",
        "tokens: '14.8X': X is no unit of a number of tokens; write it as 15T or 15e12",
    ),
    (load_training, "t.yaml", JOB + "tokens: 1000\n", "tokens: 1000 are fewer than the 62,914,560 of one step"),
    (
        load_training,
        "t.yaml",
        JOB + "micro_batch: 1\n",
        "micro_batch: unknown key; did you mean microbatch? known keys: sequence, global_batch, …",
    ),
    (load_training, "t.yaml", JOB + "sequence: 4096\n", "line 3: key 'sequence' is said twice"),
]

# What is given instead of a file or a preset.
NAMES: Final[list[tuple[Callable[[str], object], str, str]]] = [
    (
        load_model,
        "llama3-9b",
        "'llama3-9b': there is no model of this name and no such file; did you mean llama3-8b? …",
    ),
    (
        load_model,
        "deepseek_v3",
        "'deepseek_v3': there is no model of this name and no such file; did you mean deepseek-v3? …",
    ),
    (load_model, "{tmp}/none.json", "{tmp}/none.json: cannot be read: No such file or directory"),
    (load_model, "{tmp}", "{tmp}: is a folder without a config.json; a model's file is needed"),
    (
        load_model,
        "/dev/null",
        "/dev/null: is not a regular file; a YAML or JSON file is needed (keep in one what a pipe gives)",
    ),
    (load_model, "x" * 300 + ".json", "x" * 300 + ".json: cannot be read: File name too long"),
    (load_model, "a\0b.json", "'a\\x00b.json': cannot be read: embedded null byte"),
    (load_model, "", "'': there is no model of this name and no such file; known: …"),
    (load_cluster, "", "'': there is no node of this name and no such file; known: …"),
    (load_cluster, f"h800x{'9' * 5000}", f"h800x{'9' * 5000}: {'9' * 5000} GPUs; a number from 1 to 10,000,000 …"),
    (load_cluster, "h800", "'h800' says no number of GPUs; write h800x64 for 64 of them"),
    (load_cluster, "h900x8", "'h900': there is no node of this name and no such file; did you mean h800? …"),
    (load_cluster, "2048", "'2048': there is no node of this name and no such file; known: a100-80g, …"),
    (load_cluster, "h800x0", "h800x0: 0 GPUs; a number from 1 to 10,000,000 is needed"),
    (load_cluster, "h800x12", "h800x12: 12 GPUs do not fill nodes of 8; nearest: 8 or 16"),
    (load_cluster, "h800x99999999999", "h800x99999999999: 99999999999 GPUs; a number from 1 to 10,000,000 is needed"),
    (load_cluster, "{tmp}", "{tmp}: is a folder; a cluster's YAML file is needed, or a name such as h800x2048"),
    (load_cluster, "{tmp}/none.yaml", "{tmp}/none.yaml: cannot be read: No such file or directory"),
    (load_training, "{tmp}", "{tmp}: is a folder; a training job's YAML file is needed"),
    (load_training, "{tmp}/none.yaml", "{tmp}/none.yaml: cannot be read: No such file or directory"),
]


def refused(load: Callable[[Any], object], given: object, message: str) -> None:
    with pytest.raises(InputError) as caught:
        load(given)
    if message.endswith("…"):
        assert str(caught.value).startswith(message.removesuffix("…"))
    else:
        assert str(caught.value) == message


@pytest.mark.parametrize(("base", "change", "message"), CONFIGS, ids=[message[:60] for *_, message in CONFIGS])
def test_a_wrong_config(base: dict[str, Any], change: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({key: value for key, value in (base | change).items() if value is not MISSING}))
    refused(load_model, file, f"{file}: {message}")


@pytest.mark.parametrize(("load", "name", "content", "message"), FILES, ids=[message[:60] for *_, message in FILES])
def test_a_wrong_file(
    load: Callable[[Path], object], name: str, content: str | bytes, message: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(load, file, f"{file}: {message}")


@pytest.mark.parametrize(("load", "given", "message"), NAMES, ids=[message[:60] for *_, message in NAMES])
def test_a_wrong_name(load: Callable[[str], object], given: str, message: str, tmp_path: Path) -> None:
    refused(load, given.replace("{tmp}", str(tmp_path)), message.replace("{tmp}", str(tmp_path)))


def test_a_type_that_not_all_groups_have(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "groups:\n  - {node: h100, nodes: 1, gpu: {peak: {bf16: 989e12}}}\n"
        "  - {node: h100, nodes: 1, gpu: {peak: {fp16: 989e12}}}\n"
    )
    with pytest.raises(InputError, match=r"^dtype: bf16; H100\+H100 has fast products for no type that is the same in"):
        agree(Training(2048, 16), load_model("llama3-8b"), load_cluster(file))


def test_the_configurations_that_are_made_wrong_are_sound(tmp_path: Path) -> None:
    for base in (LLAMA, DEEPSEEK, QWEN):
        file = tmp_path / "config.json"
        file.write_text(json.dumps(base))
        load_model(file)
    assert len(CONFIGS) + len(FILES) + len(NAMES) >= 40
