"""The program in docs/running.md does what the text says, twice: anew, and from its checkpoint."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import stageloom as sl
from stageloom.execute.workers import Pool

pytestmark = pytest.mark.torch
EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"


def test_the_example_trains_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("train")
    schedule = sl.build("zb-v", 2, 4)
    with Pool(2) as pool:
        (began, losses, evaluated), other = pool.run(example.train, schedule, str(tmp_path), 20)
        again, further, better = pool.run(example.train, schedule, str(tmp_path), 5)[0]
    assert other == (began, losses, evaluated)
    assert (began, len(losses), again, len(further)) == (0, 20, 20, 5)
    assert max(further) < losses[0] - 0.5
    assert better < evaluated < losses[0]
