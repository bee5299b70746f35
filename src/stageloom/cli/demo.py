"""The costs of `stageloom demo`: a published profile that travels with the package."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from stageloom.costs import Costs

MODEL = "6.2B GPT on 8 A100s, one micro-batch = 3 sequences of 1,024 tokens (arXiv 2401.10241, tables 3 and 6)"


def demo_costs() -> Costs:
    """Measured stage times of the zero-bubble paper's 6.2B model at 8 ranks, and its activation sizes (its table 2)."""
    folder = resources.files("stageloom") / "data"
    times: dict[str, Any] = json.loads((folder / "zb_profile_times.json").read_text(encoding="utf-8"))
    models: dict[str, Any] = json.loads((folder / "zb_models.json").read_text(encoding="utf-8"))
    profile = dict(zip(times["columns"], next(row for row in times["rows"] if row[:3] == ["6.2B", 8, 24]), strict=True))
    model = dict(zip(models["columns"], next(row for row in models["rows"] if row[0] == "6.2B"), strict=True))
    hidden, heads, sequence, batch = (model[key] for key in ("hidden", "heads", "seq", "microbatch_size"))
    per_layer = sequence * batch * (34 * hidden + 5 * heads * sequence)
    return Costs(
        unit="ms",
        F=profile["T_F"],
        B=profile["T_B"],
        W=profile["T_W"],
        latency=profile["T_comm"],
        w_share=32 * hidden / (34 * hidden + 5 * heads * sequence),
        activation_bytes=per_layer * model["layers"] / 8,
        tokens=sequence * batch,
    )
