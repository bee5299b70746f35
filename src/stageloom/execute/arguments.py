"""The arguments of `Pipeline`, looked at before anything is built of them."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaks unknown types)
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import nn

from stageloom.errors import InputError, ScheduleError
from stageloom.execute.replicas import Tied
from stageloom.execute.split import Mode
from stageloom.schedule import Schedule
from stageloom.validate import problems

Stages = Mapping[int, nn.Module] | Mapping[tuple[int, int], nn.Module]
Split = Mode | Literal["auto"]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def require_sound(schedule: Schedule) -> None:
    """Raise ScheduleError, with all its problems, for a schedule that cannot run."""
    found = problems(schedule)
    if found:
        raise ScheduleError(f"{schedule.name} cannot run: {found[0]}", [str(problem) for problem in found])


def own_stages(schedule: Schedule, rank: int, stages: Stages) -> dict[tuple[int, int], nn.Module]:
    """The modules of a rank by (path, stage). Raises InputError where the schedule puts others there."""
    wanted = {(path, stage) for path, of in enumerate(schedule.placement.stages_of[rank]) for stage in of}
    given = {(key if isinstance(key, tuple) else (0, key)): module for key, module in stages.items()}
    if set(given) != wanted:
        raise InputError(
            f"rank {rank} of {schedule.name} holds (path, stage) {sorted(wanted)}, "
            f"but stages are given for {sorted(given, key=str)}"
        )
    for key, module in given.items():
        if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance] (from a user)
            raise InputError(f"stage {key}: is a {type(module).__name__}; expected an nn.Module")
    return {key: given[key] for key in sorted(wanted)}


def check_options(
    schedule: Schedule,
    loss: object,
    split: Split | Mapping[int, Split],
    recompute: Sequence[int],
    tied: Tied,
    dynamic: bool,
    static: bool,
    window: int,
    optimizer: Make | None,
) -> None:
    """Refuse what does not fit the schedule, each with an InputError that names the argument."""
    if not callable(loss):
        raise InputError(f"loss: is a {type(loss).__name__}; expected a function of output and target")
    if static and dynamic:
        raise InputError("static: says that shapes stay, and dynamic that they change; give one of them")
    if window < 1:
        raise InputError(f"window: is {window}; at least 1 receive has to be posted")
    modes = (split,) if isinstance(split, str) else tuple(split.values())
    for mode in modes:
        if mode not in ("auto", *get_args(Mode)):
            raise InputError(f"split: mode {mode!r} is unknown; expected auto, {', '.join(get_args(Mode))}")
    for what, named in (("split", () if isinstance(split, str) else split), ("recompute", recompute)):
        wrong = sorted(stage for stage in named if stage not in range(schedule.stages))
        if wrong:
            raise InputError(f"{what}: names stages {wrong}; {schedule.name} has 0 to {schedule.stages - 1}")
    if schedule.synchronous:
        if optimizer is not None:
            raise InputError(
                f"optimizer: {schedule.name} is synchronous; give none, and step your own optimiser after each step"
            )
        return
    if optimizer is None:
        raise InputError(f"{schedule.name} updates weights under way; give optimizer=, such as a torch.optim class")
    if tied:
        raise InputError(f"tied: {schedule.name} updates stages at different times, so no weights can be tied")
    if schedule.microbatches % schedule.update_every:
        raise InputError(
            f"{schedule.name} updates every {schedule.update_every} micro-batches, which {schedule.microbatches} "
            "micro-batches are no multiple of; the last ones would be lost"
        )


def optimizer_of(module: nn.Module, make: Make, stage: int) -> torch.optim.Optimizer | None:
    """The optimiser of a stage; None for one that has nothing to train."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        return None
    made: Any = make(parameters)
    if not isinstance(made, torch.optim.Optimizer):
        raise InputError(f"optimizer: gave a {type(made).__name__}; expected a function that makes an Optimizer")
    theirs = {id(p) for group in made.param_groups for p in group["params"]}
    if theirs != {id(p) for p in parameters}:
        raise InputError(f"optimizer: the one made for stage {stage} is not for exactly the parameters it was given")
    return made


def refuse_walking_twice(module: nn.Module, mode: Split, stage: int) -> None:
    """Mode "graph" keeps a graph for W, and the backward of compiled code may give its memory away in B."""
    for layer in module.modules() if mode == "graph" else ():
        if getattr(layer, "_compiled_call_impl", None) is not None or type(layer).__name__ == "OptimizedModule":
            raise InputError(f"split: stage {stage} is compiled, so autograd cannot split it; use 'fused' or 'auto'")
