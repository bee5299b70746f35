"""Measured costs: memory to the byte, times no shorter than what they are made of, files that every other verb takes.

Nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
import yaml
from torch import nn

import stageloom as sl
from command import stageloom
from profile_tasks import (
    BACKWARD,
    CONFIG,
    FORWARD,
    HIDDEN,
    ROWS,
    WIDTH,
    Slow,
    adamw,
    clocks,
    data,
    loads,
    mlp,
    of_language_model,
    squares,
)
from stageloom.costs import Costs, load_costs
from stageloom.errors import InputError
from stageloom.execute.language import language_model
from stageloom.execute.profile import Profile, profile, profile_stages, share_of_w, variants
from stageloom.execute.progress import busy
from stageloom.execute.stragglers import Load, straggler
from stageloom.execute.tree import flatten, unflatten
from stageloom.execute.workers import Pool
from stageloom.op import Kind
from stageloom.validate import problems

pytestmark = pytest.mark.torch
FLOAT = 4  # bytes


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2, timeout=120) as pool:
        yield pool


# ------------------------------------------------------------------------------------------------------------ profiles


@pytest.mark.parametrize("name", [record.name for record in sl.records()])
def test_backwards_whole_and_split_of_every_schedule(name: str) -> None:
    schedule = sl.build(name, 4, 8)
    whole, parted = variants(schedule)
    backwards = {(op.stage, op.microbatch, op.slice) for rank in range(4) for op in schedule.ops(rank) if op.kind == 0}
    for variant, kinds in ((whole, {Kind.F, Kind.BW}), (parted, {Kind.F, Kind.B, Kind.W})):
        if variant is None:
            assert not schedule.synchronous
            continue
        assert problems(variant) == []
        assert set(map(Kind, variant.kind.tolist())) == kinds
        assert not variant.pair.any()
        for kind in kinds:
            of_kind = [op[1:] for rank in range(4) for op in variant.ops(rank) if op.kind == kind]
            assert len(of_kind) == len(backwards)
            assert set(of_kind) == backwards


@pytest.mark.parametrize("split", ["deferred", "fused"])
def test_memory_is_measured_to_the_byte(split: str) -> None:
    torch.manual_seed(0)
    stages = [mlp(), nn.Sequential(nn.ReLU(), mlp())]
    x, y = data(4)
    before = [p.clone() for stage in stages for p in stage.parameters()]
    costs = profile_stages(stages, x, squares, y, microbatches=4, repeats=1, split=split, optimizer=adamw, tokens=ROWS)
    narrow, wide = ROWS * WIDTH * FLOAT, ROWS * HIDDEN * FLOAT
    # Linear and GELU keep their inputs; the first stage's is the user's. The second's waits for its gradient, though
    # ReLU keeps its output, which the next layer needs as well. The loss keeps output - target, and numbers.
    assert isinstance(costs.activation_bytes, list)
    first, second = costs.activation_bytes
    assert first == pytest.approx(2 * wide, abs=16)
    assert second == pytest.approx(narrow + narrow + 2 * wide + narrow, abs=32)
    # B frees what GELU keeps and makes the gradients of both linear layers' outputs, one of which comes from outside.
    freed_by_w = {"deferred": 2 * (2 * wide + narrow) + narrow, "fused": 0}[split]
    assert costs.w_share * (first + second) == pytest.approx(freed_by_w, rel=0.02)
    own = 2 * WIDTH * HIDDEN + HIDDEN + WIDTH
    assert costs.parameter_bytes == costs.gradient_bytes == [FLOAT * own] * 2
    assert costs.optimizer_bytes == [2 * FLOAT * own + 4 * FLOAT] * 2  # two moments, and a step a parameter
    assert (costs.latency, costs.message_bytes, costs.bandwidth, costs.tokens) == (0, 0, None, ROWS)
    assert all(torch.equal(p, q) for p, q in zip((p for s in stages for p in s.parameters()), before, strict=True))
    assert all(p.grad is None and "forward" not in vars(layer) for s in stages for layer in s for p in s.parameters())
    assert not torch.distributed.is_initialized()


def test_a_share_that_is_nearly_whole_is_whole() -> None:
    """1.00183 was measured: taken literally, each B would add to the memory that F needs, and 1F1B's would not do."""
    found = {
        freed: share_of_w(freed, 100.0) for freed in (-1.0, 0.0, 2.9, 3.1, 50.0, 96.9, 97.1, 100.183, 103.1, 250.0)
    }
    expected = [0.0, 0.0, 0.0, 0.031, 0.5, 0.969, 1.0, 1.0, 1.031, 2.5]
    assert list(found.values()) == pytest.approx(expected)
    assert share_of_w(1.0, 0.0) == 0.0


