"""`Pipeline`: train a model that is cut in stages, by any schedule, on the ranks of a process group."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaks unknown types)
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stageloom.errors import InputError, ScheduleError
from stageloom.execute.executor import Executor, Net, Run
from stageloom.execute.split import Mode, Report, prepare
from stageloom.execute.stage import Feed, StageRunner
from stageloom.execute.tasks import Place, Task, forward_only, tasks_of
from stageloom.execute.tree import cut, flatten
from stageloom.execute.versions import Versions
from stageloom.lower import lower
from stageloom.schedule import Schedule
from stageloom.validate import problems

Stages = Mapping[int, nn.Module] | Mapping[tuple[int, int], nn.Module]


@dataclass(frozen=True)
class StepResult:
    """What a step gave.

    `loss`: mean over micro-batches, on every rank. `outputs`: an evaluation's, by micro-batch, on ranks with a last
    stage. `run`: what this rank did and when.
    """

    loss: float
    outputs: dict[int, Any]
    run: Run


class Pipeline:
    """The stages of one rank, and how they train.

    schedule
        Any schedule value; its ranks are the ranks of `group`.
    stages
        The modules of this rank, by stage, or by (path, stage) where the schedule has two paths. Each gets what the
        stage before returned (a tuple as its arguments) and returns what the next one gets. Where micro-batches are cut
        along their sequence it is called with `carry=` too and returns (output, carry for the next slice).
    loss
        loss(output, target): a scalar for one micro-batch. The step's loss and gradients are its mean over
        micro-batches (and slices), ready for the optimiser, added to what `.grad` holds already.
    split
        How backwards are split in B and W (see `execute.split`): one mode for all stages, or a mode by stage.
    recompute
        Stages whose forward is run again in the backward instead of keeping activations.
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
        split: Mode | Literal["auto"] | Mapping[int, Mode | Literal["auto"]] = "auto",
        recompute: Sequence[int] = (),
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
        window: int = 2,
        on_task: Callable[[str], None] | None = None,
    ) -> None:
        found = problems(schedule)
        if found:
            raise ScheduleError(f"{schedule.name} cannot run: {found[0]}", [str(problem) for problem in found])
        self.schedule = schedule
        self.group = group if group is not None else dist.group.WORLD
        assert self.group is not None
        self.rank = dist.get_rank(self.group)
        if dist.get_world_size(self.group) != schedule.ranks:
            raise InputError(
                f"{schedule.name} has {schedule.ranks} ranks and the process group {dist.get_world_size(self.group)}"
            )
        self.modules = self._own(stages)
        self.optimizer = optimizer
        self._check_asynchronous()
        self.tasks = tasks_of(lower(schedule), self.rank)
        self.reports: dict[tuple[int, int], Report] = {}
        self.runners = {key: self._runner(key, module, loss, split, recompute) for key, module in self.modules.items()}
        self.replicas = self._replica_groups()
        net = Net(self.group, device=torch.device("cpu"), rank=self.rank)
        self.reductions: list[tuple[Any, list[nn.Parameter], Tensor]] = []
        self.executor = Executor(self.runners, net, self._reduce, window=window, on_task=on_task)
        self.signature: Any = None
        self.steps = 0
        self._equalise_replicas()

    # ----------------------------------------------------------------------------------------------- construction

    def _own(self, stages: Stages) -> dict[tuple[int, int], nn.Module]:
        placement = self.schedule.placement
        wanted = {(path, stage) for path, of in enumerate(placement.stages_of[self.rank]) for stage in of}
        given = {(key if isinstance(key, tuple) else (0, key)): module for key, module in stages.items()}
        if set(given) != wanted:
            raise InputError(
                f"rank {self.rank} of {self.schedule.name} holds (path, stage) {sorted(wanted)}, "
                f"but stages are given for {sorted(given)}"
            )
        return {key: given[key] for key in sorted(wanted)}

    def _check_asynchronous(self) -> None:
        schedule = self.schedule
        if schedule.synchronous:
            return
        if self.optimizer is None:
            raise InputError(f"{schedule.name} updates weights under way; give optimizer=, such as a torch.optim class")
        if schedule.microbatches % schedule.update_every:
            raise InputError(
                f"{schedule.name} updates every {schedule.update_every} micro-batches, which {schedule.microbatches} "
                "micro-batches are no multiple of; the last ones would be lost"
            )

    def _runner(
        self,
        key: tuple[int, int],
        module: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        split: Mode | Literal["auto"] | Mapping[int, Mode | Literal["auto"]],
        recompute: Sequence[int],
    ) -> StageRunner:
        schedule, (_, stage) = self.schedule, key
        mode = split if isinstance(split, str) else split.get(stage, "auto")
        if self.optimizer is not None and not schedule.synchronous:
            report = Report("fused", "asynchronous schedules run on copies of the weights", {}, ())
            parameters = [p for p in module.parameters() if p.requires_grad]
            versions = Versions(module, self.optimizer(parameters), schedule.update_every)
        else:
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
            parts=1 if versions is not None else schedule.microbatches * schedule.slices,
            recompute=stage in recompute,
            versions=versions,
        )

    def _replica_groups(self) -> dict[int, Any]:
        """One group for every set of ranks that hold replicas of a stage; made by all ranks in one order."""
        assert self.group is not None
        groups: dict[tuple[int, ...], Any] = {}
        found: dict[int, Any] = {}
        for stage, ranks in enumerate(self.schedule.placement.table.T.tolist()):
            holders = tuple(sorted(set(ranks)))
            if len(holders) < 2:
                continue
            if holders not in groups:
                world = [dist.get_global_rank(self.group, rank) for rank in holders]
                groups[holders] = (
                    dist.new_group(world, use_local_synchronization=True) if self.rank in holders else None
                )
            if self.rank in holders:
                found[stage] = groups[holders]
        return found

    def _equalise_replicas(self) -> None:
        """Replicas start equal: the lowest rank's weights and buffers go to the other."""
        assert self.group is not None
        # by stage: the holders of two stages have to broadcast them in one order
        for (_, stage), module in sorted(self.modules.items(), key=lambda item: item[0][1]):
            if stage in self.replicas:
                source = min(path[stage] for path in self.schedule.placement.paths)
                for tensor in (*module.parameters(), *module.buffers()):
                    dist.broadcast(
                        tensor.data, group=self.replicas[stage], src=dist.get_global_rank(self.group, source)
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
        kwargs go to every stage as they are. scale multiplies the loss before its backward (for a GradScaler). With
        `seed`, random numbers (dropout) depend on seed, stage and micro-batch alone.
        """
        feed = self._feed(inputs, targets, kwargs, scale=scale, seed=seed)
        for runner in self.runners.values():
            runner.feed = feed
            if runner.versions is not None:
                runner.versions.begin(self._version_uses(runner))
        self.reductions = []
        before = self._set_aside()
        run = self.executor.run(self.tasks, announce=self._announce(feed))
        self._finish_reductions(before)
        self.steps += 1
        return StepResult(self._mean_loss(run), {}, run)

    def evaluate(
        self, inputs: Any = None, targets: Any = None, *, kwargs: Mapping[str, Any] | None = None
    ) -> StepResult:
        """Forward only: the mean loss where targets are given (else nan), and outputs by micro-batch."""
        feed = replace(self._feed(inputs, targets, kwargs, scale=1.0, seed=None), keep_outputs=True)
        for runner in self.runners.values():
            runner.feed = feed
        run = self.executor.run(forward_only(self.tasks), announce=True, backward=False)
        outputs = {place.microbatch: output for place, output in sorted(run.outputs.items())}
        return StepResult(self._mean_loss(run) if targets is not None else float("nan"), outputs, run)

    def _feed(
        self, inputs: Any, targets: Any, kwargs: Mapping[str, Any] | None, *, scale: float, seed: int | None
    ) -> Feed:
        feed = Feed(scale=scale, seed=seed)
        for path, stage in self.modules:
            mine = [m for m in range(self.schedule.microbatches) if self.schedule.path_of[m] == path]
            if stage == 0:
                if inputs is None:
                    raise InputError(f"rank {self.rank} holds the first stage and needs inputs")
                feed.inputs.update(self._places(inputs, path, stage, mine, "inputs"))
            if stage == self.schedule.stages - 1 and targets is not None:
                feed.targets.update(self._places(targets, path, stage, mine, "targets"))
            if kwargs is not None:
                feed.kwargs.update(
                    {Place(path, stage, m, s): dict(kwargs) for m in mine for s in range(self.schedule.slices)}
                )
        return feed

    def _places(self, value: Any, path: int, stage: int, mine: list[int], what: str) -> dict[Place, Any]:
        schedule = self.schedule
        parts = value if isinstance(value, list) else cut(value, schedule.microbatches, 0, what)
        if len(parts) != schedule.microbatches:
            raise InputError(f"{what}: a list of {len(parts)} for {schedule.microbatches} micro-batches")
        found: dict[Place, Any] = {}
        for microbatch in mine:
            whole = parts[microbatch]
            along = 1 if schedule.cut == "sequence" else 0
            slices = [whole] if schedule.slices == 1 else cut(whole, schedule.slices, along, what)
            for number, part in enumerate(slices):
                found[Place(path, stage, microbatch, number)] = part
        return found

    def _announce(self, feed: Feed) -> bool:
        """Have shapes changed since the last step on any rank that feeds the pipeline?"""
        assert self.group is not None
        signature = [
            (place, [(tuple(t.shape), t.dtype) for t in flatten(value)[0]]) for place, value in feed.inputs.items()
        ]
        changed = torch.tensor([int(self.steps == 0 or signature != self.signature)])
        self.signature = signature
        dist.all_reduce(changed, op=dist.ReduceOp.MAX, group=self.group)
        return bool(changed)

    def _version_uses(self, runner: StageRunner) -> dict[int, int]:
        del runner  # every stage of a rank runs each micro-batch once; versions are stated by the tasks
        return dict(Counter(task.version for task in self.tasks if task.code in (1, 3)))

    def _mean_loss(self, run: Run) -> float:
        assert self.group is not None
        total = torch.zeros(1, dtype=torch.float64)
        for loss in run.losses.values():
            total += loss.to(torch.float64)
        dist.all_reduce(total, group=self.group)
        return float(total) / (self.schedule.microbatches * self.schedule.slices)

    # --------------------------------------------------------------------------------------------------- reductions

    def _reduce(self, task: Task) -> None:
        """Start to sum the gradients of a stage over its replicas."""
        stage = task.place.stage
        module = next(module for (_, own), module in self.modules.items() if own == stage)
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not parameters:
            return
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
        work = dist.all_reduce(flat, group=self.replicas[stage], async_op=True)
        self.reductions.append((work, parameters, flat))

    def _set_aside(self) -> dict[nn.Parameter, Tensor]:
        """Gradients of replicated stages from earlier steps, which must not be summed over the replicas once more."""
        before: dict[nn.Parameter, Tensor] = {}
        for (_, stage), module in self.modules.items():
            if stage in self.replicas:
                for parameter in module.parameters():
                    if parameter.grad is not None:
                        before[parameter] = parameter.grad
                        parameter.grad = None
        return before

    def _finish_reductions(self, before: dict[nn.Parameter, Tensor]) -> None:
        for work, parameters, flat in self.reductions:
            work.wait()
            for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                total = part.view_as(parameter)
                parameter.grad = total + before[parameter] if parameter in before else total.clone()
        self.reductions = []

    # ---------------------------------------------------------------------------------------------- around the step

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of this rank, for an optimiser."""
        return [p for module in self.modules.values() for p in module.parameters()]

    def state_dict(self) -> dict[str, Tensor]:
        """The state of this rank's stages, under the names that their modules give it."""
        state: dict[str, Tensor] = {}
        for module in self.modules.values():
            state.update(module.state_dict())
        return state
