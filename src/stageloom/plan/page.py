"""The one-page answer as sections of lines and tables, before it is drawn in a terminal, in Markdown or in HTML."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stageloom.plan.answer import Plan
from stageloom.plan.memory import RankMemory
from stageloom.plan.rollback import STEPS, Rollback
from stageloom.plan.score import Scored

MOST_RANKS = 16
"""Of deeper pipelines the memory table shows the first and last ranks, and the fullest."""

STEP_PARTS: Final = {"optimizer": "optimiser", "step": "once a step"}
"""Parts of a step whose names say too little beside the others."""


@dataclass(frozen=True, slots=True)
class Table:
    """heads and cells as text; left: columns that are words. bars: a share from 0 to 1 a row, to draw beside it."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: tuple[int, ...] = (0,)
    bars: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """A title, lines and perhaps a table."""

    title: str
    lines: tuple[str, ...] = ()
    table: Table | None = None


def page(plan: Plan) -> tuple[Section, ...]:
    """The whole answer; first what to run, last what was searched."""
    sections = [
        _chosen(plan),
        _step(plan),
        _memory(plan),
        _baseline(plan),
        _alternatives(plan),
        _thumb(plan),
        _rollback(plan.rollback),
        _presumed(plan),
        _search(plan),
    ]
    return tuple(section for section in sections if section.lines or section.table)


def title(plan: Plan) -> str:
    """What was asked."""
    training = plan.training
    blocks = " scaled by block" if training.scaling == "block" else ""
    return (
        f"{plan.model.name} on {plan.cluster.name}: sequences of {training.sequence:,}, {training.global_batch:,} a "
        f"step, {training.dtype}{blocks}, ZeRO {training.zero}"
    )


def _chosen(plan: Plan) -> Section:
    at, best = plan.best.layout, plan.best
    of = plan.cluster.gpu.mfu_type(plan.training.dtype)
    rows = [
        ("schedule", best.schedule + (f", {at.chunks} chunks a rank" if at.chunks > 1 else "")
         + (", on one stage: no pipeline" if at.pipeline * at.chunks == 1 else "")),
        ("pipeline", f"P = {many(at.pipeline, 'rank')}, M = {many(best.microbatches, 'micro-batch', 'es')} of "
         f"{at.microbatch}"),
        ("parallel", f"tensor {at.tensor} x pipeline {at.pipeline} x data {at.data}"
         + (f", experts over {at.expert}" if at.expert > 1 else "")),
        ("recompute", word(at.recompute)),
        ("layers", f"{runs(at.layers)}, by stage"),
        ("step", f"{best.seconds:.4g} s, {best.tokens_per_second:,.0f} tokens/s, MFU {share(best.mfu)}"
         + (f" of the peak in {of}" if of != plan.training.dtype else "")),
        ("bubble", f"{share(best.bubble)} of the pipeline"),
        ("exposed", f"{best.exposed:.3g} s of communication that nothing hides, {share(best.exposed / best.seconds)}"),
        ("memory", f"{gigabytes(best.memory)} of {gigabytes(plan.limit)} on the fullest GPU"),
        ("GPU-hours", f"{plan.gpu_hours:,.0f} for {tokens(plan)}"),
    ]  # fmt: skip
    if plan.saved is not None and best.form.name != "1f1b":
        rows.append(("saved", _saved(plan)))
    return Section("Plan", table=Table(("", ""), tuple(rows), left=(0, 1)))


def _saved(plan: Plan) -> str:
    assert plan.baseline is not None
    assert plan.saved is not None
    hours = plan.hours(plan.baseline.seconds)
    text = f"{plan.saved:,.0f} GPU-hours against 1F1B in the same layout ({share(plan.saved / hours)})"
    return text if plan.baseline.fits else f"{text}, which needs {gigabytes(plan.baseline.memory)} and does not fit"


def _step(plan: Plan) -> Section:
    parts = plan.prediction.parts
    parts = {key: value for key, value in parts.items() if value > 1e-6 * plan.best.seconds}
    rows = tuple(
        (STEP_PARTS.get(key, key), f"{value:.3g} s", share(value / plan.best.seconds)) for key, value in parts.items()
    )
    return Section(
        "Where the step goes, on the rank that is done last",
        table=Table(("part", "time", "share"), rows, bars=tuple(value / plan.best.seconds for value in parts.values())),
    )


