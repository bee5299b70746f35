"""`python -m benchmarks [speed|published|planning|runtime|predicted|search|all] [--runs N] [--seconds N] [--write]`."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from benchmarks import published, speed
from benchmarks.report import Table

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "benchmarks.md"
VALIDATION: Final = ROOT / "docs" / "validation.md"
WIDTH: Final = 120
SHARED: Final = "Times on a shared machine vary; the best of several runs is the figure to compare."
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


def page(measured: Mapping[str, Any], recomputed: list[Table]) -> str:
    """The page of all parts, each as it was measured last."""
    parts = [
        "# Benchmarks",
        "Made by `python -m benchmarks all --write`, or a part of it at a time. Do not edit.",
    ]
    for part, (heading, _) in PARTS.items():
        if part in measured:
            tables = [Table(**table) for table in measured[part]["tables"]]
            parts += [f"## {heading}", f"Measured on {measured[part]['machine']}. {SHARED}"]
            parts += [table.markdown() for table in tables]
    parts += [
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


def _speed(given: argparse.Namespace) -> Iterator[Table]:
    yield from speed.tables(given.runs)


def _runtime(given: argparse.Namespace) -> Iterator[Table]:
    from benchmarks import runtime, split

    yield from runtime.tables(given.runs)
    yield from split.tables(given.runs)


def _predicted(given: argparse.Namespace) -> Iterator[Table]:
    from benchmarks import predicted

    del given
    yield from predicted.tables()


def _search(given: argparse.Namespace) -> Iterator[Table]:
    from benchmarks import search

    yield from search.tables(given.seconds)


PARTS: Final[dict[str, tuple[str, Callable[[argparse.Namespace], Iterator[Table]]]]] = {
    "speed": ("Speed", _speed),
    "runtime": ("The runtime", _runtime),
    "predicted": ("Predicted against measured", _predicted),
    "search": ("The optimiser", _search),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Speed, and published tables recomputed.")
    parser.add_argument("what", nargs="?", choices=(*PARTS, "published", "planning", "all"), default="speed")
    parser.add_argument("--runs", type=int, default=15, help="runs of each measurement (default 15)")
    parser.add_argument("--seconds", type=float, default=30.0, help="effort of a hard search (search; default 30)")
    parser.add_argument(
        "--write",
        action="store_true",
        help=f"keep the tables in results.json and write {PAGE.relative_to(ROOT)} "
        f"(planning: write {VALIDATION.relative_to(ROOT)})",
    )
    given = parser.parse_args()
    if given.runs < 1:
        parser.error("--runs: at least 1 is needed")
    console = Console()
    console = console if console.width >= WIDTH else Console(width=WIDTH)
    if given.what == "planning":  # a page of its own, and nothing in it was measured here
        from benchmarks import planning

        shown = show(planning.tables(), console)
        if given.write:
            VALIDATION.write_text(planning.page(shown), encoding="utf-8")
            console.print(f"wrote {VALIDATION.relative_to(ROOT)}")
        return
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    for part, (_, tables) in PARTS.items():
        if given.what in (part, "all"):
            shown = show(tables(given), console)
            results[part] = {"machine": machine(), "tables": [asdict(table) for table in shown]}
            if given.write:  # at once: the next part may take an hour
                RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    recomputed = show(published.tables(), console) if given.write or given.what in ("published", "all") else []
    if given.write:
        PAGE.write_text(page(results, recomputed), encoding="utf-8")
        console.print(f"wrote {PAGE.relative_to(ROOT)} and {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
