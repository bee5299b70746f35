"""docs/planning.md: its files load and plan together, and it names every key, flag and figure."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from command import Result, stageloom
from stageloom.plan import Training, answer, load_cluster
from stageloom.plan.page import STEP_PARTS

TEXT = (Path(__file__).parents[1] / "docs" / "planning.md").read_text(encoding="utf-8")
FILES = {found[1]: found[0] for found in re.findall(r"```yaml\n(# (\w+\.yaml)\n.*?)```", TEXT, re.DOTALL)}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """The folder with the page's files, and what planning from them prints as JSON."""
    folder = tmp_path_factory.mktemp("docs")
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    words = [f"--{key}={folder / key}.yaml" for key in ("model", "cluster")]
    return folder, stageloom("plan", *words, f"--training={folder / 'job.yaml'}", "--pp", "2", "--json")


def test_the_files_plan_together(planned: tuple[Path, Result]) -> None:
    folder, result = planned
    assert sorted(FILES) == ["cluster.yaml", "job.yaml", "mixed.yaml", "model.yaml"]
    assert result.status == 0, result.err
    data = json.loads(result.out)
    assert (data["gpus"], data["tokens"]) == (8, 300e9)
    assert data["training"]["recompute"] == data["plan"]["layout"]["recompute"] == "selective"
    mixed = load_cluster(folder / "mixed.yaml")
    assert mixed.gpus == 24
    assert mixed.between.bandwidth == 100e9 / 8


def named(words: list[str]) -> None:
    """Each word stands in the page as code, outside of its examples."""
    plain = " ".join(re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL).split())
    code = " ".join(re.findall(r"`([^`]+)`", plain))
    assert not [word for word in words if not re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", code)]


@pytest.mark.parametrize("module", ["short_form", "load_cluster"])
def test_every_key_of_a_file_is_explained(module: str) -> None:
    source = (Path(answer.__file__).parent / f"{module}.py").read_text(encoding="utf-8")
    keys = set(re.findall(r'\.(?:whole|maybe_whole|number|amount|text|truth|choice|list|inner|has)\("(\w+)"', source))
    assert len(keys) >= 10
    named(sorted(keys))


def test_every_key_and_flag_of_the_job_is_explained() -> None:
    named([field.name for field in dataclasses.fields(Training)])
    flags = set(re.findall(r"(?<![\w-])--[a-z-]+", stageloom("plan", "--help").out)) - {"--help", "--out"}
    assert len(flags) > 20
    named(sorted(flags))


def test_every_figure_is_explained(planned: tuple[Path, Result]) -> None:
    data = json.loads(planned[1].out)
    named([key for key in data if key != "plan"])
    parts: list[str] = list(data["plan"]["parts"])
    named([STEP_PARTS.get(part, part) for part in parts])
    words = "plan --model llama3-8b --cluster h100x8 --seq 2048 --global-batch 16 --pp 4"
    screen = stageloom(*words.split()).out
    sections = screen.split("\n\n")
    for title in (part.splitlines()[0] for part in sections[1:-1]):
        assert f"**{title.split(',')[0]}**" in TEXT, title
    rows = [line.split("  ")[0] for line in sections[1].splitlines()[1:]]
    named([row for row in rows if row not in ("schedule", "pipeline", "parallel", "recompute", "memory")])
