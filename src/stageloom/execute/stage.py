"""One stage on its rank: runs forwards and backwards of micro-batches, and keeps what lies between them."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaks unknown types)
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stageloom.execute.channel import Spec, spec_of
from stageloom.execute.split import (
    Mode,
    Report,
    Saved,
    run_backward,
    run_backward_input,
    run_backward_weight,
    run_forward,
)
from stageloom.execute.tasks import Place
from stageloom.execute.tree import flatten, unflatten
from stageloom.execute.versions import Versions


@dataclass
class Result:
    """What a forward gives: tensors and structure for the next stage, or on the last stage the loss and the output."""

    tensors: list[Tensor]
    structure: Any
    loss: Tensor | None = None
    output: Any = None


@dataclass
class Feed:
    """What one step gives a stage: inputs by place (first stage), targets by place (last stage), keyword arguments.

    `scale` multiplies every loss before its backward, `seed` makes random numbers of a place the same wherever it runs.
    """

    inputs: dict[Place, Any] = field(default_factory=dict[Place, Any])
    targets: dict[Place, Any] = field(default_factory=dict[Place, Any])
    kwargs: dict[Place, dict[str, Any]] = field(default_factory=dict[Place, dict[str, Any]])
    scale: float = 1.0
    seed: int | None = None
    keep_outputs: bool = False


@dataclass
class _Flight:
    """A micro-batch between its forward and the end of its backward."""

    saved: Saved
    spec: Spec  # of the outputs that are for the next stage; what follows them is carry
    outputs: int
    inputs: Spec  # of what came from the stage before; what follows it is carry
    version: int


class StageRunner:
    """Runs one stage. Slices of a micro-batch that is cut along its sequence pass a carry (keys and values) along."""

    def __init__(
        self,
        module: nn.Module,
        report: Report,
        *,
        first: bool,
        last: bool,
        loss: Callable[[Any, Any], Tensor],
        slices: int,
        sequence: bool,
        parts: int,
        recompute: bool = False,
        versions: Versions | None = None,
    ) -> None:
        self.module = module
        self.mode: Mode = report.mode
        self.report = report
        self.first = first
        self.last = last
        self.loss = loss
        self.slices = slices
        self.sequence = sequence
        self.parts = parts  # losses of a mini-batch: each weighs 1/parts
        self.recompute = recompute
        self.versions = versions
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.flights: dict[Place, _Flight] = {}
        self.carries: dict[Place, tuple[list[Tensor], Any]] = {}
        self.carry_gradients: dict[Place, list[Tensor | None]] = {}
        self.feed = Feed()

    # --------------------------------------------------------------------------------------------------- forward

    def forward(self, place: Place, value: tuple[list[Tensor], Any] | None, *, version: int, backward: bool) -> Result:
        """Run the stage for one slice of a micro-batch."""
        tensors, structure = flatten(self.feed.inputs.pop(place)) if value is None else value
        carry, carry_structure = self.carries.pop(place, ([], None))
        kwargs = self.feed.kwargs.get(place, {})
        shape: dict[str, Any] = {}

        def call(given: list[Tensor]) -> list[Tensor]:
            """The stage on flat tensors: outputs (or the loss), then the carry for the next slice."""
            argument = unflatten(given[: len(tensors)], structure)
            past = unflatten(given[len(tensors) :], carry_structure) if carry_structure is not None else None
            output, following = self._call(argument, past, kwargs, version)
            shape["output"] = output
            results: list[Tensor]
            if self.last and place in self.feed.targets:
                loss = self.loss(output, self.feed.targets[place])
                shape["loss"] = loss.detach()
                results = [loss * (self.feed.scale / self.parts)]
                shape["structure"] = None
            else:
                results, shape["structure"] = flatten(output)
            shape["values"] = len(results)
            carried: list[Tensor] = []
            if following is not None:
                carried, shape["carry"] = flatten(following)
            return results + carried

        def again(given: list[Tensor]) -> list[Tensor]:
            results: list[Tensor] = checkpoint(call, given, use_reentrant=False)  # pyright: ignore[reportAssignmentType]
            return results

        run = again if self.recompute and backward else call
        with self._random(place):
            if backward:
                outputs, saved = run_forward(self.mode, run, tensors + carry, self._leaves(version))
            else:
                with torch.no_grad():
                    outputs, saved = call(tensors + carry), None
        values: int = shape["values"]
        if self.sequence and place.slice + 1 < self.slices and "carry" in shape:
            self.carries[place._replace(slice=place.slice + 1)] = outputs[values:], shape["carry"]
        if saved is not None:
            spec = spec_of(outputs[:values], None)
            self.flights[place] = _Flight(saved, spec, len(outputs), spec_of(tensors, None), version)
        if not self.last:
            return Result(outputs[:values], shape["structure"])
        kept = shape["output"] if self.feed.keep_outputs else None
        detached = None if kept is None else unflatten([t.detach() for t in flatten(kept)[0]], flatten(kept)[1])
        return Result([], None, shape.get("loss"), detached)

    def _call(self, argument: Any, past: Any, kwargs: dict[str, Any], version: int) -> tuple[Any, Any]:
        arguments = argument if isinstance(argument, tuple) else (argument,)
        if self.sequence:
            kwargs = {**kwargs, "carry": past}
        if self.versions is not None:
            output = self.versions.call(version, arguments, kwargs)
        else:
            output = self.module(*arguments, **kwargs)
        return output if self.sequence else (output, None)

    def _leaves(self, version: int) -> list[Any]:
        return self.parameters if self.versions is None else self.versions.leaves(version)

    def _random(self, place: Place) -> Any:
        """Random numbers that depend on the seed and the place alone, not on the order in which ranks run."""
        if self.feed.seed is None:
            return _Unchanged()
        return _Seeded(hash((self.feed.seed, place.stage, place.microbatch, place.slice)) & (2**63 - 1))

    # -------------------------------------------------------------------------------------------------- backward

    def gradient_spec(self, place: Place) -> Spec | None:
        """The shapes of the gradient that this stage waits for; None before the forward has run."""
        flight = self.flights.get(place)
        return None if flight is None else _differentiable(flight.spec)

    def backward(self, place: Place, gradients: list[Tensor] | None, *, whole: bool) -> list[Tensor]:
        """B, or BW where `whole`: gradients for the stage before, one for each floating-point input."""
        flight = self.flights[place]
        values = len(flight.spec.dtypes)
        grads: list[Tensor | None] = [None] * values
        if gradients is None:  # the last stage: its output is the loss
            grads = [torch.ones((), dtype=flight.spec.dtypes[0])]
        else:
            rest = iter(gradients)
            grads = [next(rest) if _has_gradient(dtype) else None for dtype in flight.spec.dtypes]
        grads += self.carry_gradients.pop(place, [None] * (flight.outputs - values))
        inputs = (run_backward if whole else run_backward_input)(flight.saved, grads)
        if self.sequence and place.slice > 0:
            self.carry_gradients[place._replace(slice=place.slice - 1)] = inputs[len(flight.inputs.dtypes) :]
        if whole:
            self._ended(place)
        if self.first:
            return []
        wanted = zip(inputs, flight.inputs.shapes, flight.inputs.dtypes, strict=False)
        return [
            torch.zeros(shape, dtype=dtype) if found is None else found
            for found, shape, dtype in wanted
            if _has_gradient(dtype)
        ]

    def backward_weight(self, place: Place) -> None:
        """W."""
        run_backward_weight(self.flights[place].saved)
        self._ended(place)

    def _ended(self, place: Place) -> None:
        flight = self.flights.pop(place)
        if self.versions is not None:
            self.versions.ended(flight.version)


def _has_gradient(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _differentiable(spec: Spec) -> Spec:
    kept = [at for at, dtype in enumerate(spec.dtypes) if _has_gradient(dtype)]
    return Spec(None, tuple(spec.shapes[at] for at in kept), tuple(spec.dtypes[at] for at in kept))


class _Unchanged:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class _Seeded:
    """torch's random numbers from a seed within the block, and as they were after it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __enter__(self) -> None:
        self.state = torch.get_rng_state()
        torch.manual_seed(self.seed)

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self.state)
