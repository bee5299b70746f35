"""What a user does around a schedule, on real processes: each against the same without a pipeline, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import stageloom as sl
from feature_tasks import (
    evaluate,
    losses_read,
    refused,
    refused_ties,
    refused_training,
    restart,
    scaled,
    train,
    train_decoder,
    train_whole_decoder,
    whole,
)
from stageloom.execute.channel import Posts
from stageloom.execute.tasks import Task, tasks_of
from stageloom.execute.workers import Failure, Pool
from stageloom.lower import Code, lower
from stageloom.schedule import Schedule
from stageloom.schedules import Record, records
from toy import LENGTH, WIDTH, data

pytestmark = pytest.mark.torch
SYNCHRONOUS = [record for record in records() if record.synchronous]
Feed = tuple[list[Any], list[Any]]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4, timeout=60) as started:
        yield started


def feed(microbatches: int, step: int = 0, dtype: torch.dtype = torch.float64) -> Feed:
    x, y = data(microbatches, step, dtype)
    return list(x.chunk(microbatches)), list(y.chunk(microbatches))


def one_rank() -> Schedule:
    """Two stages on a single rank: what only one of several ranks would refuse ends no others here."""
    text = "stageloom schedule 1\nname: one\nranks: 1\nmicrobatches: 3\npath: 0 0\n"
    text += "rank 0: F0@0 F0@1 BW0@1 BW0@0 F1@0 F1@1 BW1@1 BW1@0 F2@0 F2@1 BW2@1 BW2@0\n"
    return sl.loads(text)


def check(
    pool: Pool, schedule: Schedule, make: str, feeds: list[Feed], tolerance: float = 1e-10, **options: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Losses of all steps and the gradients added up over them."""
    known = {key: options[key] for key in ("seed", "bf16", "kwargs", "clip") if key in options}
    expected = whole(make, schedule.stages, feeds, **known)
    results = pool.run(train, schedule, make, feeds, options, size=schedule.ranks)
    scale = options.get("scale", 1.0)
    for rank, result in enumerate(results):
        assert result["losses"] == pytest.approx(expected["losses"], rel=0, abs=tolerance), f"rank {rank}"
        for stage, gradients in result["gradients"]:
            for name, wanted in expected["gradients"][stage].items():
                got = gradients[name]
                where = f"rank {rank}, stage {stage}: {name}"
                assert (got is None) == (wanted is None), where
                if got is not None:
                    assert torch.allclose(got / scale, wanted, rtol=0, atol=tolerance), where
        if "clip" in options:
            assert result["norm"] == pytest.approx(expected["norm"], rel=max(tolerance, 1e-9))
    return results, expected


