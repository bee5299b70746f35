"""Stages wrapped by `torch.distributed.fsdp.fully_shard`: gathered before their first op, reduced after their last.

Left alone, fully_shard gathers a module's weights in every forward and backward and reduces its gradients at the end of
every backward. In a pipeline that is a gather and a reduction for each micro-batch, and it is wrong where the backward
is split: weight gradients that W computes come after the reduction. So its hooks are told to leave weights and
gradients alone, and the program's own GATHER and REDUCE do both, once a step. Between them a stage's weights are whole.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false
# (torch leaks unknown types, and has no public way to reduce the gradients of a sharded module outside of a backward)
from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stageloom.errors import InputError
from stageloom.execute.mesh import Grid

Modules = Mapping[tuple[int, int], nn.Module]


@dataclass
class _Used:
    """How many holders have a gradient of each of these parameters: a sum under way, None if there is one holder."""

    parameters: list[nn.Parameter]
    counts: Tensor
    work: Any
    earlier: list[bool]  # which had a gradient of an earlier step


class Sharded:
    """The stages of this rank that lie in shards between steps."""

    def __init__(self, modules: Modules, grid: Grid, rank: int) -> None:
        self._modules: dict[int, list[Any]] = {}
        for (_, stage), module in modules.items():
            _refuse_reducers(module, stage)
            found = _wrapped(module)
            if found:
                self._modules.setdefault(stage, []).extend(found)
        self._under_way: list[Any] = []
        self._used: list[_Used] = []
        self._holders: dict[int, Any] = {}
        for stage, found in self._modules.items():
            for each in found:
                _check_mesh(each, stage, grid, rank)
                _tame(each)

    @property
    def stages(self) -> frozenset[int]:
        return frozenset(self._modules)

    def join(self, stage: int, holders: Any) -> None:
        """The group of all that hold a sharded stage; None where that is this process alone."""
        self._holders[stage] = holders

    def gather(self, stage: int) -> None:
        """Start to gather a stage's weights; its first forward waits for them."""
        for module in self._modules[stage]:
            module.unshard(async_op=True)

    def reduce(self, stage: int) -> None:
        """Start to sum a stage's gradients; every rank is left with those of its shard, and its shard of the weights.

        With Gloo this waits until it is done; on a GPU it runs in a stream of its own until `finish`.
        """
        if stage in self._modules:
            self._used.append(self._complete(stage))
        for module in filter(_has_run, self._modules.get(stage, ())):
            module.set_requires_gradient_sync(True, recurse=False)
            module.set_reshard_after_backward(True, recurse=False)
            for group in _groups(module):
                group.post_backward()
            module.set_requires_gradient_sync(False, recurse=False)
            module.set_reshard_after_backward(False, recurse=False)
            self._under_way.append(module)

    def finish(self) -> None:
        """Wait for reductions and drop what they needed."""
        under_way, self._under_way = self._under_way, []
        for module in under_way:
            state = module._get_fsdp_state()
            if state._is_root is not False:  # one for all modules within it
                module.set_is_last_backward(True)
                state._root_post_backward_final_callback()
                module.set_is_last_backward(False)

    def _complete(self, stage: int) -> _Used:
        """Zeros for gradients that other holders may have; all in the dtype in which they are reduced."""
        used: list[bool] = []
        trained = [each for module in self._modules[stage] for each in _parameters(module)]
        for each in trained:
            own = getattr(each, "_unsharded_param", None)  # None on a path without micro-batches
            used.append(own is not None and (own.grad is not None or each.unsharded_accumulated_grad is not None))
            if own is not None and not used[-1]:
                own.grad = torch.zeros_like(own)
            if own is not None:
                _accumulate(each)
        parameters = [each.sharded_param for each in trained]
        counts = torch.tensor([float(one) for one in used], device=parameters[0].device if parameters else None)
        holders = self._holders[stage]
        work = None if holders is None else dist.all_reduce(counts, group=holders, async_op=True)
        return _Used(parameters, counts, work, [p.grad is not None for p in parameters])

    def drop_unused(self) -> None:
        """A parameter that has a gradient nowhere keeps none, as in one process; zeros have stood in for it."""
        used, self._used = self._used, []
        for each in used:
            if each.work is not None:
                each.work.wait()
            for parameter, count, earlier in zip(each.parameters, each.counts.tolist(), each.earlier, strict=True):
                if not count and not earlier:
                    parameter.grad = None

    def scatter(self) -> None:
        """Leave every rank with its shard of the weights, after a run without reductions."""
        for found in self._modules.values():
            for module in found:
                module.reshard()

    @contextmanager
    def whole(self, module: nn.Module) -> Generator[None]:
        """Within the block all weights of a stage are here."""
        found = _wrapped(module)
        for each in found:
            each.unshard()
            for parameter in _parameters(each):
                _accumulate_always(parameter)
        try:
            yield
        finally:
            for each in found:
                each.reshard()


