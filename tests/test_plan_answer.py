"""The answer: what it says beside the best plan, and when it refuses."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

import stageloom as sl
from stageloom.errors import InputError
from stageloom.plan import Model, Training, gpt, load_cluster, load_model
from stageloom.plan.alternatives import cut_of
from stageloom.plan.answer import Plan, plan
from stageloom.plan.cluster import Cluster
from stageloom.plan.floors import set_up
from stageloom.plan.layout import Layout, spread
from stageloom.plan.page import page
from stageloom.plan.replicas import replication
from stageloom.plan.rollback import rollback
from stageloom.plan.search import search
from stageloom.plan.space import Refusal, Space


@cache
def answered() -> Plan:
    """A small mixture of experts whose best schedule overlaps pairs or splits backwards."""
    model = load_model("mixtral-8x7b")
    model = replace(model, layers=model.layers[:8])
    training = Training(2048, 32, tokens=1e12)
    return plan(model, load_cluster("h100x16"), training, Space(pipeline=4, recompute=("none",)))


def test_the_answer_says_what_was_asked() -> None:
    found = answered()
    best = found.best
    assert best.fits
    assert best.seconds == found.prediction.seconds
    assert found.gpu_hours == pytest.approx(best.seconds * 16 / 3600 * 1e12 / (2048 * 32))
    assert found.baseline is not None
    assert found.saved == pytest.approx(found.hours(found.baseline.seconds) - found.gpu_hours)
    assert cut_of(found.baseline) == cut_of(best)
    assert sum(found.prediction.parts.values()) == pytest.approx(best.seconds, rel=1e-6)
    assert found.found.best == min((one for one in found.found.scored if one.fits), key=lambda one: one.place)


def test_alternatives_are_slower_and_say_why() -> None:
    found = answered()
    assert 1 <= len(found.alternatives) <= 5
    for one in found.alternatives:
        assert one.plan.fits
        assert one.slower >= 0
        assert one.why
    assert [one.slower for one in found.alternatives] == sorted(one.slower for one in found.alternatives)


def test_the_rollback_is_where_the_simpler_schedule_is_as_fast() -> None:
    found = answered()
    back = found.rollback
    assert back is not None
    assert back.to.form.complexity < found.best.form.complexity
    assert back.seconds >= found.best.seconds
    for expected, trigger in zip(back.expected, back.trigger, strict=True):
        assert trigger * back.seconds == pytest.approx(expected * found.best.seconds)
        assert trigger <= expected <= 1


def test_a_schedule_close_in_another_layout_is_still_one_to_go_back_to_in_this() -> None:
    found = answered()
    best, plain = found.best, found.baseline
    assert plain is not None
    assert plain.form.complexity < best.form.complexity
    far = replace(plain, fits=True, seconds=1.1 * best.seconds)
    close = replace(far, seconds=1.01 * best.seconds, layout=replace(far.layout, tensor=2, data=2))
    slow = next(one for one in found.same_layout if one.form.chunks > 1 and not one.form.split and not one.form.paired)
    slow = replace(slow, fits=True, seconds=1.3 * best.seconds)
    setup = set_up(found.model, found.cluster, found.training)
    back = rollback(setup, best, found.prediction, (far, close, slow))
    assert back is not None
    assert back.to is far
    assert back.equal is close
    said = " ".join(line for section in page(replace(found, rollback=back)) for line in section.lines)
    assert "begin with it unless the plan's schedule costs nothing to set up, and then go back to this one." in said


def test_a_rule_broken_on_request_has_no_gain_to_show() -> None:
    model, cluster = gpt(2048, 16, 8), load_cluster("h100x8")
    found = plan(model, cluster, Training(1024, 64), Space(pipeline=4, microbatch=4, recompute=("full",)))
    texts = [one.text for one in found.disagreements if one.slower is not None and one.slower < 0]
    assert any("here recomputing full; " in text for text in texts)
    assert all("which makes room" not in text and "closer to the peak" not in text for text in texts)


def test_recomputing_what_does_not_fit_otherwise_breaks_no_rule() -> None:
    found = plan(load_model("llama3-70b"), load_cluster("h100x16"), Training(4096, 64), Space(tensor=4, pipeline=4))
    assert found.best.layout.recompute == "full"
    assert not [one.text for one in found.disagreements if one.rule.startswith("recompute")]


def test_a_mixed_cluster_says_what_its_gpus_count_as() -> None:
    fast, slow = load_cluster("h100x8"), load_cluster("a100-80gx8")
    mixed = Cluster("mixed", (*fast.groups, *slow.groups))
    found = plan(gpt(2048, 16, 8), mixed, Training(1024, 64), Space(pipeline=2, recompute=("none",)))
    lines = [line for section in page(found) for line in section.lines if line.startswith("Nodes: ")]
    assert len(lines) == 1
    assert "85.5 GB, 312 TFLOP/s in bf16" in lines[0]
    assert answered().mixed is None


def test_mfu_is_of_the_peak_in_fp8_where_no_gpu_of_a_mixed_cluster_has_bf16() -> None:
    groups = [
        replace(group, gpu=replace(group.gpu, peak={"fp8": peak}))
        for group, peak in zip(load_cluster("h100x8").groups * 2, (2e15, 1.5e15), strict=True)
    ]
    job = Training(1024, 64, dtype="fp8")
    found = plan(gpt(2048, 16, 8), Cluster("mixed", tuple(groups)), job, Space(pipeline=2, recompute=("none",)))
    best = found.prediction
    assert best.mfu == pytest.approx(best.flops / best.seconds / 16 / 1.5e15)
    text = str(page(found))
    assert "1,500 TFLOP/s in fp8 (MFU is of that)" in text
    assert "of the peak in" not in text


def test_on_one_stage_chunks_are_no_alternative() -> None:
    names = ("1f1b", "interleaved-1f1b")
    found = plan(gpt(2048, 16, 8), load_cluster("h100x8"), Training(1024, 64), Space(tensor=2, schedules=names))
    assert found.best.layout.pipeline == 1
    scored = (*found.found.scored, *(one.plan for one in found.alternatives))
    assert {one.schedule for one in scored if one.layout.pipeline == 1} == {"1f1b"}
    table = page(found)[0].table
    assert table is not None
    rows = {row[0]: row[1] for row in table.rows}
    assert rows["schedule"] == "1f1b, on one stage: no pipeline"
    assert rows["pipeline"].startswith("P = 1 rank, M = ")


def test_an_expert_heavy_model_gets_pairs_and_a_dense_one_does_not() -> None:
    """By the numbers: with all-to-alls over the network to hide, overlapped pairs win; a dense model that is as tight
    in memory has nothing to hide, and a second replica or a pair's memory is not worth it."""
    model = load_model("deepseek-v3")
    model = replace(model, layers=model.layers[3:19], predicted=0)
    cluster = load_cluster("h800x128")
    training = Training(4096, 512, dtype="fp8", communication_share=20 / 132, optimizer="adam-bf16", scaling="block")
    space = Space(pipeline=4, tensor=1, expert=32, microbatch=1, recompute=("selective", "full"))
    sparse = search(model, cluster, training, space)
    assert sparse.best.form.paired, sparse.best
    llama = load_model("llama3-70b")
    even = search(llama, load_cluster("h100x64"), Training(4096, 256), Space(pipeline=8, tensor=2, microbatch=1))
    assert not even.best.form.paired, even.best


