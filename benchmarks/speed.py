"""How fast it is: a schedule from sizes to metrics, its growth, the compiled kernel, a cold start."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.clock import Runs, time_once, time_steps
from benchmarks.peers import pytorch
from benchmarks.report import Table
from stageloom import _kernel
from stageloom.costs import Costs
from stageloom.metrics import measure
from stageloom.schedule import Schedule
from stageloom.schedules import build, records
from stageloom.simulate import durations, simulate
from stageloom.validate import problems

RANKS: Final = 64
MICROBATCHES: Final = 512
STEPS: Final = ("generate", "validate", "simulate", "measure")


def pipeline(name: str, ranks: int, microbatches: int, runs: int) -> tuple[int, Runs]:
    """(ops, times of the four steps). What a step looks up once is in the step that needs it first."""
    costs = Costs()
    ops = len(build(name, ranks, microbatches))

    def chain() -> Sequence[float]:
        instants = [time.perf_counter()]
        schedule = build(name, ranks, microbatches)
        instants.append(time.perf_counter())
        found = problems(schedule)
        instants.append(time.perf_counter())
        timeline = simulate(schedule, costs)
        instants.append(time.perf_counter())
        measure(timeline)
        instants.append(time.perf_counter())
        assert not found
        return instants

    return ops, time_steps(chain, runs, warm=2)


def schedules(runs: int) -> Table:
    """Every schedule at 64 ranks, beside PyTorch where it has it."""
    rows: list[tuple[Any, ...]] = []
    for record in records():
        ops, ours = pipeline(record.name, RANKS, MICROBATCHES, runs)
        other = pytorch(record.name, RANKS, MICROBATCHES)
        theirs = None if other is None else time_steps(time_once(other), 3, warm=0, seconds=3).best_total
        rows.append(
            (
                record.name,
                ops,
                *(1e3 * ours.best(step) for step in range(len(STEPS))),
                1e3 * ours.best_total,
                1e3 * ours.median_total,
                None if theirs is None else 1e3 * theirs,
                None if theirs is None else f"{theirs / ours.best_total:,.0f}x",
            )
        )
    return Table(
        f"Sizes to metrics at {RANKS} ranks and {MICROBATCHES} micro-batches, ms",
        f"Of {runs} runs the best of each step, the best and the median of all; kernels compiled before. "
        "PyTorch: order, validate, add sends and "
        "receives, simulate (unit steps), best of 3 (of fewer where one takes seconds); "
        "the ratio is of best to best. PyTorch counts equal steps and "
        "computes no metrics. Where it says –, PyTorch has no such schedule or cannot simulate it.",
        ("schedule", "ops", *STEPS, "best", "median", "PyTorch", "ratio"),
        tuple(rows),
    )


def growth(runs: int) -> Table:
    rows: list[tuple[Any, ...]] = []
    for name in ("1f1b", "zb-h1", "dualpipe"):
        for microbatches in (512, 2048, 8192):
            ops, ours = pipeline(name, RANKS, microbatches, runs)
            each = (1e9 * ours.best(step) / ops for step in range(len(STEPS)))
            total = 1e3 * ours.best_total
            rows.append((name, microbatches, ops, *each, 1e6 * total / ops, total))
    return Table(
        f"Growth with the number of micro-batches at {RANKS} ranks, ns an op",
        f"Best of {runs} runs.",
        ("schedule", "micro-batches", "ops", *STEPS, "total, ns an op", "total, ms"),
        tuple(rows),
        digits=1,
    )


def kernel(runs: int) -> Table:
    """The compiled longest path alone, in million ops a second."""
    rows: list[tuple[Any, ...]] = []
    for name in ("1f1b", "zb-h1", "interleaved-1f1b", "dualpipe"):
        for microbatches in (512, 8192):
            schedule = build(name, RANKS, microbatches)
            best, median = _kernel_seconds(schedule, runs)
            ops = len(schedule)
            rows.append((name, microbatches, ops, ops / best / 1e6, ops / median / 1e6))
    return Table(
        f"The compiled kernel alone at {RANKS} ranks, million ops a second",
        f"One core, {runs} runs; the arrays it fills are made before the clock starts.",
        ("schedule", "micro-batches", "ops", "best", "median"),
        tuple(rows),
        digits=1,
    )


def _kernel_seconds(schedule: Schedule, runs: int) -> tuple[float, float]:
    rows = len(schedule)
    source, taken, delay = schedule.links.source, durations(schedule, Costs()), np.zeros(rows)
    start, end, waiter = np.empty(rows), np.empty(rows), np.empty(rows, dtype=np.int32)
    longest_path = _kernel.longest_path.compiled

    def chain() -> Sequence[float]:
        end.fill(-1.0)
        waiter.fill(-1)
        begin = time.perf_counter()
        ran = longest_path(schedule.offsets, source, delay, taken, schedule.pair, start, end, waiter)
        finish = time.perf_counter()
        assert ran == rows
        return begin, finish

    measured = time_steps(chain, runs, warm=2)
    return measured.best_total, measured.median_total


def cold(runs: int = 5) -> Table:
    """A new process, from its start to its end."""
    rows: list[tuple[Any, ...]] = []
    commands = {"python -c pass": [sys.executable, "-c", "pass"]}
    commands["python -c 'import numpy'"] = [sys.executable, "-c", "import numpy"]
    commands["python -c 'import stageloom'"] = [sys.executable, "-c", "import stageloom"]
    tool = Path(sys.executable).with_name("stageloom")
    for arguments in ("1f1b -p 8 -m 32", "1f1b -p 64 -m 512"):
        commands[f"stageloom simulate {arguments}"] = [str(tool), "simulate", *arguments.split()]
    numpy_alone = 0.0
    for text, command in commands.items():
        seconds = _process_runs(command, runs)
        if seconds is None:
            rows.append((text, None, None, None))
            continue
        if text.endswith("numpy'"):
            numpy_alone = seconds.median_total
        ratio = f"{seconds.median_total / numpy_alone:.1f}x" if numpy_alone else None
        rows.append((text, 1e3 * seconds.best_total, 1e3 * seconds.median_total, ratio))
    return Table(
        "A cold process, ms",
        f"{runs} runs after two that are not counted; the ratio is of medians, to numpy alone. –: did not run.",
        ("command", "best", "median", "ratio"),
        tuple(rows),
        digits=0,
    )


def _process_runs(command: list[str], runs: int) -> Runs | None:
    """None where the command is not there or fails."""
    if shutil.which(command[0]) is None:
        return None
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        return None
    return time_steps(time_once(lambda: subprocess.run(command, capture_output=True, check=True)), runs)


def tables(runs: int) -> Iterator[Table]:
    yield schedules(runs)
    yield growth(max(3, runs // 3))
    yield kernel(runs)
    yield cold()
