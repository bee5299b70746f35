"""NVIDIA's measured steps on H100s as the planner would be asked about them: BF16 was seen by no fit, and of FP8 every
other row by that of one constant, the share of 8-bit products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Final

from benchmarks.planning_rows import Job, Row, facts, seconds_of
from stageloom.plan.layout import Layout, spread
from stageloom.plan.load_cluster import load_cluster
from stageloom.plan.model import Model
from stageloom.plan.short_form import from_short_form
from stageloom.plan.software import MODERN
from stageloom.plan.training import Dtype, Training


def bf16() -> list[Row]:
    return _rows("bf16")


def fp8() -> list[Row]:
    return _rows("fp8")


def _rows(dtype: Dtype) -> list[Row]:
    """NeMo of 2024 and 2025: gradients reduced in 16 bits, ZeRO 1, sequence parallelism, nothing recomputed."""
    rows: list[Row] = []
    for recipe, name, each, micro, t, p, chunks, gpus, *seconds in facts("dgxc_h100")["rows"]:
        model, known = _model(name), facts("dgxc_h100")["models"][name]
        software = replace(MODERN, dropout="dropout" in known)
        for count, measured in zip(gpus, seconds[("bf16", "fp8").index(dtype)], strict=True):
            training = Training(known["sequence"], round(each * count), micro, dtype, gradients="bf16", zero=1)
            layout = Layout(
                t, p, count // (t * p), chunks=chunks, microbatch=micro, zero=1, sequence_parallel=True,
                layers=spread(len(model.layers), p * chunks),
            )  # fmt: skip
            schedule = "1f1b" if chunks == 1 else "interleaved-1f1b"
            one = Job(model, load_cluster(f"h100x{count}"), training, layout, schedule, software)
            label = f"{name} ({recipe}), {count} GPUs, TP {t}, PP {p}, micro-batch {micro}"
            rows.append(
                Row(f"h100 {dtype}", label, measured, seconds_of(one), fitted=dtype == "fp8" and len(rows) % 2 == 0)
            )
    return rows


@cache
def _model(name: str) -> Model:
    """The models that the recipes name; an activation function makes no difference to times."""
    known = facts("dgxc_h100")["models"][name]
    sizes = {"hidden": known["hidden"], "layers": known["layers"], "heads": known["heads"]}
    sizes |= {"style": "gpt", "vocabulary": known["vocabulary"], "context": known["sequence"]}
    if name.startswith("nemotron4"):
        sizes |= {"kv_heads": 8, "bias": False, "positions": "rotary", "tied": False}
    return from_short_form(sizes, "tests/facts/dgxc_h100.json", name)


TABLES: Final[dict[str, tuple[Callable[[], list[Row]], float]]] = {"h100 bf16": (bf16, 0.10), "h100 fp8": (fp8, 0.08)}
"""As `planning_rows.TABLES`."""
