"""What passes cost on this machine, measured on real steps: F, B, W and BW of given stages, messages between the
processes, the interpreter's own time an op, and memory.

    costs = profile_stages([embed, block, head], inputs, loss, targets)          # in this process alone
    costs = profile_stages({0: embed}, inputs, loss, targets, schedule=..., group=...)   # as each rank of a pipeline

The stages train by the schedule they are to be run by, on the processes they are to be run on: so ops are measured with
as many ranks computing at once, with as many micro-batches held and as much memory traffic. BW is measured where no
backward is split and B and W where all are, so that the costs serve other schedules too. A time is the median over
micro-batches and steps, the first step left out.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false
# (torch leaks unknown types, and re-exports its stores without saying so)
from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn

from stageloom.costs import Costs
from stageloom.errors import InputError
from stageloom.execute.arguments import Make, Split, Stages
from stageloom.execute.profile_steps import Counter, Found, Options, measure, talk, weigh
from stageloom.execute.replicas import Tied
from stageloom.execute.split import restore
from stageloom.op import Kind
from stageloom.placement import Placement
from stageloom.schedule import Schedule
from stageloom.schedules import find

MILLI: Final = 1e3  # costs are in ms
NEAR: Final = 0.03  # what w_share may be off from 0 or 1 by small tensors that are no activations


@dataclass(frozen=True)
class Profile:
    """Measured costs, and how.

    modes: how each stage splits its backward. spread: by key of the costs and stage, half the distance between the 10th
    and the 90th percentile of a time, as a part of its median. samples: ops that a time is the median of, at least.
    """

    costs: Costs
    modes: dict[int, str]
    spread: dict[str, list[float]]
    samples: int


def profile_stages(
    stages: Sequence[nn.Module] | Stages, inputs: Any, loss: Callable[[Any, Any], Tensor], targets: Any, **options: Any
) -> Costs:
    """The costs that `profile` measures, and nothing else of it."""
    return profile(stages, inputs, loss, targets, **options).costs


def profile(
    stages: Sequence[nn.Module] | Stages,
    inputs: Any,
    loss: Callable[[Any, Any], Tensor],
    targets: Any,
    *,
    schedule: Schedule | None = None,
    group: dist.ProcessGroup | None = None,
    microbatches: int = 8,
    repeats: int = 5,
    split: Split | Mapping[int, Split] = "auto",
    recompute: Sequence[int] = (),
    tied: Tied | None = None,
    kwargs: Mapping[str, Any] | None = None,
    optimizer: Make | None = None,
    tokens: float | None = None,
    on_task: Callable[[str], None] | None = None,
    on_step: Callable[[int, int], None] | None = None,
) -> Profile:
    """Measure the costs of stages. All ranks of the group call it, and get the same.

    stages: of this rank, as `Pipeline` takes them; or a list of all stages, where this process is the only one.
    inputs, targets, loss, split, recompute, tied, kwargs, on_task: as for `Pipeline` and its `step`.
    schedule: by which the stages are to train; unless given, 1F1B of one stage a rank (or of all on this one), with
    `microbatches`. repeats: steps of which ops are measured. optimizer: makes the optimiser of a list of parameters;
    with it the costs say how much memory its state takes. on_step: told how many steps of how many are done.

    Gradients of the stages are None after it; weights are as before, unless the schedule is asynchronous. Ranks that
    do not share a schedule, and stages that do not fit it, are refused as `Pipeline` refuses them.
    """
    if repeats < 1:
        raise InputError(f"repeats: {repeats}; at least 1 step has to be measured")
    with _group(group) as own:
        size = dist.get_world_size(own)
        mine, count = _numbered(stages, size)
        schedule = _usual(size, count, microbatches) if schedule is None else schedule
        whole, parted = variants(schedule)
        total = (1 + repeats) * (1 + (parted is not None)) + 1
        options = Options(loss, inputs, targets, kwargs, split, recompute, tied, optimizer, on_task)
        counter = Counter(on_step, total)
        found = Found()
        pipeline = options.pipeline(whole, mine, own)
        measure(found, pipeline, options, repeats, counter, split_up=False)
        if parted is not None:
            pipeline = options.pipeline(parted, mine, own)
            measure(found, pipeline, options, repeats, counter, split_up=True)
        weigh(found, pipeline, options)
        counter.done()
        talk(found, pipeline)
        for module in pipeline.modules.values():
            restore(module)
        everything: list[Any] = [None] * size
        dist.all_gather_object(everything, found, group=own)
    return _combine(schedule, everything, parted is not None, tokens)


# -------------------------------------------------------------------------------------------------- what is to be run


def variants(schedule: Schedule) -> tuple[Schedule, Schedule | None]:
    """The schedule with every backward whole, and with every one split in B and W; None for the latter where weights
    are updated under way, as backwards are then whole in any case. No op is overlapped with another."""
    alone = replace(schedule, pair=np.zeros(len(schedule), dtype=np.bool_))
    if not schedule.synchronous:
        return alone, None
    stays = np.where(schedule.kind == Kind.W, 0, 1)
    whole = _repeated(alone, stays)
    whole = replace(whole, kind=np.where(whole.kind == Kind.B, Kind.BW, whole.kind).astype(np.int8))
    parts = np.where(schedule.kind == Kind.BW, 2, 1)
    parted = _repeated(alone, parts)
    second = np.concatenate(([0], np.cumsum(parts)[:-1])) + parts - 1  # the last row that each op has become
    kind = np.where(parted.kind == Kind.BW, Kind.B, parted.kind)
    kind[second[parts == 2]] = Kind.W
    return whole, replace(parted, kind=kind.astype(np.int8))


def _repeated(schedule: Schedule, times: np.ndarray[Any, Any]) -> Schedule:
    """Each row so many times."""
    ends = np.concatenate(([0], np.cumsum(times)))
    columns = {
        name: np.repeat(getattr(schedule, name), times) for name in ("kind", "stage", "microbatch", "slice", "pair")
    }
    return replace(schedule, offsets=ends[schedule.offsets], **columns)


def _usual(size: int, stages: int | None, microbatches: int) -> Schedule:
    if size > 1 or stages is None:
        return find("1f1b")(size, microbatches)
    one = np.concatenate((np.arange(stages), np.arange(stages)[::-1])).astype(np.int32)
    kinds = np.repeat(np.array([Kind.F, Kind.BW], dtype=np.int8), stages)
    rows = 2 * stages * microbatches
    return Schedule(
        "one process",
        Placement(1, ((0,) * stages,)),
        microbatches,
        np.array([0, rows], dtype=np.int64),
        np.tile(kinds, microbatches),
        np.tile(one, microbatches),
        np.repeat(np.arange(microbatches, dtype=np.int32), 2 * stages),
        np.zeros(rows, dtype=np.int32),
        np.zeros(rows, dtype=np.bool_),
        np.zeros(microbatches, dtype=np.int8),
    )


def _numbered(stages: Sequence[nn.Module] | Stages, size: int) -> tuple[Stages, int | None]:
    """Stages by number, and how many there are where this process has them all."""
    if isinstance(stages, Mapping):
        return stages, len(stages) if size == 1 else None
    if size > 1:
        raise InputError(f"stages: a list is for one process, and the group has {size}; give {{stage: module}}")
    if not stages:
        raise InputError("stages: there is none to measure")
    return dict(enumerate(stages)), len(stages)


@contextmanager
def _group(group: dist.ProcessGroup | None) -> Generator[dist.ProcessGroup]:
    """The group given, or torch's default one, or where there is none one of this process alone."""
    if group is not None or dist.is_initialized():
        world = dist.group.WORLD if group is None else group
        assert world is not None
        yield world
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


