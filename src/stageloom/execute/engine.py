"""How a stage's forward and backward are run where not as one graph of autograd: for overlapped pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from stageloom.execute.tasks import Place


@dataclass(frozen=True)
class Job:
    """A forward that is ready to run, on flat lists of tensors: `leave(module(*args, **kwargs))` with the
    (args, kwargs) that `enter` gives."""

    enter: Callable[[list[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]
    leave: Callable[[Any], list[Tensor]]
    given: list[Tensor]
    parameters: Sequence[Tensor]
    wanted: list[bool]  # which of the given get a gradient
    place: Place
    target: Any = None  # what the loss compares with, on the last stage


class Engine(Protocol):
    """Another way to run a stage than as one graph.

    `saved` is what its forward leaves for its backward; it has the `inputs` and `outputs` that `split.Saved` has.
    """

    def forward(self, job: Job) -> tuple[list[Tensor], Any]: ...

    def backward(self, saved: Any, gradients: list[Tensor | None], whole: bool) -> list[Tensor | None]: ...

    def weight(self, saved: Any) -> None: ...
