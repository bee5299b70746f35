"""Published tables and formulas, recomputed: a cell is what was printed beside what the simulator says.

The figures and formulas are read from `tests/facts/*.json`, where their sources and conventions stand. Formulas are
evaluated as they are written there. Where a cell does not agree, `measured` keeps what was found, so that a change of
either side is noticed; nothing is adjusted.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from benchmarks.report import Table
from stageloom.costs import Costs
from stageloom.metrics import Metrics, measure
from stageloom.schedule import Schedule
from stageloom.schedules import build
from stageloom.schedules.pipedream import updates
from stageloom.simulate import simulate

FACTS: Final = Path(__file__).parents[1] / "tests" / "facts"


@dataclass(frozen=True)
class Cell:
    """One published number and ours. `decimals` are those that were printed (None: a formula, which is exact)."""

    where: str
    quantity: str
    published: float
    ours: float
    decimals: int | None = None
    measured: float | None = None
    """What we found where the two are known to differ."""

    @property
    def agrees(self) -> bool:
        return _same(self.ours, self.published, self.decimals)

    @property
    def as_known(self) -> bool:
        """Does the cell agree, or differ just as it is known to?"""
        if self.measured is None:
            return self.agrees
        return not self.agrees and _same(self.ours, self.measured, self.decimals)

    @property
    def error(self) -> float:
        """Relative, of ours; in the printed decimals where there are some."""
        ours = self.ours if self.decimals is None else round(self.ours, self.decimals)
        return (ours - self.published) / self.published if self.published else ours


def _same(ours: float, theirs: float, decimals: int | None) -> bool:
    if decimals is None:
        return math.isclose(ours, theirs, rel_tol=1e-9, abs_tol=1e-9)
    return round(ours, decimals) == theirs


@dataclass(frozen=True)
class Source:
    """A published table or set of formulas, and how its cells are computed."""

    name: str
    title: str
    note: str
    cells: Callable[[], Iterator[Cell]]


def table(source: Source, cells: list[Cell]) -> Table:
    """The cells beside one another, with their errors."""
    rows = [
        (
            cell.where,
            cell.quantity,
            f"{cell.published:.{cell.decimals}f}" if cell.decimals is not None else f"{cell.published:g}",
            f"{cell.ours:.{cell.decimals}f}" if cell.decimals is not None else f"{cell.ours:g}",
            "0" if cell.agrees else f"{cell.error:+.2%}",
        )
        for cell in cells
    ]
    return Table(source.title, source.note, ("sizes", "quantity", "published", "ours", "error"), tuple(rows))


# ------------------------------------------------------------------ reading the facts


@cache
def facts(name: str) -> Any:
    return json.loads((FACTS / f"{name}.json").read_text(encoding="utf-8"))


def records(name: str) -> list[dict[str, Any]]:
    """The rows of a table of facts, by column."""
    data = facts(name)
    return [dict(zip(data["columns"], row, strict=True)) for row in data["rows"]]


def formula(text: str, **values: float) -> float:
    """A formula as papers write it: `2(p-1)TF` is 2 * (p - 1) * TF."""
    written = text.replace("F&B", "FB").replace("3PW", "3*P*W")
    written = re.sub(r"(?<=[\d)])\s*(?=[A-Za-z(])", "*", written)
    functions: dict[str, Any] = {"__builtins__": {}, "max": max, "floor": math.floor}
    return float(eval(written, functions, values))


# ------------------------------------------------------------------ running schedules


def run(name: str, ranks: int, microbatches: int, costs: Costs, **options: Any) -> Metrics:
    return measure(simulate(build(name, ranks, microbatches, costs=costs, **options), costs))


def size(ranks: int, microbatches: int, more: str = "") -> str:
    return f"{ranks} ranks, {microbatches} micro-batches{more and ', ' + more}"


EQUAL: Final = {"TF": 1.0, "TB": 1.0, "TW": 1.0}


def _costs(times: dict[str, float], scale: float = 1.0, **more: Any) -> Costs:
    return Costs(F=times["TF"] * scale, B=times["TB"] * scale, W=times["TW"] * scale, **more)


# ------------------------------------------------------------------ zero bubble, arXiv 2401.10241


def zb_bubble_rates() -> Iterator[Cell]:
    profile = {(r["model"], r["p"], r["m"]): r for r in records("zb_profile_times")}
    models = {row[0]: row for row in facts("zb_models")["rows"]}
    for row in records("zb_bubble_rates"):
        model, ranks, microbatches = row["model"], row["p"], row["m"]
        times = profile[model, ranks, microbatches]
        costs = Costs(F=times["T_F"], B=times["T_B"], W=times["T_W"], latency=times["T_comm"])
        where = f"{model}, {size(ranks, microbatches)}"
        columns = ("1F1B", "1f1b"), ("ZB-H1", "zb-h1"), ("ZB-H2", "zb-h2"), ("ZB-1p", "zb-1p"), ("ZB-2p", "zb-2p")
        for column, name in columns:
            yield Cell(where, column, row[column], run(name, ranks, microbatches, costs).bubble_rate, 4)
        # One layer a chunk: the first and the last stage have a layer fewer, so that there are layers + 2 places.
        chunks = (models[model][1] + 2) // ranks
        metrics = run("interleaved-1f1b", ranks, microbatches, costs, chunks=chunks)
        cost = metrics.cost - ranks * times["T_comm"]  # see `reproduction` in the facts
        yield Cell(where, f"1F1B-I, v = {chunks}", row["1F1B-I"], 1 - metrics.work / cost, 4)


def zb_formulas() -> Iterator[Cell]:
    written = facts("zb_formulas")
    by_name = {"1F1B": "1f1b", "ZB-H1": "zb-h1", "ZB-H2": "zb-h2"}
    for row in records("zb_profile_times"):
        if row["m"] != 32:
            continue
        times = {"TF": row["T_F"], "TB": row["T_B"], "TW": row["T_W"]}
        for column, name in by_name.items():
            expected = formula(written["bubble"][column], p=row["p"], **times)
            found = run(name, row["p"], row["m"], _costs(times)).bubble_time
            yield Cell(f"{row['model']}, {size(row['p'], row['m'])}", f"{column}: bubble, ms", expected, found)
    for microbatches in (2, 4, 8):
        where = size(8, microbatches)
        for column, name in (("1F1B", "1f1b"), ("ZB", "zb-h1")):
            expected = formula(written["m_le_p"][column], m=microbatches, p=8, **EQUAL)
            found = run(name, 8, microbatches, _costs(EQUAL)).makespan
            yield Cell(where, f"{column} with m <= p: makespan", expected, found)


def zb_share(hidden: int, heads: int, sequence: int) -> float:
    """Of a GPT layer's activations, 34h + 5as bytes a token, the part that only W frees, 32h."""
    return 32 * hidden / (34 * hidden + 5 * heads * sequence)


