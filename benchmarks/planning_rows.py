"""Published, measured steps as the planner would be asked about them: one row of a table, one prediction.

What a table does not say and a row has to assume stands beside it, with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from benchmarks.published import zb_share
from stageloom.costs import Costs
from stageloom.plan.cluster import Cluster, Gpu, Link, cluster
from stageloom.plan.constants import Constants
from stageloom.plan.cost_layer import layer_times
from stageloom.plan.cost_setting import Setting
from stageloom.plan.cost_work import all_reduce, machine
from stageloom.plan.layout import Layout, spread
from stageloom.plan.model import Layer, Model, gpt
from stageloom.plan.predict import Prediction, predict
from stageloom.plan.software import MEGATRON_2021, MEGATRON_2022, MEGATRON_DEEPSPEED, ZERO_BUBBLE, Software
from stageloom.plan.training import Recompute, Training
from stageloom.schedule import Schedule
from stageloom.schedules import find

FACTS: Final = Path(__file__).parents[1] / "tests" / "facts"
A100: Final = Gpu("A100 SXM 80 GB", 80 * 2.0**30, {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12}, 2.039e12)
NVLINK_3: Final = Link(300e9, 3e-6)
VOCABULARY: Final = 51_200


@dataclass(frozen=True)
class Row:
    """A measured figure and how it is predicted. fitted: the constants were fitted on it, else it was held out."""

    table: str
    label: str
    measured: float
    predicted: Callable[[Constants], float]
    fitted: bool

    def error(self, constants: Constants) -> float:
        """Relative, of the prediction."""
        return self.predicted(constants) / self.measured - 1


@cache
def facts(name: str) -> dict[str, Any]:
    return json.loads((FACTS / f"{name}.json").read_text(encoding="utf-8"))


def a100s(nodes: int, per_gpu: float, gpus: int = 8) -> Cluster:
    """`nodes` nodes of A100s; per_gpu: bytes/s of the network for each GPU."""
    return cluster(f"{nodes} nodes of A100", nodes * gpus, gpus, A100, NVLINK_3, Link(per_gpu, 5e-6))


@dataclass(frozen=True)
class Job:
    """One published run, in the planner's values."""

    model: Model
    cluster: Cluster
    training: Training
    layout: Layout
    schedule: str
    software: Software
    order: Schedule | None = None  # where it is known, the order that ran

    def run(self, constants: Constants) -> Prediction:
        order = self.schedule if self.order is None else self.order
        return predict(self.model, self.cluster, self.training, self.layout, order, constants, self.software)


def job(
    model: Model,
    cluster: Cluster,
    software: Software,
    *,
    sequence: int,
    batch: int,
    microbatch: int,
    tensor: int,
    data: int,
    pipeline: int,
    recompute: Recompute,
    chunks: int = 1,
    sequence_parallel: bool = False,
    schedule: str = "",
    layers: tuple[int, ...] = (),
) -> Job:
    """A run in 16-bit floats with Adam, gradients summed in 16 bits as these systems reduce them, and no ZeRO."""
    training = Training(
        sequence, batch, microbatch, "fp16", gradients="bf16", zero=0, recompute=recompute,
        sequence_parallel=sequence_parallel,
    )  # fmt: skip
    layout = Layout(
        tensor, pipeline, data, chunks=chunks, microbatch=microbatch, recompute=recompute, zero=0,
        sequence_parallel=sequence_parallel, layers=layers or spread(len(model.layers), pipeline * chunks),
    )  # fmt: skip
    return Job(model, cluster, training, layout, schedule or ("1f1b" if chunks == 1 else "interleaved-1f1b"), software)


def seconds_of(one: Job) -> Callable[[Constants], float]:
    """How a row predicts the step of a run."""
    return lambda constants: one.run(constants).seconds


# ---------------------------------------------------------------- vTrain's ground truth


