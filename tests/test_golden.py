"""Every schedule's order, as a text one can read and compare with its paper's figure.

`make golden` writes them anew; a change shows in the diff.
"""

from __future__ import annotations

import pytest
from tools.golden import FOLDER, goldens


@pytest.mark.parametrize("name", sorted(goldens()))
def test_order_is_the_golden_one(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == goldens()[name]


def test_no_golden_is_left_over() -> None:
    assert {path.name for path in FOLDER.glob("*.loom")} == set(goldens())
