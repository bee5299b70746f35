"""What each layer whose weight gradient can wait computes in B and in W.

A layer is a *rule*: its forward, its input gradient and its weight gradients, as three functions of plain tensors.
Rules use the kernels that autograd uses where torch offers them, so that gradients agree to rounding.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaks unknown types)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_aten: Any = torch.ops.aten
Gradients = tuple[Tensor, ...]


class Rule(Protocol):
    """One call of a layer: x is its input, w its weight, b its bias if any, `kept` what forward leaves beside them."""

    keeps: ClassVar[bool]  # whether it leaves anything

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Gradients]:
        """The output, and the tensors that the backward needs beside x and w."""
        ...

    def input_gradient(self, g: Tensor, x: Tensor, w: Tensor, kept: Gradients) -> Tensor: ...

    def weight_gradients(self, g: Tensor, x: Tensor, w: Tensor, kept: Gradients, bias: bool) -> Gradients:
        """The gradient of w and, where `bias`, that of b. Never a view of g: autograd may keep and change it."""
        ...


def _as_input(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The parameters in the input's type, which autocast may have changed."""
    return (w, b) if w.dtype is x.dtype else (w.to(x.dtype), None if b is None else b.to(x.dtype))


@dataclass(frozen=True)
class LinearRule:
    """y = x wᵀ + b; under autocast the weight is cast again in B rather than kept twice."""

    keeps: ClassVar[bool] = False

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Gradients]:
        return F.linear(x, *_as_input(x, w, b)), ()

    def input_gradient(self, g: Tensor, x: Tensor, w: Tensor, kept: Gradients) -> Tensor:
        return g.matmul(w if w.dtype is g.dtype else w.to(g.dtype))

    def weight_gradients(self, g: Tensor, x: Tensor, w: Tensor, kept: Gradients, bias: bool) -> Gradients:
        rows = g.reshape(-1, g.shape[-1])
        found = rows.t().mm(x.reshape(-1, x.shape[-1])), *((rows.sum(0),) if bias else ())
        return found if g.dtype is w.dtype else tuple(t.to(w.dtype) for t in found)


@dataclass(frozen=True)
class TransposedRule:
    """y = x w + b: a linear layer whose weight lies the other way round, as GPT-2 has it."""

    keeps: ClassVar[bool] = False

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Gradients]:
        w, b = _as_input(x, w, b)
        rows = x.reshape(-1, x.shape[-1])
        y = rows.mm(w) if b is None else torch.addmm(b, rows, w)
        return y.view(*x.shape[:-1], w.shape[1]), ()

    def input_gradient(self, g: Tensor, x: Tensor, w: Tensor, kept: Gradients) -> Tensor:
        return g.matmul((w if w.dtype is g.dtype else w.to(g.dtype)).t())

    def weight_gradients(self, g: Tensor, x: Tensor, w: Tensor, kept: Gradients, bias: bool) -> Gradients:
        rows = g.reshape(-1, g.shape[-1])
        found = x.reshape(-1, x.shape[-1]).t().mm(rows), *((rows.sum(0),) if bias else ())
        return found if g.dtype is w.dtype else tuple(t.to(w.dtype) for t in found)


@dataclass(frozen=True)
class ConvRule:
    """A convolution over 1, 2 or 3 dimensions, padded with zeros."""

    keeps: ClassVar[bool] = False

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Gradients]:
        function: Any = (F.conv1d, F.conv2d, F.conv3d)[len(self.stride) - 1]
        bias = None if b is None else b.to(x.dtype)
        return function(x, w.to(x.dtype), bias, self.stride, self.padding, self.dilation, self.groups), ()

    def input_gradient(self, g: Tensor, x: Tensor, w: Tensor, kept: Gradients) -> Tensor:
        return self._backward(g, x, w, [True, False, False])[0]

    def weight_gradients(self, g: Tensor, x: Tensor, w: Tensor, kept: Gradients, bias: bool) -> Gradients:
        found = self._backward(g, x, w, [False, True, bias])[1:]
        return tuple(t.to(w.dtype) for t in found if t is not None)

    def _backward(self, g: Tensor, x: Tensor, w: Tensor, mask: list[bool]) -> list[Any]:
        none = [0] * len(self.stride)
        cast = w.to(x.dtype)
        return _aten.convolution_backward(
            g, x, cast, [w.shape[0]], self.stride, self.padding, self.dilation, False, none, self.groups, mask
        )


@dataclass(frozen=True)
class EmbeddingRule:
    """Rows of w by number; x are the numbers."""

    keeps: ClassVar[bool] = False

    padding: int  # -1: none
    by_frequency: bool

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Gradients]:
        return F.embedding(x, w, None if self.padding < 0 else self.padding, None, 2.0, self.by_frequency), ()

    def input_gradient(self, g: Tensor, x: Tensor, w: Tensor, kept: Gradients) -> Tensor:
        raise AssertionError("numbers of rows have no gradient")

    def weight_gradients(self, g: Tensor, x: Tensor, w: Tensor, kept: Gradients, bias: bool) -> Gradients:
        return (_aten.embedding_dense_backward(g, x, w.shape[0], self.padding, self.by_frequency),)