@pytest.mark.parametrize("record", SYNCHRONOUS, ids=lambda record: record.name)
def test_evaluation(record: Record, pool: Pool) -> None:
    schedule = record(2, 4)
    x, y = feed(4)
    expected = whole("toy", schedule.stages, [(x, y)])
    results = pool.run(evaluate, schedule, torch.cat(x), torch.cat(y), size=2)
    outputs: dict[int, Any] = {}
    for result in results:
        assert result["loss"] == pytest.approx(expected["losses"][0], abs=1e-10)
        assert result["steps"] == pytest.approx(expected["losses"] * 2, abs=1e-10)
        assert result["none"] != result["none"]  # nan: no targets, no loss
        assert result["clean"]
        assert result["modes"]
        outputs |= result["outputs"]
    for m, wanted in enumerate(expected["outputs"]):
        assert torch.allclose(outputs[m], wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("how", ["all", "backwards", "one rank", "the last"])
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_losses_belong_to_their_steps_whoever_reads_them_and_when(name: str, how: str, pool: Pool) -> None:
    # Sums travel while ranks go on: one that nobody has looked at must not be taken for the next one.
    schedule = sl.build(name, 2, 4)
    x, _ = feed(4)
    batch = torch.cat(x)
    expected = [whole("toy", schedule.stages, [([one * (step + 1) for one in x], x)])["losses"][0] for step in range(6)]
    read = pool.run(losses_read, schedule, batch, how, size=2)
    wanted = expected[-1:] if how == "the last" else expected
    for rank, found in enumerate(read):
        assert found == pytest.approx([] if how == "one rank" and rank else wanted, abs=1e-10)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe", "interleaved-zb"])
def test_uneven_and_changing_shapes(name: str, pool: Pool) -> None:
    def rows(counts: list[int], length: int, seed: int) -> Feed:
        generator = torch.Generator().manual_seed(seed)
        x = [torch.randn(n, length, WIDTH, generator=generator, dtype=torch.float64) for n in counts]
        return x, [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in x]

    uneven, even, longer = rows([1, 3, 2, 5], 4, 1), rows([2] * 4, LENGTH, 2), rows([2, 1, 1, 1], 7, 3)
    check(pool, sl.build(name, 2, 4), "toy", [uneven, uneven, even, longer, uneven, even])


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "dualpipe"])
def test_nested_values_keyword_arguments_and_trees_of_targets(name: str, pool: Pool) -> None:
    x, y = feed(4)
    targets = [{"y": t, "weight": torch.ones(2), "name": None} for t in y]
    results, _ = check(
        pool, sl.build(name, 2, 4), "nested", [(x, targets)] * 2, kwargs={"factor": 1.5}, split="deferred"
    )
    assert set(results[0]["modes"].values()) == {"deferred"}


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "dualpipe", "chimera"])
def test_gradients_accumulate_over_steps(name: str, pool: Pool) -> None:
    check(pool, sl.build(name, 2, 4), "toy", [feed(4, step) for step in range(3)], clip=0.01)


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize(
    ("name", "how"),
    [("1f1b", "marked"), ("1f1b", "given"), ("zb-h1", "wrapped"), ("zb-v", "moved"), ("dualpipe", "marked")],
)
def test_tied_embeddings_of_transformers(model: str, name: str, how: str, pool: Pool) -> None:
    """zb-v has both tied stages on one rank, dualpipe both on both. What `split` marked need not be given."""
    expected = train_whole_decoder(model, 4, 0.5)
    for result in pool.run(train_decoder, sl.build(name, 2, 4), model, 0.5, how, size=2):
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-10)
        for key, value in result["weights"].items():
            assert torch.allclose(value, expected["weights"][key], rtol=0, atol=1e-10), key


def test_ties_that_split_marked_are_trained_apart_only_where_one_says_so(pool: Pool) -> None:
    expected = train_whole_decoder("gpt2", 4, 0.5)
    for result in pool.run(train_decoder, sl.build("1f1b", 2, 4), "gpt2", 0.5, "apart", size=2):
        assert result["norms"][0] != pytest.approx(expected["norms"][0], rel=1e-6)
    for message in pool.run(refused_ties, sl.build("1f1b", 2, 4), "shape", size=2):
        assert "have the shapes [(32, 16), (3, 16)] now; give tied=()" in message
    for message in pool.run(refused_ties, sl.build("pipedream", 2, 4), "", size=2):
        assert "are one parameter in the model that was split, and pipedream updates stages" in message


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "dualpipe", "zb-v"])
def test_dropout_depends_on_seed_stage_and_microbatch_alone(name: str, pool: Pool) -> None:
    schedule = sl.build(name, 2, 4)
    plain, _ = check(pool, schedule, "dropping", [feed(4)], seed=5)
    check(pool, schedule, "dropping", [feed(4)], seed=5, recompute=list(range(schedule.stages)))
    other = pool.run(train, schedule, "dropping", [feed(4)], {"seed": 6}, size=2)
    assert other[0]["losses"] != plain[0]["losses"]


@pytest.mark.parametrize("split", ["deferred", "graph", "fused"])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_recomputation_runs_each_forward_twice(name: str, split: str, pool: Pool) -> None:
    schedule = sl.build(name, 2, 4)
    results, _ = check(pool, schedule, "dropping", [feed(4)], seed=1, split=split, recompute=[0], hooks=True)
    for result in results:
        assert set(result["modes"].values()) == {split}
        for stage, calls in result["calls"].items():
            assert calls == (8 if stage == 0 else 4)  # once in F and once in B; none in W
        assert set(result["fired"].values()) == {4}


