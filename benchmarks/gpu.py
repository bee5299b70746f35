"""`python -m benchmarks.gpu [--device cuda|cpu] [--quick] [--json FILE]`: what a machine with a GPU has to show.

    correctness   every synchronous schedule on one GPU, two to four processes over Gloo: gradients of one process
    edges         a process group a directed edge; over NCCL where there are as many GPUs as ranks, else over Gloo
    pairs         experts on several ranks with their all-to-alls overlapped, and a pair's two halves in two streams
    split         bytes between B and W and times of a stage of a billion parameters: deferred, graph, PyTorch's
    profile       F, B, W and BW of a transformer layer by device events

Takes less than eight minutes. Exit status 1 if a gradient is wrong. `--device cpu` runs the same code in small.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from rich.console import Console

import stageloom as sl
from benchmarks import split
from benchmarks.__main__ import WIDTH, machine
from benchmarks.gpu_tasks import Verdict, correct, experts, streams
from benchmarks.report import Table, Value
from stageloom.execute.devices import Clock
from stageloom.execute.language import Config
from stageloom.execute.split import prepare, run_backward, run_backward_input, run_backward_weight, run_forward
from stageloom.execute.workers import Pool
from stageloom.schedule import Schedule
from stageloom.schedules import Record, records

TOLERANCE: Final = 1e-9
"""Of a gradient in float64, relative to the largest of its parameter."""


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    ranks: tuple[int, ...]
    layers: int  # of the stage of a billion parameters
    width: int
    length: int
    batch: int
    profiled: tuple[tuple[int, int, int], ...]  # (batch, length, width)
    streamed: tuple[int, int, int]
    runs: int


FULL: Final = Sizes(
    ranks=(2, 4),
    layers=5,
    width=4096,
    length=2048,
    batch=1,
    profiled=((4, 2048, 1024), (2, 2048, 2048), (1, 4096, 4096)),
    streamed=(2, 1024, 1024),
    runs=10,
)
SMALL: Final = Sizes(
    ranks=(2,),
    layers=1,
    width=64,
    length=32,
    batch=2,
    profiled=((2, 32, 64),),
    streamed=(2, 32, 64),
    runs=2,
)


def smallest(record: Record, ranks: int) -> Schedule | None:
    """The schedule at the fewest micro-batches, 2P or more, that it allows; None where it allows no such ranks."""
    for microbatches in range(2 * ranks, 4 * ranks + 1):
        if record.refusal(ranks, microbatches) is None:
            return record(ranks, microbatches)
    return None


def _verdicts(found: list[Verdict]) -> tuple[Value, ...]:
    how = sorted({each for verdict in found for each in verdict.how})
    worst = max(verdict.gradient for verdict in found)
    loss = max(verdict.loss for verdict in found)
    return ", ".join(how), f"{loss:.1e}", f"{worst:.1e}", "yes" if worst <= TOLERANCE and loss <= TOLERANCE else "NO"


CHECKED: Final = ("schedule", "processes", "micro-batches", "how", "loss off by", "gradient off by", "equal")


def correctness(pool: Pool, device: str, sizes: Sizes, only: tuple[str, ...]) -> Iterator[Table]:
    """Every synchronous schedule with the automatic split, some with the graph's."""
    config = Config(layers=14, width=32, heads=2, context=16)
    rows: list[tuple[Value, ...]] = []
    for record in records():
        for ranks in sizes.ranks if record.synchronous and (not only or record.name in only) else ():
            schedule = smallest(record, ranks)
            if schedule is None:
                continue
            modes = ("auto", "graph") if record.name in ("zb-h1", "zb-v", "dualpipev") else ("auto",)
            for mode in modes:
                arguments = (schedule, [device] * ranks, config, mode, False)
                found = pool.run(correct, *arguments, size=ranks)
                rows.append((record.name, ranks, schedule.microbatches, *_verdicts(found)))
    note = "A byte-level language model in float64, one step, against one process on the same device."
    yield Table(f"Every synchronous schedule on {device}, over Gloo", note, CHECKED, tuple(rows))