def vtrain_multi() -> list[Row]:
    """64 nodes with 800 Gbit/s of network each. Layers were recomputed: the repository's configurations of these runs
    say so (`use_checkpoint`), and without it 175B at TP 8, PP 8 would keep 110 GB of activations a GPU."""
    rows: list[Row] = []
    for at, (_, gpus, batch, micro, hidden, heads, layers, sequence, t, d, p, ms) in enumerate(
        facts("vtrain_ground_truth_multi")["rows"]
    ):
        one = job(
            _gpt(hidden, heads, layers, sequence), a100s(gpus // 8, 12.5e9), MEGATRON_DEEPSPEED, sequence=sequence,
            batch=batch, microbatch=micro, tensor=t, data=d, pipeline=p, recompute="full",
        )  # fmt: skip
        label = f"{facts('vtrain_ground_truth_multi')['rows'][at][0]}B, micro-batch {micro}, TP {t}, DP {d}, PP {p}"
        rows.append(Row("vtrain multi", label, ms / 1e3, seconds_of(one), at % 2 == 0))
    return rows


def vtrain_single() -> list[Row]:
    """One node. Nothing was recomputed: with it the largest layers would run faster than the GPU can (a micro-batch of
    8 at hidden 2,048 takes 17.1 ms a layer, of which the four passes' memory traffic alone is 7 ms; their products
    would need 350 TFLOP/s)."""
    rows: list[Row] = []
    for at, (gpus, batch, micro, hidden, heads, layers, sequence, t, d, p, ms) in enumerate(
        facts("vtrain_ground_truth_single")["rows"]
    ):
        one = job(
            _gpt(hidden, heads, layers, sequence), a100s(1, 12.5e9), MEGATRON_DEEPSPEED, sequence=sequence,
            batch=batch, microbatch=micro, tensor=t, data=d, pipeline=p, recompute="none",
        )  # fmt: skip
        label = f"h {hidden}, L {layers}, batch {batch}, micro-batch {micro}, TP {t}, DP {d}, PP {p} ({gpus} GPUs)"
        rows.append(Row("vtrain single", label, ms / 1e3, seconds_of(one), at % 2 == 0))
    return rows


@cache
def _gpt(hidden: int, heads: int, layers: int, sequence: int, vocabulary: int = VOCABULARY) -> Model:
    return gpt(hidden, heads, layers, vocabulary, sequence)


def vtrain_all_reduce() -> list[Row]:
    """All-reduces inside a node, timed alone: not scored, they pin the two constants of collectives."""
    rows: list[Row] = []
    for at, (gpus, mebibytes, us) in enumerate(facts("vtrain_all_reduce")["rows"]):

        def took(constants: Constants, gpus: int = gpus, size: float = mebibytes * 2.0**20) -> float:
            return all_reduce(machine(a100s(1, 12.5e9), "fp16", constants), size, gpus)

        rows.append(Row("all-reduce", f"{mebibytes} MiB on {gpus} GPUs", us / 1e6, took, at % 2 == 0))
    return rows


# ---------------------------------------------------------------- Megatron-LM, table 1

TABLE_1: Final = {1.7: (16, 1), 7.5: (16, 1), 39.1: (4, 1), 145.6: (2, 2), 529.6: (1, 3)}
"""Micro-batch and chunks of each model (billions of parameters): the table does not print them; they are those of the
authors' script for it (NVIDIA/Megatron-LM, examples/sc21/run_table_1.sh)."""


def megatron_table_1() -> list[Row]:
    """DGX A100s with eight 200 Gbit/s links each; seconds from TFLOP/s a GPU by the paper's formula of flops."""
    rows: list[Row] = []
    for at, (billions, heads, hidden, layers, t, p, gpus, batch, tflops, *_) in enumerate(
        facts("megatron_table1")["rows"]
    ):
        micro, chunks = TABLE_1[billions]
        sequence = 2048
        flops = 96 * batch * sequence * layers * hidden**2
        flops *= 1 + sequence / (6 * hidden) + VOCABULARY / (16 * layers * hidden)
        one = job(
            _gpt(hidden, heads, layers, sequence), a100s(gpus // 8, 25e9), MEGATRON_2021, sequence=sequence,
            batch=batch, microbatch=micro, tensor=t, data=gpus // (t * p), pipeline=p, recompute="full", chunks=chunks,
        )  # fmt: skip
        label = f"{billions}B, {gpus} GPUs, TP {t}, PP {p}, batch {batch}"
        rows.append(Row("megatron table 1", label, flops / (gpus * tflops * 1e12), seconds_of(one), at % 2 == 0))
    return rows


# ---------------------------------------------------------------- Korthikanti et al.

EXPERIMENTS: Final[dict[str, tuple[bool, Recompute]]] = {
    "baseline no recompute": (False, "none"),
    "sequence parallel": (True, "none"),
    "full recompute": (False, "full"),
    "selective": (False, "selective"),
    "selective+SP": (True, "selective"),
}


def korthikanti() -> list[Row]:
    """Table 4: one layer of the 22B model. Table 5: an iteration, with everything recomputed without sequence
    parallelism, and with the paper's two techniques."""
    known = facts("korthikanti")
    _, heads, hidden, layers, t, *_ = known["table3"]["rows"][0]
    layer = _gpt(hidden, heads, layers, 2048).layers[0]
    rows: list[Row] = []
    for name, forward, backward, combined, _ in known["table4"]["rows"]:
        parallel, words = EXPERIMENTS[name]

        for which, ms in (("forward", forward), ("backward", backward), ("combined", combined)):
            took = _layer(layer, hidden, t, parallel, words, which)
            rows.append(Row("korthikanti", f"layer, {name}, {which}", ms / 1e3, took, len(rows) % 2 == 0))
    for sizes, (name, full, present, *_) in zip(known["table3"]["rows"], known["table5"]["rows"], strict=True):
        _, heads, hidden, layers, t, p, gpus, batch, micro, chunks = sizes
        words: tuple[tuple[Recompute, bool, float], ...] = (("full", False, full), ("selective", True, present))
        for recompute, parallel, seconds in words:
            one = job(
                _gpt(hidden, heads, layers, 2048), a100s(gpus // 8, 25e9), MEGATRON_2022, sequence=2048, batch=batch,
                microbatch=micro, tensor=t, data=gpus // (t * p), pipeline=p, recompute=recompute, chunks=chunks,
                sequence_parallel=parallel,
            )  # fmt: skip
            label = f"iteration of {name}, " + ("full recompute" if recompute == "full" else "selective+SP")
            rows.append(Row("korthikanti", label, seconds, seconds_of(one), len(rows) % 2 == 0))
    return rows


def _layer(
    layer: Layer, hidden: int, tensor: int, parallel: bool, words: Recompute, which: str
) -> Callable[[Constants], float]:
    def took(constants: Constants) -> float:
        on = machine(a100s(1, 25e9), "fp16", constants)
        s = Setting(on, constants, MEGATRON_2022, hidden, 2048, 4, tensor, 1, parallel, False)
        one = layer_times(layer, s, words)
        return {"forward": one.F, "backward": one.BW, "combined": one.F + one.BW}[which]

    return took


# ---------------------------------------------------------------- zero bubble

ZB_VOCABULARY: Final = 32_000
"""The paper names its models by size: 14.6B and 28.3B are 46 and 62 layers with an embedding of about 32,000 rows (with
51,200 they would be 14.7B and 28.4B), and its repository's runs use a SentencePiece tokenizer of that size."""

ZB_SCHEDULES: Final = {"ZB-2p": "zb-2p", "ZB-1p": "zb-1p", "1F1B": "1f1b", "1F1B-I": "interleaved-1f1b"}


def zb_job(name: str, microbatches: int, schedule: str) -> Job:
    """One cell of the table: a pipeline of 8 A100s of one node. First and last stage have one layer fewer; interleaved
    1F1B has a layer a chunk, and only embedding or head on its first and last. ZB-1p and ZB-2p run in the order that
    their search finds for what the authors had profiled (table 6), as theirs did."""
    sizes = {row[0]: row for row in facts("zb_models")["rows"]}
    _, layers, heads, hidden, sequence, ranks, micro, _ = sizes[name]
    chunks = (layers + 2) // ranks if schedule == "1F1B-I" else 1
    stages = ranks * chunks
    each = (layers + 2) // stages
    one = job(
        _gpt(hidden, heads, layers, sequence, ZB_VOCABULARY), a100s(1, 12.5e9),
        MEGATRON_2022 if schedule.startswith("1F1B") else ZERO_BUBBLE, sequence=sequence,
        batch=microbatches * micro, microbatch=micro, tensor=1, data=1, pipeline=ranks, recompute="none",
        chunks=chunks, schedule=ZB_SCHEDULES[schedule], layers=(each - 1, *[each] * (stages - 2), each - 1),
    )  # fmt: skip
    return replace(one, order=_zb_order(name, microbatches, schedule)) if schedule.startswith("ZB") else one


@cache
def _zb_order(name: str, microbatches: int, schedule: str) -> Schedule:
    """As searched for from the authors' profile, in ms."""
    import stageloom.search  # noqa: F401  makes ZB-1p and ZB-2p known

    _, _, heads, hidden, sequence, *_ = next(row for row in facts("zb_models")["rows"] if row[0] == name)
    _, ranks, _, f, b, w, latency = next(
        row for row in facts("zb_profile_times")["rows"] if row[0] == name and row[2] == microbatches
    )
    costs = Costs(F=f, B=b, W=w, latency=latency, w_share=zb_share(hidden, heads, sequence))
    return find(ZB_SCHEDULES[schedule])(ranks, microbatches, costs=costs)


def zb_throughput() -> list[Row]:
    """Seconds of a step, from samples per GPU per second."""
    import stageloom.search  # noqa: F401  makes ZB-1p and ZB-2p known

    known = facts("zb_throughput_memory")
    rows: list[Row] = []
    for name, rates in known["samples_per_gpu_per_s"].items():
        for at, (config, rate) in enumerate(zip(known["configs"], rates, strict=True)):
            one = zb_job(config["model"], config["m"], name)
            seconds = one.training.global_batch / config["gpus"] / rate
            label = f"{config['model']}, {config['m']} micro-batches, {name}"
            rows.append(Row("zb throughput", label, seconds, seconds_of(one), at % 2 == 0))
    return rows


def zb_memory() -> list[Row]:
    """Peak of the allocator on the fullest rank. Nothing is fitted on it."""
    import stageloom.search  # noqa: F401

    known = facts("zb_throughput_memory")
    rows: list[Row] = []
    for name, sizes in known["memory_GB"].items():
        for config, size in zip(known["configs"], sizes, strict=True):
            one = zb_job(config["model"], config["m"], name)

            def held(constants: Constants, one: Job = one) -> float:
                return max(rank.allocated for rank in one.run(constants).memory)

            label = f"{config['model']}, {config['m']} micro-batches, {name}"
            rows.append(Row("zb memory", label, size * 1e9, held, False))
    return rows


TABLES: Final[dict[str, tuple[Callable[[], list[Row]], float]]] = {
    "korthikanti": (korthikanti, 0.04),
    "megatron table 1": (megatron_table_1, 0.05),
    "zb throughput": (zb_throughput, 0.06),
    "zb memory": (zb_memory, 0.08),
    "vtrain multi": (vtrain_multi, 0.08),
    "vtrain single": (vtrain_single, 0.08),
}
"""Every scored table, and the mean absolute error that the planner is to stay within."""
