"""Write the generated parts of the documentation: `make docs`. A test holds the files to what this makes.

README.md, CONTRIBUTING.md and docs/*.md: the output below every `$ stageloom ...` line of a console block is what the
command prints, and the Python below a `file:` comment is that file.
docs/schedules.md: one section a schedule, from its record. docs/schema/: the JSON of `simulate` and `compare`.
docs/images/: the pictures that the texts show.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import re
import shlex
import sys
from pathlib import Path
from unittest import mock

from pydantic import TypeAdapter

import stageloom as sl
from stageloom.cli import main
from stageloom.cli.demo import demo_costs
from stageloom.render import gallery, svg
from stageloom.schedule import tokens

ROOT = Path(__file__).parent.parent
SOURCE = re.compile(r"(<!-- file: (\S+) -->\n)```python\n.*?```", re.DOTALL)
CONSOLE = re.compile(r"```console\n(.*?)```", re.DOTALL)


def run(command: str) -> str:
    """What a `stageloom` command prints, lines without trailing blanks."""
    out = io.StringIO()
    with (
        mock.patch.object(sys, "argv", shlex.split(command)),
        mock.patch.dict(os.environ, {"COLUMNS": "100", "NO_COLOR": "1"}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
        contextlib.chdir(ROOT / "docs" / "examples"),
        contextlib.suppress(SystemExit),
    ):
        main()
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def refreshed(text: str) -> str:
    """A Markdown text with the output of its console blocks made anew; other commands' blocks stay."""

    def block(match: re.Match[str]) -> str:
        lines = match[1].splitlines()
        if not lines or not lines[0].startswith("$ stageloom "):
            return match[0]
        commands = [line for line in lines if line.startswith("$ stageloom ")]
        parts = [f"{command}\n{run(command[2:])}".rstrip() for command in commands]
        return "```console\n" + "\n".join(parts) + "\n```"

    def source(match: re.Match[str]) -> str:
        return f"{match[1]}```python\n{(ROOT / match[2]).read_text(encoding='utf-8')}```"

    return SOURCE.sub(source, CONSOLE.sub(block, text))


def schedules_page() -> str:
    """One section a schedule, from its record."""
    lines = [
        "# The schedules",
        "",
        "Made from the records in `src/stageloom/schedules` by `make docs`. P ranks, M micro-batches, v chunks a rank,",
        "s slices; F, B, W are times of a whole rank's layers. A bubble is (cost - work), cost being the",
        "longest rank from its own first start to its last end. Peak activations are of rank r, in micro-batches of a",
        "whole rank's layers.",
        "Tests hold every promise to be exact under its stated conditions.",
    ]
    for record in sl.records():
        ranks, microbatches = 4, 8
        lines += ["", f"## {record.title}", "", f"`{record.name}`" + "".join(f", `{a}`" for a in record.aliases), ""]
        lines += [f"{record.summary[0].upper()}{record.summary[1:]}.", "", f"- Source: {record.citation}"]
        for title, promise in (("Bubble", record.bubble), ("Peak activations", record.activations)):
            lines.append(f"- {title}: {promise.text}. Exact: {promise.exact}.")
        if not record.synchronous:
            lines.append("- Asynchronous: ops state the weight version they use, after `^`.")
        lines += [
            f"- Option `{option.name}`: {option.help}; default {option.default}"
            + (f", one of {', '.join(option.choices)}" if option.choices else "")
            for option in record.options
        ]
        schedule = record(ranks, microbatches)
        lines += ["", f"{ranks} ranks, {microbatches} micro-batches:", "", "```"]
        lines += [f"rank {rank}: " + " ".join(tokens(schedule, rank)) for rank in range(ranks)]
        lines += ["```"]
    return "\n".join(lines) + "\n"


def schemas() -> dict[str, str]:
    """JSON schemas of what `simulate --json` and `compare --json` print."""
    metrics = TypeAdapter(sl.Metrics).json_schema()
    metrics["description"] = inspect.cleandoc(sl.Metrics.__doc__ or "")
    compared = TypeAdapter(list[sl.Metrics]).json_schema()
    compared["$defs"]["Metrics"]["description"] = metrics["description"]
    return {
        "simulate.schema.json": json.dumps(metrics, indent=2) + "\n",
        "compare.schema.json": json.dumps(compared, indent=2) + "\n",
    }


def pictures() -> dict[str, str]:
    """The drawings that the texts show."""
    comparison = sl.compare(8, 16, demo_costs())
    dualpipe = sl.simulate(sl.build("dualpipe", 8, 20), sl.Costs())
    return {
        "gallery.svg": gallery.svg([row.timeline for row in comparison.rows]),
        "dualpipe.svg": svg.timeline(dualpipe),
    }


def generated() -> dict[Path, str]:
    """Every generated file and its text."""
    files = {ROOT / "docs" / "schedules.md": schedules_page()}
    files |= {ROOT / "docs" / "schema" / name: text for name, text in schemas().items()}
    files |= {ROOT / "docs" / "images" / name: text for name, text in pictures().items()}
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))):
        if page not in files and page.exists():
            files[page] = refreshed(page.read_text(encoding="utf-8"))
    return files


if __name__ == "__main__":
    for path, text in generated().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