def test_recomputation_without_a_seed_draws_the_same_again(pool: Pool) -> None:
    schedule = sl.build("1f1b", 1, 3)
    kept, again = (
        pool.run(train, schedule, "dropping", [feed(3)], {"recompute": stages, "start": 4}, size=1)[0]
        for stages in ([], [0])
    )
    assert kept["losses"] == again["losses"]
    for name, gradient in kept["gradients"][0][1].items():
        assert torch.allclose(gradient, again["gradients"][0][1][name], rtol=0, atol=1e-12), name


def test_recomputation_of_a_stage_that_changes_its_input_is_refused(pool: Pool) -> None:
    [message] = pool.run(refused_training, one_rank(), "in place", [feed(3)], {"recompute": [1]}, size=1)
    assert "changes its input in place" in message
    check(pool, sl.build("1f1b", 2, 2), "in place", [feed(2)])


def test_outputs_that_change_while_inputs_do_not(pool: Pool) -> None:
    """A stage whose output's shape depends on how often it ran needs dynamic=True, and is told so."""
    schedule = sl.build("1f1b", 2, 2)
    check(pool, schedule, "growing", [feed(2)] * 3, dynamic=True)
    check(pool, one_rank(), "growing", [feed(3)] * 2)  # on one rank nobody has made buffers for what comes
    with pytest.raises(Failure, match=r"rank 0.*dynamic=True"):
        pool.run(train, schedule, "growing", [feed(2)] * 2, {}, size=2)


def test_shapes_that_stay_need_no_exchange(pool: Pool) -> None:
    """With static=True ranks do not ask each other whether shapes have changed; a change is refused."""
    for name in ("zb-v", "dualpipe"):
        check(pool, sl.build(name, 2, 4), "toy", [feed(4, step) for step in range(3)], static=True)
    changed = tuple([part[:, 1:] for part in side] for side in feed(3))
    [message] = pool.run(refused_training, one_rank(), "toy", [feed(3), changed], {"static": True}, size=1)
    assert "static: inputs (their shapes)" in message
    [message] = pool.run(refused_training, one_rank(), "toy", [feed(3)], {"static": True, "dynamic": True}, size=1)
    assert "give one of them" in message


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_autocast_and_scale(name: str, pool: Pool) -> None:
    feeds = [feed(4, 0, torch.float32)]
    for options in ({}, {"recompute": [0, 1]}):
        check(pool, sl.build(name, 2, 4), "toy32", feeds, 1e-5, bf16=True, scale=1024.0, **options)


def test_all_ranks_skip_a_step_in_which_one_overflows(pool: Pool) -> None:
    for result in pool.run(scaled, sl.build("zb-h1", 2, 4), size=2):
        before, first, second, third = result["weights"]
        assert not torch.equal(before, first)
        assert torch.allclose(first, result["plain"], rtol=0, atol=1e-6)
        assert torch.equal(first, second)
        assert not torch.equal(second, third)
        assert result["scales"] == [1024.0, 512.0, 512.0]


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe", "chimera"])
def test_clipping_by_the_norm_of_the_whole_model(name: str, pool: Pool) -> None:
    for limit in (0.01, 1e6):
        check(pool, sl.build(name, 2, 4), "toy", [feed(4)], clip=limit)


@pytest.mark.parametrize("make", ["frozen", "sparse", "cubed", "compiled"])
@pytest.mark.parametrize("split", ["auto", "graph"])
def test_stages_of_all_kinds(make: str, split: str, pool: Pool) -> None:
    if make == "compiled" and split == "graph":
        for message in pool.run(refused_training, sl.build("zb-h1", 2, 4), make, [feed(4)], {"split": split}, size=2):
            assert "is compiled, so autograd cannot split it" in message
        return
    names = ("zb-v", "interleaved-1f1b") if make != "compiled" else ("zb-h1",)
    for name in names:
        results, _ = check(pool, sl.build(name, 2, 4), make, [feed(4)], split=split)
        if make == "compiled":
            assert {mode for result in results for mode in result["modes"].values()} == {"fused"}


