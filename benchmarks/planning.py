"""The planner's predictions beside published measurements: every row of every table with its error.

`python -m benchmarks planning` (`make bench-plan`) prints the tables, `--write` makes docs/validation.md of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Final

import numpy as np

from benchmarks import h100_rows, planning_rows
from benchmarks.planning_rows import Row, facts, zb_job
from benchmarks.report import Table
from stageloom.plan.constants import fitted
from stageloom.plan.cost import pair_fraction, setting, stage_times
from stageloom.plan.cost_layer import layer_times
from stageloom.plan.layout import Layout, spread
from stageloom.plan.load_cluster import load_cluster
from stageloom.plan.load_model import load_model
from stageloom.plan.predict import Prediction, predict
from stageloom.plan.software import MODERN
from stageloom.plan.training import Training

TABLES: Final = planning_rows.TABLES | h100_rows.TABLES
"""Every scored table."""

UNITS: Final = {"zb memory": ("GB", 1e-9)}


@dataclass(frozen=True)
class Scored:
    """A row and what is predicted for it."""

    row: Row
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.row.measured - 1


@cache
def scored(name: str) -> tuple[Scored, ...]:
    """Every row of a table, predicted with the shipped constants."""
    constants = fitted()
    return tuple(Scored(row, row.predicted(constants)) for row in TABLES[name][0]())


def mean_error(name: str, fitted_half: bool | None = None) -> float:
    """Mean absolute error of a table's rows, or of one half of them."""
    errors = [abs(one.error) for one in scored(name) if fitted_half is None or one.row.fitted is fitted_half]
    return float(np.mean(errors)) if errors else 0.0


def tables() -> Iterator[Table]:
    """All tables, the summary first."""
    yield summary()
    yield ranks()
    yield deepseek()
    yield profile()
    for name in TABLES:
        yield rows(name)
    yield constants()


def summary() -> Table:
    found: list[tuple[Any, ...]] = []
    for name, (_, target) in TABLES.items():
        held = any(one.row.fitted for one in scored(name))
        found.append(
            (
                name, len(scored(name)), f"{target:.0%}", f"{mean_error(name):.1%}",
                f"{mean_error(name, True):.1%}" if held else "–", f"{mean_error(name, False):.1%}",
                f"{max(abs(one.error) for one in scored(name)):.0%}",
            )
        )  # fmt: skip
    note = (
        "Mean absolute error over all rows, none left out. The constants were fitted on every other row of each table "
        "of times on A100s, and the share of 8-bit products on every other H100 row in FP8; memory and BF16 on H100s "
        "were not fitted. The model's form was chosen with all rows but H100's in sight. vTrain, which profiles "
        "kernels on the same GPUs as its rows, reports 14.7 % for its multi-node rows (arXiv 2312.12391)."
    )
    columns = ("table", "rows", "target", "mean error", "fitted half", "held-out half", "largest")
    return Table("Predicted and measured", note, columns, tuple(found))


def rows(name: str) -> Table:
    unit, scale = UNITS.get(name, ("s", 1.0))
    found = tuple(
        (
            one.row.label, f"{one.row.measured * scale:.4g}", f"{one.predicted * scale:.4g}", f"{one.error:+.1%}",
            "fitted" if one.row.fitted else "held out",
        )
        for one in scored(name)
    )  # fmt: skip
    return Table(name, "", ("row", f"measured, {unit}", f"predicted, {unit}", "error", "half"), found)


# ---------------------------------------------------------------- the order of schedules


@dataclass(frozen=True)
class Column:
    """One setting of the zero-bubble paper's table: samples per GPU per second of its four schedules."""

    label: str
    measured: dict[str, float]
    predicted: dict[str, float]

    @property
    def agrees(self) -> bool:
        """No two schedules are the other way round (equal measured figures allow either)."""
        names = list(self.measured)
        return all(
            self.predicted[a] > self.predicted[b] for a in names for b in names if self.measured[a] > self.measured[b]
        )


@cache
def columns() -> tuple[Column, ...]:
    known, found = facts("zb_throughput_memory"), []
    for at, config in enumerate(known["configs"]):
        measured = {name: rates[at] for name, rates in known["samples_per_gpu_per_s"].items()}
        predicted: dict[str, float] = {}
        for name in measured:
            one = zb_job(config["model"], config["m"], name)
            predicted[name] = one.training.global_batch / config["gpus"] / one.run(fitted()).seconds
        found.append(Column(f"{config['model']}, {config['m']} micro-batches", measured, predicted))
    return tuple(found)


def ranks() -> Table:
    import stageloom.search  # noqa: F401  makes ZB-1p and ZB-2p known

    def order(rates: dict[str, float]) -> str:
        return ", ".join(f"{name} {rates[name]:.3g}" for name in sorted(rates, key=rates.__getitem__, reverse=True))

    found = tuple(
        (one.label, order(one.measured), order(one.predicted), "yes" if one.agrees else "no") for one in columns()
    )
    note = (
        "Samples per GPU per second (arXiv 2401.10241, table 4), fastest first; equal measured figures fix no order. "
        "ZB-1p and ZB-2p run in the order that their search finds for the authors' own profile, as theirs did: found "
        "for the times that are predicted here, ZB-1p comes before 1F1B-I in the first row."
    )
    return Table("Order of the schedules", note, ("setting", "measured", "predicted", "same order"), found)


# ---------------------------------------------------------------- DeepSeek-V3