# --------------------------------------------------------------------------------------------------------- the result


def _combine(schedule: Schedule, ranks: Sequence[Found], parted: bool, tokens: float | None) -> Profile:
    split_up = bool(np.isin(schedule.kind, (Kind.B, Kind.W)).any())
    times: dict[str, list[float]] = {}
    spread: dict[str, list[float]] = {}
    fewest: list[int] = []
    for kind in Kind:
        from_parted = parted and (kind in (Kind.B, Kind.W) or (kind is Kind.F and split_up))
        if kind in (Kind.B, Kind.W) and not parted:
            continue
        values: list[float] = []
        spreads: list[float] = []
        for stage in range(schedule.stages):
            medians = 0.0
            widths = 0.0
            for part in range(schedule.slices):
                key = int(kind), stage, part
                seconds = [s for one in ranks for s in (one.parted if from_parted else one.whole).get(key, ())]
                fewest.append(len(seconds))
                low, middle, high = np.percentile(seconds, (10, 50, 90)).tolist()
                medians += middle
                widths += (high - low) / 2
            values.append(MILLI * medians)
            spreads.append(widths / medians if medians else 0.0)
        times[kind.name], spread[kind.name] = values, spreads
    if not parted:  # W is part of BW
        times["B"], times["W"] = times["BW"], [0.0] * schedule.stages
    gaps = [gap for one in ranks for gap in one.gaps]
    data: dict[str, Any] = {"unit": "ms", **times, "overhead": MILLI * float(np.median(gaps)) if gaps else 0.0}
    data |= _bytes(schedule, ranks) | _messages(ranks)
    if tokens is not None:
        data["tokens"] = tokens
    modes = {stage: mode for one in ranks for stage, mode in one.modes.items()}
    return Profile(Costs(**_rounded(data)), dict(sorted(modes.items())), spread, min(fewest))


