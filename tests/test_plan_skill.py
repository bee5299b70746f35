"""The agent skill: every command in it runs, and does what the skill says."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from command import stageloom

SKILL = Path(__file__).parents[1] / "skills" / "pipeline-planner" / "SKILL.md"
TEXT = SKILL.read_text(encoding="utf-8")


def commands() -> list[tuple[str, str]]:
    """(command, the line it is said to print first; empty where it is to succeed)."""
    found: list[tuple[str, str]] = []
    for block in re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], ""))
            else:
                found[-1] = (found[-1][0], line)
    return found


def test_the_front_matter_names_the_skill() -> None:
    front = yaml.safe_load(TEXT.split("---\n")[1])
    assert front["name"] == SKILL.parent.name
    assert 50 < len(front["description"]) <= 1024


def test_it_has_enough_commands_of_both_kinds() -> None:
    said = [line for _, line in commands()]
    assert said.count("") >= 6
    assert len([line for line in said if line]) >= 5


@pytest.mark.parametrize(("command", "says"), commands(), ids=lambda text: text[10:70])
def test_a_command_does_what_the_skill_says(
    command: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    assert words[0] == "stageloom"
    result = stageloom(*words[1:])
    if says:
        assert result.status == 2, result.out
        assert result.err.startswith(says), result.err
        assert len(result.err.strip().splitlines()) == 1
        assert list(tmp_path.iterdir()) == []
        return
    assert result.status == 0, result.err
    if words[1] != "plan":
        return
    if "--json" in words:
        data = json.loads(result.out)
        for key in ("memory_limit", "gpu_hours", "gpu_hours_saved", "alternatives"):
            assert key in data
        assert {"seconds", "layout", "memory"} <= data["plan"].keys()
        assert data["rollback"] is None or {"to", "trigger_utilization"} <= data["rollback"].keys()
        return
    for heading in ("Plan", "The nearest alternatives", "When to give it up"):
        assert heading in result.out.splitlines()
    if "--launch" in words:
        assert (tmp_path / "megatron.sh").read_text().count("--pipeline-model-parallel-size 4") == 1
    if "-o" in words:
        assert (tmp_path / words[words.index("-o") + 1]).stat().st_size > 1000