def _memory(plan: Plan) -> Section:
    ranks = plan.prediction.memory
    shown = list(range(len(ranks)))
    if len(ranks) > MOST_RANKS:
        fullest = max(shown, key=lambda rank: ranks[rank].total)
        shown = sorted({*range(4), fullest, *range(len(ranks) - 4, len(ranks))})
    rows = tuple(
        (
            str(rank), *(f"{value / 1e9:.1f}" for value in parts(ranks[rank]).values()),
            f"{ranks[rank].total / 1e9:.1f}", share(ranks[rank].total / plan.limit),
        )
        for rank in shown
    )  # fmt: skip
    heads = ("rank", *parts(ranks[0]), "total", "of limit")
    lines = [f"GB on one GPU of each rank; the limit is {gigabytes(plan.limit)}."]
    if len(shown) < len(ranks):
        lines.append(f"{len(shown)} of {len(ranks)} ranks, the fullest among them.")
    extra = plan.replication
    if extra is not None:
        lines.append(
            f"Two replicas: each GPU holds {gigabytes(extra.extra)} more for the second ({share(extra.share)} of its "
            f"memory): {(extra.dense + extra.routed) / 1e9:.2f} billion parameters, of which "
            f"{extra.routed / 1e9:.2f} are of routed experts."
        )
    bars = tuple(min(1.0, ranks[rank].total / plan.limit) for rank in shown)
    return Section("Memory", tuple(lines), Table(heads, rows, bars=bars))


def parts(rank: RankMemory) -> dict[str, float]:
    """Bytes of a rank by part."""
    return {
        "weights": rank.parameters,
        "gradients": rank.gradients,
        "optimiser": rank.optimizer,
        "activations": rank.activations,
        "working": rank.working + rank.buffers,
        "unseen": rank.fragments + rank.context,
    }


def _baseline(plan: Plan) -> Section:
    shown: dict[str, Scored] = {}
    for one in sorted(plan.same_layout, key=lambda each: (not each.fits, each.place)):
        shown.setdefault(one.schedule, one)
    rows = [
        (
            one.schedule, f"{one.seconds:.4g} s", f"{100 * (one.seconds / plan.best.seconds - 1):+.1f} %",
            share(one.bubble), gigabytes(one.memory), "yes" if one.fits else "no",
        )
        for one in sorted(shown.values(), key=lambda each: each.place)
    ]  # fmt: skip
    lines: list[str] = []
    other = plan.baseline_best
    if other is not None and plan.best.form.name != "1f1b":
        saved = plan.hours(other.seconds) - plan.gpu_hours
        lines.append(
            f"1F1B in the layout that suits it best ({layout(other)}) takes {other.seconds:.4g} s a step; against that "
            f"the plan saves {saved:,.0f} GPU-hours."
        )
    if len(rows) < 2:
        return Section("")
    heads = ("schedule", "step", "to the plan", "bubble", "memory", "fits")
    return Section("Every schedule in this layout", tuple(lines), Table(heads, tuple(rows), left=(0, 5)))


def _alternatives(plan: Plan) -> Section:
    rows = tuple(
        (one.plan.schedule, layout(one.plan), f"{100 * one.slower:+.1f} %", gigabytes(one.plan.memory), one.why)
        for one in plan.alternatives
    )
    lines: list[str] = []
    large = plan.too_large
    if large is not None:
        lines.append(
            f"Faster, but too large: {large.schedule} in {layout(large)}, {large.seconds:.4g} s, "
            f"{gigabytes(large.memory)}: {gigabytes(large.memory - plan.limit)} are missing."
        )
    heads = ("schedule", "layout", "step", "memory", "why it lost")
    return Section("The nearest alternatives", tuple(lines), Table(heads, rows, left=(0, 1, 4)) if rows else None)


def _thumb(plan: Plan) -> Section:
    return Section("Where rules of thumb and the numbers disagree", tuple(one.text for one in plan.disagreements))