@pytest.mark.parametrize("make", ["frozen", "toy"])
def test_frozen_parameters_of_replicas_get_no_gradient(make: str, pool: Pool) -> None:
    check(pool, sl.build("dualpipe", 2, 4), make, [feed(4)])


def test_replicas_of_a_stage_on_one_rank(pool: Pool) -> None:
    text = "stageloom schedule 1\nname: twice\nranks: 2\nmicrobatches: 2\npath: 0 1\npath: 0 1\n"
    text += "paths of micro-batches: 0*1 1*1\nrank 0: F0 F1 BW0 BW1\nrank 1: F0 BW0 F1 BW1\n"
    check(pool, sl.loads(text), "toy", [feed(2)] * 2, clip=0.01)
    text = "stageloom schedule 1\nname: across\nranks: 3\nmicrobatches: 3\npath: 0 1\npath: 0 1\npath: 0 2\n"
    text += "paths of micro-batches: 0*1 1*1 2*1\nrank 0: F0 F1 F2 BW0 BW1 BW2\nrank 1: F0 BW0 F1 BW1\nrank 2: F2 BW2\n"
    check(pool, sl.loads(text), "toy", [feed(3)] * 2, clip=0.01)


@pytest.mark.parametrize("split", ["deferred", "graph", "fused"])
def test_hooks_fire_once_a_microbatch(split: str, pool: Pool) -> None:
    results, _ = check(pool, sl.build("zb-v", 2, 6), "cubed", [feed(6)], split=split, hooks=True)
    assert {count for result in results for count in result["fired"].values()} == {6}


def test_a_mode_for_each_stage(pool: Pool) -> None:
    split = {0: "graph", 1: "fused", 3: "deferred"}
    results, _ = check(pool, sl.build("zb-v", 2, 4), "toy", [feed(4)], split=split)
    modes = {stage: mode for result in results for stage, mode in result["modes"].items()}
    assert modes == {0: "graph", 1: "fused", 2: "deferred", 3: "deferred"}


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "chimera"])
def test_windows_change_nothing(name: str, pool: Pool) -> None:
    results = [check(pool, sl.build(name, 2, 4), "toy", [feed(4)] * 2, window=window)[0] for window in (1, 2, 3, 4)]
    for other in results[1:]:
        for one, same in zip(results[0], other, strict=True):
            assert one["losses"] == same["losses"]


@pytest.mark.parametrize(
    ("window", "posted"), [(1, [1, 1, 1, 1, 1]), (2, [2, 1, 1, 1]), (3, [3, 2]), (4, [4, 1]), (5, [5]), (9, [5])]
)
def test_receives_are_posted_some_together(window: int, posted: list[int]) -> None:
    """`posted`: how many of five are posted together, at the start and each time that half of the window is used up."""
    tasks = tasks_of(lower(sl.build("gpipe", 2, 5)), 1)
    made: list[Task] = []
    posts = Posts(tasks, window, lambda task: made.append(task) or task)  # type: ignore[func-returns-value, arg-type, return-value]
    counts = [len(made)]
    receives = [task for task in tasks if task.code is Code.RECV]
    for expected in receives:
        assert posts.take(0) is expected
        before = len(made)
        posts.ahead(0)
        counts.append(len(made) - before)
    assert made == receives
    assert [count for count in counts if count] == posted


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
@pytest.mark.parametrize("window", [1, 4])
def test_few_values_are_alive_however_many_microbatches(name: str, window: int, pool: Pool) -> None:
    ranks = 4
    schedule = sl.build(name, ranks, 32)
    chunks = schedule.stages // ranks
    results, _ = check(pool, schedule, "toy", [feed(32)] * 2, window=window)
    for result in results:
        # at most P micro-batches a stage are in flight in 1F1B, and 2P halves in ZB-V
        assert result["values"] <= ranks * chunks + window + 2
        assert result["sends"] <= ranks * chunks + window + 2