def trained(module: nn.Module) -> Sequence[nn.Parameter]:
    """The parameters of a stage that are trained."""
    return _Trained(module) if _wrapped(module) else _trained(module)


class _Trained(Sequence[nn.Parameter]):
    """Those that are trained at the moment of asking: gathering puts other parameters in the place of shards."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __len__(self) -> int:
        return len(_trained(self.module))

    @overload
    def __getitem__(self, at: int) -> nn.Parameter: ...
    @overload
    def __getitem__(self, at: slice) -> list[nn.Parameter]: ...
    def __getitem__(self, at: int | slice) -> nn.Parameter | list[nn.Parameter]:
        return _trained(self.module)[at]

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(_trained(self.module))


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def _wrapped(module: nn.Module) -> list[Any]:
    """The modules in it that fully_shard has wrapped, outer ones first."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without it nothing has been wrapped
    return [] if fsdp is None else [each for each in module.modules() if isinstance(each, fsdp.FSDPModule)]


def _groups(module: Any) -> list[Any]:
    """A wrapped module's own groups of parameters; older versions of torch have one at most."""
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)
    return list(several) if several is not None else [g for g in (state._fsdp_param_group,) if g is not None]


def _has_run(module: Any) -> bool:
    """Whether it has ever computed anything: a replica on a path without micro-batches has not."""
    return module._get_fsdp_state()._is_root is not None


def _parameters(module: Any) -> list[Any]:
    """What fully_shard keeps of each trained parameter."""
    return [each for group in _groups(module) for each in group.fsdp_params if each.sharded_param.requires_grad]


def _accumulate(parameter: Any) -> None:
    """Add a gradient to those of earlier micro-batches in the dtype in which they will be reduced."""
    parameter.accumulate_unsharded_grad_if_needed()
    parameter.to_accumulated_grad_if_needed()


def _accumulate_always(parameter: Any) -> None:
    """Do so as soon as there is one: fully_shard does it at the end of a backward, which is too early for W."""
    own = parameter._unsharded_param
    if parameter.reduce_dtype not in (None, own.dtype) and not getattr(own, "_post_accumulate_grad_hooks", None):

        def at_once(_: Any) -> None:
            _accumulate(parameter)

        own.register_post_accumulate_grad_hook(at_once)


def _refuse_reducers(module: nn.Module, stage: int) -> None:
    for each in module.modules():
        names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(each).__mro__}
        found = next((name for name in _REDUCERS if name in names), None)
        if found is not None:
            raise InputError(
                f"stage {stage}: is wrapped by {_REDUCERS[found]}, which sums gradients after each backward, before "
                "W has computed them; give the plain module and mesh=, or wrap it by fully_shard"
            )


_REDUCERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "DistributedDataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "FullyShardedDataParallel",
    "torch.distributed._composable.replicate.DDP": "replicate",
    "torch.distributed._composable.replicate_with_fsdp.ReplicateModule": "replicate",
}


def _check_mesh(module: Any, stage: int, grid: Grid, rank: int) -> None:
    """Its shards have to lie on ranks that train on other data, and nowhere else."""
    if grid.mesh is None:
        raise InputError(f"stage {stage}: is wrapped by fully_shard; give mesh= with the dimension it is sharded over")
    beside = set(grid.beside((rank,), grid.data))
    for group in _groups(module):
        ranks = set(group.mesh_info.mesh.mesh.flatten().tolist())
        if not ranks <= beside:
            raise InputError(
                f"stage {stage}: fully_shard spreads it over ranks {sorted(ranks)}; expected some of "
                f"{sorted(beside)}, which hold this stage and train on other data (along {list(grid.data)})"
            )


def _tame(module: Any) -> None:
    module.set_reshard_after_forward(False, recurse=False)
    module.set_reshard_after_backward(False, recurse=False)
    module.set_requires_gradient_sync(False, recurse=False)
    module.set_is_last_backward(False)
    # losses are divided by the number of all micro-batches, so that gradients are sums
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
