"""The memory model: the published formulas, and what sharding and schedules must do to the bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stageloom.plan import gpt, load_cluster, load_model
from stageloom.plan.constants import fitted
from stageloom.plan.cost import setting
from stageloom.plan.cost_setting import Setting
from stageloom.plan.cost_work import machine
from stageloom.plan.layout import Layout, spread
from stageloom.plan.memory_stage import layer_kept, stage_bytes
from stageloom.plan.model import total_parameters
from stageloom.plan.predict import predict
from stageloom.plan.software import MEGATRON_2022, MODERN
from stageloom.plan.training import Training

CLUSTER = load_cluster("a100-80gx64")
MODEL = gpt(2048, 16, 24, sequence=1024)
TRAINING = Training(1024, 64, 1, "bf16")
PLAIN = Layout(1, 4, 2, zero=0, sequence_parallel=False, layers=spread(24, 4))


@pytest.mark.parametrize(
    ("t", "parallel", "words", "formula"),
    [  # arXiv 2205.05198, table 2, in units of s b h bytes: (a s / h, t) -> bytes
        (1, False, "none", lambda k, t: 34 + 5 * k),
        (8, False, "none", lambda k, t: 10 + 24 / t + 5 * k / t),
        (8, True, "none", lambda k, t: 34 / t + 5 * k / t),
        (8, False, "selective", lambda k, t: 10 + 24 / t),
        (8, True, "selective", lambda k, t: 34 / t),
        (8, False, "full", lambda k, t: 2),
    ],
)  # fmt: skip
def test_a_layer_keeps_what_the_published_formulas_say(t: int, parallel: bool, words: str, formula: object) -> None:
    hidden, heads, sequence, micro = 6144, 64, 2048, 4
    layer = gpt(hidden, heads, 1, sequence=sequence).layers[0]
    on = machine(CLUSTER, "bf16", fitted())
    s = Setting(on, fitted(), MEGATRON_2022, hidden, sequence, micro, t, 1, parallel, False)
    kept = layer_kept(layer, s, words)  # type: ignore[arg-type]
    expected = formula(heads * sequence / hidden, t)  # type: ignore[operator]
    assert kept.bytes / (sequence * micro * hidden) == pytest.approx(expected)


def test_weight_gradients_hold_what_the_zero_bubble_paper_says() -> None:
    # arXiv 2401.10241, table 1: W frees 32 sbh of a layer's sb(34h + 5as); it counts norms and their like to W.
    on = machine(CLUSTER, "bf16", fitted())
    s = Setting(on, fitted(), MEGATRON_2022, 2304, 1024, 6, 1, 1, False, False)
    kept = layer_kept(gpt(2304, 24, 1, sequence=1024).layers[0], s, "none")
    unit = 1024 * 6 * 2304
    assert kept.bytes / unit == pytest.approx(34 + 5 * 24 * 1024 / 2304)
    assert kept.for_weights / unit == pytest.approx(32)  # 14 of inputs, 18 of gradients of outputs


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_shards_exactly_what_its_stage_says(zero: int) -> None:
    chosen = replace(PLAIN, zero=zero)
    s = setting(MODEL, CLUSTER, TRAINING, chosen, fitted(), MODERN)
    held = stage_bytes(MODEL, TRAINING, chosen, s)
    whole = stage_bytes(MODEL, TRAINING, PLAIN, s)
    for one, base in zip(held, whole, strict=True):
        assert one.optimizer == pytest.approx(base.optimizer / (2 if zero >= 1 else 1))
        assert one.gradients == pytest.approx(base.gradients / (2 if zero >= 2 else 1))
        assert one.parameters == pytest.approx(base.parameters / (2 if zero >= 3 else 1))
        assert one.activations == base.activations


def test_stages_hold_all_parameters_and_a_copy_of_a_tied_embedding() -> None:
    s = setting(MODEL, CLUSTER, TRAINING, PLAIN, fitted(), MODERN)
    held = stage_bytes(MODEL, TRAINING, PLAIN, s)
    assert sum(one.count for one in held) == total_parameters(MODEL) + MODEL.vocabulary * MODEL.hidden
    alone = replace(PLAIN, pipeline=1, layers=(24,))
    assert sum(one.count for one in stage_bytes(MODEL, TRAINING, alone, s)) == total_parameters(MODEL)


def test_experts_are_cut_by_expert_parallelism_alone() -> None:
    model = load_model("mixtral-8x7b")
    training = Training(1024, 64, 1, "bf16")
    base = Layout(1, 4, 8, expert=1, layers=spread(32, 4))
    s = setting(model, CLUSTER, training, base, fitted(), MODERN)
    one, eight = (stage_bytes(model, training, replace(base, expert=e), s)[1] for e in (1, 8))
    assert eight.routed == pytest.approx(one.routed / 8)
    assert eight.dense == one.dense
    # Its optimiser state is sharded over the replicas that are left, one of eight: a GPU holds as much as before.
    assert eight.optimizer == pytest.approx(one.optimizer)


def test_more_in_flight_holds_more_and_two_replicas_hold_twice() -> None:
    def held(name: str, batch: int = 64) -> list[float]:
        step = predict(MODEL, CLUSTER, Training(1024, batch, 1, "bf16"), PLAIN, name)
        return [rank.activations for rank in step.memory]

    assert all(a >= b for a, b in zip(held("gpipe"), held("1f1b"), strict=True))
    assert held("gpipe", 128) > held("gpipe", 64)
    assert held("1f1b", 128) == held("1f1b", 64)
    assert held("1f1b")[0] > held("1f1b")[2]
    one, both = (predict(MODEL, CLUSTER, TRAINING, PLAIN, name).memory for name in ("1f1b", "dualpipe"))
    for rank in range(4):
        assert both[rank].parameters == pytest.approx(one[rank].parameters + one[3 - rank].parameters)
        assert both[rank].gradients == pytest.approx(one[rank].gradients + one[3 - rank].gradients)


def test_parts_sum_to_the_whole_and_ends_differ() -> None:
    step = predict(MODEL, CLUSTER, TRAINING, PLAIN, "1f1b")
    for rank in step.memory:
        assert rank.total == pytest.approx(rank.allocated + rank.fragments + rank.context)
        assert min(getattr(rank, key) for key in rank.__slots__) >= 0
    first, second, third, last = step.memory
    assert second.parameters == third.parameters
    assert first.parameters > second.parameters < last.parameters
    assert last.working > second.working  # the loss
    assert step.peak_memory == max(rank.total for rank in step.memory)


@pytest.mark.parametrize("words", ["selective", "full"])
def test_recomputation_holds_less(words: str) -> None:
    changed = replace(PLAIN, recompute=words)
    training = Training(1024, 64, 8, "bf16")  # large enough that the GPU, not the host, sets the pace
    less, all_kept = (predict(MODEL, CLUSTER, training, replace(one, microbatch=8), "1f1b") for one in (changed, PLAIN))
    assert less.memory[1].activations < all_kept.memory[1].activations
    assert less.seconds > all_kept.seconds
