"""`Pipeline`: train a model that is cut in stages, by any schedule, on the ranks of a process group."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaks unknown types)
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from stageloom.errors import InputError
from stageloom.execute.agreement import agree
from stageloom.execute.arguments import (
    Make,
    Options,
    Split,
    Stages,
    check_kwargs,
    check_norm,
    check_options,
    check_step,
    optimizer_of,
    own_stages,
    refuse_marked_ties,
    refuse_walking_twice,
    require_sound,
    said,
)
from stageloom.execute.buffers import Buffers
from stageloom.execute.channel import WINDOW
from stageloom.execute.devices import control_device, device_of, net_of
from stageloom.execute.executor import Executor
from stageloom.execute.feeding import Feed, along, fill, same, signature
from stageloom.execute.mesh import Mesh, grid_of
from stageloom.execute.pairs import has_parts, join_pairs
from stageloom.execute.replicas import Shared, Tied
from stageloom.execute.results import Losses, StepResult
from stageloom.execute.sharded import Sharded
from stageloom.execute.split import Report, prepare
from stageloom.execute.stage import StageRunner
from stageloom.execute.state import names_of
from stageloom.execute.tasks import Task, forward_only, tasks_of
from stageloom.execute.ties import marked
from stageloom.execute.tree import join
from stageloom.execute.versions import Versions
from stageloom.lower import Code, lower
from stageloom.schedule import Schedule


class Pipeline:
    """The stages of one rank, and how they train.

    schedule
        Any schedule value; its ranks are the ranks of `group`, or those of the mesh along its dimension "pp".
    stages
        The modules of this rank, by stage, or by (path, stage) where the schedule has two paths. Each gets what the
        stage before returned (a tuple as its arguments) and returns what the next one gets. Where micro-batches are cut
        along their sequence it is called with `carry=` too and returns (output, carry for the next slice).
    loss
        loss(output, target): a scalar for one micro-batch. The step's loss and gradients are its mean over
        micro-batches (and slices), ready for the optimiser, added to what `.grad` holds already.
    mesh
        For other parallelism beside the pipeline: a DeviceMesh with a dimension "pp", and dimensions "dp..." along
        which processes train on other data, or an `execute.mesh.Mesh` that says more. Losses and gradients are then
        means over the micro-batches of all of them, as if one process had trained on the whole global batch; replicas
        start equal. Stages may be wrapped by fully_shard over data dimensions, or be tensor parallel along others.
    split
        How backwards are split in B and W (see `execute.split`): one mode for all stages, or a mode by stage.
    recompute
        Stages whose forward is run again in B (or BW) instead of keeping activations.
    tied
        Groups of (stage, name) that are one parameter in the whole model, the same on all ranks: they start equal, and
        each step gives every member the sum of the group's gradients. Unless given, those that `partition.split` found
        in the model; () for none.
    dynamic
        For stages whose outputs change in shape, or in what is no tensor, while the inputs' shapes stay.
    static
        For inputs whose shapes, and values that are no tensors, stay as in the first step: saves ranks an exchange a
        step. Others are refused.
    window
        Receives posted ahead at most, a sender; more are posted when no more than half of them are left.
    device
        Where this rank's stages live; their parameters' device unless given. Inputs and targets are moved there.
    edge_groups
        Whether every directed edge between two ranks gets a process group of its own; unless given, where the backend
        runs all messages of a group in one order (NCCL).
    check_finite
        An infinity or nan in what an op computes ends the step with an error that names op and values.
    optimizer
        For asynchronous schedules, which update under way: makes the optimiser of a stage from its parameters.

    Raises InputError for stages that the schedule does not put here, ScheduleError for a schedule that cannot run.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Stages,
        loss: Callable[[Any, Any], Tensor],
        *,
        group: dist.ProcessGroup | None = None,
        mesh: Mesh | DeviceMesh | None = None,
        split: Split | Mapping[int, Split] = "auto",
        recompute: Sequence[int] = (),
        tied: Tied | None = None,
        dynamic: bool = False,
        static: bool = False,
        optimizer: Make | None = None,
        window: int = WINDOW,
        device: str | torch.device | None = None,
        edge_groups: bool | None = None,
        check_finite: bool = False,
        on_task: Callable[[str], None] | None = None,
    ) -> None:
        require_sound(schedule)
        given = Options(
            loss, group, split, recompute, tied, dynamic, static, optimizer, window, edge_groups, check_finite, on_task
        )
        check_options(schedule, given)
        self.schedule = schedule
        self.grid = grid_of(mesh, group, schedule)
        self.group = self.grid.pipeline
        self.rank = dist.get_rank(self.group)
        self.modules = own_stages(schedule, self.rank, stages)
        self.optimizer = optimizer
        self.dynamic, self.static = dynamic, static
        self.device = device_of(self.modules, device, self.group)
        if tied is None:
            tied = marked(self.modules, self.group)
            refuse_marked_ties(schedule, tied)
        members = [[tuple(member) for member in group] for group in tied]
        agree(self.grid, schedule, tied=members, dynamic=dynamic, static=static, edge_groups=edge_groups)
        self.sharded = Sharded(self.modules, self.grid, self.rank)
        program = lower(schedule, data_parallel=bool(self.grid.data), sharded=self.sharded.stages)
        self.tasks = tasks_of(program, self.rank)
        self.shared = Shared(schedule, self.grid, self.rank, self.modules, tied, self.sharded)
        self.reports: dict[tuple[int, int], Report] = {}
        self.runners = {key: self._runner(key, module, loss, split, recompute) for key, module in self.modules.items()}
        joints, self.overlaps = join_pairs(self.tasks, self.runners, dynamic=dynamic)
        net = net_of(self.group, program, self.device, edge_groups)
        self.executor = Executor(
            self.runners, net, self._beside, window=window, on_task=on_task, check_finite=check_finite, joints=joints
        )
        self.signature: Any = None  # None: nothing that the other ranks know of
        self.names = names_of(self.group, self.modules, tied)
        self.shared.equalise()
        self.buffers = Buffers(self.shared)
        self.losses = Losses(self.grid, schedule)

    # ----------------------------------------------------------------------------------------------- construction

    def _splits(self, stage: int, module: nn.Module) -> bool:
        """Is it of use to have B and W of the stage apart? Where this rank runs one by itself, or the stage has
        all-to-alls that W can be done under."""
        own = [task for task in self.tasks if task.place.stage == stage]
        return any(task.code in (Code.B, Code.W) or (task.pair and has_parts(module)) for task in own)

    def _runner(
        self,
        key: tuple[int, int],
        module: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        split: Split | Mapping[int, Split],
        recompute: Sequence[int],
    ) -> StageRunner:
        schedule, (_, stage) = self.schedule, key
        mode = split if isinstance(split, str) else split.get(stage, "auto")
        if self.optimizer is not None:
            report = Report("fused", "asynchronous schedules run on copies of the weights", {}, ())
            optimizer, shared = optimizer_of(module, self.optimizer, stage), bool(self.grid.data)
            versions = Versions(module, optimizer, schedule.update_every, shared=shared)
        elif mode == "auto" and not self._splits(stage, module):
            report, versions = Report("fused", "the schedule has no op that does B or W alone here", {}, ()), None
        else:
            refuse_walking_twice(module, mode, stage)
            with self.sharded.whole(module):  # shards of weights are not what a layer computes with
                report, versions = prepare(module, mode), None
        self.reports[key] = report
        return StageRunner(
            module,
            report,
            first=stage == 0,
            last=stage == schedule.stages - 1,
            loss=loss,
            slices=schedule.slices,
            sequence=schedule.sequence,
            parts=self.grid.copies * (1 if versions is not None else schedule.microbatches * schedule.slices),
            recompute=stage in recompute,
            versions=versions,
            device=self.device,
        )

    # ----------------------------------------------------------------------------------------------------- running

    def step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        kwargs: Mapping[str, Any] | None = None,
        scale: float = 1.0,
        seed: int | None = None,
    ) -> StepResult:
        """Forward and backward of one mini-batch; gradients are added to `.grad`.

        inputs: the mini-batch, cut along its first dimension in micro-batches, or a list of micro-batches (which may
        differ in shape); wanted on ranks with a first stage, ignored elsewhere. targets: the same, for the last stage.
        With a mesh they are this pipeline's own part of the global batch: each one has as many micro-batches.
        kwargs go to every stage as they are. scale multiplies the loss before its backward (for a GradScaler, see
        docs/running.md). With `seed`, random numbers (dropout) depend on seed, stage and micro-batch (of the global
        batch) alone. Raises InputError for what does not fit, and for a loss that leads back to nothing trained.
        """
        scale = check_step(self.schedule, kwargs, scale, seed)
        if targets is None and any(stage == self.schedule.stages - 1 for _, stage in self.modules):
            raise InputError("targets: this rank holds the last stage and needs them")
        before = self.grid.number * self.schedule.microbatches
        feed = fill(
            Feed(scale=scale, seed=seed, microbatches_before=before),
            self.schedule,
            self.modules,
            inputs,
            targets,
            kwargs,
            self.device,
        )
        announce = self._announce(feed)
        for runner in self.runners.values():
            runner.begin(feed)
            if runner.versions is not None:
                runner.versions.begin(self._version_uses())
        earlier = self.shared.set_aside()
        self.buffers.begin()
        run = self.executor.run(self.tasks, announce=announce)
        self.shared.finish(earlier)
        self.buffers.finish()
        return StepResult({}, run, self.losses.summed(run))

    def evaluate(
        self, inputs: Any = None, targets: Any = None, *, kwargs: Mapping[str, Any] | None = None
    ) -> StepResult:
        """Forward only: the mean loss where targets are given (else nan), and outputs by micro-batch.

        Modules stay in training or evaluation mode, whichever they are in.
        """
        check_kwargs(kwargs)
        feed = fill(Feed(keep_outputs=True), self.schedule, self.modules, inputs, targets, kwargs, self.device)
        for runner in self.runners.values():
            runner.begin(feed)
        self.signature = None  # the shapes announced now are not those of the last step
        self.buffers.begin()
        run = self.executor.run(forward_only(self.tasks), announce=True, backward=False)
        self.sharded.scatter()
        self.buffers.finish()
        slices: dict[int, list[Any]] = {}
        for place, output in sorted(run.outputs.items(), key=lambda item: item[0]):
            slices.setdefault(place.microbatch, []).append(output)
        outputs = {
            microbatch: parts[0] if self.schedule.slices == 1 else join(parts, along(self.schedule))
            for microbatch, parts in slices.items()
        }
        return StepResult(outputs, run, self.losses.summed(run))

    def _announce(self, feed: Feed) -> bool:
        """Have shapes changed since the last step on any rank?"""
        now = signature(feed, self.modules.values(), self.device)
        if self.static and self.signature is not None:
            if not same(now, self.signature):
                raise InputError(
                    "static: inputs (their shapes), autocast or training modes are not those of the first step"
                )
            return False
        differs = self.dynamic or self.signature is None or not same(now, self.signature)
        changed = torch.tensor([int(differs)], device=control_device(self.group))
        self.signature = now
        dist.all_reduce(changed, op=dist.ReduceOp.MAX, group=self.group)
        return bool(changed)

    def _version_uses(self) -> dict[int, int]:
        # every stage of a rank runs each micro-batch once; versions are stated by the tasks
        return dict(Counter(task.version for task in self.tasks if task.code in (Code.B, Code.BW)))

    def _beside(self, task: Task) -> None:
        """What this rank does together with other holders of a stage."""
        if task.code is Code.GATHER:
            self.sharded.gather(task.place.stage)
        elif not self.schedule.synchronous:
            self.shared.sum_now(task.place.stage)
            versions = self.runners[task.place.path, task.place.stage].versions
            assert versions is not None
            versions.update()
        else:
            self.shared.start(task.place.stage)

    # ---------------------------------------------------------------------------------------------- around the step

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of this rank, each once, for an optimiser."""
        return list(dict.fromkeys(p for module in self.modules.values() for p in module.parameters()))

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale all gradients so that their norm over the whole model is at most `max_norm`; returns the norm before.

        As torch.nn.utils.clip_grad_norm_ on the model in one process: replicas and tied weights count once. Called on
        all ranks.
        """
        check_norm(self.schedule, max_norm)
        return self.shared.clip(float(max_norm))

    def state_dict(self) -> dict[str, Tensor]:
        """The state of this rank's stages, under the unsplit model's names (see `execute.state` for other stages)."""
        return self.names.state(self.modules)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy into this rank's stages what `state` has of them: the unsplit model's, or what `state_dict` gave.

        Raises InputError, and changes nothing, for a name that no stage has, one that is missing, or another shape.
        """
        if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] (from a user)
            raise InputError(f"load_state_dict: state is {said(state)}; expected tensors by name, as of state_dict()")
        self.names.load(self.modules, state)
