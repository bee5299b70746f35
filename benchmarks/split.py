"""What a split backward costs: bytes held between B and W, seconds of B, W and BW, and forwards that W runs again.

Three ways to split, on the same layers and inputs: Stageloom's deferred and graph modes, and what PyTorch's pipelining
does (`stage_backward_input` and `stage_backward_weight`). BW is a plain backward of the layers as torch defines them.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from benchmarks.report import Table
from stageloom.execute.split import Mode, prepare, run_backward, run_backward_input, run_backward_weight, run_forward

WIDTH: Final = 512
HEADS: Final = 8
BATCH: Final = 4
LENGTH: Final = 256
CLAIM: Final = 1.1
"""(B + W)/BW of the deferred mode is at most this."""


# -------------------------------------------------------------------------------------------------------------- layers


class Mlp(nn.Module):
    """x + second(gelu(first(norm(x))))"""

    def __init__(self, width: int, _: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, 4 * width)
        self.second = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.gelu(self.first(self.norm(x))))


class Attention(nn.Module):
    """Causal self-attention with a norm before and x added after."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(rows, length, width))


class Layer(nn.Module):
    """A transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.mlp = Mlp(width, heads)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attention(x))


class Checkpointed(Layer):
    """A transformer layer whose activations are computed again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        again: Any = checkpoint(super().forward, x, use_reentrant=False)
        return again


LAYERS: Final[dict[str, type[nn.Module]]] = {
    "Linear-MLP block": Mlp,
    "attention block": Attention,
    "transformer layer": Layer,
    "checkpointed layer": Checkpointed,
}


# ---------------------------------------------------------------------------------------------------------------- ways


class Way:
    """One way to run F, B and W of a module. `held` is what stays alive from B to W."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.held: Any = None

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def backward_input(self, gradient: Tensor) -> Tensor:
        raise NotImplementedError

    def backward_weight(self) -> None:
        raise NotImplementedError


class Ours(Way):
    """A mode of Stageloom's."""

    def __init__(self, module: nn.Module, mode: Mode) -> None:
        super().__init__(module)
        report = prepare(module, mode)
        assert report.mode == mode, report.reason
        self.mode: Mode = mode
        self.layers = report.layers
        self.parameters = list(module.parameters())

    def forward(self, x: Tensor) -> Tensor:
        [y], self.held = run_forward(
            self.mode, lambda given: [self.module(given[0])], [x], self.parameters, layers=self.layers
        )
        return y

    def backward_input(self, gradient: Tensor) -> Tensor:
        [found] = run_backward_input(self.held, [gradient])
        assert found is not None
        return found

    def backward_weight(self) -> None:
        run_backward_weight(self.held)
        self.held = None


class PyTorch(Way):
    """What PyTorch's pipelining does, and what its stage keeps from B to W."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = self.module(x)
        self.held = x, y
        return y.detach()

    def backward_input(self, gradient: Tensor) -> Tensor:
        from torch.distributed.pipelining._backward import stage_backward_input

        x, y = self.held
        found, groups = stage_backward_input([y], [gradient], [x], self.module.parameters())
        self.held = x, y, groups, gradient
        assert found[0] is not None
        return found[0]

    def backward_weight(self) -> None:
        from torch.distributed.pipelining._backward import stage_backward_weight

        stage_backward_weight(self.module.parameters(), self.held[2])
        self.held = None


class Whole(Way):
    """BW: a plain backward, with nothing left for W."""

    def forward(self, x: Tensor) -> Tensor:
        [y], self.held = run_forward("fused", lambda given: [self.module(given[0])], [x], [])
        return y

    def backward_input(self, gradient: Tensor) -> Tensor:
        [found] = run_backward(self.held, [gradient])
        assert found is not None
        self.held = None
        return found

    def backward_weight(self) -> None:
        pass


WAYS: Final[dict[str, Callable[[nn.Module], Way]]] = {
    "deferred": lambda module: Ours(module, "deferred"),
    "graph": lambda module: Ours(module, "graph"),
    "PyTorch": PyTorch,
    "whole": Whole,
}


# -------------------------------------------------------------------------------------------------------------- memory


class Storages(TorchDispatchMode):
    """Sees every storage that an op within the block makes, and knows which are alive: those that only a graph holds,
    too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, Tensor):
                storage = made.untyped_storage()
                self.seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def alive(self, without: Sequence[Tensor]) -> int:
        """Bytes of the storages that are alive, leaving out those of `without`."""
        gc.collect()
        other = {tensor.untyped_storage()._cdata for tensor in without}
        return sum(size for key, (ref, size) in self.seen.items() if key not in other and not ref.expired())