def test_times_of_a_busy_machine_are_said_to_be() -> None:
    from stageloom.cli.profiling import warnings

    schedule = sl.build("1f1b", 2, 4)
    even = {"F": [0.1, 0.1], "BW": [0.29, 0.1]}
    calm = Profile(Costs(F=[1, 1], B=[1, 1], W=[1, 1], BW=[1.9, 0.95]), {}, even, 4)
    assert warnings(schedule, calm) == []
    busy = Profile(Costs(F=[1, 1], B=[1, 1], W=[1, 1], BW=[2, 0.8]), {}, even | {"F": [0.1, 11.08]}, 4)
    assert warnings(schedule, busy) == [
        "warning: F of stage 1 varied by +-1108 %: the machine was busy; repeat, or raise --repeats",
        "warning: BW of stage 1 took less time than B, which is a part of it: the machine was busy; repeat, or raise "
        "--repeats",
    ]


def test_times_are_those_of_the_stages() -> None:
    """Sleeping takes at least as long as it should."""
    stages = [Slow(), Slow(2)]
    x, y = data(3)
    seen: list[tuple[int, int]] = []
    found = profile(stages, x, squares, y, microbatches=3, repeats=2, on_step=lambda *at: seen.append(at))
    costs = found.costs
    for stage, times in ((0, 1), (1, 2)):
        assert costs.stage_times(2, 1)[Kind.F, stage] >= 1e3 * times * FORWARD
        assert costs.stage_times(2, 1)[Kind.B, stage] >= 1e3 * times * BACKWARD
        assert costs.stage_times(2, 1)[Kind.BW, stage] >= 1e3 * times * BACKWARD
    assert costs.unit == "ms"
    assert found.samples == 6
    assert found.modes == {0: "deferred", 1: "deferred"}
    assert seen == [(done, 7) for done in range(1, 8)]


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "seq1f1b", "chimera", "pipedream"])
def test_profiles_on_several_processes(pool: Pool, name: str) -> None:
    schedule = sl.build(name, 2, 4)
    one, other = pool.run(of_language_model, schedule, 1)
    assert one == other
    costs = one.costs
    assert costs.latency > 0
    # a whole micro-batch, in however many slices it goes; slices along the sequence change nothing
    assert costs.message_bytes == 2 * CONFIG.context * CONFIG.width * FLOAT
    for key in ("F", "B", "W", "BW", "activation_bytes", "parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        values = getattr(costs, key)
        assert len(values) == schedule.stages
        positive = [value > 0 for value in values]
        assert all(positive) or (name == "pipedream" and key == "W" and not any(positive))
    assert sum(costs.parameter_bytes) == FLOAT * sum(p.numel() for p in language_model(CONFIG, 0).parameters())
    assert sl.simulate(schedule, costs).end.max() > 0
    assert sorted(one.modes) == list(range(schedule.stages))


def test_what_does_not_fit_is_refused() -> None:
    x, y = data(2)
    with pytest.raises(InputError, match="repeats: 0"):
        profile([mlp()], x, squares, y, repeats=0)
    with pytest.raises(InputError, match="stages: there is none"):
        profile([], x, squares, y)
    with pytest.raises(InputError, match="but stages are given for"):
        profile({3: mlp()}, x, squares, y, schedule=sl.build("1f1b", 1, 2))
    assert not torch.distributed.is_initialized()


def test_what_passes_between_stages_is_not_held_by_taking_it_apart() -> None:
    """No reference cycle: memory is free at once, without the garbage collector."""

    class Held:
        pass

    gc.disable()
    try:
        tensor, held = torch.zeros(3), Held()
        tensor.held = held  # type: ignore[attr-defined]
        gone = weakref.ref(held)
        tensors, structure = flatten({"a": (tensor, [tensor, 3])})
        again = unflatten(tensors, structure)
        assert again["a"][1][1] == 3
        del tensor, held, tensors, structure, again
        assert gone() is None
    finally:
        gc.enable()


# -------------------------------------------------------------------------------------------------------- command line

SMALL = ["--layers", "2", "--width", "16", "--context", "16", "--size", "2"]


def test_a_profile_serves_every_other_verb(tmp_path: Path) -> None:
    file = tmp_path / "costs.yaml"
    shown = stageloom("profile", "1f1b", "-p", "2", "-m", "4", *SMALL, "--repeats", "1", "-o", str(file))
    assert shown.status == 0, shown.err
    for words in ("1f1b: 2 processes, 4 micro-batches; medians of 4 ops", "message: 2.05 kB", f"wrote {file}"):
        assert words in shown.out
    costs = load_costs(file)
    assert costs.unit == "ms"
    assert costs.tokens == 32
    assert len(np.ravel(costs.F)) == len(np.ravel(costs.BW)) == 2
    assert file.read_text().startswith("# measured by `stageloom profile 1f1b` on 2 processes")
    given = ["-p", "2", "-m", "4", "--costs", str(file)]
    assert stageloom("simulate", "zb-v", *given).status == 0
    compared = stageloom("compare", *given, "--json")
    assert compared.status == 0
    assert all(row["gpu_hours_per_million_tokens"] > 0 for row in json.loads(compared.out))
    run = stageloom("run", "zb-h1", *given, "--emulate", "--scale", "0.001", "--json")
    assert run.status == 0, run.err


def test_a_profile_of_a_decoder(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 3, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(
        **sizes, intermediate_size=24, vocab_size=50, max_position_embeddings=32, architectures=["LlamaForCausalLM"]
    )
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    sized = ["profile", "1f1b", "-p", "2", "-m", "2", "--size", "2", "--repeats", "1", "--model", str(file)]
    shown = stageloom(*sized, "--context", "8", "--json")
    assert shown.status == 0, shown.err
    data = json.loads(shown.out)
    costs = Costs(**data["costs"])
    whole = transformers.LlamaForCausalLM(config)
    assert isinstance(costs.parameter_bytes, list)
    assert sum(costs.parameter_bytes) == FLOAT * sum(p.numel() for p in whole.parameters())
    assert costs.message_bytes == 2 * 8 * 16 * FLOAT
    assert data["modes"] == {"0": "deferred", "1": "deferred"}
    wrong = {
        "--context 33": "--context 33:",
        "--layers 2": "--layers is of run's model",
        "--width 16": "--width is of run's model",
    }
    for arguments, message in wrong.items():
        result = stageloom(*sized, *arguments.split())
        assert (result.status, message in result.err) == (2, True), result
    too_deep = stageloom("profile", "1f1b", "-p", "4", "-m", "4", "--context", "8", "--model", str(file))
    assert "3 layers are too few for 1f1b's 4 stages" in too_deep.err
    other = tmp_path / "other.json"
    other.write_text('{"architectures": ["BertModel"]}')
    assert "expected one of GPT2LMHeadModel" in stageloom(*sized[:-1], str(other)).err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("profile 1f1b -p 2 -m 2 --repeats 0", "--repeats 0: at least 1"),
        ("profile 1f1b -p 2 -m 2 -o nowhere/c.yaml", "-o nowhere/c.yaml: there is no folder nowhere"),
        ("profile 1f1b -p 2 -m 2 --device cuda", "--device cuda: "),
        ("run 1f1b -p 2 -m 2 --device cuda", "--device cuda: "),
        ("verify 1f1b -p 2 -m 2 --device cuda", "use --device cpu"),
        ("verify 1f1b -p 2 -m 2 --device tpu", "tpu"),
        ("run 1f1b -p 2 -m 2 --emulate --device cpu", "--device is of a model"),
    ],
)
def test_wrong_invocations(arguments: str, message: str) -> None:
    if torch.cuda.is_available() and "--device cuda" in arguments:
        pytest.skip("there is a CUDA device here")
    result = stageloom(*arguments.split())
    assert result.status == 2, result
    assert message in result.err
    assert len(result.err.splitlines()) == 1


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "costs.yaml"
    folder.mkdir()
    result = stageloom("profile", "1f1b", "-p", "2", "-m", "2", "-o", str(folder))
    assert (result.status, "is a folder" in result.err) == (2, True)
    assert list(tmp_path.iterdir()) == [folder]