REFUSALS = {
    "stages": "holds (path, stage)",
    "no module": "expected an nn.Module",
    "inputs": "inputs: this rank holds the first stage",
    "targets": "targets: this rank holds the last stage",
    "list": "inputs: a list of",
    "not divisible": "equal parts",
    "too small": "cannot be cut in",
    "group": "has 2 ranks and the process group 1",
    "loss": "loss: gave shape",
    "loss kind": "loss: is 3; expected a function",
    "detached": "loss: leads back to nothing that is trained",
    "detached stage": "what stage 1 returns, or the loss, is detached",
    "schedule": "schedule: is '1f1b'; expected a schedule, as of stageloom.build",
    "stage list": "stages: is a list; expected a dict of modules by stage",
    "no stages": "stages: is None; expected a dict of modules by stage",
    "group kind": "group: is 5; expected a process group",
    "split kind": "split: is 5; expected a mode (auto, ",
    "recompute kind": "recompute: is 0; expected numbers of stages",
    "recompute none": "recompute: is None; expected numbers of stages",
    "window kind": "window: is 'a'; expected a whole number of receives",
    "window part": "window: is 1.5; expected a whole number of receives",
    "edge groups": "edge_groups: is 'x'; expected True, False or None",
    "static kind": "static: is 'yes'; expected True or False",
    "check finite": "check_finite: is 'x'; expected True or False",
    "on task": "on_task: is 5; expected a function",
    "tied kind": "tied: is 5; expected groups of (stage, name)",
    "tied member": "tied: is a list; expected groups of (stage, name)",
    "two differ": "ranks [1] were given another dynamic, edge_groups than rank 0",
    "kwargs": "kwargs: is 5; expected a dict of keyword arguments",
    "scale text": "scale: is 'x'; expected a finite number",
    "scale none": "scale: is None; expected a finite number",
    "scale nan": "scale: is nan; expected a finite number",
    "seed part": "seed: is 1.5; expected a whole number",
    "seed text": "seed: is 'x'; expected a whole number",
    "clip kind": "max_norm is 'x'; expected a number above 0",
    "state": "load_state_dict: state is None; expected tensors by name",
    "no tensor": "stage 0 returned no tensor",
    "split mode": "mode 'half' is unknown",
    "split stage": "split: names stages [9]",
    "recompute": "recompute: names stages [7]",
    "window": "window: is 0",
    "optimizer": "is synchronous",
    "tied stage": "tied: (5, 'first.weight')",
    "tied name": "has no parameter 'nothing'",
    "tied alone": "has 1 members",
    "tied differently": "ranks [1] were given another tied than rank 0",
    "clip": "max_norm is 0",
}
ONE_RANK = (
    "inputs",
    "targets",
    "list",
    "not divisible",
    "too small",
    "loss",
    "no tensor",
    "detached",
    "detached stage",
)
"""Only some ranks see these; one rank is all there is then."""


@pytest.mark.parametrize("case", REFUSALS)
def test_wrong_use_is_refused(case: str, pool: Pool) -> None:
    if case in ONE_RANK:
        schedule = one_rank()
    else:
        schedule = sl.build("1f1b", 2, 2)
    for message in pool.run(refused, schedule, case, size=schedule.ranks):
        assert REFUSALS[case] in message
        assert "\n" not in message


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("", "give optimizer="),
        ("wrong optimizer", "is not for exactly the parameters"),
        ("no optimizer made", "gave a NoneType"),
        ("scale", "updates under way"),
    ],
)
def test_wrong_use_of_asynchronous_schedules_is_refused(case: str, expected: str, pool: Pool) -> None:
    for message in pool.run(refused, sl.build("pipedream", 2, 4), case, size=2):
        assert expected in message


def test_an_asynchronous_pipeline_runs_on_the_weights_it_is_given(pool: Pool) -> None:
    """Weights loaded after the pipeline was made count, an evaluation uses the newest, stages may have none at all."""
    for result in pool.run(restart, sl.build("pipedream", 3, 4), size=3):
        assert result["fresh"] == result["loaded"]
        assert result["evaluated"] == pytest.approx(result["direct"], abs=1e-12)
        assert result["fresh"] != result["further"]
