"""The state of a pipeline: names that no two stages share, loading, and buffers that replicas keep in step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import stageloom as sl
import state_tasks as tasks
from stageloom.execute.workers import Pool
from stageloom.schedule import Schedule

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2, timeout=60) as started:
        yield started


# --------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", ["zb-v", "interleaved-1f1b"])
@pytest.mark.parametrize("kind", ["split", "compiled", "tied", "one name", "shared", "alike", "layers"])
def test_names_of_state(kind: str, name: str, pool: Pool) -> None:
    """zb-v has stages 0 and 3 on one rank, interleaved-1f1b 0 and 2."""
    if kind == "shared" and name != "zb-v":
        return  # only stages of one rank can share a tensor
    schedule = sl.build(name, 2, 4)
    expected = {
        "split": tasks.whole_model().state_dict(),
        "compiled": tasks.whole_model().state_dict(),
        "tied": dict.fromkeys(f"{layer}.{what}" for layer in range(4) for what in ("weight", "bias")),
        "alike": dict.fromkeys(f"stages.{n}.{key}" for n in range(4) for key in tasks.toy.stage(0).state_dict()),
    }.get(kind)
    if expected is None:  # stages 1 and 2 both say "0.weight", so all say their stages
        middle = (f"stages.{n}.0.{what}" for n in (1, 2) for what in ("weight", "bias"))
        expected = dict.fromkeys([*middle, "stages.0.embed.weight", "stages.3.embed.weight"])
    for result in pool.run(tasks.names, schedule, kind):
        assert result["whole"].keys() == expected.keys()
        if kind in ("split", "compiled"):
            assert all(torch.equal(result["whole"][key], tensor) for key, tensor in expected.items())
        assert result["equal"]
        missing, unknown, shape, number = result["refused"]
        if kind == "tied" and result["first"] == "0.weight":
            assert missing == "went through"  # it is there as 3.weight
        else:
            assert result["untouched"]
            assert missing.startswith(f"{result['first']}: is missing")
        assert unknown.startswith("stages.9.weight: no stage has such a name")
        qualified = result["first"].startswith("stages.")
        assert ("all names begin with stages.N." in unknown) == qualified
        assert ("which another stage has too" in missing) == (qualified and missing != "went through")
        assert shape.startswith(f"{result['first']}: has shape (3, 3, 3); stage ")
        assert number.startswith(f"{result['first']}: has shape none, as a int; stage ")


@pytest.mark.parametrize("kind", ["one name", "shared"])
def test_a_parameter_that_two_stages_share_under_one_name_is_one_entry(kind: str, pool: Pool) -> None:
    text = "stageloom schedule 1\nname: there and back\nranks: 2\nmicrobatches: 1\npath: 0 1 0\n"
    text += "rank 0: F0@0 F0@2 BW0@2 BW0@0\nrank 1: F0 BW0\n"
    for result in pool.run(tasks.names, sl.loads(text), kind):
        assert set(result["whole"]) == {"embed.weight", "0.weight", "0.bias"}
        assert result["equal"]


# ------------------------------------------------------------------------------------------------------------- buffers


def twice() -> Schedule:
    """Both replicas of a stage on one rank."""
    text = "stageloom schedule 1\nname: twice\nranks: 2\nmicrobatches: 3\npath: 0 1\npath: 0 1\n"
    text += "paths of micro-batches: 0*2 1*1\nrank 0: F0 F1 F2 BW0 BW1 BW2\nrank 1: F0 BW0 F1 BW1 F2 BW2\n"
    return sl.loads(text)


def idle() -> Schedule:
    """A path without micro-batches."""
    text = "stageloom schedule 1\nname: idle\nranks: 2\nmicrobatches: 2\npath: 0 1\npath: 1 0\n"
    text += "paths of micro-batches: 1*2\nrank 0: F0@1 BW0@1 F1@1 BW1@1\nrank 1: F0@0 F1@0 BW0@0 BW1@0\n"
    return sl.loads(text)


SCHEDULES = {
    "dualpipe": lambda: sl.build("dualpipe", 2, 6),
    "chimera": lambda: sl.build("chimera", 2, 4),
    "twice": twice,
    "idle": idle,
    "1f1b": lambda: sl.build("1f1b", 2, 3),
}


def check_statistics(pool: Pool, schedule: Schedule, options: dict[str, Any], copies: int = 1) -> None:
    gradients, buffers = tasks.whole_statistics(schedule, 3, copies)
    found: dict[int, list[Any]] = {}
    for result in pool.run(tasks.statistics, schedule, 3, options, copies, size=schedule.ranks * copies):
        for (_, stage), mine, own in result:
            found.setdefault(stage, []).append(own)
            for key, wanted in gradients[stage].items():
                assert torch.allclose(mine[key], wanted, rtol=0, atol=1e-10), (stage, key)
            for norm in ("moving", "mean"):
                for what in ("running_mean", "running_var", "num_batches_tracked"):
                    got, wanted = own[f"{norm}.{what}"], buffers[stage][f"{norm}.{what}"]
                    assert torch.allclose(got, wanted, rtol=0, atol=1e-10), (stage, norm, what, got, wanted)
    for stage, replicas in found.items():
        assert len(replicas) == len(schedule.placement.paths) * copies, stage
        for other in replicas[1:]:  # of other buffers it is known that they are equal
            assert other.keys() == replicas[0].keys()
            for key in ("seen", "largest"):
                assert torch.equal(other[key], replicas[0][key]), (stage, key)


@pytest.mark.parametrize("recompute", [[], [0, 1]])
@pytest.mark.parametrize("name", SCHEDULES)
def test_statistics_of_replicas_are_those_of_one_process(name: str, recompute: list[int], pool: Pool) -> None:
    """.. that runs the first path's micro-batches first, over three steps and an evaluation in training mode."""
    check_statistics(pool, SCHEDULES[name](), {"recompute": recompute, "split": "fused"})


def test_statistics_of_data_parallel_pipelines_are_those_of_one_process(pool: Pool) -> None:
    """.. that runs the first pipeline's micro-batches first, and within those the first path's."""
    text = "stageloom schedule 1\nname: two replicas on one rank\nranks: 1\nmicrobatches: 3\npath: 0 0\npath: 0 0\n"
    text += "paths of micro-batches: 1*1 0*2\nrank 0: " + " ".join(f"F{m}@0 F{m}@1 BW{m}@1 BW{m}@0" for m in range(3))
    for schedule in (sl.build("gpipe", 1, 2), sl.loads(f"{text}\n")):
        check_statistics(pool, schedule, {}, copies=2)


def test_other_buffers_are_those_of_the_first_path(pool: Pool) -> None:
    """Path 0 of this schedule has two of three micro-batches."""
    for result in pool.run(tasks.statistics, twice(), 3, {}):
        for _, _, own in result:
            assert own["seen"].tolist() == [8, 8]
            assert own["largest"] > 1.0


def test_a_buffer_of_replicas_that_grows_is_refused(pool: Pool) -> None:
    text = "stageloom schedule 1\nname: one rank\nranks: 1\nmicrobatches: 2\npath: 0\npath: 0\n"
    text += "paths of micro-batches: 0*1 1*1\nrank 0: F0 BW0 F1 BW1\n"
    [message] = pool.run(tasks.growing, sl.loads(text), size=1)
    assert message.startswith("stage 0: its buffer largest has changed its shape from () to (1,)")
    assert "persistent=False" in message