def test_cost_files_give_the_costs_back(tmp_path: Path) -> None:
    from stageloom.cli.profiling import written

    costs = Costs.model_validate(
        {
            "unit": "ms",
            "F": [1.25, 1 / 3],
            "BW": [1e-7, 2e9],
            "message_bytes": 65536,
            "bandwidth": 1.5e9,
            "links": [{"from": 0, "to": 1, "latency": 0.1}],
            "w_share": 1.25,
        }
    )
    for name in ("costs.yaml", "costs.json"):
        file = tmp_path / name
        file.write_text(written(costs, file, "a comment"))
        assert load_costs(file) == costs
    assert yaml.safe_load((tmp_path / "costs.yaml").read_text())["unit"] == "ms"


# ---------------------------------------------------------------------------------------------------- while training


def test_clocks_of_other_hosts_are_found_within_their_error(pool: Pool) -> None:
    for ahead in (1000.0, -0.25):
        for rank, (found, known) in enumerate(pool.run(clocks, ahead)):
            assert abs(found.seconds - ahead * rank) <= found.error + 1e-9
            assert (found.error > 0) == (rank > 0)
            assert known == (0, 0)  # these processes share a clock
            assert found.aligned({3: (ahead * rank + 1, ahead * rank + 2)})[3] == pytest.approx(
                (1, 2), abs=found.error + 1e-9
            )


