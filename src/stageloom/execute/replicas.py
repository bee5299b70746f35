"""Parameters that live in more than one place: replicas of a stage on two paths, and weights tied between stages.

Both end a step with one gradient, the sum over all places, and both start equal. Groups are made by all ranks in one
order, of nothing but the schedule's placement and the list of ties, which every rank is given alike.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaks unknown types)
from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stageloom.errors import InputError
from stageloom.schedule import Schedule

Tied = Sequence[Sequence[tuple[int, str]]]
Modules = Mapping[tuple[int, int], nn.Module]


@dataclass
class _Tie:
    """A group of tied parameters, as one of its holders sees it.

    `own` has its members here, `counted` those whose gradients add up (path 0: replicas have been summed before).
    """

    name: str
    source: int
    first: nn.Parameter | None
    own: list[nn.Parameter]
    counted: list[nn.Parameter]
    group: Any


@dataclass
class _Sum:
    """A sum over ranks under way: gradients of parameters of one dtype, and how many ranks have one."""

    work: Any
    parameters: list[nn.Parameter]
    flat: Tensor

    def finish(self) -> None:
        """A parameter that has a gradient nowhere keeps none, as in one process."""
        self.work.wait()
        *parts, present = self.flat.split([*(p.numel() for p in self.parameters), len(self.parameters)])
        for parameter, part, count in zip(self.parameters, parts, present.tolist(), strict=True):
            parameter.grad = part.view_as(parameter).clone() if count else None


@dataclass
class Shared:
    """What this rank's parameters share with others, and the sums of their gradients."""

    schedule: Schedule
    group: dist.ProcessGroup
    rank: int
    modules: Modules
    tied: Tied
    _groups: dict[tuple[int, ...], Any] = field(default_factory=dict[tuple[int, ...], Any])
    _under_way: list[_Sum] = field(default_factory=list[_Sum])

    def __post_init__(self) -> None:
        self._check()
        table = self.schedule.placement.table.T.tolist()
        self.holders = {stage: tuple(sorted(set(ranks))) for stage, ranks in enumerate(table)}
        # where a rank holds two replicas of a stage, its own are summed first, when both are complete
        self.late = [stage for stage, ranks in enumerate(table) if len(set(ranks)) < len(ranks)]
        self.replicas: dict[int, Any] = {}
        for stage, ranks in self.holders.items():
            if len(ranks) > 1 or stage in self.late:
                group = self._group(ranks)  # by all ranks, so that all make the same groups
                if self.rank in ranks:
                    self.replicas[stage] = group
        self.ties = [tie for tie in map(self._tie, self.tied) if tie is not None]

    # ----------------------------------------------------------------------------------------------- construction

    def _check(self) -> None:
        seen: set[tuple[int, str]] = set()
        for group in self.tied:
            if len(group) < 2:
                raise InputError(
                    f"tied: the group {list(group)} has {len(group)} members; a tie is between two or more"
                )
            for member in group:
                if not 0 <= member[0] < self.schedule.stages:
                    raise InputError(f"tied: {member} is on a stage from 0 to {self.schedule.stages - 1}, or nowhere")
                if member in seen:
                    raise InputError(f"tied: {member} is named twice")
                seen.add(member)

    def _group(self, ranks: tuple[int, ...]) -> Any:
        """The process group of these ranks; None for a single rank, or on ranks outside."""
        if ranks not in self._groups:
            world = [dist.get_global_rank(self.group, rank) for rank in ranks]
            here = self.rank in ranks and len(ranks) > 1
            self._groups[ranks] = dist.new_group(world, use_local_synchronization=True) if here else None
        return self._groups[ranks]

    def _tie(self, members: Sequence[tuple[int, str]]) -> _Tie | None:
        ranks = tuple(sorted({rank for stage, _ in members for rank in self.holders[stage]}))
        group = self._group(ranks)
        if self.rank not in ranks:
            return None
        source = self.schedule.placement.paths[0][members[0][0]]
        tie = _Tie(f"{members[0][1]} of stage {members[0][0]}", source, None, [], [], group)
        for path in range(len(self.schedule.placement.paths)):
            for stage, name in members:
                if (path, stage) not in self.modules:
                    continue
                parameter = self._parameter(self.modules[path, stage], stage, name)
                if path == 0 and (stage, name) == tuple(members[0]):
                    tie.first = parameter
                # one parameter that two stages share is one: autograd has summed its gradients already
                if all(parameter is not other for other in tie.own):
                    tie.own.append(parameter)
                    if path == 0:
                        tie.counted.append(parameter)
        shapes = {tuple(parameter.shape) for parameter in tie.own}
        if len(shapes) > 1:
            raise InputError(f"tied: {list(members)} have the shapes {sorted(shapes)}; tied parameters have one")
        return tie

    @staticmethod
    def _parameter(module: nn.Module, stage: int, name: str) -> nn.Parameter:
        try:
            return module.get_parameter(name)
        except AttributeError:
            raise InputError(f"tied: stage {stage} has no parameter {name!r}") from None

    def equalise(self) -> None:
        """Replicas start as on path 0, tied parameters as the first of their group."""
        for stage in sorted(self.replicas):  # by stage: two ranks have to meet in one order
            source = self.schedule.placement.paths[0][stage]
            mine = [module for (_, own), module in sorted(self.modules.items()) if own == stage]
            for copies in zip(*([*m.parameters(), *m.buffers()] for m in mine), strict=True):
                self._spread(copies[0], copies[1:], source, self.replicas[stage])
        for tie in self.ties:
            first = tie.first if tie.first is not None else tie.own[0]
            self._spread(first, [p for p in tie.own if p is not first], tie.source, tie.group)

    def _spread(self, first: Tensor, others: Iterable[Tensor], source: int, group: Any) -> None:
        if group is not None:
            value = first.detach().contiguous()
            sent = value.view(torch.uint8) if value.dtype is torch.bool else value
            dist.broadcast(sent, group=group, src=dist.get_global_rank(self.group, source))
            first.detach().copy_(value)
        for other in others:
            other.detach().copy_(first.detach())

    # ----------------------------------------------------------------------------------------------------- a step

    def set_aside(self) -> dict[nn.Parameter, Tensor]:
        """Gradients of earlier steps, which have been summed already and must not be once more."""
        replicated = [p for (_, s), m in self.modules.items() if s in self.replicas for p in m.parameters()]
        before: dict[nn.Parameter, Tensor] = {}
        for parameter in (*replicated, *(p for tie in self.ties for p in tie.own)):
            if parameter.grad is not None:
                before[parameter] = parameter.grad
                parameter.grad = None
        return before

    def start(self, stage: int) -> None:
        """Start to sum the gradients of a stage over its replicas."""
        if stage not in self.late:
            module = next(module for (_, own), module in self.modules.items() if own == stage)
            self._under_way += self._sums(list(module.parameters()), self.replicas[stage])

    def finish(self, before: dict[nn.Parameter, Tensor]) -> None:
        """End all sums, add up ties, and put back what was set aside."""
        for stage in (stage for stage in self.late if stage in self.replicas):
            mine = [list(module.parameters()) for (_, own), module in self.modules.items() if own == stage]
            for copies in zip(*mine, strict=True):
                _add_up(copies, copies)
            self._sum_now(mine[0], self.replicas[stage])
            for copies in zip(*mine, strict=True):
                _add_up(copies, copies[:1])
        for under_way in self._under_way:
            under_way.finish()
        self._under_way = []
        for tie in self.ties:
            trained = [p for p in tie.own if p.requires_grad]
            if not trained:
                continue
            _add_up(trained, [p for p in tie.counted if p.requires_grad])
            self._sum_now(trained[:1], tie.group)
            _add_up(trained, trained[:1])
        for parameter, earlier in before.items():
            parameter.grad = earlier if parameter.grad is None else parameter.grad + earlier

    def _sum_now(self, parameters: list[nn.Parameter], group: Any) -> None:
        for each in self._sums(parameters, group) if group is not None else []:
            each.finish()

    @staticmethod
    def _sums(parameters: list[nn.Parameter], group: Any) -> list[_Sum]:
        found: list[_Sum] = []
        trained = [p for p in parameters if p.requires_grad]
        for dtype in dict.fromkeys(p.dtype for p in trained):
            own = [p for p in trained if p.dtype is dtype]
            gradients = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in own]
            present = torch.tensor([p.grad is not None for p in own]).to(gradients[0])
            flat = torch.cat([*gradients, present])
            found.append(_Sum(dist.all_reduce(flat, group=group, async_op=True), own, flat))
        return found

    # ------------------------------------------------------------------------------------------------ after a step

    def clip(self, max_norm: float) -> float:
        """Scale all gradients so that their norm over all stages is at most `max_norm`; the norm before."""
        uncounted = {id(p) for tie in self.ties for p in tie.own if p is not tie.first}
        gradients = {
            id(p): (path, p.grad)
            for (path, _), module in sorted(self.modules.items())
            for p in module.parameters()
            if p.grad is not None
        }
        squares = torch.zeros(1, dtype=torch.float64)
        for key, (path, gradient) in gradients.items():
            if path == 0 and key not in uncounted:  # other paths hold replicas
                squares += gradient.detach().double().square().sum().cpu()
        dist.all_reduce(squares, group=self.group)
        norm = float(squares.sqrt())
        factor = max_norm / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_ has it
        if not factor >= 1.0:
            for _, gradient in gradients.values():
                gradient.mul_(factor)
        return norm


def _add_up(to: Sequence[nn.Parameter], parts: Sequence[nn.Parameter]) -> None:
    """Give `to` the sum of the gradients of `parts`."""
    gradients = [p.grad for p in parts if p.grad is not None]
    total = None if not gradients else torch.stack(gradients).sum(0) if len(gradients) > 1 else gradients[0]
    for parameter in to:
        parameter.grad = None if total is None else total.clone()


def agree(group: dist.ProcessGroup, schedule: Schedule, *options: object) -> None:
    """Refuse, on every rank, ranks that were given different schedules or options: they would wait for ever."""
    said = hashlib.sha256(repr((schedule.name, schedule.placement, schedule.microbatches, options)).encode())
    for column in (schedule.offsets, schedule.kind, schedule.stage, schedule.microbatch, schedule.slice):
        said.update(column.tobytes())
    mine = torch.frombuffer(bytearray(said.digest()[:8]), dtype=torch.int64)
    all_said = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_said, mine, group=group)
    others = [rank for rank, theirs in enumerate(all_said) if not torch.equal(theirs, all_said[0])]
    if others:
        raise InputError(f"ranks {others} were given another schedule, tied or dynamic than rank 0")
