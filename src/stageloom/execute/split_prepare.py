"""Which layers of a stage can put their weight gradients off, and their forwards replaced so that they do."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false
# (torch leaks unknown types, and has no public way to tell a module's own parameter from a computed one)
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeGuard, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stageloom.errors import InputError
from stageloom.execute.mesh import is_dtensor
from stageloom.execute.split_experts import Experts
from stageloom.execute.split_layers import call
from stageloom.execute.split_queue import Layers
from stageloom.execute.split_rules import (
    ConvRule,
    EmbeddingRule,
    GroupNormRule,
    LayerNormRule,
    LinearRule,
    RMSNormRule,
    Rule,
    TransposedRule,
)

Mode = Literal["deferred", "graph", "fused"]


@dataclass(frozen=True)
class Report:
    """How a stage's backward is split, and why.

    `deferred` counts the layers, by type, whose weight gradients wait for W. `at_once` names the parameters whose
    gradient comes in B: in mode "deferred" those of other layers, in "graph" none, in "fused" all.
    """

    mode: Mode
    reason: str
    deferred: dict[str, int]
    at_once: tuple[str, ...]
    layers: Layers = field(default_factory=Layers, repr=False, compare=False)


def prepare(module: nn.Module, mode: Mode | Literal["auto"] = "auto") -> Report:
    """Make a stage ready for a mode: for "deferred", replace the forward of each layer that can be deferred.

    Only layers of exactly the known types are touched, on the instance; a subclass may compute something else.
    "auto" is "deferred" where anything can be deferred. Where nothing can, both give "fused" and say why. May be called
    again, after a change of the module or for another mode; `restore` undoes it. Raises InputError for another mode.
    """
    if mode not in ("auto", *get_args(Mode)):
        raise InputError(f"split mode {mode!r} is unknown; expected 'auto', 'deferred', 'graph' or 'fused'")
    restore(module)
    names = tuple(name for name, parameter in module.named_parameters() if parameter.requires_grad)
    if mode == "fused":
        return Report("fused", "asked for", {}, names)
    if mode == "graph":
        return Report("graph", "asked for: autograd walks the graph twice and keeps it between B and W", {}, ())
    if not names:
        return Report("fused", "no parameter is trained: W has nothing to do", {}, ())
    deferred, at_once = _sort(module)
    if not deferred:
        return Report("fused", f"no weight gradient can be deferred: {_why(module)}", {}, names)
    layers = Layers()
    for layer in deferred:
        # A partial, unlike a closure, is copied and pickled along with its module.
        layer.forward = partial(_forward, layer, layers)
    reason = "all weight gradients are deferred" if not at_once else f"B computes {len(at_once)} parameters' at once"
    return Report("deferred", reason, dict(Counter(type(layer).__name__ for layer in deferred)), tuple(at_once), layers)


def restore(module: nn.Module) -> None:
    """Undo `prepare`. Micro-batches in flight end as they began."""
    for layer in module.modules():
        if _is_replaced(layer):
            del layer.forward


def _is_replaced(layer: nn.Module) -> bool:
    own = vars(layer).get("forward")
    return isinstance(own, partial) and own.func is _forward


def _sort(module: nn.Module) -> tuple[list[nn.Module], list[str]]:
    """The layers that can be deferred, and the names of the trained parameters that others hold."""
    deferred: list[nn.Module] = []
    at_once: list[str] = []
    for name, layer, compiled in _walk(module):
        trained = [key for key, p in layer.named_parameters(recurse=False) if p.requires_grad]
        if not trained:
            continue
        if not compiled and _can_defer(layer):
            deferred.append(layer)
        else:
            at_once += [f"{name}.{key}" if name else key for key in trained]
    return deferred, at_once


def _walk(module: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """Every module once: name, module, whether it runs in compiled code, which does not call our forwards."""
    prefixes: list[str] = []
    for name, layer in module.named_modules():
        inside = any(not prefix or name == prefix or name.startswith(prefix + ".") for prefix in prefixes)
        if not inside and _is_compiled(layer):
            prefixes.append(name)
            inside = True
        yield name, layer, inside


def _is_compiled(layer: nn.Module) -> bool:
    if getattr(layer, "_compiled_call_impl", None) is not None or isinstance(layer, torch.jit.ScriptModule):
        return True
    return type(layer).__name__ == "OptimizedModule"  # its module takes seconds to import


def _why(module: nn.Module) -> str:
    if any(compiled for _, _, compiled in _walk(module)):
        return "the stage is compiled"
    return f"it has none of {', '.join(kind.__name__ for kind in _RULES)} as torch defines them, with trained weights"


def _can_defer(layer: nn.Module) -> bool:
    if _rule_of(layer) is None or "forward" in vars(layer):
        return False
    if not _is_plain_layer(layer) and not _is_parallel_linear(layer):
        return False
    if isinstance(layer, nn.Embedding):
        return layer.max_norm is None and not layer.sparse
    return not (isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and _padding(layer) is None)


def _is_plain_layer(layer: nn.Module) -> bool:
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    return _is_plain(weight) and weight.requires_grad and (bias is None or _is_plain(bias))


def _is_parallel_linear(layer: nn.Module) -> bool:
    """A linear layer over tensor parallel ranks: what its rule computes with is made for DTensors, too."""
    if type(layer) is not nn.Linear:
        return False
    own = [p for p in layer._parameters.values() if p is not None]
    return layer.weight.requires_grad and all(is_dtensor(p) and p.is_leaf for p in own)


def _is_plain(parameter: Any) -> TypeGuard[nn.Parameter]:
    """A leaf of the plain type: not one that is computed (weight norm, pruning), sharded or quantised."""
    return type(parameter) is nn.Parameter and parameter.is_leaf


# ------------------------------------------------------------------------------------------------ replaced forwards


def _forward(layer: nn.Module, layers: Layers, *args: Any, **kwargs: Any) -> Any:
    plain: Any = type(layer).forward
    if layers.plain:
        return plain(layer, *args, **kwargs)
    names = ("x", "sizes") if isinstance(layer, Experts) else ("x",) if _is_transposed(layer) else ("input",)
    given = args + tuple(kwargs[name] for name in names[len(args) :] if name in kwargs)
    fits = len(given) == len(names) == len(args) + len(kwargs)
    make = _rule_of(layer)
    found = make(layer, *given) if make is not None and fits and _can_defer_now(layer, given[0]) else None
    if found is None:
        return plain(layer, *args, **kwargs)
    rule, x = found
    y = call(rule, x, *_own(layer))
    # A convolution may be called without a batch dimension; its rule needs one.
    return y.squeeze(0) if isinstance(rule, ConvRule) and given[0].dim() < y.dim() else y


def _own(layer: Any) -> tuple[Tensor, Tensor | None]:
    return layer.weight, getattr(layer, "bias", None)


def _can_defer_now(layer: nn.Module, x: Any) -> bool:
    """Whether this very call is an ordinary one. A recomputation under checkpointing must come to the same answer."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or _functorch_active():
        return False
    if type(x) in (Tensor, nn.Parameter):
        return _is_plain_layer(layer) and x.device == layer.weight.device  # pyright: ignore[reportAttributeAccessIssue]
    return is_dtensor(x) and _is_parallel_linear(layer)


