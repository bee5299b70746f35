"""The arguments of `Pipeline`, looked at before anything is built of them."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnnecessaryIsInstance=false
# (torch leaks unknown types, and a user may give anything)
from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Final, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stageloom.errors import InputError, ScheduleError
from stageloom.execute.replicas import Tied
from stageloom.execute.split import Mode
from stageloom.schedule import Schedule
from stageloom.validate import problems

Stages = Mapping[int, nn.Module] | Mapping[tuple[int, int], nn.Module]
Split = Mode | Literal["auto"]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Options:
    """What `Pipeline` is given beside the schedule, the stages and the mesh."""

    loss: object
    group: object
    split: Split | Mapping[int, Split]
    recompute: Sequence[int]
    tied: Tied | None
    dynamic: bool
    static: bool
    optimizer: Make | None
    window: int
    edge_groups: bool | None
    check_finite: bool
    on_task: object


def require_sound(schedule: Schedule) -> None:
    """Raise ScheduleError, with all its problems, for a schedule that cannot run; InputError for what is none."""
    if not isinstance(schedule, Schedule):
        raise InputError(f"schedule: is {said(schedule)}; expected a schedule, as of stageloom.build('1f1b', 4, 8)")
    found = problems(schedule)
    if found:
        raise ScheduleError(f"{schedule.name} cannot run: {found[0]}", [str(problem) for problem in found])


def own_stages(schedule: Schedule, rank: int, stages: Stages) -> dict[tuple[int, int], nn.Module]:
    """The modules of a rank by (path, stage). Raises InputError where the schedule puts others there."""
    wanted = {(path, stage) for path, of in enumerate(schedule.placement.stages_of[rank]) for stage in of}
    if not isinstance(stages, Mapping):
        raise InputError(f"stages: is {said(stages)}; expected a dict of modules by stage, {{0: module}}")
    given = {(key if isinstance(key, tuple) else (0, key)): module for key, module in stages.items()}
    if set(given) != wanted:
        raise InputError(
            f"rank {rank} of {schedule.name} holds (path, stage) {sorted(wanted)}, "
            f"but stages are given for {sorted(given, key=str)}"
        )
    for key, module in given.items():
        if not isinstance(module, nn.Module):
            raise InputError(f"stage {key}: is {said(module)}; expected an nn.Module")
    return {key: given[key] for key in sorted(wanted)}


# ---------------------------------------------------------------------------------------------- what kinds are expected


def said(value: object) -> str:
    """A wrong value in a message: itself where it is short and plain, else its type."""
    text = repr(value) if value is None or isinstance(value, bool | int | float | str) else ""
    return text if 0 < len(text) <= 40 else f"a {type(value).__name__}"


def is_whole(value: object) -> bool:
    """A whole number, which True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """A real number, or a tensor of one; nan and infinities are, True and False are not."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.is_complex() and value.dtype != torch.bool
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_tied(value: Any) -> bool:
    return _is_list(value) and all(_is_list(group) and all(map(_is_member, group)) for group in value)


def _is_list(value: Any) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str | Mapping)


def _is_member(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and is_whole(value[0]) and isinstance(value[1], str)


def _or_none(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or test(value)


_EXPECTED: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "loss": (callable, "a function of output and target"),
    "group": (lambda value: value is None or isinstance(value, dist.ProcessGroup), "a process group, or None"),
    "split": (
        lambda value: isinstance(value, str | Mapping),
        f"a mode (auto, {', '.join(get_args(Mode))}), or modes by stage, {{0: 'graph'}}",
    ),
    "recompute": (lambda value: _is_list(value) and all(map(is_whole, value)), "numbers of stages, as [0, 2]"),
    "tied": (_or_none(_is_tied), "groups of (stage, name), as partition.tied gives them"),
    "dynamic": (lambda value: isinstance(value, bool), "True or False"),
    "static": (lambda value: isinstance(value, bool), "True or False"),
    "optimizer": (_or_none(callable), "a function that makes the optimiser of a list of parameters"),
    "window": (lambda value: is_whole(value) and value >= 1, "a whole number of receives, at least 1"),
    "edge_groups": (_or_none(lambda value: isinstance(value, bool)), "True, False or None"),
    "check_finite": (lambda value: isinstance(value, bool), "True or False"),
    "on_task": (_or_none(callable), "a function of the name of an op"),
}


def check_options(schedule: Schedule, given: Options) -> None:
    """Refuse what does not fit the schedule, each with an InputError that names the argument."""
    for name, (fits, expected) in _EXPECTED.items():
        if not fits(getattr(given, name)):
            raise InputError(f"{name}: is {said(getattr(given, name))}; expected {expected}")
    if given.static and given.dynamic:
        raise InputError("static: says that shapes stay, and dynamic that they change; give one of them")
    by_stage = {} if isinstance(given.split, str) else given.split
    for mode in (given.split,) if isinstance(given.split, str) else by_stage.values():
        if mode not in ("auto", *get_args(Mode)):
            raise InputError(f"split: mode {mode!r} is unknown; expected auto, {', '.join(get_args(Mode))}")
    for what, named in (("split", by_stage), ("recompute", given.recompute)):
        wrong = sorted((stage for stage in named if stage not in range(schedule.stages)), key=str)
        if wrong:
            raise InputError(f"{what}: names stages {wrong}; {schedule.name} has 0 to {schedule.stages - 1}")
    if schedule.synchronous:
        if given.optimizer is not None:
            raise InputError(
                f"optimizer: {schedule.name} is synchronous; give none, and step your own optimiser after each step"
            )
        return
    if given.optimizer is None:
        raise InputError(f"{schedule.name} updates weights under way; give optimizer=, such as a torch.optim class")
    if given.tied:
        raise InputError(f"tied: {schedule.name} updates stages at different times, so no weights can be tied")
    if schedule.microbatches % schedule.update_every:
        raise InputError(
            f"{schedule.name} updates every {schedule.update_every} micro-batches, which {schedule.microbatches} "
            "micro-batches are no multiple of; the last ones would be lost"
        )


def refuse_marked_ties(schedule: Schedule, ties: Tied) -> None:
    """What `tied` may not name in an asynchronous schedule, marks of `split` may not either."""
    if ties and not schedule.synchronous:
        raise InputError(
            f"stages: {list(ties[0])} are one parameter in the model that was split, and {schedule.name} updates "
            "stages at different times; use a synchronous schedule, untie them (tie_word_embeddings=False), or give "
            "tied=() to train them apart"
        )


def check_kwargs(kwargs: object) -> None:
    """Raise InputError for what are no keyword arguments."""
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs)):
        raise InputError(f"kwargs: is {said(kwargs)}; expected a dict of keyword arguments for every stage")


def check_step(schedule: Schedule, kwargs: object, scale: Any, seed: Any) -> float:
    """Refuse arguments of a step, each with an InputError that names it; the scale as a plain number."""
    check_kwargs(kwargs)
    if seed is not None and not is_whole(seed):
        raise InputError(f"seed: is {said(seed)}; expected a whole number, or None")
    if not is_number(scale) or not math.isfinite(float(scale)):
        raise InputError(f"scale: is {said(scale)}; expected a finite number, such as a GradScaler's get_scale()")
    if float(scale) != 1.0 and not schedule.synchronous:
        raise InputError(f"scale: {schedule.name} updates under way, before gradients could be unscaled")
    return float(scale)


def check_norm(schedule: Schedule, max_norm: Any) -> None:
    """Refuse what gradients cannot be clipped to."""
    if not schedule.synchronous:
        raise InputError(f"clip_grad_norm: {schedule.name} updates under way and leaves no gradients")
    if not is_number(max_norm) or not float(max_norm) > 0:
        raise InputError(f"clip_grad_norm: max_norm is {said(max_norm)}; expected a number above 0")


# ----------------------------------------------------------------------------------------------------- single stages


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
