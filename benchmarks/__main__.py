"""`python -m benchmarks [speed|published|planning|runtime|predicted|search|all] [--runs N] [--seconds N] [--write]`."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks import published, speed
from benchmarks.report import Table

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "benchmarks.md"
VALIDATION: Final = ROOT / "docs" / "validation.md"
WIDTH: Final = 120
RESULTS: Final = ROOT / "benchmarks" / "results.json"


def machine() -> str:
    """The processor and the versions that the times depend on."""
    versions = [f"Python {platform.python_version()}"]
    for package in ("numpy", "numba", "torch"):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"no {package}")
    return f"{_processor()}; {', '.join(versions)}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.machine()


def page(measured: list[Table], recomputed: list[Table]) -> str:
    parts = [
        "# Benchmarks",
        "Made by `python -m benchmarks all --write`; `make bench` prints the times. Do not edit.",
        "## Speed",
        f"Measured on {machine()}. Times on a shared machine vary; the best of several runs is the figure to compare.",
        *(table.markdown() for table in measured),
        "## Published tables, recomputed",
        "Figures and formulas stand in `tests/facts` with their sources; the test suite holds these tables to them. "
        "An error of 0 means equal to all printed digits, or to nine digits for a formula.",
        *(table.markdown() for table in recomputed),
    ]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def show(tables: Iterable[Table], console: Console) -> list[Table]:
    """Print each table as soon as it is there."""
    shown: list[Table] = []
    for table in tables:
        table.print(console)
        shown.append(table)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Speed, and published tables recomputed.")
    choices = ("speed", "published", "planning", "runtime", "predicted", "search", "all")
    parser.add_argument("what", nargs="?", choices=choices, default="speed")
    parser.add_argument("--runs", type=int, default=15, help="runs of each measurement (default 15)")
    parser.add_argument("--seconds", type=float, default=30.0, help="effort of a hard search (search; default 30)")
    parser.add_argument(
        "--write",
        action="store_true",
        help=f"write {PAGE.relative_to(ROOT)} and results.json (all), or {VALIDATION.relative_to(ROOT)} (planning)",
    )
    given = parser.parse_args()
    if given.runs < 1:
        parser.error("--runs: at least 1 is needed")
    console = Console()
    console = console if console.width >= WIDTH else Console(width=WIDTH)
    if given.what == "planning":
        from benchmarks import planning

        shown = show(planning.tables(), console)
        if given.write:
            VALIDATION.write_text(planning.page(shown), encoding="utf-8")
            console.print(f"wrote {VALIDATION.relative_to(ROOT)}")
        return
    everything = given.what == "all" or given.write
    measured = show(speed.tables(given.runs), console) if everything or given.what == "speed" else []
    recomputed = show(published.tables(), console) if everything or given.what == "published" else []
    if given.what == "search":
        from benchmarks import search

        show(search.tables(given.seconds), console)
    if everything or given.what == "runtime":
        from benchmarks import runtime, split

        measured += show(runtime.tables(given.runs), console)
        measured += show(split.tables(given.runs), console)
    if everything or given.what == "predicted":
        from benchmarks import predicted

        measured += show(predicted.tables(), console)
    if given.write:
        PAGE.write_text(page(measured, recomputed), encoding="utf-8")
        results = {"machine": machine(), "speed": [asdict(t) for t in measured]}
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        console.print(f"wrote {PAGE.relative_to(ROOT)} and {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
