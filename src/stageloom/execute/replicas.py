"""Parameters that live in more than one place: replicas of a stage, on two paths or on data parallel ranks, and weights
tied between stages.

All end a step with one gradient, the sum over all places, and all start equal.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaks unknown types)
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stageloom.errors import InputError
from stageloom.execute.agreement import Part, agree_on_parts
from stageloom.execute.devices import control_device
from stageloom.execute.groups import make_groups
from stageloom.execute.mesh import Grid, gradient_of, shards_of
from stageloom.execute.sharded import Modules, Sharded
from stageloom.execute.sums import Sum, add_up, spread, sums
from stageloom.schedule import Schedule

Tied = Sequence[Sequence[tuple[int, str]]]


@dataclass
class _Tie:
    """A group of tied parameters, as one of its holders sees it.

    `own` has its members here, `counted` those whose gradients add up (path 0: replicas have been summed before).
    """

    source: int
    first: nn.Parameter | None
    own: list[nn.Parameter]
    counted: list[nn.Parameter]
    group: Any


@dataclass
class Copies:
    """Parameters of a stage that the same ranks hold: `of[n]` are those of this rank's n-th replica of the stage.

    `group` is that of the holders, `source` the one whose values all start with; buffers of `part` start equal, too.
    """

    part: Part
    group: Any
    source: int
    of: list[list[nn.Parameter]]
    buffers: list[list[Tensor]]


@dataclass
class Shared:
    """What this rank's parameters share with others, and the sums of their gradients."""

    schedule: Schedule
    grid: Grid
    rank: int
    modules: Modules
    tied: Tied
    sharded: Sharded
    _groups: dict[tuple[int, ...], Any] = field(default_factory=dict[tuple[int, ...], Any])
    _under_way: list[Sum] = field(default_factory=list[Sum])
    _waiting: set[int] = field(default_factory=set[int])  # stages whose sums have not been started

    def __post_init__(self) -> None:
        self._check()
        table = self.schedule.placement.table.T.tolist()
        self.holders = {stage: tuple(sorted(set(ranks))) for stage, ranks in enumerate(table)}
        parts = self._parts()
        agree_on_parts(self.grid, parts)
        shards = {stage: self.grid.beside(self.holders[stage], self.grid.data) for stage in sorted(self.sharded.stages)}
        ties = [self.grid.beside(self._tied_ranks(members), ()) for members in self.tied]
        self._groups = make_groups([*shards.values(), *(part.ranks for part in parts), *ties], self.grid.whole)
        for stage, holders in shards.items():
            self.sharded.join(stage, self._groups.get(holders))
        self.copies: dict[int, list[Copies]] = {}
        for part in parts:  # by all ranks in one order, so that all make the same groups
            if len(part.ranks) > 1 or len(part.replicas) > 1:
                self.copies.setdefault(part.stage, []).append(self._copies(part))
        self.ties = [tie for tie in map(self._tie, self.tied) if tie is not None]
        self._check_objects()

    # ----------------------------------------------------------------------------------------------- construction

    def _parts(self) -> list[Part]:
        """What this rank shares of its stages, by stage and by the ranks that hold it."""
        found: dict[tuple[int, tuple[int, ...]], Part] = {}
        for stage in sorted({stage for _, stage in self.modules}):
            everyone = [module for (_, own), module in sorted(self.modules.items()) if own == stage]
            replicas = list({id(module): module for module in everyone}.values())  # two paths may run one module
            for name, tensor in (*replicas[0].named_parameters(), *replicas[0].named_buffers()):
                dims = self.grid.summed(stage, name, tensor)
                key = stage, self.grid.beside(self.holders[stage], dims)
                if key not in found:
                    source = self.grid.beside((self.schedule.placement.paths[0][stage],), dims)[0]
                    found[key] = Part(stage, key[1], source, replicas, [])
                found[key].names.append(name)
        return [found[key] for key in sorted(found)]

    def _copies(self, part: Part) -> Copies:
        parameters: list[list[nn.Parameter]] = []
        buffers: list[list[Tensor]] = []
        for module in part.replicas:
            if Part(part.stage, part.ranks, part.source, [module], part.names).described() != part.described():
                raise InputError(f"stage {part.stage}: its replicas on rank {self.rank} are not alike")
            of = dict(module.named_parameters())
            parameters.append([of[name] for name in part.names if name in of])
            others = dict(module.named_buffers())
            buffers.append([others[name] for name in part.names if name in others])
        return Copies(part, self._groups.get(part.ranks), part.source, parameters, buffers)

    def _check_objects(self) -> None:
        """Refuse one parameter object in several stages here where its replicas elsewhere are other parameters."""
        found: dict[int, dict[int, int]] = {}
        names: dict[int, str] = {}
        for (path, stage), module in self.modules.items():
            for name, parameter in module.named_parameters():
                found.setdefault(id(parameter), {})[stage] = path
                names.setdefault(id(parameter), name)
        for key, stages in found.items():
            if len(stages) > 1 and (len(set(stages.values())) > 1 or any(len(self.holders[s]) > 1 for s in stages)):
                raise InputError(
                    f"stages {sorted(stages)} on rank {self.rank} share one parameter object ({names[key]}), and the "
                    "schedule has replicas of them; give each stage its own parameter and name them in tied="
                )

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

    def _tied_ranks(self, members: Sequence[tuple[int, str]]) -> tuple[int, ...]:
        return tuple(sorted({rank for stage, _ in members for rank in self.holders[stage]}))

    def _tie(self, members: Sequence[tuple[int, str]]) -> _Tie | None:
        ranks = self._tied_ranks(members)
        group = self._groups.get(self.grid.beside(ranks, ()))
        if self.rank not in ranks:
            return None
        source = self.grid.beside((self.schedule.placement.paths[0][members[0][0]],), ())[0]
        tie = _Tie(source, None, [], [], group)
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
        placed: set[Any] = {getattr(parameter, "placements", None) for parameter in tie.own}
        if len(placed) > 1:
            raise InputError(f"tied: {list(members)} lie in shards {placed}; tied parameters are sharded alike")
        return tie

    @staticmethod
    def _parameter(module: nn.Module, stage: int, name: str) -> nn.Parameter:
        try:
            return module.get_parameter(name)
        except AttributeError:
            raise InputError(f"tied: stage {stage} has no parameter {name!r}") from None

    def equalise(self) -> None:
        """Replicas start as the first one on path 0, tied parameters as the first of their group."""
        for stage in sorted(self.copies):  # two ranks have to meet in one order
            for copies in self.copies[stage]:
                for each in (*zip(*copies.of, strict=True), *zip(*copies.buffers, strict=True)):
                    spread(each[0], each[1:], copies.source, copies.group)
        for tie in self.ties:
            first = tie.first if tie.first is not None else tie.own[0]
            spread(first, [p for p in tie.own if p is not first], tie.source, tie.group)

    # ----------------------------------------------------------------------------------------------------- a step

    def set_aside(self) -> dict[nn.Parameter, Tensor]:
        """Gradients of earlier steps, which have been summed already and must not be once more."""
        self._waiting = set(self.copies)
        copied = [p for copies in self.copies.values() for each in copies for of in each.of for p in of]
        before: dict[nn.Parameter, Tensor] = {}
        for parameter in (*copied, *(p for tie in self.ties for p in tie.own)):
            if parameter.grad is not None:
                before[parameter] = parameter.grad
                parameter.grad = None
        return before

    def start(self, stage: int) -> None:
        """Start to sum the gradients of a stage over its holders."""
        self._waiting.discard(stage)
        self.sharded.reduce(stage)
        if stage in self.sharded.stages and stage in self.copies:
            self.sharded.finish()  # these sums are of its results
        # a parameter that is one object in several stages is summed with each; the last sum has all of it, and stays
        for copies in self.copies.get(stage, ()):
            for each in zip(*copies.of, strict=True) if len(copies.of) > 1 else ():
                add_up(each, each)
            self._under_way += sums(copies.of[0], copies.group)

    def sum_now(self, stage: int) -> None:
        """Sum the gradients of a stage over its holders, and wait for it."""
        self.start(stage)
        under_way, self._under_way = self._under_way, []
        for each in under_way:
            each.finish()

    def finish(self, before: dict[nn.Parameter, Tensor]) -> None:
        """End all sums, add up ties, and put back what was set aside."""
        for stage in sorted(self._waiting):  # replicas on this rank alone, which no reduction is needed for
            self.start(stage)
        self.sharded.finish()
        for under_way in self._under_way:
            under_way.finish()
        self._under_way = []
        self.sharded.drop_unused()
        for copies in (each for of_stage in self.copies.values() for each in of_stage if len(each.of) > 1):
            for each in zip(*copies.of, strict=True):
                add_up(each, each[:1])
        for tie in self.ties:
            trained = [p for p in tie.own if p.requires_grad]
            if not trained:
                continue
            add_up(trained, [p for p in tie.counted if p.requires_grad])
            for each in sums(trained[:1], tie.group):
                each.finish()
            add_up(trained, trained[:1])
        for parameter, earlier in before.items():
            parameter.grad = earlier if parameter.grad is None else parameter.grad + earlier

    # ------------------------------------------------------------------------------------------------ after a step

    def clip(self, max_norm: float) -> float:
        """Scale all gradients so that their norm over all stages is at most `max_norm`; the norm before."""
        everything = [
            (path, stage, name, parameter)
            for (path, stage), module in sorted(self.modules.items())
            for name, parameter in module.named_parameters()
        ]
        if self.grid.mesh is None and shards_of(parameter for *_, parameter in everything):
            raise InputError("clip_grad_norm: parameters lie in shards; give Pipeline the mesh= of all processes")
        uncounted = {id(p) for tie in self.ties for p in tie.own if p is not tie.first}
        squares = torch.zeros(1, dtype=torch.float64, device=control_device(self.grid.whole))
        gradients: dict[int, Tensor] = {}
        for path, stage, name, parameter in everything:
            gradient = None if id(parameter) in gradients else gradient_of(parameter)
            if gradient is None:
                continue
            gradients[id(parameter)] = gradient
            if path == 0 and id(parameter) not in uncounted:  # other paths hold replicas
                held = self.grid.held_by(stage, name, parameter)
                squares += gradient.detach().double().square().sum().to(squares.device) / held
        dist.all_reduce(squares, group=self.grid.whole)
        norm = float(squares.sqrt())
        factor = max_norm / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_ has it
        if not factor >= 1.0:
            for gradient in gradients.values():
                gradient.mul_(factor)
        return norm