def zb_activations() -> Iterator[Cell]:
    """Activations of every worker. MB, MW: all of a micro-batch's, and the part that only W frees, per layer."""
    written = facts("zb_formulas")["activation_worker_i_1indexed"]
    for model, _, heads, hidden, sequence, ranks, *_ in facts("zb_models")["rows"]:
        held_by_w = zb_share(hidden, heads, sequence)
        for column, name in (("ZB-H1", "zb-h1"), ("ZB-H2", "zb-h2")):
            peaks = run(name, ranks, 4 * ranks, Costs(w_share=held_by_w)).peak_activations
            for worker in (1, ranks // 2, ranks):
                expected = formula(written[column], p=ranks, i=worker, MB=1, MW=held_by_w)
                where = f"{model}, {size(ranks, 4 * ranks)}"
                yield Cell(where, f"{column}: activations of worker {worker}", round(expected, 9), peaks[worker - 1])


def v_shaped() -> Iterator[Cell]:
    """V-Min and V-Half in passes of a chunk, and the most chunk activations of a rank."""
    for row in facts("vmin_vhalf_unit_cost"):
        costs = Costs(F=2 * row["TF"], B=2 * row["TB"], W=2 * row["TW"], latency=row["Tcomm"], w_share=1.0)
        metrics = run(row["schedule"].lower(), row["p"], row["m"], costs)
        where = size(row["p"], row["m"])
        yield Cell(where, f"{row['schedule']}: makespan", row["makespan"], metrics.makespan)
        peak = 2 * max(metrics.peak_activations)
        yield Cell(where, f"{row['schedule']}: peak of chunk activations", row["peak_chunk_activations"], peak)


def makespans() -> Iterator[Cell]:
    written = facts("zb_formulas")["bubble"]
    for ranks, microbatches in ((8, 32), (64, 512)):
        for column, name in (("1F1B", "1f1b"), ("ZB-H1", "zb-h1")):
            expected = 3 * microbatches + formula(written[column], p=ranks, **EQUAL)
            yield Cell(size(ranks, microbatches), column, expected, run(name, ranks, microbatches, Costs()).makespan)
        # Not in the paper: what two other implementations of the order give, 6 m + (p - 1) passes of a chunk.
        expected = 3 * microbatches + (ranks - 1) / 2
        yield Cell(size(ranks, microbatches), "ZB-V", expected, run("zb-v", ranks, microbatches, Costs()).makespan)


# ------------------------------------------------------------------ DualPipe, arXiv 2412.19437


def dualpipe() -> Iterator[Cell]:
    """Table 2: bubble, copies of the parameters and activations of a pipeline of PP stages."""
    rows = {row["method"]: row for row in facts("dualpipe_bubbles")["rows"]}
    schedules = {"1F1B": "1f1b", "ZB1P": "zb-h1", "DualPipe": "dualpipe", "DualPipeV": "dualpipev"}
    cases = [
        (8, 20, EQUAL, None),
        (16, 64, EQUAL, None),
        (16, 64, {"TF": 2.0, "TB": 2.0, "TW": 1.0}, None),
        (8, 20, {"TF": 1.0, "TB": 1.2, "TW": 0.8}, 7.2),  # DualPipe's formula is exact for TF = TB only
    ]
    for stages, microbatches, times, measured in cases:
        full = times["TB"] + times["TW"]
        values = {"F": times["TF"], "B": full, "W": times["TW"], "FB": times["TF"] + full, "PP": stages}
        for method, name in schedules.items():
            # DualPipeV has two stages a rank: half the ranks, which work twice as long on half the micro-batches.
            fold = 2 if method == "DualPipeV" else 1
            ranks, many = stages // fold, microbatches // fold
            metrics = run(name, ranks, many, _costs(times, fold))
            text = "F:B:W = " + ":".join(f"{times[key]:g}" for key in ("TF", "TB", "TW"))
            where = size(ranks, many, text)
            known = measured if method in ("DualPipe", "DualPipeV") else None
            expected = formula(rows[method]["bubble"], **values)
            yield Cell(where, f"{method}: bubble", expected, metrics.bubble_time, measured=known)
            if times == EQUAL and fold * many >= 2 * stages:
                copies = metrics.parameter_copies * metrics.chunks
                yield Cell(where, f"{method}: copies of a stage's parameters", rows[method]["param"], copies)
                act = formula(rows[method]["act"], PP=stages)
                yield Cell(where, f"{method}: activations", act, max(metrics.peak_activations) * fold)


def dualpipe_figure() -> Iterator[Cell]:
    """Figure 5 and the note in the facts: 8 ranks, 20 micro-batches, 66 slots, equal idle time on every rank."""
    slots = float(re.findall(r"-> (\d+) slots", facts("dualpipe_bubbles")["verified_here"])[0])
    for name, ranks, microbatches, scale in (("dualpipe", 8, 20, 1), ("dualpipev", 4, 10, 2)):
        metrics = run(name, ranks, microbatches, _costs(EQUAL, scale))
        where = size(ranks, microbatches)
        busiest, idlest = max(metrics.utilization_per_rank), min(metrics.utilization_per_rank)
        yield Cell(where, f"{name}: slots", slots, metrics.makespan)
        yield Cell(where, f"{name}: difference of idle time between ranks", 0.0, busiest - idlest)
        yield Cell(where, f"{name}: peak activations, every rank", 9.0, scale * max(metrics.peak_activations))
        yield Cell(where, f"{name}: peak activations, least rank", 9.0, scale * min(metrics.peak_activations))


# ------------------------------------------------------------------ the rest


def chimera() -> Iterator[Cell]:
    """Table 2 where a backward takes as long as a forward, in passes. D ranks, N micro-batches."""
    rows = {row["scheme"]: row for row in facts("chimera")["rows"]}
    costs = Costs(F=1.0, B=0.5, W=0.5)
    for ranks, microbatches in ((4, 4), (8, 8), (16, 16), (8, 32)):
        where = size(ranks, microbatches)
        found = {name: run(name, ranks, microbatches, costs) for name in ("chimera", "gpipe", "1f1b")}
        for scheme, name in (("Chimera", "chimera"), ("GPipe", "gpipe"), ("DAPPLE", "1f1b")):
            expected = formula(rows[scheme]["bubble"], D=ranks, N=microbatches)
            yield Cell(where, f"{scheme}: bubble rate", expected, found[name].bubble_rate)
        yield Cell(where, "Chimera: passes", 2 * microbatches + ranks - 2, found["chimera"].makespan)
        yield Cell(where, "Chimera: copies of the weights", 2, found["chimera"].parameter_copies)
        yield Cell(where, "Chimera: activations, least", ranks / 2 + 1, min(found["chimera"].peak_activations))
        yield Cell(where, "Chimera: activations, most", ranks, max(found["chimera"].peak_activations))


def gpipe() -> Iterator[Cell]:
    text = re.findall(r"O\((.*)\);", facts("gpipe")["bubble"])[0]
    for ranks, microbatches in ((2, 4), (4, 4), (8, 8), (8, 32)):
        expected = formula(text, K=ranks, M=microbatches)
        found = run("gpipe", ranks, microbatches, Costs(B=1.5, W=0.5)).bubble_rate
        yield Cell(size(ranks, microbatches), "GPipe: bubble rate", expected, found)


def megatron() -> Iterator[Cell]:
    """Bubble as a part of the ideal time, arXiv 2104.04473, section 2.2."""
    written = facts("megatron_formulas")
    of_1f1b = written["bubble"].removesuffix(" of ideal time")
    of_interleaved = written["interleaved"].removesuffix(" of ideal time")
    for ranks, microbatches, chunks in ((4, 8, 2), (8, 32, 2), (8, 64, 4)):
        where = size(ranks, microbatches)
        plain = run("1f1b", ranks, microbatches, Costs())
        yield Cell(where, "1F1B", formula(of_1f1b, p=ranks, m=microbatches), plain.bubble_time / plain.work)
        woven = run("interleaved-1f1b", ranks, microbatches, Costs(), chunks=chunks)
        expected = formula(of_interleaved, p=ranks, m=microbatches, v=chunks)
        yield Cell(where, f"interleaved, v = {chunks}", expected, woven.bubble_time / woven.work)


def pipedream() -> Iterator[Cell]:
    """Weight versions: of every micro-batch on every stage, and how many are held at once."""
    family = facts("pipedream_family")
    text = family["pipedream_2bw"]["version"]
    for ranks, microbatches, minibatch in ((4, 16, 4), (8, 64, 8), (4, 40, 10)):
        schedule = build("pipedream-2bw", ranks, microbatches, minibatch=minibatch)
        where = size(ranks, microbatches, f"m = {minibatch}")
        expected = [formula(text, k=number + 1, m=minibatch) for number in schedule.microbatch.tolist()]
        right = sum(map(float.__eq__, expected, map(float, schedule.versions.tolist())))
        yield Cell(where, f"2BW: ops that use version {text}", len(schedule), right)
        held = measure(simulate(schedule)).parameter_copies
        yield Cell(where, "2BW: weight versions held", 2, held)
    for ranks, microbatches in ((4, 16), (8, 32)):
        schedule = build("pipedream", ranks, microbatches)
        where = size(ranks, microbatches)
        forwards = ranks * microbatches
        yield Cell(where, "PipeDream: forwards that use the newest weights", forwards, _newest(schedule))
        held = measure(simulate(schedule)).parameter_copies
        yield Cell(where, "PipeDream: weight versions held, up to d", ranks, held)


def _newest(schedule: Schedule) -> int:
    right = 0
    for rank in range(schedule.ranks):
        rows = slice(int(schedule.offsets[rank]), int(schedule.offsets[rank + 1]))
        used = schedule.versions[rows][schedule.kind[rows] == 0].tolist()
        right += sum(map(int.__eq__, used, updates(schedule, rank)))
    return right


def dapple() -> Iterator[Cell]:
    """Warm-up forwards of every stage (from 0), which are the activations held at the peak: arXiv 2007.01045."""
    ranks, memory = 8, 12
    for name, text in (("1f1b", "min(S-i,D)"), ("eager-1f1b", "min(2(S-i)-1,D)")):
        assert text in facts("pipedream_family")["dapple"]["warmup_K"].values()
        peaks = run(name, ranks, memory, Costs()).peak_activations
        for stage in (0, 3, 7):
            left = ranks - stage
            expected = min(left if name == "1f1b" else 2 * left - 1, memory)
            yield Cell(size(ranks, memory), f"{name}: {text} of stage {stage}", expected, peaks[stage])


def seq1f1b() -> Iterator[Cell]:
    written = facts("other_schedules")["seq1f1b"]
    memory = written["memory"].split(" * M")[0]  # without the keys and values, which we do not count
    for ranks, microbatches, slices in ((4, 8, 2), (8, 32, 4), (8, 32, 8)):
        metrics = run("seq1f1b", ranks, microbatches, Costs(), slices=slices)
        where = size(ranks, microbatches, f"{slices} slices")
        bubble = formula(written["bubble"], p=ranks, s=slices, F=1, B=2)
        yield Cell(where, "bubble", bubble, metrics.bubble_time)
        peak = formula(memory, p=ranks, s=slices)
        yield Cell(where, "activations of the first rank", peak, metrics.peak_activations[0])


def hanayo() -> Iterator[Cell]:
    """A formula from second-hand notes, which we do not reproduce: its denominator has P-1 where we find 2P-2."""
    text = facts("other_schedules")["hanayo"]["bubble"].split(" for ")[0]
    for ranks, waves in ((4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (8, 4)):
        expected = formula(text, P=ranks, W=waves)
        found = run("hanayo", ranks, ranks, Costs(), waves=waves).bubble_rate
        measured = (2 * ranks - 2) / (3 * ranks * waves + 2 * ranks - 2)
        yield Cell(size(ranks, ranks, f"W = {waves}"), "bubble rate", expected, found, measured=measured)


SOURCES: Final = (
    Source(
        "zb-bubble-rates",
        "Bubble rates of zero-bubble schedules (arXiv 2401.10241, table 5)",
        "From the profiled times of its table 9. 1F1B-I: interleaved, one layer a chunk; 8 latencies are taken off "
        "its cost, without which the cells are not met.",
        zb_bubble_rates,
    ),
    Source("zb-formulas", "Zero-bubble formulas (arXiv 2401.10241, table 1, appendix)", "", zb_formulas),
    Source(
        "zb-activations",
        "Activations of zero-bubble schedules (arXiv 2401.10241, tables 1 and 2)",
        "In micro-batches, with the memory freed by B and by W from the paper's numbers of bytes a layer.",
        zb_activations,
    ),
    Source(
        "v-shaped",
        "V-Min and V-Half at F = B = W = 1 (arXiv 2405.15362)",
        "As the authors' program gives them; a chunk's activations are held until its W.",
        v_shaped,
    ),
    Source("makespans", "Makespans at F = B = W = 1", "In passes of a whole rank's layers.", makespans),
    Source(
        "dualpipe",
        "DualPipe and its peers (arXiv 2412.19437, table 2)",
        "DualPipe's formula is exact where F = B; with a longer B we find less bubble than it says.",
        dualpipe,
    ),
    Source("dualpipe-figure", "DualPipe at 8 ranks (arXiv 2412.19437, figure 5)", "", dualpipe_figure),
    Source("chimera", "Chimera and its peers (arXiv 2107.06925, table 2), F = B + W", "", chimera),
    Source("gpipe", "GPipe (arXiv 1811.06965)", "", gpipe),
    Source("megatron", "Megatron-LM (arXiv 2104.04473): bubble over ideal time", "", megatron),
    Source("pipedream", "PipeDream and PipeDream-2BW (arXiv 1806.03377, 2006.09503)", "", pipedream),
    Source("dapple", "DAPPLE's warm-up (arXiv 2007.01045): peak activations", "", dapple),
    Source("seq1f1b", "Seq1F1B (arXiv 2406.03488)", "F = B = W = 1.", seq1f1b),
    Source(
        "hanayo",
        "Hanayo's bubble at B + W = 2F, M = P (second-hand notes)",
        "Not reproduced: ours is (2P-2)/(3PW+2P-2), theirs (2P-2)/(3PW+P-1).",
        hanayo,
    ),
)


def tables() -> list[Table]:
    return [table(source, list(source.cells())) for source in SOURCES]
