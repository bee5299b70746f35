"""Published tables and formulas, recomputed cell by cell (`pytest -s` prints them with their errors)."""

from __future__ import annotations

from functools import cache

import pytest
from benchmarks.published import SOURCES, Cell, Source, formula, table
from rich.console import Console


@cache
def cells_of(source: Source) -> list[Cell]:
    return list(source.cells())


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_published_cells(source: Source) -> None:
    cells = cells_of(source)
    table(source, cells).print(Console(width=120))
    assert cells
    wrong = [cell for cell in cells if not cell.as_known]
    assert not wrong, "\n".join(f"{c.where}, {c.quantity}: {c.published} and {c.ours}" for c in wrong)


def test_all_cells_agree_but_those_named() -> None:
    apart = {source.name for source in SOURCES for cell in cells_of(source) if not cell.agrees}
    assert apart == {"dualpipe", "hanayo"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(p-1)(a+b)", 3 * 5), ("2(p-1)b", 2 * 3 * 3), ("(p-i+1)a+(i-1)b", 4 * 2), ("(1/a)(p-1)/b", 0.5),
        ("max(floor((p-1)/a)-1,0)", 0), ("max(floor(p/a)-1,0)", 1),
    ],
)  # fmt: skip
def test_formulas_are_read_as_papers_write_them(text: str, value: float) -> None:
    assert formula(text, p=4, a=2, b=3, i=1) == value