# Within torch.func's transforms tensors are wrapped, and what a queue keeps of them would be wrong later.
_functorch_active: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)


def _low(x: Tensor, w: Tensor) -> Tensor | None:
    """x in the dtype in which a matrix product runs, w being cast like it. None where torch would refuse."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype.is_floating_point and torch.float64 not in (x.dtype, w.dtype):
        return x.to(torch.get_autocast_dtype(kind))
    return x if x.dtype == w.dtype else None


def _linear(layer: nn.Linear, x: Tensor) -> tuple[Rule, Tensor] | None:
    given = _low(x, layer.weight)
    return None if given is None else (LinearRule(), given)


def _transposed(layer: Any, x: Tensor) -> tuple[Rule, Tensor] | None:
    given = _low(x, layer.weight)
    return None if given is None else (TransposedRule(), given)


def _is_transposed(layer: nn.Module) -> bool:
    """transformers' Conv1D, the linear layer of GPT-2; known by its name, so that nothing has to import it."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__ == "transformers.pytorch_utils"


def _experts(layer: Experts, x: Tensor, sizes: Any) -> tuple[Rule, Tensor] | None:
    given = _low(x, layer.weight)
    return None if given is None else (layer.rule(x, sizes), given)


def _conv(layer: Any, x: Tensor) -> tuple[Rule, Tensor] | None:
    given, padding, dims = _low(x, layer.weight), _padding(layer), len(layer.kernel_size)
    if given is None or padding is None or x.dim() not in (dims + 1, dims + 2):
        return None
    if x.dim() == dims + 1:
        given = given.unsqueeze(0)
    if layer.padding_mode != "zeros":
        given = F.pad(given, layer._reversed_padding_repeated_twice, layer.padding_mode)
        padding = (0,) * dims
    return ConvRule(tuple(layer.stride), padding, tuple(layer.dilation), layer.groups), given


