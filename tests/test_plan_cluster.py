"""Clusters by name and from YAML, quantities with units, training jobs, and what does not go together."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stageloom.errors import InputError
from stageloom.plan import Training, agree, gpt, load_cluster, load_model, load_training, presets
from stageloom.plan.cluster import Cluster, Link
from stageloom.plan.quantities import MEMORY, RATE, SPEED, TIME, Dimension, quantity


@pytest.mark.parametrize("node", presets.names("nodes"))
def test_a_preset_has_plausible_figures_and_a_source(node: str) -> None:
    cluster = load_cluster(f"{node}x64")
    assert (cluster.gpus, cluster.nodes, cluster.gpus_per_node) == (64, 8, 8)
    assert cluster.source
    assert not cluster.mixed
    gpu = cluster.gpu
    assert 79 * 2**30 < gpu.memory < 193 * 2**30
    assert gpu.peak["bf16"] == gpu.peak["fp16"] > gpu.peak["fp32"]
    assert gpu.peak.get("fp8", 2 * gpu.peak["bf16"]) == pytest.approx(2 * gpu.peak["bf16"], rel=1e-3)
    assert 100 < gpu.peak["bf16"] / gpu.bandwidth < 350  # flops a byte at which a roofline bends
    assert cluster.inside.bandwidth > cluster.between.bandwidth
    assert cluster.inside.latency < cluster.between.latency


def test_a_few_gpus_are_a_part_of_one_node() -> None:
    cluster = load_cluster("H100x4")
    assert (cluster.gpus, cluster.nodes, cluster.gpus_per_node) == (4, 1, 4)


def test_a_file_may_name_a_preset_and_say_what_differs(tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text(
        "node: h800\nnodes: 16\noversubscription: 2\nbetween: {bandwidth: 200 Gb/s}\ngpu: {memory: 64 GiB}\n"
    )
    cluster, preset = load_cluster(file), load_cluster("h800x128")
    assert (cluster.name, cluster.gpus, cluster.oversubscription) == ("ours", 128, 2.0)
    assert cluster.between == Link(25e9, preset.between.latency)
    assert cluster.gpu.memory == 64 * 2**30
    assert (cluster.gpu.peak, cluster.inside) == (preset.gpu.peak, preset.inside)


def test_a_node_may_be_described_in_full(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "node:\n"
        "  gpu: {name: X1, memory: 96e9, peak: {bf16: 400e12}, bandwidth: 3e12}\n"
        "  gpus_per_node: 4\n"
        "  inside: {bandwidth: 100e9, latency: 2e-6}\n"
        "  between: {bandwidth: 12.5e9, latency: 5e-6}\n"
        "gpus: 12\n"
    )
    cluster = load_cluster(file)
    assert (cluster.gpu.name, cluster.gpu.memory, cluster.gpu.peak) == ("X1", 96e9, {"bf16": 4e14})
    assert (cluster.nodes, cluster.gpus_per_node) == (3, 4)


def mixed(tmp_path: Path) -> Cluster:
    file = tmp_path / "mixed.yaml"
    file.write_text("groups:\n  - {node: h100, nodes: 2}\n  - {node: a100-80g, gpus: 8}\n")
    return load_cluster(file)


def test_a_mixed_cluster_is_as_its_worst_and_each_gpu_is_what_it_is(tmp_path: Path) -> None:
    cluster = mixed(tmp_path)
    assert cluster.mixed
    assert (cluster.gpus, cluster.nodes) == (24, 3)
    a100, h100 = load_cluster("a100-80gx8").gpu, load_cluster("h100x8").gpu
    assert cluster.gpu.peak == {dtype: a100.peak[dtype] for dtype in ("bf16", "fp16", "fp32")}  # no fp8 on an A100
    assert cluster.gpu.memory == min(a100.memory, h100.memory)
    assert cluster.between.bandwidth == 25e9
    assert [cluster.group(n).gpu.name for n in (0, 15, 16, 23)] == ["H100", "H100", "A100-80G", "A100-80G"]
    for n in (-1, 24):
        with pytest.raises(InputError, match="it has GPUs 0 to 23"):
            cluster.group(n)


def test_values_can_be_keys_of_a_cache_and_go_to_other_processes() -> None:
    assert len({load_cluster("h800x64"), load_cluster("h800x64"), load_cluster("h800x128")}) == 2
    for value in (load_cluster("h800x64"), load_model("deepseek-v3"), Training(4096, 64, recompute=("full", "none"))):
        assert pickle.loads(pickle.dumps(value)) == value
        assert len({value, value}) == 1


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("80 GB", MEMORY, 80e9),
        ("80GiB", MEMORY, 80 * 2**30),
        (80e9, MEMORY, 80e9),
        ("81559 MiB", MEMORY, 81559 * 2**20),
        ("400 Gb/s", RATE, 50e9),
        ("400 Gbit/s", RATE, 50e9),
        ("50 GB/s", RATE, 50e9),
        ("3.35 TB/s", RATE, 3.35e12),
        ("989.4 TFLOP/s", SPEED, 989.4e12),
        ("2.25 PFLOPS", SPEED, 2.25e15),
        ("3.3 us", TIME, 3.3e-6),
        ("2500 ns", TIME, 2.5e-6),
        (0, TIME, 0.0),
    ],
)
def test_amounts_have_units(text: Any, dimension: Dimension, value: float) -> None:
    assert quantity(text, dimension, "c.yaml: key") == pytest.approx(value)


def test_a_training_file_and_its_overrides(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("sequence: 4096\nglobal_batch: 15360\nzero: 1\ndtype: fp8\ntokens: 14.8T\n")
    job = load_training(file)
    assert job == Training(4096, 15360, dtype="fp8", tokens=14.8e12)
    assert job.step_tokens == 62_914_560
    assert load_training(file, global_batch=3072, dtype=None).global_batch == 3072
    assert load_training(file, scaling="block") == replace(job, scaling="block")


def test_recomputation_may_be_said_layer_by_layer(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("sequence: 1024\nglobal_batch: 64\nrecompute: [full, selective, none]\n")
    job = load_training(file)
    assert job.recompute == ("full", "selective", "none")
    agree(job, gpt(64, 4, 3, sequence=1024))
    with pytest.raises(InputError, match=r"recompute: a list of 3; gpt has 4 layers, so as many entries are needed"):
        agree(job, gpt(64, 4, 4, sequence=1024))


def test_sequence_and_context_have_to_agree() -> None:
    with pytest.raises(InputError, match=r"sequence: 16,384; llama3-8b has a context of 8,192 tokens: shorten"):
        agree(Training(16384, 64), load_model("llama3-8b"))


def test_precision_and_gpu_have_to_agree() -> None:
    agree(Training(4096, 64, dtype="fp8"), load_model("llama3-8b"), load_cluster("h100x8"))
    with pytest.raises(InputError, match="dtype: fp8; A100-80G has fast products for bf16, fp16, fp32 alone"):
        agree(Training(4096, 64, dtype="fp8"), load_model("llama3-8b"), load_cluster("a100-80gx8"))
