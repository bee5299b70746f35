"""Hooks of parameters see the whole of a gradient, once, though parts of it come at different times."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaks unknown types)
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from stageloom.execute.split_queue import Entry, Queue


def whole_gradients(queue: Queue, nodes: Callable[[], Sequence[Any]]) -> AbstractContextManager[None]:
    """Keep hooks whole during a backward over the graph that ends in `nodes()`.

    A parameter that a deferred layer and some other operation use (`F.linear(x, layer.weight)`) gets one part of its
    gradient in the backward and the other from the queue. If it has hooks, they would fire twice, with half a gradient
    each. So its first part is caught here, hooks off, and queued.
    """
    hooked = {key for key, parameter in queue.parameters.items() if hooks_of(parameter) != (None, None)}
    both = reached(nodes(), hooked) if hooked else []
    return _held(queue, both) if both else nullcontext()


@contextmanager
def _held(queue: Queue, both: list[Tensor]) -> Generator[None]:
    queue.held = {id(parameter) for parameter in both}
    try:
        with caught(both, queue):
            yield
    finally:
        queue.held = set()


@contextmanager
def caught(parameters: Sequence[Tensor], queue: Queue | None) -> Generator[None]:
    """Within the block no hook of these parameters fires and their `.grad` starts as None; both come back after it.

    What the parameters got meanwhile goes into the queue, so that their hooks see the whole of it; without one it is
    dropped.
    """
    before = [(parameter, parameter.grad, *hooks_of(parameter)) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
        _set_hooks(parameter, None, None)
    try:
        yield
    finally:
        for parameter, gradient, first, last in before:
            part, parameter.grad = parameter.grad, gradient
            _set_hooks(parameter, first, last)
            if part is not None and queue is not None:
                queue.add(Entry((parameter,), (part,), lambda tensors: tensors))


def hooks_of(parameter: Tensor) -> tuple[Any, Any]:
    # Torch has no public way to set hooks aside.
    return getattr(parameter, "_backward_hooks", None) or None, (
        getattr(parameter, "_post_accumulate_grad_hooks", None) or None
    )


def _set_hooks(parameter: Any, first: Any, last: Any) -> None:
    parameter._backward_hooks = first
    if parameter._post_accumulate_grad_hooks is not None:
        # None would leave torch with the hooks it has.
        parameter._post_accumulate_grad_hooks = OrderedDict[int, Any]() if last is None else last


def reached(nodes: Sequence[Any], keys: set[int]) -> list[Tensor]:
    """The parameters among `keys` whose accumulation stands in the graph."""
    seen: set[Any] = set()
    waiting: list[Any] = list(nodes)
    found: dict[int, Tensor] = {}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad" and id(node.variable) in keys:
            found[id(node.variable)] = node.variable
        waiting.extend(edge[0] for edge in node.next_functions)
    return list(found.values())