@dataclass(frozen=True)
class LayerNormRule:
    keeps: ClassVar[bool] = True

    shape: tuple[int, ...]
    eps: float

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Gradients]:
        y, mean, rstd = torch.native_layer_norm(x, self.shape, w, b, self.eps)
        return y, (mean, rstd)

    def input_gradient(self, g: Tensor, x: Tensor, w: Tensor, kept: Gradients) -> Tensor:
        return _aten.native_layer_norm_backward(g, x, self.shape, *kept, w, None, [True, False, False])[0]

    def weight_gradients(self, g: Tensor, x: Tensor, w: Tensor, kept: Gradients, bias: bool) -> Gradients:
        # Asked for the weight's alone, some kernels read the bias for its shape: w has it too.
        found = _aten.native_layer_norm_backward(g, x, self.shape, *kept, w, w, [False, True, bias])
        return tuple(found[1 : 3 if bias else 2])

    def all_gradients(self, g: Tensor, x: Tensor, w: Tensor, kept: Gradients, bias: bool) -> tuple[Tensor, Gradients]:
        dx, *found = _aten.native_layer_norm_backward(g, x, self.shape, *kept, w, w, [True, True, bias])
        return dx, tuple(found[: 2 if bias else 1])


@dataclass(frozen=True)
class GroupNormRule:
    keeps: ClassVar[bool] = True

    groups: int
    eps: float

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Gradients]:
        y, mean, rstd = torch.native_group_norm(x, w, b, *self._sizes(x), self.groups, self.eps)
        return y, (mean, rstd)

    def _sizes(self, x: Tensor) -> tuple[int, int, int]:
        return x.shape[0], x.shape[1], x.shape[2:].numel()

    def _backward(self, g: Tensor, x: Tensor, w: Tensor, kept: Gradients, mask: list[bool]) -> list[Tensor]:
        return _aten.native_group_norm_backward(g.contiguous(), x, *kept, w, *self._sizes(x), self.groups, mask)

    def input_gradient(self, g: Tensor, x: Tensor, w: Tensor, kept: Gradients) -> Tensor:
        return self._backward(g, x, w, kept, [True, False, False])[0]

    def weight_gradients(self, g: Tensor, x: Tensor, w: Tensor, kept: Gradients, bias: bool) -> Gradients:
        found = self._backward(g, x, w, kept, [False, True, bias])
        return tuple(found[1 : 3 if bias else 2])

    def all_gradients(self, g: Tensor, x: Tensor, w: Tensor, kept: Gradients, bias: bool) -> tuple[Tensor, Gradients]:
        dx, *found = self._backward(g, x, w, kept, [True, True, bias])
        return dx, tuple(found[: 2 if bias else 1])


@dataclass(frozen=True)
class RMSNormRule:
    """y = w x / sqrt(mean(x²) + eps); computed in float32 or better, as the forward is."""

    keeps: ClassVar[bool] = False

    shape: tuple[int, ...]
    eps: float

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Gradients]:
        return F.rms_norm(x, self.shape, w, self.eps), ()

    def _unit(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x / sqrt(mean(x²) + eps), and the factor of x in it."""
        wide = x if x.dtype == torch.float64 else x.float()
        factor = torch.rsqrt(wide.square().mean(self._own(), keepdim=True) + self.eps)
        return wide * factor, factor

    def _own(self) -> tuple[int, ...]:
        return tuple(range(-len(self.shape), 0))

    def input_gradient(self, g: Tensor, x: Tensor, w: Tensor, kept: Gradients) -> Tensor:
        return self._input(g, x, w, *self._unit(x))

    def _input(self, g: Tensor, x: Tensor, w: Tensor, unit: Tensor, factor: Tensor) -> Tensor:
        weighted = g.to(unit.dtype) * w.to(unit.dtype)
        along = (weighted * unit).mean(self._own(), keepdim=True)
        return ((weighted - unit * along) * factor).to(x.dtype)

    def weight_gradients(self, g: Tensor, x: Tensor, w: Tensor, kept: Gradients, bias: bool) -> Gradients:
        return self._weight(g, w, self._unit(x)[0])

    def _weight(self, g: Tensor, w: Tensor, unit: Tensor) -> Gradients:
        products = g.to(unit.dtype) * unit
        return (products.reshape(-1, *self.shape).sum(0).to(w.dtype),)

    def all_gradients(self, g: Tensor, x: Tensor, w: Tensor, kept: Gradients, bias: bool) -> tuple[Tensor, Gradients]:
        unit, factor = self._unit(x)
        return self._input(g, x, w, unit, factor), self._weight(g, w, unit)


@dataclass(frozen=True)
class ExpertsRule:
    """Rows of x, sorted by expert, `sizes[e]` of them through w[e] (and b[e])."""

    keeps: ClassVar[bool] = False

    sizes: tuple[int, ...]

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Gradients]:
        parts = x.split(self.sizes)
        y = [part.mm(w[e].to(x.dtype).t()) for e, part in enumerate(parts)]
        if b is not None:
            y = [part + b[e].to(x.dtype) for e, part in enumerate(y)]
        return torch.cat(y), ()

    def input_gradient(self, g: Tensor, x: Tensor, w: Tensor, kept: Gradients) -> Tensor:
        return torch.cat([part.mm(w[e].to(g.dtype)) for e, part in enumerate(g.split(self.sizes))])

    def weight_gradients(self, g: Tensor, x: Tensor, w: Tensor, kept: Gradients, bias: bool) -> Gradients:
        pairs = list(zip(g.split(self.sizes), x.split(self.sizes), strict=True))
        dw = torch.stack([rows.t().mm(part) for rows, part in pairs]).to(w.dtype)
        return (dw, torch.stack([rows.sum(0) for rows, _ in pairs]).to(w.dtype)) if bias else (dw,)


NORMS: Final = (LayerNormRule, GroupNormRule, RMSNormRule)
"""Rules whose weight gradients are small and cost little beside the input's: B computes them in the same pass, and W
only adds them up, which takes less time and memory than to keep x and g. They have `all_gradients`."""
