"""Try a stage's split on sample inputs: is it right, and which mode does the stage get?"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false
# (torch leaks unknown types, and has no public way to set a buffer)
from __future__ import annotations

import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stageloom.execute.split_hooks import caught
from stageloom.execute.split_prepare import Mode, Report, prepare
from stageloom.execute.split_run import run_backward, run_backward_input, run_backward_weight, run_forward

_Gradients = dict[str, Tensor | None]


def probe(
    module: nn.Module,
    fn: Callable[[list[Tensor]], list[Tensor]],
    inputs: list[Tensor],
    mode: Mode | Literal["auto"] = "auto",
) -> Report:
    """Prepare the stage, compare B and W on sample inputs with a plain backward, and report the mode it got and why.

    A split that fails or gives another gradient is replaced by "fused", and the reason says what was seen. The module
    is left prepared for the reported mode; gradients, buffers and random states are as they were, and no hook of a
    parameter fires. An error of the stage itself, in its plain forward or backward, is raised as it is.
    """
    parameters = dict(module.named_parameters())
    with _undisturbed(module):
        prepare(module, "fused")
        expected = _gradients("fused", fn, inputs, parameters)
    report = prepare(module, mode)
    if report.mode == "fused":
        return report
    try:
        with _undisturbed(module):
            found = _gradients(report.mode, fn, inputs, parameters)
        wrong = _differences(expected, found)
    except Exception as error:
        return _fused(module, f"mode {report.mode!r} failed with {type(error).__name__}: {_first_line(error)}")
    if not wrong:
        return replace(report, reason=f"{report.reason}; a sample's gradients equal those of a plain backward")
    with _undisturbed(module):
        prepare(module, "fused")
        again = _gradients("fused", fn, inputs, parameters)
    if _differences(expected, again):
        return _fused(module, "two plain backwards give different gradients, so that a split cannot be checked")
    return _fused(module, f"mode {report.mode!r} gives another gradient for {', '.join(wrong[:3])}")


def _fused(module: nn.Module, reason: str) -> Report:
    return replace(prepare(module, "fused"), reason=reason)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _gradients(
    mode: Mode, fn: Callable[[list[Tensor]], list[Tensor]], inputs: list[Tensor], parameters: dict[str, nn.Parameter]
) -> _Gradients:
    """All gradients of one micro-batch by name, from one BW in mode "fused", else from B and W."""
    copies = [x.detach().clone() for x in inputs]  # a stage may change its inputs in place
    outputs, saved = run_forward(mode, fn, copies, list(parameters.values()))
    grads: list[Tensor | None] = [None]
    if len(outputs) != 1 or outputs[0].numel() != 1:
        grads = [_sample(y, at) for at, y in enumerate(outputs)]
    if mode == "fused":
        found = run_backward(saved, grads)
    else:
        found = run_backward_input(saved, grads)
        run_backward_weight(saved)
    named: _Gradients = {f"input {at}": gradient for at, gradient in enumerate(found)}
    return named | {name: p.grad for name, p in parameters.items()}


def _sample(y: Tensor, at: int) -> Tensor | None:
    """A gradient for an output, the same in every run and unlike for all its entries."""
    if not (y.is_floating_point() or y.is_complex()):
        return None
    steps = torch.arange(y.numel(), device=y.device, dtype=torch.float64)
    return torch.cos(steps * 1.7 + at).reshape(y.shape).to(y.dtype)


def _differences(expected: _Gradients, found: _Gradients) -> list[str]:
    return [name for name in expected if not _agree(expected[name], found[name])]


def _agree(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.numel() == 0:
        return True
    # Another order of summation changes a gradient by rounding errors of the largest values that went into it.
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4}.get(a.dtype, 5e-2)
    scale = a.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


@contextmanager
def _undisturbed(module: nn.Module) -> Generator[None]:
    """Within the block gradients start at None; after it they, buffers and random states are as they were before it."""
    buffers = [
        (owner, name, buffer, None if buffer is None else buffer.detach().clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
    ]
    plain, cpu = random.getstate(), torch.get_rng_state()
    devices: list[Any] = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        with caught(list(module.parameters()), None):
            yield
    finally:
        random.setstate(plain)
        torch.set_rng_state(cpu)
        if devices:
            torch.cuda.set_rng_state_all(devices)
        for owner, name, buffer, before in buffers:
            owner._buffers[name] = buffer
            if buffer is not None and before is not None:
                with torch.no_grad():
                    buffer.copy_(before)
