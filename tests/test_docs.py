"""The documentation says what the program does: its generated parts are what the tool makes of it now."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
from tools.docs import ROOT, generated

from command import stageloom
from conftest import HAS_TORCH

GENERATED = generated()


@pytest.mark.parametrize("path", sorted(GENERATED), ids=lambda path: str(path.relative_to(ROOT)))
def test_generated_file_is_up_to_date(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == GENERATED[path], "run `make docs` and read the diff"


def test_simulate_json_obeys_its_schema() -> None:
    schema = json.loads((ROOT / "docs" / "schema" / "simulate.schema.json").read_text())
    for arguments in ("1f1b -p 4 -m 8", "pipedream -p 2 -m 2 --unit ms --tokens 10", "zb-v -p 1 -m 1 --jitter 0.1"):
        data = json.loads(stageloom("simulate", *arguments.split(), "--json").out)
        jsonschema.validate(data, schema)
        promised = {
            "schedule", "ranks", "microbatches", "chunks", "makespan", "cost", "work", "bubble_time", "bubble_rate",
            "utilization", "steady_utilization", "utilization_per_rank", "peak_activations", "first_full_time",
        }  # fmt: skip
        assert promised <= data.keys()


def test_compare_json_is_a_list_of_the_same() -> None:
    schema = json.loads((ROOT / "docs" / "schema" / "compare.schema.json").read_text())
    data = json.loads(stageloom("compare", "-p", "4", "-m", "8", "--json").out)
    jsonschema.validate(data, schema)
    assert len(data) >= 17
    alone = json.loads(stageloom("simulate", "zb-h1", "-p", "4", "-m", "8", "--json").out)
    assert alone in data


def test_links_in_the_texts_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


# those of this page need PyTorch, as the tests of the runtime do
LEFT_OUT = set[str]() if HAS_TORCH else {"running.md"}
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in LEFT_OUT)]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_in_the_texts_runs(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for code in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(code, str(page), "exec"), {})
    assert "Traceback" not in capsys.readouterr().out