def test_two_replicas_cost_a_large_mixture_less_than_a_small_dense_model() -> None:
    """70 billion dense parameters on P = 8 against 671 billion with experts over 64 GPUs on P = 16, tensor 1."""
    llama, deepseek = load_model("llama3-70b"), load_model("deepseek-v3")
    dense = replication(llama, load_cluster("h100x64"), Training(4096, 512), Layout(1, 8, 8, layers=spread(80, 8)))
    experts = replication(
        deepseek, load_cluster("h800x2048"), Training(4096, 15360), Layout(1, 16, 128, 64, layers=spread(61, 16))
    )
    # a second copy is 2 bytes a weight and 4 a gradient; optimiser state is sharded over both replicas
    assert dense.extra == pytest.approx(6 * (dense.dense + dense.routed))
    assert dense.dense + dense.routed == pytest.approx(70.6e9 / 8, rel=0.01)
    assert dense.extra / 1e9 == pytest.approx(52.9, abs=0.5)
    assert experts.routed == pytest.approx(58 * 256 * 3 * 7168 * 2048 / 16 / 64, rel=0.03)
    assert experts.extra < 0.25 * dense.extra
    assert experts.share < 0.16 < 0.5 < dense.share


# ------------------------------------------------------------------ refusals


def refused(model: Model, cluster: str, training: Training, space: Space | None = None) -> Refusal:
    with pytest.raises(Refusal) as caught:
        plan(model, load_cluster(cluster), training, space)
    return caught.value