DEEPSEEK: Final = Training(
    4096, 15360, 1, "fp8", "adam-bf16", zero=1, recompute="selective", communication_share=20 / 132, scaling="block"
)
"""As arXiv 2412.19437 describes it: 4,096 tokens, batches of 15,360, FP8 scaled by block, BF16 moments, ZeRO 1, cheap
parts recomputed, 20 of 132 multiprocessors for communication."""


@cache
def deepseek_step(schedule: str) -> Prediction:
    """A step of DeepSeek-V3 on 2,048 H800 with PP 16, EP 64; layers laid out so that the busiest rank has least."""
    import stageloom.search  # noqa: F401

    model, machines = load_model("deepseek-v3"), load_cluster("h800x2048")
    two_ways = schedule == "dualpipe"
    layout = Layout(1, 16, 128, expert=64, microbatch=1, recompute="selective", zero=1, layers=spread(61, 16))

    def busiest(layers: tuple[int, ...]) -> float:
        laid = replace(layout, layers=layers)
        s = setting(model, machines, DEEPSEEK, laid, fitted(), MODERN)
        work = np.array([one.work.total for one in stage_times(model, laid, s, DEEPSEEK.communication_share)])
        return float((work + work[::-1] if two_ways else work).max())

    choices = [(first, *spread(61 - first - last, 14), last) for first in range(3, 8) for last in range(1, 5)]
    best = min(choices, key=busiest)
    return predict(model, machines, DEEPSEEK, replace(layout, layers=best), schedule)


def gpu_hours(step: Prediction) -> float:
    """GPU-hours for a trillion tokens on 2,048 GPUs."""
    return step.seconds * 2048 / 3600 / DEEPSEEK.step_tokens * 1e12


def deepseek() -> Table:
    published = facts("deepseek_v3_facts")["per_trillion_tokens_gpu_hours"]
    base = gpu_hours(deepseek_step("1f1b"))
    found: list[tuple[Any, ...]] = []
    for name in ("dualpipe", "1f1b", "zb-1p"):
        step = deepseek_step(name)
        hours = gpu_hours(step)
        found.append(
            (
                name, step.seconds, round(hours), published if name == "dualpipe" else None,
                f"{hours / published - 1:+.1%}" if name == "dualpipe" else None, f"{1 - hours / base:.0%}",
                f"{step.bubble:.1%}", step.peak_memory / 1e9,
            )
        )  # fmt: skip
    note = (
        "671B, 2,048 H800, PP 16, EP 64, ZeRO 1, batches of 15,360 x 4,096 tokens. 1F1B and ZB-1p overlap no "
        "all-to-all with compute; every schedule has the layout of layers on stages that makes its busiest rank least "
        "busy. The published figure (arXiv 2412.19437, table 1) is of a whole run, with whatever held it up."
    )
    heads = (
        "schedule", "step, s", "GPU-hours a trillion tokens", "published", "error", "saved against 1F1B", "bubble",
        "GB on the fullest GPU",
    )  # fmt: skip
    return Table("DeepSeek-V3", note, heads, tuple(found))


def profile() -> Table:
    """One layer of DeepSeek-V3, a forward overlapped with a backward, beside the published profile."""
    known = facts("deepseek_profile")
    model, machines = load_model("deepseek-v3"), load_cluster("h800x2048")
    layout = Layout(1, 16, 128, expert=64, microbatch=1, recompute="selective", layers=spread(61, 16))
    one = layer_times(model.layers[-1], setting(model, machines, DEEPSEEK, layout, fitted(), MODERN), "selective")
    share = DEEPSEEK.communication_share
    pair = pair_fraction(one, share) * (one.F + one.BW)
    measured = known["layer_period"] / 1e3
    found = (("layer of a pair", f"{measured * 1e3:.1f}", f"{pair * 1e3:.1f}", f"{pair / measured - 1:+.1%}"),)
    note = "Two constants (8-bit products, all-to-alls) come from the same profile's kernels; attention's does not."
    return Table("A layer's overlapped pair on H800", note, ("what", "measured, ms", "predicted, ms", "error"), found)


def constants() -> Table:
    text = (files("stageloom") / "data" / "plan_constants.json").read_text(encoding="utf-8")
    found = tuple(
        (name, f"{one['value']:.4g}", one["unit"], one["meaning"], one["from"])
        for name, one in json.loads(text)["constants"].items()
    )
    note = (
        "Written by `python -m benchmarks.fit_planning --write`, before the last changes to the model's form. Fitted "
        "anew (the same without `--write`), tables of times change by at most 0.6 points, vTrain's for the better, and "
        "one of the six orders turns (6.2B, 32 micro-batches); these were kept. Starts of kernels, tiles and the "
        "host's times make up for one another: each alone is known roughly only."
    )
    return Table("Constants", note, ("name", "value", "unit", "meaning", "from"), found)


def page(shown: list[Table]) -> str:
    """docs/validation.md."""
    parts = [
        "# The planner's predictions, validated",
        "Made by `python -m benchmarks planning --write`; `make bench-plan` prints the same tables. Do not edit.",
        "The figures stand in `tests/facts` with their sources. What a table does not say and a row has to assume "
        "(vocabulary, recomputation, chunks) stands with its reason in `planning_rows.py` and `h100_rows.py` of "
        "`benchmarks`. Rows of vTrain are from VIA-Research/vTrain (MIT licence).",
    ]
    for table in shown:
        text = table.markdown().rstrip()
        if len(table.rows) > 100:
            title, rest = text.split("\n", 1)
            text = f"{title}\n\n<details><summary>{len(table.rows)} rows</summary>\n{rest}\n\n</details>"
        parts.append(text)
    return "\n\n".join(parts) + "\n"