def _padding(layer: Any) -> tuple[int, ...] | None:
    """Padding by dimension; None for "same" where it differs between the two sides."""
    if layer.padding == "valid":
        return (0,) * len(layer.kernel_size)
    if layer.padding != "same":
        return tuple(layer.padding)
    totals = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    return None if any(total % 2 for total in totals) else tuple(total // 2 for total in totals)


def _embedding(layer: nn.Embedding, x: Tensor) -> tuple[Rule, Tensor] | None:
    if layer.max_norm is not None or layer.sparse or x.dtype not in (torch.int32, torch.int64):
        return None
    return EmbeddingRule(-1 if layer.padding_idx is None else layer.padding_idx, layer.scale_grad_by_freq), x


def _layer_norm(layer: nn.LayerNorm, x: Tensor) -> tuple[Rule, Tensor] | None:
    given = _as_norm(layer, x)
    return None if given is None else (LayerNormRule(tuple(layer.normalized_shape), layer.eps), given)


def _group_norm(layer: nn.GroupNorm, x: Tensor) -> tuple[Rule, Tensor] | None:
    given = _as_norm(layer, x) if x.dim() > 1 and x.numel() else None
    return None if given is None else (GroupNormRule(layer.num_groups, layer.eps), given.contiguous())


def _rms_norm(layer: nn.RMSNorm, x: Tensor) -> tuple[Rule, Tensor] | None:
    given = _as_norm(layer, x)
    if given is None or (layer.eps is None and given.dtype not in (torch.float32, torch.float64)):
        return None  # what the default of eps is in low precision differs between versions of torch
    eps = torch.finfo(given.dtype).eps if layer.eps is None else layer.eps
    return RMSNormRule(tuple(layer.normalized_shape), eps), given


def _as_norm(layer: Any, x: Tensor) -> Tensor | None:
    """x as the norm takes it: under autocast some devices normalise in float32, others in the dtype of x."""
    w: Tensor = layer.weight
    if not torch.is_autocast_enabled(x.device.type):
        return x if x.dtype == w.dtype else None
    if w.dtype != torch.float32 or x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return None
    return x.float() if x.device.type == "cuda" else x


_RULES: dict[type[nn.Module], Callable[..., tuple[Rule, Tensor] | None]] = {
    nn.Linear: _linear,
    nn.Conv1d: _conv,
    nn.Conv2d: _conv,
    nn.Conv3d: _conv,
    nn.Embedding: _embedding,
    nn.LayerNorm: _layer_norm,
    nn.GroupNorm: _group_norm,
    nn.RMSNorm: _rms_norm,
    Experts: _experts,
}


def _rule_of(layer: nn.Module) -> Callable[..., tuple[Rule, Tensor] | None] | None:
    return _transposed if _is_transposed(layer) else _RULES.get(type(layer))