def edges(pool: Pool, device: str, sizes: Sizes, only: tuple[str, ...]) -> Iterator[Table]:
    """Over NCCL where each rank can have a GPU of its own."""
    rows: list[tuple[Value, ...]] = []
    config = Config(layers=14, width=32, heads=2, context=16)
    ranks = sizes.ranks[-1]
    several = device.startswith("cuda") and torch.cuda.device_count() >= ranks
    # NCCL refuses two ranks on one GPU
    devices = [f"cuda:{n}" for n in range(ranks)] if several else ["cpu"] * ranks
    names = ("1f1b", "interleaved-1f1b", "zb-v", "dualpipe")
    for name in [name for name in names if name in only] or names:
        schedule = sl.build(name, ranks, 2 * ranks)
        found = pool.run(correct, schedule, devices, config, "auto", True, size=ranks)
        rows.append((name, ranks, schedule.microbatches, *_verdicts(found)))
    backend = "NCCL, a GPU a rank" if several else "Gloo, on the CPU (fewer GPUs than ranks)"
    yield Table(f"A process group for each directed edge: {backend}", "", CHECKED, tuple(rows))


def pairs(pool: Pool, device: str, sizes: Sizes) -> Iterator[Table]:
    """Experts over two ranks, and a user's function with two streams."""
    rows: list[tuple[Value, ...]] = []
    cases = (("dualpipe", 2, 6), ("dualpipev", 2, 5)) if pool.size >= 4 else (("dualpipev", 1, 4),)
    for name, ranks, microbatches in cases:
        schedule = sl.build(name, ranks, microbatches)
        found = pool.run(experts, schedule, [device] * (2 * ranks), 16, size=2 * ranks)
        rows.append((name, 2 * ranks, microbatches, *_verdicts(found)))
    note = "Two pipelines that share their experts rank by rank; float64, one step, against one process."
    yield Table(f"Mixture of experts, all-to-alls overlapped, on {device}", note, CHECKED, tuple(rows))
    schedule = sl.build("dualpipev", 1, 8)
    [found_streams] = pool.run(streams, schedule, device, sizes.streamed, sizes.runs, size=1)
    apart, together = found_streams["apart"], found_streams["streams"]
    batch, length, width = sizes.streamed
    yield Table(
        "Pairs in two streams, by overlapped_forward_backward",
        f"DualPipeV on one rank, 8 micro-batches of {batch} x {length}, width {width}; seconds a step, the best of "
        f"{sizes.runs}. Gradients relative to the largest of each parameter.",
        ("device", "one op after the other", "two streams", "ratio", "gradients differ by"),
        ((device, apart, together, apart / together, f"{found_streams['difference']:.1e}"),),
        digits=4,
    )


def billion(device: torch.device, sizes: Sizes) -> Iterator[Table]:
    """A stage of about a billion parameters."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    shape = (sizes.batch, sizes.length, sizes.width)
    heads = max(1, sizes.width // 128)
    measured = {
        kind: split.measure(layer, shape, heads, runs=sizes.runs, device=device, dtype=dtype, copies=sizes.layers)
        for kind, layer in (("transformer layers", split.Layer), ("checkpointed layers", split.Checkpointed))
    }
    parameters = sizes.layers * 12 * sizes.width**2
    what = (
        f"{sizes.layers} layers, {parameters / 1e6:,.0f} million parameters, {sizes.batch} x {sizes.length} positions"
    )
    yield from split.shown(measured, f"{what}, {str(dtype).removeprefix('torch.')}")


def profile(device: torch.device, sizes: Sizes) -> Iterator[Table]:
    """F, B, W and BW of a transformer layer; on a GPU by events of its stream."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    rows: list[tuple[Value, ...]] = []
    for shape in sizes.profiled:
        best = _profile(shape, device, dtype, sizes.runs)
        f, b, w, bw = (best[name] * 1e3 for name in ("F", "B", "W", "BW"))
        rows.append((f"{shape[0]} x {shape[1]}", shape[2], f, b, w, bw, b / f, w / f, (b + w) / bw))
    how = "events of the device's stream" if device.type != "cpu" else "the machine's clock"
    yield Table(
        f"F, B and W of a transformer layer on {device}",
        f"Milliseconds, the best of {sizes.runs}, by {how}; {str(dtype).removeprefix('torch.')}, deferred split.",
        ("positions", "width", "F", "B", "W", "BW", "B/F", "W/F", "(B + W)/BW"),
        tuple(rows),
        digits=3,
    )


