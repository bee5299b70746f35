"""The script for machines with a GPU runs to its end without one, and what it measures of a split's memory holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks import gpu, split

pytestmark = pytest.mark.torch


def test_the_gpu_script_runs_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gpu.json"
    assert gpu.main(["--device", "cpu", "--schedule", "zb-v", "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "all equal" in shown
    found = {table["title"]: table for table in json.loads(file.read_text(encoding="utf-8"))["tables"]}
    assert [row[:4] for row in found["Every synchronous schedule on cpu, over Gloo"]["rows"]] == [
        ["zb-v", 2, 4, "deferred"],
        ["zb-v", 2, 4, "graph"],
    ]
    moe = found["Mixture of experts, all-to-alls overlapped, on cpu"]["rows"]
    assert [(row[3], row[-1]) for row in moe] == [("interleaved at its all-to-alls", "yes")]
    [streams] = found["Pairs in two streams, by overlapped_forward_backward"]["rows"]
    assert streams[-1] == "0.0e+00"
    assert len(found["F, B and W of a transformer layer on cpu"]["rows"]) == 1


def test_a_wrong_gradient_is_told_by_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    table = gpu.Table("one", "", gpu.CHECKED, (("zb-v", 2, 4, "deferred", "0", "1", "NO"),))
    monkeypatch.setattr(gpu, "tables", lambda *_: iter([table]))
    assert gpu.main(["--device", "cpu"]) == 1


@pytest.mark.parametrize(
    ("arguments", "expected"), [(["--schedule", "nothing"], "there is no nothing"), (["--device", "tpu"], "invalid")]
)
def test_wrong_arguments(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.main(arguments)
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("name", split.LAYERS)
def test_a_deferred_split_keeps_least_and_runs_nothing_again(name: str) -> None:
    """Bytes from B to W, counted by storage: none of what is measured here is a time."""
    ways = split.measure(split.LAYERS[name], (2, 16, 32), 2, runs=1)
    assert ways["whole"].held == 0
    assert ways["deferred"].again[1] == ways["whole"].again[1] == 0
    tensor = 2 * 16 * 32 * 4  # bytes of an activation
    if name == "checkpointed layer":
        assert ways["deferred"].again == (1, 0)  # recomputed once, in B
        assert ways["graph"].again == (1, 1)
        assert ways["PyTorch"].again[1] > 1
        assert ways["graph"].held < ways["deferred"].held  # the price: what W needs is kept, not computed again
        return
    assert ways["deferred"].held < ways["graph"].held < ways["PyTorch"].held
    # inputs and output gradients of the linear layers (theirs may share memory), and the gradients of the norms
    widths = {"Linear-MLP block": 1 + 4 + 4 + 1, "attention block": 1 + 3 + 1 + 1, "transformer layer": 16}
    assert tensor * widths[name] <= ways["deferred"].held <= tensor * widths[name] + 5 * 32 * 4


def test_what_only_a_graph_holds_is_counted() -> None:
    x = torch.ones(1000, requires_grad=True)
    with split.Storages() as storages:
        y = (x * 2).exp().sum()  # exp keeps its result, 4,000 bytes that no name leads to
        assert storages.alive([]) == 4000 + 4
        y.backward()
        assert storages.alive([x.grad] if x.grad is not None else []) == 4
