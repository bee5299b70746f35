"""Other parallelism beside the pipeline, on real processes: each against one process over the whole global batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import stageloom as sl
import toy
from feature_tasks import whole
from mesh_tasks import (
    Feeds,
    Layout,
    evaluate,
    is_expert,
    refused,
    refused_training,
    reload,
    reload_whole,
    train,
    train_asynchronously,
    train_experts,
    train_in_a_part,
    wait_for_what_follows,
    whole_experts,
)
from stageloom.execute.workers import Pool
from stageloom.schedule import Schedule
from stageloom.schedules import Record, records

pytestmark = pytest.mark.torch
SYNCHRONOUS = [record for record in records() if record.synchronous]
TWO_BY_TWO = {"pp": 2, "dp": 2}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4, timeout=60) as started:
        yield started


def feeds(microbatches: int, steps: int = 1) -> Feeds:
    """The micro-batches of the whole global batch, step by step."""
    pairs = [toy.data(microbatches, step) for step in range(steps)]
    return [(list(x.chunk(microbatches)), list(y.chunk(microbatches))) for x, y in pairs]


def copies(layout: Layout) -> int:
    count = 1
    for name, size in layout.items():
        count *= size if name.startswith("dp") else 1
    return count


def check(
    pool: Pool, schedule: Schedule, layout: Layout, make: str = "toy", steps: int = 1, **options: Any
) -> list[dict[str, Any]]:
    """Losses of all steps and the gradients added up over them, against one process."""
    given = feeds(schedule.microbatches * copies(layout), steps)
    known = {key: options[key] for key in ("seed", "clip") if key in options}
    expected = whole(make, schedule.stages, given, **known)
    size = 1
    for extent in layout.values():
        size *= extent
    results = pool.run(train, schedule, layout, make, given, options, size=size)
    scale = options.get("scale", 1.0)
    for rank, result in enumerate(results):
        assert result["losses"] == pytest.approx(expected["losses"], rel=0, abs=1e-10), f"rank {rank}"
        for stage, gradients in result["gradients"]:
            same(gradients, expected["gradients"][stage], scale, f"rank {rank}, stage {stage}")
        if "clip" in options:
            assert result["norm"] == pytest.approx(expected["norm"], rel=1e-9)
    return results


def same(found: dict[str, Any], expected: dict[str, Any], scale: float, where: str) -> None:
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        got = found[name]
        assert (got is None) == (wanted is None), f"{where}: {name}"
        if got is not None:
            difference = float((got / scale - wanted).abs().max())
            assert difference <= 1e-10, f"{where}: {name} is off by {difference}"


@pytest.mark.parametrize("record", SYNCHRONOUS, ids=lambda record: record.name)
def test_two_steps_of_every_schedule_equal_one_process(record: Record, pool: Pool) -> None:
    schedule = record(2, 4)
    losses, gradients, weights = toy.reference(schedule.stages, 8, 2)
    results = pool.run(train, schedule, TWO_BY_TWO, "toy", feeds(8, 2), {"rates": True})
    for rank, result in enumerate(results):
        assert result["losses"] == pytest.approx(losses, rel=0, abs=1e-10)
        for what, expected in (("gradients", gradients), ("weights", weights)):
            for stage, found in result[what]:
                same(found, expected[stage], 1.0, f"rank {rank}, {what} of stage {stage}")
        reductions = [task for task in result["tasks"] if task.startswith("reduce")]
        assert len(reductions) == len(set(reductions)) == len({stage for stage, _ in result["gradients"]})


def test_a_mesh_of_some_of_the_processes(pool: Pool) -> None:
    (expected,), _, _ = toy.reference(2, 4, 1)
    first, second, *others = pool.run(train_in_a_part, sl.build("1f1b", 2, 4))
    assert [first, second] == pytest.approx([expected] * 2, abs=1e-10)
    assert others == ["mesh: this process is not in it"] * 2


def test_a_reduction_runs_under_the_ops_that_follow_it(pool: Pool) -> None:
    """Were it waited for in its place, the two processes would wait for each other for ever."""
    for tasks in pool.run(wait_for_what_follows, sl.build("zb-v", 1, 1), size=2):
        assert tasks == ["F0@0", "F0@1", "B0@1", "W0@1", "reduce @1", "B0@0", "W0@0", "reduce @0"]


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "zb-v", "dualpipe", "chimera"])
def test_accumulation_loss_scale_and_clipping(name: str, pool: Pool) -> None:
    check(pool, sl.build(name, 2, 4), TWO_BY_TWO, steps=3, clip=0.01)
    check(pool, sl.build(name, 2, 4), TWO_BY_TWO, steps=2, scale=64.0, differ=True)


@pytest.mark.parametrize(
    "layout", [{"dp": 2, "pp": 2}, {"pp": 1, "dp": 4}, {"pp": 4, "dp": 1}, {"dp_outer": 2, "pp": 1, "dp_inner": 2}]
)
def test_other_meshes(layout: Layout, pool: Pool) -> None:
    check(pool, sl.build("zb-h1", layout["pp"], 4), layout, clip=0.1, steps=2)


@pytest.mark.parametrize("make", ["dropping", "frozen", "sparse"])
def test_stages_of_all_sorts(make: str, pool: Pool) -> None:
    """Dropout of a micro-batch is that of its place in the global batch; what is frozen has nothing to sum."""
    for name in ("zb-v", "dualpipe"):
        options: dict[str, Any] = {"seed": 7} if make == "dropping" else {}
        check(pool, sl.build(name, 2, 4), TWO_BY_TWO, make, steps=2, **options)


def whole_and_tied(stages: int, count: int, ties: list[tuple[int, int]], clip: float) -> tuple[Any, float]:
    """One process in which pairs of stages share the weight of a layer: gradients by stage, and their norm."""
    modules = [toy.stage(number) for number in range(stages)]
    for low, high in ties:
        modules[high].get_submodule("first").weight = modules[low].get_submodule("first").weight
    for x, y in zip(*feeds(count)[0], strict=True):
        for module in modules:
            x = module(x)
        (toy.loss(x, y) / count).backward()
    once = dict.fromkeys(p for module in modules for p in module.parameters())
    norm = float(nn.utils.clip_grad_norm_(list(once), clip, foreach=False))
    return [{name: p.grad for name, p in module.named_parameters()} for module in modules], norm


def test_a_parameter_that_two_stages_of_a_rank_share_is_summed_once(pool: Pool) -> None:
    """zb-v has stages 0 and 3 on rank 0; dualpipe has replicas of both elsewhere, where they are two parameters."""
    expected, norm = whole_and_tied(4, 8, [(0, 3), (1, 2)], 0.01)
    for result in pool.run(train, sl.build("zb-v", 2, 4), TWO_BY_TWO, "toy", feeds(8), {"shared": True, "clip": 0.01}):
        for stage, found in result["gradients"]:
            same(found, expected[stage], 1.0, f"stage {stage}")
        assert result["norm"] == pytest.approx(norm)
    options = {"shared": True}
    for said in pool.run(refused_training, sl.build("dualpipe", 2, 4), TWO_BY_TWO, "toy", feeds(8), options):
        assert "share one parameter object (first.weight), and the schedule has replicas of them" in said


@pytest.mark.parametrize("wrap", [None, "fsdp"])
@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "dualpipe"])
def test_tied_weights(name: str, wrap: str | None, pool: Pool) -> None:
    schedule = sl.build(name, 2, 4)
    last = schedule.stages - 1
    expected, norm = whole_and_tied(schedule.stages, 8, [(0, last)], 0.01)
    options = {"tied": [((0, "first.weight"), (last, "first.weight"))], "clip": 0.01, "wrap": wrap}
    for result in pool.run(train, schedule, TWO_BY_TWO, "toy", feeds(8), options):
        assert result["norm"] == pytest.approx(norm)
        for stage, found in result["gradients"]:
            same(found, expected[stage], 1.0, f"stage {stage}")


@pytest.mark.parametrize("wrap", [None, "fsdp"])
def test_evaluation(wrap: str | None, pool: Pool) -> None:
    schedule = sl.build("dualpipe", 2, 4)
    x, y = feeds(8)[0]
    expected = whole("toy", schedule.stages, [(x, y)])
    outputs: dict[int, Any] = {}
    for result in pool.run(evaluate, schedule, TWO_BY_TWO, (x, y), wrap):
        assert result["losses"] == pytest.approx(expected["losses"] * 3, abs=1e-10)
        assert result["clean"]
        assert result["sharded"] is (wrap is not None)
        outputs |= result["outputs"]
    for m, wanted in enumerate(expected["outputs"]):
        assert torch.allclose(outputs[m], wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_asynchronous_schedules_update_all_pipelines_alike(name: str, pool: Pool) -> None:
    """As one process with the same staleness, for which the micro-batches of one number are one."""
    schedule = sl.build(name, 2, 6)
    every = schedule.update_every
    expected = toy.emulate(
        2, 6, every, lambda m, s: max(0, m - 1 + s) if every == 1 else max(m // 2 - 1, 0), pipelines=2
    )
    (x, y), losses = feeds(12)[0], []
    for result in pool.run(train_asynchronously, schedule, TWO_BY_TWO, (x, y)):
        losses.append(result["loss"])
        same(result["weights"], expected[result["stage"]], 1.0, f"{name}, stage {result['stage']}")
    assert losses == [losses[0]] * 4


# ------------------------------------------------------------------------------------------------------ fully sharded


FSDP = [("zb-h2", mode) for mode in ("deferred", "graph", "fused")] + [
    (name, "auto") for name in ("1f1b", "zb-v", "dualpipe", "chimera")
]


@pytest.mark.parametrize(("name", "split"), FSDP)
def test_fully_sharded_stages(name: str, split: str, pool: Pool) -> None:
    results = check(pool, sl.build(name, 2, 4), TWO_BY_TWO, wrap="fsdp", split=split, steps=2, clip=0.01)
    for result in results:
        stages = sorted(result["modes"])
        assert split == "auto" or {mode for mode, _ in result["modes"].values()} == {split}
        for verb in ("gather", "reduce"):
            assert sorted(task for task in result["tasks"] if task.startswith(verb)) == [f"{verb} @{n}" for n in stages]


@pytest.mark.parametrize(
    ("wrap", "layout"),
    [
        ("nested", TWO_BY_TWO),
        ("hsdp", {"pp": 1, "dp_replicate": 2, "dp_shard": 2}),
        ("inner", {"pp": 1, "dp_replicate": 2, "dp_shard": 2}),
    ],
)
def test_modules_wrapped_by_themselves_and_replicas_of_shards(wrap: str, layout: Layout, pool: Pool) -> None:
    for split in ("deferred", "graph"):
        check(pool, sl.build("zb-v", layout["pp"], 4), layout, wrap=wrap, split=split, steps=2, clip=0.01)
    check(pool, sl.build("zb-h1", layout["pp"], 4), layout, "toy", wrap=wrap, recompute=(0,))


def test_a_sharded_stage_trains_on(pool: Pool) -> None:
    """Two steps with momentum, on shards of weights and of the optimiser's state."""
    schedule = sl.build("dualpipe", 2, 4)
    losses, _, weights = toy.reference(schedule.stages, 8, 2)
    for result in pool.run(train, schedule, TWO_BY_TWO, "toy", feeds(8, 2), {"rates": True, "wrap": "fsdp"}):
        assert result["losses"] == pytest.approx(losses, rel=0, abs=1e-10)
        for stage, found in result["weights"]:
            same(found, weights[stage], 1.0, f"stage {stage}")