def held_after_b(way: Way, shape: tuple[int, ...], device: torch.device) -> int:
    """Bytes that the way keeps from B to W: neither parameters and their gradients, nor the input's gradient."""
    parameters = list(way.module.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    if device.type != "cpu":
        return _held_on_accelerator(way, shape, device)
    with Storages() as storages:
        found = way.backward_input(_gradient_of(way, shape, device))
        grads = [p.grad for p in parameters if p.grad is not None]
        held = storages.alive([*parameters, *grads, found])
        way.backward_weight()
        return held


def _held_on_accelerator(way: Way, shape: tuple[int, ...], device: torch.device) -> int:
    module: Any = torch.get_device_module(device)
    way.backward_input(_gradient_of(way, shape, device))  # libraries allocate memory of their own at first use
    way.backward_weight()
    gc.collect()
    before = module.memory_allocated(device)
    found = way.backward_input(_gradient_of(way, shape, device))
    module.synchronize(device)
    gc.collect()
    held = module.memory_allocated(device) - before - found.nbytes
    way.backward_weight()
    return held


def _gradient_of(way: Way, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Run the forward; nobody but the way keeps its input and output. A gradient of the output."""
    dtype = next(way.module.parameters()).dtype
    return torch.randn_like(way.forward(torch.randn(shape, device=device, dtype=dtype)))


# ---------------------------------------------------------------------------------------------------------------- time


@dataclass(frozen=True)
class Split:
    """Of one way: bytes held from B to W; seconds of B, W and both together, the best and the median of all runs;
    forwards that B and W ran again."""

    held: int
    b: float
    w: float
    both: float
    median: float
    again: tuple[int, int]


def measure(
    layer: type[nn.Module],
    shape: tuple[int, ...] = (BATCH, LENGTH, WIDTH),
    heads: int = HEADS,
    *,
    runs: int = 7,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    copies: int = 1,
) -> dict[str, Split]:
    """Measure every way on `copies` of a layer one after another.

    On the CPU in turns, by the process's own time and with one thread, so that other work on the machine meets all
    alike and counts little; on an accelerator one way after the other, as each holds its own copy of the weights.
    """
    device = torch.device("cpu") if device is None else device
    torch.manual_seed(0)
    with device:
        plain = nn.Sequential(*(layer(shape[-1], heads) for _ in range(copies))).to(dtype)
    threads = torch.get_num_threads()
    together = [tuple(WAYS)] if device.type == "cpu" else [(name,) for name in WAYS]
    found: dict[str, Split] = {}
    try:
        if device.type == "cpu":
            torch.set_num_threads(1)
        for names in together:
            found |= _in_turns({name: WAYS[name](copy.deepcopy(plain)) for name in names}, shape, runs, device)
    finally:
        torch.set_num_threads(threads)
    return found


def _in_turns(ways: dict[str, Way], shape: tuple[int, ...], runs: int, device: torch.device) -> dict[str, Split]:
    held = {name: held_after_b(way, shape, device) for name, way in ways.items()}
    counts = {name: _Count(way.module) for name, way in ways.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    again: dict[str, tuple[int, int]] = {}
    for _ in range(runs + 1):  # one for what happens only once
        for name, way in ways.items():
            gradient = _gradient_of(way, shape, device)
            counts[name].calls = 0
            began = _now(device)
            way.backward_input(gradient)
            between = _now(device)
            after_b = counts[name].calls
            way.backward_weight()
            times[name].append((between - began, _now(device) - between))
            again[name] = after_b, counts[name].calls - after_b
    found: dict[str, Split] = {}
    for name in ways:
        own = times[name][1:]
        b, w, both = min(b for b, _ in own), min(w for _, w in own), [b + w for b, w in own]
        found[name] = Split(held[name], b, w, min(both), statistics.median(both), again[name])
    return found


class _Count:
    """Counts forwards: a norm is called once in each, and once more where it is run again."""

    def __init__(self, module: nn.Module) -> None:
        self.calls = 0
        next(m for m in module.modules() if isinstance(m, nn.LayerNorm)).register_forward_hook(self._called)

    def _called(self, *_: Any) -> None:
        self.calls += 1


def _now(device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time()
    torch.get_device_module(device).synchronize(device)
    return time.perf_counter()


# -------------------------------------------------------------------------------------------------------------- tables


def tables(runs: int) -> Iterator[Table]:
    """Memory between B and W, and time, of each layer and way."""
    measured = {name: measure(layer, runs=runs) for name, layer in LAYERS.items()}
    yield from shown(measured, f"{BATCH} x {LENGTH} positions, width {WIDTH}, float32, CPU time of one thread")


def shown(measured: dict[str, dict[str, Split]], what: str) -> Iterator[Table]:
    """The tables of what was measured; `what` says on which sizes."""
    rows: list[tuple[str | float | int | None, ...]] = []
    for name, ways in measured.items():
        megabytes = [ways[way].held / 1e6 for way in ("deferred", "graph", "PyTorch")]
        again = [ways[way].again[1] for way in ("deferred", "graph", "PyTorch")]
        rows.append((name, *megabytes, *again))
    yield Table(
        "Between B and W",
        f"{what}. Megabytes of storages that live from B to W, without parameters, their gradients and the input's "
        "gradient; forwards of the layer that W runs again. Under checkpointing it is a choice: deferred saves W the "
        "forwards and keeps what W needs from B on; graph keeps least, and is quicker than PyTorch's too.",
        ("layers", "MB deferred", "MB graph", "MB PyTorch", "re-run deferred", "re-run graph", "re-run PyTorch"),
        tuple(rows),
    )
    rows = []
    for name, ways in measured.items():
        whole = ways["whole"]
        for way in ("deferred", "graph", "PyTorch"):
            own = ways[way]
            rows.append(
                (
                    name,
                    way,
                    own.b * 1e3,
                    own.w * 1e3,
                    whole.both * 1e3,
                    own.both / whole.both,
                    own.median / whole.median,
                )
            )
    yield Table(
        "Time of a split backward",
        f"{what}. Milliseconds, the best of all runs, taken in turns; BW is a plain backward. Gradients are added to "
        f"those of earlier micro-batches. The claim is (B + W)/BW <= {CLAIM} for deferred.",
        ("layers", "split", "B", "W", "BW", "(B + W)/BW", "of medians"),
        tuple(rows),
    )