def _profile(shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype, runs: int) -> dict[str, float]:
    """Seconds of each kind of op, the best of all runs."""
    layer = split.Layer(shape[2], max(1, shape[2] // 128)).to(device, dtype)
    report, clock = prepare(layer, "deferred"), Clock(device)
    parameters = list(layer.parameters())
    x = torch.randn(shape, device=device, dtype=dtype)
    gradient = torch.randn_like(x)
    best: dict[str, float] = {}
    for run in range(runs + 2):
        clock.begin()
        marks = [clock.now()]
        _, saved = run_forward("deferred", lambda given: [layer(given[0])], [x], parameters, layers=report.layers)
        marks.append(clock.now())
        run_backward_input(saved, [gradient])
        marks.append(clock.now())
        run_backward_weight(saved)
        marks.append(clock.now())
        report.layers.plain = True
        _, saved = run_forward("fused", lambda given: [layer(given[0])], [x], parameters)
        report.layers.plain = False
        marks.append(clock.now())
        run_backward(saved, [gradient])
        marks.append(clock.now())
        named = {0: "F", 1: "B", 2: "W", 4: "BW"}
        seconds = clock.seconds({at: (marks[at], marks[at + 1]) for at in named})
        for at, name in named.items():
            taken = seconds[at][1] - seconds[at][0]
            best[name] = min(best.get(name, taken), taken) if run > 1 else float("inf")
    return best


def tables(device: str, sizes: Sizes, only: tuple[str, ...] = ()) -> Iterator[Table]:
    """All tables; `only` names the schedules to check."""
    with Pool(max(*sizes.ranks, 2), timeout=120) as pool:
        yield from correctness(pool, device, sizes, only)
        yield from edges(pool, device, sizes, only)
        yield from pairs(pool, device, sizes)
    yield from billion(torch.device(device), sizes)
    yield from profile(torch.device(device), sizes)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="small sizes (always on the CPU)")
    parser.add_argument("--schedule", action="append", default=[], help="check these schedules only (may be repeated)")
    parser.add_argument("--json", type=Path, help="write all tables to this file")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device cuda: torch {torch.__version__} sees no GPU here; --device cpu runs the same in small")
    unknown = sorted(set(given.schedule) - {record.name for record in records()})
    if unknown:
        parser.error(f"--schedule: there is no {unknown[0]}; `stageloom list` names all")
    console = Console()
    console = console if console.width >= WIDTH else Console(width=WIDTH)
    device = "cpu" if given.device == "cpu" else "cuda:0"
    sizes = SMALL if given.quick or given.device == "cpu" else FULL
    began = time.perf_counter()
    shown: list[Table] = []
    for table in tables(device, sizes, tuple(given.schedule)):
        table.print(console)
        shown.append(table)
    wrong = [row for table in shown if table.columns == CHECKED for row in table.rows if row[-1] != "yes"]
    name = torch.cuda.get_device_name() if device != "cpu" else "CPU"
    taken = time.perf_counter() - began
    console.print(f"{name}: {'all equal' if not wrong else f'{len(wrong)} WRONG'}; {taken:.0f} s")
    if given.json is not None:
        results = {"machine": f"{name}; {machine()}", "seconds": taken, "tables": [asdict(table) for table in shown]}
        given.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
