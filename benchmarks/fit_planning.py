"""Fit the cost model's constants: `python -m benchmarks.fit_planning [--write]`.

The rows that are fitted on are every other row (the first, the third, ...) of each published table of times; the rest
are held out, and both halves' errors are printed. Levenberg-Marquardt on the logarithms of the constants. A row's
residual is the logarithm of predicted over measured, bent to a line beyond 8 % (pseudo-Huber), so that rows which no
model explains pull little; a table weighs as one, by the error that it is to stay within.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import h100_rows
from benchmarks.planning_rows import TABLES, Row, vtrain_all_reduce
from stageloom.plan.constants import Constants

TABLE: Final = Path(__file__).parents[1] / "src" / "stageloom" / "data" / "plan_constants.json"
BEND: Final = 0.08
TIMES: Final = ("korthikanti", "megatron table 1", "zb throughput", "vtrain multi", "vtrain single")

START: Final = Constants(
    product_share=0.8,
    product_share_fp8=0.6,
    product_share_blocks=0.5,
    product_tiles=120.0,
    memory_share=0.8,
    score_share=0.55,
    attention_forward=0.55,
    attention_backward=0.45,
    kernel=3e-6,
    host_forward=1.3e-3,
    host_backward=1.7e-3,
    host_collective=6e-5,
    host_softmax=1.5e-3,
    host_head=1e-3,
    inside_share=0.78,
    network_share=0.95,
    exchange_share=0.61,
    collective=3.5e-5,
    message=4e-4,
    step=1e-2,
)

FUSED: Final = "FlashAttention-2, arXiv 2307.08691, figures 4 to 6: causal, width 128, 2k to 4k tokens, on an A100"
PROFILE: Final = (
    "DeepSeek-V3's layers on H800s, github.com/deepseek-ai/profile-data, train.json: 14.8 Tflop of products in 18.6 ms "
    "on 112 of 132 multiprocessors; dispatch and combine of 617 MB a GPU in 20.1 ms"
)
FITTED: Final = "the odd-numbered rows of vtrain single and multi, megatron table 1, korthikanti, zb throughput"
EIGHT_BITS: Final = "the odd-numbered rows of h100 fp8, after all others"
MEANING: Final[dict[str, tuple[str, str, str]]] = {
    "product_share": ("of the peak", "reached by a large matrix product", FITTED),
    "product_share_fp8": ("of the peak", "reached by a large product of 8-bit inputs scaled by tensor", EIGHT_BITS),
    "product_share_blocks": ("of the peak", "reached by a large product of 8-bit inputs scaled by block", PROFILE),
    "product_tiles": ("tiles of 128 x 128 x 4096", "at which a product reaches half of that", FITTED),
    "memory_share": ("of the bandwidth", "reached by kernels that only move data", FITTED),
    "score_share": ("of the bandwidth", "reached by softmax and dropout of attention's scores", FITTED),
    "attention_forward": ("of the peak", "reached by fused attention", FUSED),
    "attention_backward": ("of the peak", "reached by its backward", FUSED),
    "kernel": ("s", "added by each kernel, for starting and draining", FITTED),
    "host_forward": ("s", "the host's time to launch a layer's forward", FITTED),
    "host_backward": ("s", "the host's time to launch a layer's backward", FITTED),
    "host_collective": ("s", "more for each tensor-parallel collective", FITTED),
    "host_softmax": ("s", "more where the softmax falls back to several kernels", FITTED),
    "host_head": ("s", "the host's time for head and loss", FITTED),
    "inside_share": ("of the bandwidth", "reached by links inside a node", FITTED + ", and all-reduces timed alone"),
    "network_share": ("of the bandwidth", "reached by the network between nodes", FITTED),
    "exchange_share": ("of the bandwidth", "of network or node, reached by dispatch and combine", PROFILE),
    "collective": ("s", "start of a collective", FITTED + ", and all-reduces timed alone"),
    "message": ("s", "what a message between stages takes beside its bytes", FITTED),
    "step": ("s", "once a step", FITTED),
}
"""Unit, meaning and data of every constant."""

FREE: Final = tuple(
    field.name
    for field in fields(Constants)
    if field.name
    not in ("product_share_fp8", "product_share_blocks", "attention_forward", "attention_backward", "exchange_share")
)


def tables() -> dict[str, list[Row]]:
    """The rows of every table of times, and the all-reduces that are timed alone."""
    found = {name: TABLES[name][0]() for name in TIMES}
    found["all-reduce"] = vtrain_all_reduce()
    return found


def residuals(rows: list[tuple[Row, float]], constants: Constants) -> Any:
    """Bent and weighted logarithms of predicted over measured."""
    off = np.array([np.log(row.predicted(constants) / row.measured) for row, _ in rows])
    bent = np.sign(off) * BEND * np.sqrt(2 * (np.sqrt(1 + (off / BEND) ** 2) - 1))
    return bent * np.array([weight for _, weight in rows])


def fit(rows: list[tuple[Row, float]], steps: int = 20) -> Constants:
    """The constants with the least sum of squared residuals."""
    constants = START
    at = np.log([getattr(constants, name) for name in FREE])
    anchor, damping = at.copy(), 1e-2

    def off(point: Any) -> Any:
        known = replace(START, **dict(zip(FREE, np.exp(point).tolist(), strict=True)))
        # A weak pull to where we start keeps what no row depends on from drifting.
        return np.concatenate((residuals(rows, known), 0.02 * (point - anchor)))

    here = off(at)
    for step in range(steps):
        slope = np.stack([(off(at + 1e-3 * unit) - here) / 1e-3 for unit in np.eye(len(at))], axis=1)
        square, before = slope.T @ slope, float(here @ here)
        while damping < 1e6:
            move = np.linalg.solve(square + damping * np.diag(np.diag(square)), -slope.T @ here)
            there = off(at + np.clip(move, -0.5, 0.5))
            if there @ there < before:
                break
            damping *= 4
        else:
            break
        at, here, damping = at + np.clip(move, -0.5, 0.5), there, damping / 5
        print(f"step {step + 1}: {float(here @ here):.4f}", flush=True)
        if before - float(here @ here) < 2e-4 * before:
            break
    return replace(START, **dict(zip(FREE, np.exp(at).tolist(), strict=True)))


def fit_eight_bits(constants: Constants) -> Constants:
    """With the share of 8-bit products that leaves the least sum of squared residuals on H100s, all else as it is."""
    rows = [(row, 1.0) for row in h100_rows.fp8() if row.fitted]
    tried = [replace(constants, product_share_fp8=share / 1000) for share in range(400, 900, 5)]
    return min(tried, key=lambda one: float((residuals(rows, one) ** 2).sum()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    given = parser.parse_args()
    found = tables()
    rows: list[tuple[Row, float]] = []
    for name, of_table in found.items():
        used = [row for row in of_table if row.fitted]
        bound = TABLES[name][1] if name in TABLES else 0.15
        rows += [(row, 1 / (bound * np.sqrt(len(used)))) for row in used]
    constants = fit_eight_bits(fit(rows))
    found |= {name: rows_of() for name, (rows_of, _) in h100_rows.TABLES.items()}
    rounded = Constants(**{name: float(f"{value:.3g}") for name, value in asdict(constants).items()})
    for name, of_table in found.items():
        for half in dict.fromkeys(row.fitted for row in of_table):
            error = np.mean([abs(row.error(rounded)) for row in of_table if row.fitted is half])
            print(f"{name:18} mean error of {'fitted' if half else 'held-out'} rows: {error:.1%}")
    for name, value in asdict(rounded).items():
        print(f"{name:20} {value:10.4g}  {MEANING[name][0]}")
    if given.write:
        table = {
            name: dict(zip(("value", "unit", "meaning", "from"), (value, *MEANING[name]), strict=True))
            for name, value in asdict(rounded).items()
        }
        TABLE.write_text(json.dumps({"gpu": "A100", "constants": table}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