@pytest.mark.parametrize("split", ["auto", "deferred"])
def test_a_path_without_micro_batches(split: str, pool: Pool) -> None:
    """Its replicas compute nothing, gather nothing, and end the step with the gradients of the others."""
    text = "stageloom schedule 1\nname: idle\nranks: 2\nmicrobatches: 2\npath: 0 1\npath: 1 0\n"
    text += (
        "paths of micro-batches: 0*2\nrank 0: F0@0 F1@0 B0@0 W0@0 B1@0 W1@0\nrank 1: F0@1 B0@1 W0@1 F1@1 B1@1 W1@1\n"
    )
    for wrap in (None, "fsdp"):
        check(pool, sl.loads(text), TWO_BY_TWO, wrap=wrap, split=split, steps=2, clip=0.01)


def test_layers_that_only_some_processes_use(pool: Pool) -> None:
    """Which layer a micro-batch takes depends on its values; what no process uses keeps no gradient."""
    for wrap in (None, "fsdp"):
        for name, microbatches, layout in (("dualpipe", 4, TWO_BY_TWO), ("zb-v", 1, {"pp": 1, "dp": 4})):
            schedule = sl.build(name, layout["pp"], microbatches)
            results = check(pool, schedule, layout, "choosy", steps=2, wrap=wrap)
            used = [
                {name for name, g in found.items() if g is not None}
                for result in results
                for _, found in result["gradients"]
            ]
            assert all(not any(name.startswith("none") for name in names) for names in used)
            # of one micro-batch a process uses one of the layers
            assert microbatches > 1 or {"low.weight", "high.weight"} <= used[0]