def _rollback(found: Rollback | None) -> Section:
    if found is None:
        return Section("When to give it up", ("The schedule is the simplest that fits; there is none to go back to.",))
    worst = found.worst
    lines = [
        f"Go back to {found.to.schedule} ({layout(found.to)}) if over the first {STEPS:,} steps rank {worst} is busy "
        f"less than {share(found.trigger[worst])} of a step (planned: {share(found.expected[worst])}), or a step takes "
        f"more than {found.seconds:.4g} s: then the simpler schedule is as fast by its own simulation.",
        "By rank: " + " ".join(f"{100 * value:.1f}" for value in found.trigger) + " %.",
    ]
    if found.equal is not None:
        better = found.equal.seconds < found.to.seconds and found.equal.form.complexity <= found.to.form.complexity
        back = ", and then go back to this one" if better else ""
        lines.append(
            f"{found.equal.schedule} ({layout(found.equal)}, {found.equal.seconds:.4g} s) is simpler, and as good for "
            f"all that a prediction can tell: begin with it unless the plan's schedule costs nothing to set up{back}."
        )
    if found.unpaired is not None:
        verdict = "slower than" if found.unpaired > found.seconds else "still faster than"
        lines.append(
            f"If overlapped pairs hide nothing, a step takes {found.unpaired:.4g} s, {verdict} the simpler schedule."
        )
    return Section("When to give it up", tuple(lines))


def _presumed(plan: Plan) -> Section:
    lines = [f"Mesh: {plan.mesh}."]
    if plan.mixed:
        lines.append(f"Nodes: {plan.mixed}.")
    if plan.all_to_all:
        lines.append(f"All-to-all: {plan.all_to_all}.")
    return Section("What is presumed", tuple(lines))


def _search(plan: Plan) -> Section:
    found = plan.found
    dropped = ", ".join(f"{count:,} {why}" for why, count in sorted(found.dropped.items()))
    lines = [
        f"{many(found.cuts, 'layout')}; {many(len(found.scored), 'candidate')} simulated; dropped: {dropped or 'none'}."
    ]
    points = ", ".join(f"{one.seconds:.4g} s at {gigabytes(one.memory)} ({one.schedule})" for one in found.front[:6])
    lines.append(f"Time against memory, within {share(found.slack)} of the best: {points}.")
    rows = tuple((one.what, one.reason) for one in found.by_layout[:8])
    return Section("The search", tuple(lines), Table(("layout", "best"), rows, left=(0, 1)))


# ------------------------------------------------------------------ words


def runs(layers: tuple[int, ...]) -> str:
    """Layers of every stage, repeats counted: `5 4x3 1`."""
    found: list[list[int]] = []
    for count in layers:
        if found and found[-1][0] == count:
            found[-1][1] += 1
        else:
            found.append([count, 1])
    return " ".join(str(count) if times == 1 else f"{count}x{times}" for count, times in found)


def layout(one: Scored) -> str:
    """A layout in short: `TP 2, PP 8, DP 4, EP 64, mb 1, selective`."""
    at = one.layout
    words = [f"TP {at.tensor}", f"PP {at.pipeline}", f"DP {at.data}"]
    words += [f"EP {at.expert}"] * (at.expert > 1) + [f"v {at.chunks}"] * (at.chunks > 1) + [f"mb {at.microbatch}"]
    return ", ".join(words + ([] if at.recompute == "none" else [word(at.recompute)]))


def word(recompute: str | tuple[str, ...]) -> str:
    return recompute if isinstance(recompute, str) else "by layer"


def many(count: int, word: str, ending: str = "s") -> str:
    return f"{count:,} {word}{'' if count == 1 else ending}"


def share(value: float) -> str:
    return f"{round(100 * value, 1) + 0.0:.1f} %"  # no minus before a zero


def gigabytes(value: float) -> str:
    return f"{value / 1e9:.1f} GB"


def tokens(plan: Plan) -> str:
    """The target in words."""
    value = plan.tokens
    for scale, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if value >= scale:
            return f"{value / scale:.4g} {name} tokens"
    return f"{value:,.0f} tokens"
