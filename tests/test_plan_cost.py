"""The cost model as laws: what must hold for every model, cluster and layout, and sums that must come out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageloom.costs import Costs
from stageloom.errors import InputError
from stageloom.plan import gpt, load_cluster, load_model
from stageloom.plan.constants import fitted
from stageloom.plan.cost import embedding, head, setting, stage_costs, stage_times
from stageloom.plan.cost_experts import all_to_all, exchange
from stageloom.plan.cost_layer import layer_times
from stageloom.plan.cost_setting import Setting
from stageloom.plan.cost_work import Tally, all_reduce, machine, ring
from stageloom.plan.layout import Layout, check, spread
from stageloom.plan.predict import predict
from stageloom.plan.software import MEGATRON_2022, MEGATRON_DEEPSPEED, MODERN
from stageloom.plan.training import Training
from stageloom.schedules import build

CLUSTER = load_cluster("a100-80gx64")
ON = machine(CLUSTER, "bf16", fitted())
MODEL = gpt(2048, 16, 24, sequence=1024)
TRAINING = Training(1024, 64, 2, "bf16")
SIZES = st.integers(1, 40_000)


def layout(**changes: object) -> Layout:
    plain = Layout(2, 4, 2, microbatch=2, sequence_parallel=False, layers=spread(24, 4))
    return replace(plain, **changes)  # pyright: ignore[reportArgumentType]


def setting_of(**changes: object) -> Setting:
    return setting(MODEL, CLUSTER, TRAINING, layout(**changes), fitted(), MODERN)


# ------------------------------------------------------------------ products, moves, collectives


@given(SIZES, SIZES, SIZES, st.integers(1, 64), st.sampled_from(["rows", "columns", "depth", "batch"]))
def test_a_larger_product_is_never_faster(rows: int, columns: int, depth: int, batch: int, more: str) -> None:
    sizes = {"rows": rows, "columns": columns, "depth": depth, "batch": batch}

    def seconds(sizes: dict[str, int]) -> float:
        batch = sizes["batch"]
        return Tally(ON).product(sizes["rows"], sizes["columns"], sizes["depth"], batch=batch).seconds

    assert seconds({**sizes, more: sizes[more] * 2}) >= seconds(sizes)


@given(SIZES, SIZES, SIZES)
def test_no_product_beats_the_roofline(rows: int, columns: int, depth: int) -> None:
    seconds = Tally(ON).product(rows, columns, depth).seconds
    gpu = CLUSTER.gpu
    assert seconds > 2 * rows * columns * depth / gpu.peak["bf16"]
    assert seconds > 2 * (rows * depth + depth * columns + rows * columns) / gpu.bandwidth


@given(st.floats(1, 1e12), st.integers(2, 64), st.sampled_from([1, 2, 8]))
def test_an_all_reduce_is_a_scatter_and_a_gather(size: float, ranks: int, stride: int) -> None:
    assert all_reduce(ON, size, ranks, stride) == pytest.approx(2 * ring(ON, size, ranks, stride))
    assert all_reduce(ON, 2 * size, ranks, stride) >= all_reduce(ON, size, ranks, stride)


def test_a_ring_that_leaves_the_node_is_slower_and_alone_costs_nothing() -> None:
    assert ring(ON, 1e9, 1) == 0
    assert ring(ON, 1e9, 16) > ring(ON, 1e9, 8)
    # One of eight GPUs of a node in each ring: eight rings share what one ring of all eight has for itself.
    apart, together = ring(ON, 1e9, 8, stride=8), ring(ON, 1e9, 64)
    assert 6 < (apart - together * (7 / 8) / (63 / 64)) / (together * (7 / 8) / (63 / 64)) < 8


# ------------------------------------------------------------------ layers


@pytest.mark.parametrize("software", [MODERN, MEGATRON_2022, MEGATRON_DEEPSPEED], ids=lambda one: one.name)
@given(
    hidden=st.sampled_from([1024, 2048, 4096, 8192]),
    micro=st.sampled_from([1, 2, 4, 8]),
    t=st.sampled_from([1, 2, 4, 8]),
)
def test_more_tokens_are_never_faster_and_more_gpus_never_compute_longer(
    software: object, hidden: int, micro: int, t: int
) -> None:
    layer = gpt(hidden, 16, 1, sequence=1024).layers[0]
    base = Setting(ON, fitted(), software, hidden, 1024, micro, t, 1, False, False)  # type: ignore[arg-type]
    one, more = layer_times(layer, base, "none"), layer_times(layer, replace(base, microbatch=2 * micro), "none")
    for key in ("forward", "backward", "weight"):
        assert getattr(more.gpu, key) >= getattr(one.gpu, key) or software is not MODERN
        assert getattr(more.attention + more.mlp, key) > 0
    if t > 1:
        alone = layer_times(layer, replace(base, tensor=1), "none")
        assert (one.attention + one.mlp).total <= (alone.attention + alone.mlp).total * (
            1 + 1e-9
        ) or base.microbatch < 4


def test_full_recomputation_adds_just_the_forward() -> None:
    layer, s = MODEL.layers[0], setting_of()
    plain, again = layer_times(layer, s, "none"), layer_times(layer, s, "full")
    assert again.gpu.backward - plain.gpu.backward == pytest.approx(plain.gpu.forward)
    assert again.F == plain.F
    assert again.W == plain.W
    selective = layer_times(layer, s, "selective")
    assert plain.gpu.backward < selective.gpu.backward < again.gpu.backward


def test_sequence_parallelism_never_slows_a_forward_and_overlap_never_a_backward() -> None:
    layer = MODEL.layers[0]
    cut, whole = setting_of(tensor=8, sequence_parallel=True), setting_of(tensor=8, sequence_parallel=False)
    assert layer_times(layer, cut, "none").gpu.forward < layer_times(layer, whole, "none").gpu.forward
    stands = replace(whole, software=replace(MODERN, tensor_overlap=False))
    assert layer_times(layer, whole, "none").gpu.backward < layer_times(layer, stands, "none").gpu.backward


def test_a_small_layer_takes_what_the_host_takes() -> None:
    small = gpt(256, 4, 1, sequence=128)
    s = setting(small, CLUSTER, Training(128, 8, 1), Layout(1, 1, 1, layers=(1,)), fitted(), MODERN)
    one = layer_times(small.layers[0], s, "none")
    assert fitted().host_forward == one.F
    assert fitted().host_backward == one.BW


# ------------------------------------------------------------------ stages


def test_stages_sum_to_the_layers_and_the_two_ends() -> None:
    s, chosen = setting_of(), layout()
    times = stage_times(MODEL, chosen, s, 0.0)
    one, first, last = layer_times(MODEL.layers[0], s, "none"), embedding(MODEL, s), head(MODEL, s)
    assert sum(t.work.forward for t in times) == pytest.approx(24 * one.F + first.forward + last.forward)
    assert sum(t.work.backward for t in times) == pytest.approx(24 * one.B + first.backward + last.backward)
    assert sum(t.work.weight for t in times) == pytest.approx(24 * one.W + first.weight + last.weight)


def test_costs_speak_for_every_stage_and_feed_the_simulator() -> None:
    costs = stage_costs(MODEL, CLUSTER, TRAINING, layout())
    assert costs.unit == "s"
    for key in ("F", "B", "W", "BW", "activation_bytes", "parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        assert len(getattr(costs, key)) == 4
    step = predict(MODEL, CLUSTER, TRAINING, layout(), "1f1b")
    assert step.seconds > max(step.timeline.end) - min(step.timeline.start)


def test_recomputation_may_differ_by_layer() -> None:
    half = ("full",) * 12 + ("none",) * 12
    mixed, plain, full = (
        stage_costs(MODEL, CLUSTER, TRAINING, layout(recompute=word)) for word in (half, "none", "full")
    )
    assert [*full.B[:2], *plain.B[2:]] == mixed.B  # type: ignore[index]
    assert mixed.activation_bytes == [*full.activation_bytes[:2], *plain.activation_bytes[2:]]  # type: ignore[index]


# ------------------------------------------------------------------ a step


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "dualpipe", "zb-1p"])
def test_parts_sum_to_the_step(name: str) -> None:
    import stageloom.search  # noqa: F401

    chunks = 2 if name == "interleaved-1f1b" else 1
    step = predict(MODEL, CLUSTER, TRAINING, layout(chunks=chunks, layers=spread(24, 4 * chunks)), name)
    assert sum(step.parts.values()) == pytest.approx(step.seconds)
    assert all(value >= 0 for value in step.parts.values())
    assert 0 < step.mfu < 1
    assert step.tokens_per_second == pytest.approx(64 * 1024 / step.seconds)


def test_a_measured_profile_replaces_the_model() -> None:
    measured = Costs(unit="ms", F=10, B=10, W=10, latency=0, message_bytes=0, bandwidth=None, links=())
    step = predict(MODEL, CLUSTER, TRAINING, layout(), "1f1b", measured=measured)
    assert max(step.timeline.end) == pytest.approx((16 + 3) * 0.030)
    assert 0.57 < step.seconds < 0.65  # and what stands beside the pipeline
    modelled = predict(MODEL, CLUSTER, TRAINING, layout(), "1f1b")
    assert step.memory == modelled.memory  # nobody measured bytes
    only_forward = predict(MODEL, CLUSTER, TRAINING, layout(), "1f1b", measured=Costs(unit="us", F=[1, 2, 3, 4]))
    assert only_forward.costs.F == [1e-6, 2e-6, 3e-6, 4e-6]
    assert only_forward.costs.B == modelled.costs.B
    with pytest.raises(InputError, match="measured costs: unit is missing"):
        predict(MODEL, CLUSTER, TRAINING, layout(), "1f1b", measured=Costs(F=1))


def test_gradients_are_reduced_in_the_bubble_where_it_leaves_room() -> None:
    waits = replace(MODERN, gradient_overlap=False)
    plain = predict(MODEL, CLUSTER, TRAINING, layout(data=8), "1f1b", software=waits)
    overlapped = predict(MODEL, CLUSTER, TRAINING, layout(data=8), "1f1b")
    assert overlapped.seconds < plain.seconds
    # 1F1B's last rank ends its passes first, and so has time to reduce.
    assert plain.beside.last == 0


def test_a_mixture_of_experts_overlaps_all_to_all_only_in_pairs() -> None:
    model, cluster = load_model("deepseek-v3"), load_cluster("h800x2048")
    chosen = Layout(1, 16, 128, expert=64, recompute="selective", layers=spread(61, 16))
    training = Training(4096, 128 * 32, 1, "fp8", "adam-bf16", communication_share=20 / 132, scaling="block")
    costs = stage_costs(model, cluster, training, chosen)
    assert 0.5 < costs.overlap_factor() < 0.9
    dense = stage_costs(MODEL, CLUSTER, TRAINING, layout())
    assert dense.overlap_factor() == 1
    assert (
        predict(model, cluster, training, chosen, "dualpipe").seconds
        < predict(model, cluster, training, chosen, "1f1b").seconds
    )


def test_eight_bits_are_quicker_than_sixteen_and_slower_scaled_by_block() -> None:
    model, cluster, plain = load_model("llama3-8b"), load_cluster("h100x8"), Training(4096, 16, 1)
    chosen = Layout(1, 8, 1, layers=spread(32, 8))
    runs = (plain, replace(plain, dtype="fp8"), replace(plain, dtype="fp8", scaling="block"))
    sixteen, tensor, block = (predict(model, cluster, run, chosen, "1f1b").seconds for run in runs)
    assert tensor < block < sixteen


# ------------------------------------------------------------------ all-to-all


def test_dispatch_sends_once_to_each_node_and_stays_within_four() -> None:
    model, cluster = load_model("deepseek-v3"), load_cluster("h800x2048")
    experts = model.layers[-1].experts
    assert experts is not None
    on = machine(cluster, "fp8", fitted())
    sent = exchange(on, experts, model.hidden, 64)
    assert sent.between == pytest.approx(model.hidden * 4 * 7 / 8)  # at most 4 of 8 nodes, one of them its own
    free = exchange(on, replace(experts, groups=1, groups_per_token=1), model.hidden, 64)
    assert sent.between < free.between < model.hidden * 8 * 7 / 8
    inside = exchange(on, experts, model.hidden, 8)
    assert inside.between == 0
    assert inside.inside > 0
    assert all_to_all(on, exchange(on, experts, model.hidden, 1), 4096, 2.0) == 0
    assert all_to_all(on, sent, 4096, 2.0) > all_to_all(on, sent, 4096, 1.0) > all_to_all(on, inside, 4096, 1.0)


# ------------------------------------------------------------------ layouts that cannot be


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tensor": 3}, "tensor = 3; it has to divide the 16 attention heads"),
        ({"tensor": 0}, "tensor = 0; a whole number of at least 1"),
        ({"data": 64}, "tensor 2 x pipeline 4 x data 64 = 512 GPUs; a100-80gx64 has 64"),
        ({"layers": (6, 6, 6)}, "layers: 3 numbers for 4 stages"),
        ({"layers": (6, 6, 6, 7)}, "layers: 25 on all stages together; gpt has 24"),
        ({"expert": 2}, "expert = 2; gpt has no experts"),
        ({"recompute": ("full", "none")}, "recompute: 2 words for 24 layers"),
        ({"microbatch": 3}, "2 pipelines take micro-batches of 3, so it has to be a multiple of 6; nearest: 60 or 66"),
    ],
)  # fmt: skip
def test_an_impossible_layout_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(InputError) as error:
        check(MODEL, CLUSTER, TRAINING, layout(**changes))
    assert said in str(error.value)


def test_a_schedule_of_other_sizes_is_refused() -> None:
    with pytest.raises(InputError, match="1f1b has 8 stages on 8 ranks; the layout has 4 on 4"):
        predict(MODEL, CLUSTER, TRAINING, layout(), build("1f1b", 8, 16))
    with pytest.raises(InputError, match=r"dtype: fp8; A100.* has no matrix products of it"):
        stage_costs(MODEL, CLUSTER, replace(TRAINING, dtype="fp8"), layout())


@given(st.integers(1, 200), st.integers(1, 64))
def test_spread_is_even_and_spares_the_ends(layers: int, stages: int) -> None:
    if layers < stages:
        with pytest.raises(InputError, match=f"1 to {layers} stages are possible"):
            spread(layers, stages)
        return
    out = spread(layers, stages)
    assert sum(out) == layers
    assert max(out) - min(out) <= 1
    assert out[-1] == min(out)
    assert math.isclose(max(out), -(-layers // stages))