def test_mixed_precision_beside_layers_that_only_some_processes_use(pool: Pool) -> None:
    results = pool.run(train, sl.build("zb-v", 1, 1), {"pp": 1, "dp": 4}, "choosy", feeds(4), {"wrap": "mixed"})
    expected = whole("choosy", 2, feeds(4))["gradients"]
    for result in results:
        for stage, found in result["gradients"]:
            for name, wanted in expected[stage].items():
                assert (found[name] is None) == (wanted is None), name
                if wanted is not None:
                    assert float((found[name] - wanted).abs().max()) <= 0.05 * float(wanted.abs().max()), name


def test_gradients_of_low_precision_weights_are_added_up_in_high_precision(pool: Pool) -> None:
    """64 times the same micro-batch, all weight gradients at the end: in bfloat16 the sum would be off by percents."""
    count = 32
    order = " ".join([*(f"F{m} B{m}" for m in range(count)), *(f"W{m}" for m in range(count))])
    text = f"stageloom schedule 1\nname: late\nranks: 1\nmicrobatches: {count}\npath: 0\nrank 0: {order}\n"
    x, y = ([each[0].float()] for each in feeds(1)[0])
    options = {"wrap": "mixed", "split": "deferred"}
    layout = {"pp": 1, "dp": 1}
    (one,) = pool.run(train, sl.build("zb-h1", 1, 1), layout, "toy32", [(x, y)], options, size=1)
    (many,) = pool.run(train, sl.loads(text), layout, "toy32", [(x * count, y * count)], options, size=1)
    for name, wanted in one["gradients"][0][1].items():
        got = many["gradients"][0][1][name]
        assert got.dtype == torch.float32
        assert float((got - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max()), name


# ---------------------------------------------------------------------------------------------------- expert parallel


@pytest.mark.parametrize("split", ["deferred", "graph", "fused"])
def test_expert_parallel(split: str, pool: Pool) -> None:
    """Each rank of "ep" holds half of the experts; the dense parts are summed over it, the experts are not."""
    cases: list[tuple[str, Layout, bool]] = [
        ("zb-h2", {"pp": 2, "ep": 2}, False),
        ("dualpipe", {"pp": 2, "ep": 2}, False),
        ("zb-v", {"pp": 2, "ep": 2}, True),
        ("zb-v", {"pp": 1, "dp": 2, "ep": 2}, False),
    ]
    for name, layout, recompute in cases:
        schedule = sl.build(name, layout["pp"], 4)
        count = schedule.microbatches * layout["ep"] * layout.get("dp", 1)
        feed = feeds(count)[0]
        expected = whole_experts(schedule.stages, feed, 0.01)
        for result in pool.run(train_experts, schedule, layout, feed, split, 0.01, recompute):
            assert result["loss"] == pytest.approx(expected["loss"], abs=1e-10)
            assert result["norm"] == pytest.approx(expected["norm"], rel=1e-9)
            for stage, gradients in result["gradients"]:
                wanted = {
                    key: value.chunk(2)[result["part"]] if is_expert(key) else value
                    for key, value in expected["gradients"][stage].items()
                }
                same(gradients, wanted, 1.0, f"{name}, stage {stage}")
            if split == "deferred":
                assert all(each.get("Experts") == 2 for each in result["deferred"].values())


# ---------------------------------------------------------------------------------------------------- tensor parallel


# Torch keeps tensor parallel plans with the names of process groups, for good; in these meshes "tp" is the same one.
ALONG_PIPELINE: Layout = {"pp": 2, "other": 1, "tp": 2}
ALONG_DATA: Layout = {"dp": 2, "pp": 1, "tp": 2}


@pytest.mark.parametrize("split", ["auto", "deferred", "graph", "fused"])
def test_tensor_parallel_stages(split: str, pool: Pool) -> None:
    for name in ("zb-h2", "zb-v", "dualpipe"):
        results = check(pool, sl.build(name, 2, 4), ALONG_PIPELINE, wrap="tp", split=split, steps=2, clip=0.01)
        if split == "deferred":
            reasons = {reason for result in results for mode, reason in result["modes"].values() if mode == split}
            assert reasons == {"all weight gradients are deferred"}


@pytest.mark.parametrize("split", ["deferred", "graph", "fused"])
def test_sequence_parallel_stages(split: str, pool: Pool) -> None:
    """The norm sees a part of the sequence on each rank, so that its gradients are still to be added up over them."""
    results = check(pool, sl.build("zb-h2", 2, 4), ALONG_PIPELINE, "block", wrap="sp", split=split, steps=2, clip=0.01)
    check(pool, sl.build("zb-v", 2, 4), ALONG_PIPELINE, "block", wrap="sp", split=split)
    if split == "deferred":
        assert results[0]["modes"][0] == ("deferred", "B computes 2 parameters' at once")


@pytest.mark.parametrize("split", ["deferred", "graph", "fused"])
def test_tensor_parallel_beside_data_parallel(split: str, pool: Pool) -> None:
    for wrap in ("tp", "tp fsdp"):
        check(pool, sl.build("zb-v", 1, 4), ALONG_DATA, wrap=wrap, split=split, steps=2, clip=0.01)


@pytest.mark.parametrize(
    ("wrap", "layout"),
    [
        ("fsdp", TWO_BY_TWO),
        ("nested", TWO_BY_TWO),
        ("tp", ALONG_PIPELINE),
    ],
)
def test_stages_in_shards_load_whole_tensors(wrap: str, layout: Layout, pool: Pool) -> None:
    for found in pool.run(reload, sl.build("1f1b", layout["pp"], 4), layout, wrap):
        assert found
        for name, (wanted, loaded) in found.items():
            assert torch.equal(wanted, loaded), name


def test_stages_in_shards_of_shards_load_whole_tensors() -> None:
    """Tensor parallel stages sharded over data ranks. In processes of their own: torch keeps meshes of groups that are
    gone, and takes one for the new one that equals it."""
    with Pool(4, timeout=60) as fresh:
        for found in fresh.run(reload_whole, sl.build("1f1b", ALONG_DATA["pp"], 4), ALONG_DATA, "tp fsdp"):
            assert found
            for name, (wanted, loaded) in found.items():
                assert torch.equal(wanted, loaded), name


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no pp", "no dimension is called 'pp' but ['pipe', 'dp']"),
        ("size", "1f1b has 2 ranks and the mesh 4 along 'pp'"),
        ("descending", "ranks do not ascend along 'pp'"),
        ("kind", "mesh: is a list"),
        ("group", "give mesh= or group=, not both"),
        ("data", "data names ['ep']"),
        ("replicated", "gave ['tp']; expected some of ['dp']"),
        ("differing data", "ranks [1, 2, 3] were given another mesh than rank 0"),
        ("differing replicated", "stage 1: ranks 2 and 3 train it together, but hold 2 and 7 of its parameters"),
        ("frozen on one", "stage 1: ranks 2 and 3 train it together, but hold norm.weight [6] torch.float64 and"),
        (
            "unlike",
            "stage 0: ranks 0 and 1 train it together, but hold norm.weight [6] torch.float64 and norm.weight [7]",
        ),
        ("async", "pipedream: runs on copies of older weights, so that none can lie in shards"),
        ("ddp", "is wrapped by DistributedDataParallel, which sums gradients after each backward"),
        ("along pp", "fully_shard spreads it over ranks"),
        ("fsdp without mesh", "give mesh= with the dimension it is sharded over"),
        ("no data", "fully_shard spreads it over ranks"),
    ],
)
def test_refusals(case: str, message: str, pool: Pool) -> None:
    schedule = sl.build("pipedream" if case == "async" else "1f1b", 2, 4)
    for said in pool.run(refused, schedule, case):
        assert message in said