def _rounded(value: Any) -> Any:
    """Measured numbers with six digits, counted bytes with all of theirs."""
    if isinstance(value, dict):
        return {key: part if key.endswith("_bytes") else _rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _bytes(schedule: Schedule, ranks: Sequence[Found]) -> dict[str, Any]:
    def by_stage(what: str) -> list[float]:
        found = {stage: size for one in reversed(ranks) for stage, size in one.bytes.get(what, {}).items()}
        return [max(0.0, found.get(stage, 0.0)) for stage in range(schedule.stages)]

    kept = by_stage("F")
    given_back = sum(-size for one in ranks for size in one.bytes.get("W", {}).values())
    allocated = sum(size for one in ranks for size in one.bytes.get("F", {}).values())
    data: dict[str, Any] = {
        "activation_bytes": kept,
        "w_share": share_of_w(given_back, allocated),
        "parameter_bytes": by_stage("parameters"),
        "gradient_bytes": by_stage("gradients"),
    }
    return data | ({"optimizer_bytes": by_stage("optimizer")} if any("optimizer" in one.bytes for one in ranks) else {})


def share_of_w(freed: float, kept: float) -> float:
    """The part of what F keeps that W frees. What is nearly 0 or 1 is taken for that: taken literally, 1.002 would say
    that every B needs more memory than it gives back, and no schedule would fit where 1F1B just does."""
    share = min(100.0, max(0.0, freed / kept)) if kept > 0 else 0.0
    return next((whole for whole in (0.0, 1.0) if abs(share - whole) <= NEAR), share)


def _messages(ranks: Sequence[Found]) -> dict[str, Any]:
    links = {pair: link for one in ranks for pair, link in one.links.items()}
    sizes = [size for one in ranks for size in one.message.values()]
    if not links:
        return {}
    latency = float(np.median([link.latency for link in links.values()]))
    bandwidth = float(np.median([link.bandwidth for link in links.values()]))
    data: dict[str, Any] = {"latency": MILLI * latency, "bandwidth": bandwidth, "message_bytes": float(np.mean(sizes))}
    apart = [
        {"from": source, "to": target, "latency": MILLI * link.latency, "bandwidth": link.bandwidth}
        for pair, link in sorted(links.items())
        if not (0.5 < link.latency / latency < 2 and 0.5 < link.bandwidth / bandwidth < 2)
        for source, target in (pair, pair[::-1])
    ]
    return data | ({"links": apart} if apart else {})
