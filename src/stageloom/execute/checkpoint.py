"""Checkpoints under the unsplit model's names, written whole or not at all.

A checkpoint is a folder `step-N` made by torch.distributed.checkpoint: weights as `model.NAME`, optimiser state as
`optimizer.NAME.KEY`. Names do not depend on the schedule, so it can be read under another one, on other ranks. It is
written beside its place and renamed when all ranks are done; a kill or a full disk leaves the one before as it was.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaks unknown types)
from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from stageloom.errors import InputError
from stageloom.execute.pipeline import Pipeline

NAME = re.compile(r"step-(\d{8})")


class Checkpoint:
    """Checkpoints of one run, in a folder; the newest whole one counts."""

    def __init__(self, folder: str, group: dist.ProcessGroup) -> None:
        self.folder = Path(folder)
        self.group = group
        self.rank = dist.get_rank(group)

    def newest(self) -> int | None:
        """The step of the newest whole checkpoint, or None."""
        if not self.folder.is_dir():
            return None
        steps = [int(found[1]) for path in self.folder.iterdir() if (found := NAME.fullmatch(path.name))]
        return max(steps, default=None)

    def save(self, step: int, pipeline: Pipeline, optimizer: torch.optim.Optimizer | None) -> None:
        """Write the checkpoint of a step; the ones before it go when it is whole."""
        target = self.folder / f"step-{step:08d}"
        partial = self.folder / f".step-{step:08d}.partial"
        if self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
        dist.barrier(self.group)
        save(_state(pipeline, optimizer), checkpoint_id=str(partial), process_group=self.group)
        dist.barrier(self.group)
        if self.rank == 0:
            shutil.rmtree(target, ignore_errors=True)
            os.replace(partial, target)
            for old in self.folder.iterdir():
                found = NAME.fullmatch(old.name)
                if found and int(found[1]) < step:
                    shutil.rmtree(old, ignore_errors=True)
        dist.barrier(self.group)

    def load(self, pipeline: Pipeline, optimizer: torch.optim.Optimizer | None) -> int:
        """Read the newest checkpoint into the pipeline and optimiser; the step it was made after, 0 without one."""
        step = self.newest()
        if step is None:
            return 0
        if optimizer is not None:
            _materialise(optimizer)
        state = _state(pipeline, optimizer)
        try:
            load(state, checkpoint_id=str(self.folder / f"step-{step:08d}"), process_group=self.group)
        except CheckpointException as error:
            raise InputError(f"{self.folder}/step-{step:08d}: does not fit this model: {error}") from None
        return step


def _state(pipeline: Pipeline, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Live tensors by name: weights, and the optimiser's state of every parameter."""
    state: dict[str, Any] = {}
    for module in pipeline.modules.values():
        state.update({f"model.{name}": tensor for name, tensor in module.state_dict().items()})
        for name, parameter in module.named_parameters():
            for key, value in ({} if optimizer is None else optimizer.state.get(parameter, {})).items():
                if isinstance(value, torch.Tensor):
                    state[f"optimizer.{name}.{key}"] = value
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