def test_loads_are_means_of_the_last_steps_on_all_ranks(pool: Pool) -> None:
    schedule = sl.build("zb-h1", 2, 3)
    one, other = pool.run(loads, schedule)
    assert one == other
    kinds = [
        schedule.kind[low:high].tolist() for low, high in zip(schedule.offsets, schedule.offsets[1:], strict=False)
    ]
    for steps, means in zip(((1,), (1, 2), (2, 3)), one, strict=True):
        for load in means:
            ops = tuple(kinds[load.rank].count(kind) for kind in range(4))
            each = (load.rank + 1) * sum(steps) / len(steps)
            assert load.ops == ops
            assert load.seconds == pytest.approx([each * count for count in ops])
            assert load.busy == pytest.approx(each * sum(ops) / 100)


def load(rank: int, *seconds: float, ops: tuple[int, ...] = (4, 4, 4, 0)) -> Load:
    return Load(rank, 1.0, seconds, ops)


def test_the_straggler_is_named_with_the_op_it_is_slow_at() -> None:
    even = [load(rank, 0.1, 0.2, 0.1, 0.0) for rank in range(3)]
    found = straggler([*even, load(3, 0.12, 0.4, 0.1, 0.0)])
    assert found is not None
    assert (found.rank, found.kind) == (3, "B")
    assert found.excess == pytest.approx(0.62 / 0.4 - 1)
    assert (found.own, found.others) == (0.1, 0.05)
    assert str(found) == "rank 3 has 55 % more work than the others, B takes 100 ms, elsewhere 50"
    # more ops, each as quick as elsewhere
    more = straggler([*even, load(3, 0.2, 0.4, 0.2, 0.0, ops=(8, 8, 8, 0))])
    assert more is not None
    assert (more.excess, more.kind) == (pytest.approx(1.0), None)
    assert straggler(even[:1]) is None
    assert straggler([load(0, 0, 0, 0, 0), load(1, 0, 0, 0, 0)]) is None
    # kinds that no other rank has are compared with nothing
    alone = straggler([load(0, 0.1, 0, 0, 0.9, ops=(4, 0, 0, 4)), load(1, 0.1, 0.2, 0.1, 0)])
    assert alone is not None
    assert (alone.rank, alone.kind) == (0, None)


def test_progress_says_how_busy_each_rank_is() -> None:
    ranks = [load(0, 0.1, 0.2, 0.1, 0), load(1, 0.1, 0.2, 0.1, 0), load(2, 0.1, 0.5, 0.1, 0)]
    assert busy(ranks) == "busy 40 40 70 %  rank 2 +75 % (B)"
    assert busy(ranks[:2]) == "busy 40 40 %"
    assert busy([load(rank, 0.1, 0.2, 0.1, 0) for rank in range(9)]) == "busy 40 to 40 %"
