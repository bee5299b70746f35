"""One stage on its rank: runs forwards and backwards of micro-batches, and keeps what lies between them."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaks unknown types)
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stageloom.errors import InputError
from stageloom.execute.buffers import batch_norms, not_counting
from stageloom.execute.casting import AS_IT_IS, no_autocast
from stageloom.execute.chance import Random, seed_of
from stageloom.execute.channel import has_gradient
from stageloom.execute.devices import CPU
from stageloom.execute.engine import Engine, Job
from stageloom.execute.feeding import Feed, check_output
from stageloom.execute.sharded import trained
from stageloom.execute.split import (
    Mode,
    Report,
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


@dataclass(slots=True)
class _Flight:
    """A micro-batch between its forward and the end of its backward."""

    saved: Any  # a `split.Saved` or what an engine leaves; None where the forward is run again
    again: Callable[[], Any] | None
    have: list[bool]  # of the outputs that are for the next stage, which have a gradient; what follows them is carry
    outputs: int
    inputs: int  # what came from the stage before; what follows is carry
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
        device: torch.device = CPU,
    ) -> None:
        self.device = device
        self.module = module
        self.mode: Mode = report.mode
        self.engine: Engine | None = None  # None: one graph of autograd
        self.report = report
        self.first = first
        self.last = last
        self.loss = loss
        self.slices = slices
        self.sequence = sequence
        self.parts = parts  # losses of a mini-batch: each weighs 1/parts
        self.recompute = recompute
        self.versions = versions
        self.parameters = trained(module)
        self.norms = batch_norms(module) if recompute else []
        self.flights: dict[Place, _Flight] = {}
        self.carries: dict[Place, tuple[list[Tensor], Any]] = {}
        self.carry_gradients: dict[Place, list[Tensor | None]] = {}
        self.feed = Feed()

    def begin(self, feed: Feed) -> None:
        """A run starts. What a run that failed may have left is dropped."""
        self.feed = feed
        self.flights, self.carries, self.carry_gradients = {}, {}, {}
        self.parameters = trained(self.module)

    # --------------------------------------------------------------------------------------------------- forward

    def forward(
        self,
        place: Place,
        value: tuple[list[Tensor], Any] | None,
        *,
        version: int,
        backward: bool,
        whole: bool,
        run: Callable[[Job], tuple[list[Tensor], Any]] | None = None,
    ) -> Result:
        """Run the stage for one slice of a micro-batch; `whole`: its backward will be BW, and not B and W.

        `run` does it in the engine's place.
        """
        tensors, structure = flatten(self.feed.inputs.pop(place)) if value is None else value
        carry, carry_structure = self.carries.pop(place, ([], None)) if self.sequence else ([], None)
        given = tensors + carry
        trees: dict[str, Any] = {}

        def call(flat: list[Tensor]) -> list[Tensor]:
            """The stage on flat tensors: outputs (or the loss), then the carry for the next slice."""
            argument = unflatten(flat[: len(tensors)], structure)
            past = unflatten(flat[len(tensors) :], carry_structure) if carry_structure is not None else None
            output, following = self._call(argument, past, place, version if backward else None)
            results = leave(output)
            carried, trees["carry"] = ([], None) if following is None else flatten(following)
            return results + carried

        def enter(flat: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            """Of stages with an engine, which know no carry."""
            argument = unflatten(flat, structure)
            arguments = argument if isinstance(argument, tuple) else (argument,)
            return arguments, self.feed.kwargs.get(place, _NO_ARGUMENTS)

        def leave(output: Any) -> list[Tensor]:
            results = self._results(output, place, trees)
            trees["values"] = len(results)
            return results

        parameters = self._leaves(version)
        # the first stage's inputs need no gradient
        wanted = [not self.first] * len(tensors) + [True] * len(carry)
        random = self._random(place)
        saved: Any = None
        engine, layers = self.engine, self.report.layers
        layers.plain = whole and engine is None
        mode = "fused" if layers.plain else self.mode

        def job() -> Job:
            target = self.feed.targets.get(place) if self.last else None
            return Job(enter, leave, given, parameters, wanted, place, target)

        def with_graph() -> tuple[list[Tensor], Any]:
            if engine is not None:
                return engine.forward(job())
            return run_forward(mode, call, given, parameters, wanted=wanted, layers=layers)

        with random:
            if run is not None:
                outputs, saved = run(job())
            elif backward and not self.recompute:
                outputs, saved = with_graph()
            else:
                outputs = self._without_graph(call, given)

        def again() -> Any:
            with random, not_counting(self.norms):
                return with_graph()[1]

        values: int = trees["values"]
        if self.sequence and place.slice + 1 < self.slices and trees["carry"] is not None:
            self.carries[place._replace(slice=place.slice + 1)] = outputs[values:], trees["carry"]
        if backward:
            have = [has_gradient(output.dtype) for output in outputs[:values]]
            repeat = again if self.recompute else None
            self.flights[place] = _Flight(saved, repeat, have, len(outputs), len(tensors), version)
        if not self.last:
            return Result(outputs[:values], trees["structure"])
        return Result([], None, trees.pop("loss", None), trees.pop("output", None))

    def _call(self, argument: Any, past: Any, place: Place, version: int | None) -> tuple[Any, Any]:
        if type(self.module) is nn.Identity:  # a stage of nothing, which takes one argument only
            return argument, None
        arguments = argument if isinstance(argument, tuple) else (argument,)
        kwargs = self.feed.kwargs.get(place, _NO_ARGUMENTS)
        if self.sequence:
            kwargs = {**kwargs, "carry": past}
        # an evaluation runs on the newest weights, which are the module's own
        if self.versions is not None and version is not None:
            output = self.versions.call(version, arguments, kwargs)
        else:
            output = self.module(*arguments, **kwargs)
        if not self.sequence:
            return output, None
        if not isinstance(output, tuple) or len(output) != 2:
            raise InputError(f"stage {place.stage}, called with carry=, returned no pair (output, carry)")
        return output

    def _results(self, output: Any, place: Place, trees: dict[str, Any]) -> list[Tensor]:
        """The loss on the last stage, else what goes to the next one."""
        if self.last and self.feed.keep_outputs:
            tensors, structure = flatten(output)
            trees["output"] = unflatten([t.detach() for t in tensors], structure)
        if self.last and place in self.feed.targets:
            loss: Any = self.loss(output, self.feed.targets[place])
            if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
                got = f"shape {tuple(loss.shape)}, {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
                raise InputError(
                    f"loss: gave {got}; expected a floating-point tensor with a single number and shape ()"
                )
            if torch.is_grad_enabled() and not loss.requires_grad and (self.parameters or not self.first):
                raise InputError(
                    f"loss: leads back to nothing that is trained, so no stage would learn; what stage {place.stage} "
                    "returns, or the loss, is detached or made under no_grad"
                )
            trees["loss"] = loss.detach()
            return [loss * (self.feed.scale / self.parts)]
        tensors, trees["structure"] = flatten(output)
        if not self.last:
            check_output(place.stage, tensors, trees["structure"])
        return tensors

    def _without_graph(self, call: Callable[[list[Tensor]], list[Tensor]], given: list[Tensor]) -> list[Tensor]:
        before = [_version(t) for t in given]
        with torch.no_grad():
            outputs = call(given)
        if self.recompute and before != [_version(t) for t in given]:
            raise InputError("recompute: a stage changes its input in place, so it cannot be run on it again")
        return [t.detach() for t in outputs]

    def _leaves(self, version: int) -> Sequence[Tensor]:
        if self.versions is None or version not in self.versions.weights:
            return self.parameters
        return self.versions.leaves(version)

    def _random(self, place: Place) -> AbstractContextManager[None]:
        seed = self.feed.seed
        if seed is None and not self.recompute:
            return AS_IT_IS
        if seed is not None:
            seed = seed_of(seed, place.stage, self.feed.microbatches_before + place.microbatch, place.slice)
        return Random(seed, keep=self.recompute, device=self.device)

    # -------------------------------------------------------------------------------------------------- backward

    def backward(
        self,
        place: Place,
        gradients: list[Tensor] | None,
        *,
        whole: bool,
        run: Callable[[Any, list[Tensor | None]], list[Tensor | None]] | None = None,
    ) -> list[Tensor]:
        """B, or BW where `whole`: gradients for the stage before, one for each floating-point input.

        `run` does it in the engine's place, with what the forward left and the gradients of the outputs.
        """
        flight = self.flights[place]
        engine = self.engine
        self.report.layers.plain = whole and engine is None
        if flight.again is not None:
            flight.saved, flight.again = flight.again(), None
        saved = flight.saved
        assert saved is not None
        grads: list[Tensor | None]
        if gradients is None:  # the last stage: its output is the loss
            loss = saved.outputs[0]
            grads = [torch.ones((), dtype=loss.dtype, device=loss.device)]
        else:
            rest = iter(gradients)
            grads = [next(rest) if have else None for have in flight.have]
        carried = flight.outputs - len(flight.have)
        grads += self.carry_gradients.pop(place, [None] * carried)
        leaves = saved.inputs[: flight.inputs]
        with no_autocast(self.device.type):
            if run is not None:
                inputs = run(saved, grads)
            elif engine is not None:
                inputs = engine.backward(saved, grads, whole)
            else:
                inputs = (run_backward if whole else run_backward_input)(saved, grads)
        if self.sequence and place.slice > 0:
            self.carry_gradients[place._replace(slice=place.slice - 1)] = inputs[flight.inputs :]
        if whole:
            self._ended(place)
        if self.first:
            return []
        return [
            torch.zeros_like(leaf, requires_grad=False) if found is None else found
            for found, leaf in zip(inputs, leaves, strict=False)
            if leaf is not None
        ]

    def backward_weight(self, place: Place) -> None:
        """W."""
        saved = self.flights[place].saved
        assert saved is not None, "W before B"
        with no_autocast(self.device.type):
            run_backward_weight(saved) if self.engine is None else self.engine.weight(saved)
        self._ended(place)

    def _ended(self, place: Place) -> None:
        flight = self.flights.pop(place)
        if self.versions is not None:
            self.versions.ended(flight.version)


_NO_ARGUMENTS: dict[str, Any] = {}


def _version(tensor: Tensor) -> int:
    return tensor._version  # pyright: ignore[reportPrivateUsage] (torch has no public name for it)
