"""Checkpoints under the unsplit model's names, written whole or not at all.

A checkpoint is a folder `step-N` made by torch.distributed.checkpoint: weights as `model.NAME`, optimiser state as
`optimizer.NAME.KEY`. Names do not depend on the schedule, so it can be read under another one, on other ranks. One run
at a time writes in a folder.

Whenever a save ends, killed or failed, one whole checkpoint is there, the new one or that before it. It is written in
`.step-N.partial`, brought to the disk, and then renamed; what has to make way is renamed before it is deleted:

    .step-N.partial   being written; nothing yet
    .step-N.before    whole: a checkpoint of the same step as the one that takes its place; counts while that is missing
    .step-N.gone      being deleted

What a killed save leaves of these is cleared away by the next save or load.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false
# (torch leaks unknown types)
from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from stageloom.errors import InputError, RankError
from stageloom.execute.checkpoint_files import (
    Reader,
    Writer,
    read_metadata,
    read_settings,
    require_file,
    require_fit,
    require_whole,
    told,
    write_settings,
)
from stageloom.execute.pipeline import Pipeline

T = TypeVar("T")

_WHOLE = re.compile(r"step-(\d{8})|\.step-(\d{8})\.before")
_LEFT_OVER = re.compile(r"\.(step-\d{8})\.(partial|before|gone)")


def newest(folder: Path) -> int | None:
    """The step of the newest whole checkpoint in a folder, or None."""
    if not folder.is_dir():
        return None
    steps = [int(found[1] or found[2]) for path in folder.iterdir() if (found := _WHOLE.fullmatch(path.name))]
    return max(steps, default=None)


def refuse_another_run(folder: Path) -> None:
    """Raise InputError where a run that starts anew would write beside the checkpoints of another."""
    step = newest(folder)
    if step is not None:
        raise InputError(
            f"--checkpoint {folder}: holds a checkpoint of step {step} already; add --resume to go on from it, or give "
            "another folder"
        )


class Checkpoint:
    """Checkpoints of one run, in a folder; the newest whole one counts.

    Raises RankError on all ranks where one of them fails, and names that rank and the cause.
    """

    def __init__(self, folder: str, group: dist.ProcessGroup) -> None:
        self.folder = Path(folder)
        self.group = group
        self.settings: dict[str, float] = {}  # on the first rank: those that the loaded checkpoint was saved with
        self.rank = dist.get_rank(group)

    def newest(self) -> int | None:
        """The step of the newest whole checkpoint, or None."""
        return newest(self.folder)

    def save(
        self,
        step: int,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer | None,
        settings: Mapping[str, float] | None = None,
    ) -> None:
        """Write the checkpoint of a step; the ones before it go when it is whole. `settings` of the run are kept with
        it, for the one that loads it to compare."""
        what = f"the checkpoint of step {step} cannot be written"
        partial = self.folder / f".step-{step:08d}.partial"
        self._together(what, lambda: self._on_first(lambda: self._clear(make=True)))
        state = self._together(what, lambda: _state(pipeline, optimizer))
        try:
            save(state, storage_writer=Writer(str(partial)), process_group=self.group)
        except CheckpointException as error:
            failure = self._failure(what, error)
            self._on_first(lambda: shutil.rmtree(partial, ignore_errors=True))  # a full disk needs the space
            raise failure from None
        if settings is not None:
            self._together(what, lambda: self._on_first(lambda: write_settings(partial, settings)))
        self._together(what, lambda: self._on_first(lambda: self._publish(step, partial)))

    def load(self, pipeline: Pipeline, optimizer: torch.optim.Optimizer | None) -> int:
        """Read the newest checkpoint into the pipeline and optimiser; the step it was made after, 0 without one."""
        what = f"{self.folder}: no checkpoint can be read"
        self._together(what, lambda: self._on_first(lambda: self._clear(make=False)))
        step = self._together(what, self.newest)
        if step is None:
            return 0
        path = self.folder / f"step-{step:08d}"
        what = f"{path}: is damaged"
        self._together(what, lambda: self._on_first(lambda: require_file(path / ".metadata")))
        saved = self._together(what, lambda: read_metadata(path))
        if optimizer is not None:
            _materialise(optimizer)
        state = self._together(what, lambda: _state(pipeline, optimizer))
        self._together(f"{path}: is of another model", lambda: require_fit(state, saved))
        self._together(what, lambda: self._on_first(lambda: self.settings.update(read_settings(path))))
        self._together(what, lambda: require_whole(path, saved, state))
        try:
            load(state, storage_reader=Reader(str(path)), process_group=self.group)
        except CheckpointException as error:
            raise self._failure(what, error) from None
        return step

    # --------------------------------------------------------------------------------------------- folders and names

    def _clear(self, *, make: bool) -> None:
        """Put right what a killed save has left."""
        if make:
            self.folder.mkdir(parents=True, exist_ok=True)
        elif not self.folder.is_dir():
            return
        for path in sorted(self.folder.iterdir()):
            found = _LEFT_OVER.fullmatch(path.name)
            if found and found[2] == "before" and not (self.folder / found[1]).exists():
                os.rename(path, self.folder / found[1])
            elif found:
                _delete(path)

    def _publish(self, step: int, partial: Path) -> None:
        """Make the written folder the newest checkpoint, and delete those before it."""
        target = self.folder / f"step-{step:08d}"
        before = self.folder / f".step-{step:08d}.before"
        _to_disk(partial)
        if target.exists():
            os.rename(target, before)
        os.replace(partial, target)
        _to_disk(self.folder)
        for path in sorted(self.folder.iterdir()):
            found = _WHOLE.fullmatch(path.name)
            if path == before or (found and int(found[1] or found[2]) < step):
                _delete(path)

    # ------------------------------------------------------------------------------------------------ with all ranks

    def _on_first(self, act: Callable[[], None]) -> None:
        if self.rank == 0:
            act()

    def _together(self, what: str, act: Callable[[], T]) -> T:
        """What `act` returns, once all ranks have run it; where one fails, all raise RankError."""
        value, problem = None, None
        try:
            value = act()
        except Exception as error:
            problem = told(error)
        problems: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(problems, problem, group=self.group)
        failed = {rank: each for rank, each in enumerate(problems) if each is not None}
        if failed:
            raise self._error(what, failed)
        return value  # type: ignore[return-value]

    def _failure(self, what: str, error: CheckpointException) -> RankError:
        """The failure that torch tells all ranks of; those on the way to it are left out."""
        return self._error(what, {rank: told(cause) for rank, (cause, _) in error.failures.items()})

    def _error(self, what: str, failed: dict[int, str]) -> RankError:
        rank = self.rank if self.rank in failed else min(failed)
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        return RankError(f"{what}: rank {rank}{more}: {failed[rank]}", rank, rank == self.rank)


def _delete(path: Path) -> None:
    """Delete a folder, which stops being a checkpoint first. One that cannot be deleted is in nobody's way."""
    with suppress(OSError):
        if not path.name.startswith("."):
            path = path.rename(path.with_name(f".{path.name}.gone"))
        shutil.rmtree(path)


def _to_disk(folder: Path) -> None:
    """Names in a folder are on the disk after this (their contents: when they were written)."""
    if os.name == "nt":  # has no such call for folders
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


# -------------------------------------------------------------------------------------------------------- the contents


def _state(pipeline: Pipeline, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Live tensors by name: weights, and the optimiser's state of every parameter."""
    state: dict[str, Any] = {f"model.{name}": tensor for name, tensor in pipeline.state_dict().items()}
    for (_, stage), module in pipeline.modules.items():
        for own, parameter in module.named_parameters():
            name = pipeline.names.of(stage, own)
            for key, value in ({} if optimizer is None else optimizer.state.get(parameter, {})).items():
                if isinstance(value, torch.Tensor):
                    state.setdefault(f"optimizer.{name}.{key}", value)
    return state


def _materialise(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimiser make its state, by a step that changes nothing."""
    kept: list[tuple[nn.Parameter, torch.Tensor]] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            kept.append((parameter, parameter.detach().clone()))
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for parameter, value in kept:
            parameter.copy_(value)