def test_a_model_that_fits_one_gpu_is_sent_to_data_parallelism() -> None:
    found = refused(gpt(1024, 16, 8), "h100x8", Training(1024, 64))
    assert found.reason == "one GPU"
    assert "data parallelism over 8 GPUs" in str(found)
    assert " GB with ZeRO 1 over 8 GPUs), so it needs" in str(found)
    assert "give --pp" in str(found)
    assert "ZeRO" not in str(refused(gpt(1024, 16, 8), "h100x8", Training(1024, 64, zero=0)))
    alone = str(refused(gpt(1024, 16, 8), "h100x1", Training(1024, 64)))
    assert "needs no pipeline: with micro-batches of" in alone
    assert "--pp" not in alone
    assert "ZeRO" not in alone
    asked = plan(gpt(1024, 16, 8), load_cluster("h100x8"), Training(1024, 64), Space(pipeline=2))
    assert asked.best.layout.pipeline == 2


def test_what_is_missing_where_nothing_fits_and_the_nearest_that_would() -> None:
    found = refused(load_model("llama3-70b"), "h100x8", Training(4096, 64))
    assert found.reason == "memory"
    assert "GB are missing; nearest that would fit: 16 such GPUs" in str(found)
    assert plan(load_model("llama3-70b"), load_cluster("h100x16"), Training(4096, 64), Space()).best.fits


def test_recomputation_that_was_ruled_out_is_nearer_than_more_gpus() -> None:
    space = Space(tensor=4, pipeline=4, recompute=("none",))
    found = refused(load_model("llama3-70b"), "h100x16", Training(4096, 64), space)
    assert str(found).endswith("nearest that would fit: recompute full")


def test_the_chosen_schedule_is_in_its_layouts_table_as_it_was_chosen() -> None:
    """With chunks that would be faster and do not fit, it is still the plan that the table shows."""
    found = answered()
    other = replace(found.best, fits=False, seconds=0.9 * found.best.seconds, memory=2 * found.best.memory)
    sections = page(replace(found, same_layout=(other, *found.same_layout)))
    table = next(section.table for section in sections if section.title == "Every schedule in this layout")
    assert table is not None
    rows = [row for row in table.rows if row[0] == found.best.schedule]
    assert [(row[2], row[5]) for row in rows] == [("+0.0 %", "yes")]


def test_a_batch_that_cannot_be_cut_names_the_nearest_that_can() -> None:
    found = refused(gpt(1024, 16, 8), "h100x8", Training(1024, 30), Space(tensor=1, pipeline=2))
    assert found.reason == "batch"
    assert "nearest: 28" in str(found) or "nearest: 32" in str(found)


def test_a_depth_beyond_the_layers_is_refused() -> None:
    found = refused(gpt(1024, 16, 8), "h100x16", Training(1024, 64), Space(pipeline=16))
    assert found.reason == "depth"
    assert "at most 8 stages" in str(found)


def test_a_profile_is_for_one_layout() -> None:
    costs = sl.Costs(unit="ms", F=[10.0] * 4, B=[10.0] * 4, W=[8.0] * 4, latency=0.1)
    model, cluster, training = gpt(2048, 16, 16), load_cluster("a100-80gx8"), Training(1024, 64)
    with pytest.raises(InputError, match="fix tensor, pipeline and microbatch"):
        search(model, cluster, training, measured=costs)
    space = Space(tensor=1, pipeline=4, microbatch=1)
    found = search(model, cluster, training, space, measured=costs)
    # 32 micro-batches of 28 ms each are 0.896 s of work, whatever the model says
    assert 0.896 < found.best.seconds < 1.2
    with pytest.raises(InputError, match="no unit of time"):
        search(model, cluster, training, space, measured=costs.model_copy(update={"unit": None}))
