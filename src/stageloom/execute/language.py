"""A small byte-level language model, and the data to train it on.

The model is an nn.Sequential whose children, [embedding, block, ..., block, head], each take one tensor to one
tensor, so that any run of them is a pipeline stage. Where a schedule cuts the sequences of a micro-batch into slices, a
stage is called once a slice, in order, as

    output, carry = stage(x, carry=carry)            # carry=None for the first slice

and the carry brings what later positions read of earlier ones: keys and values of every attention layer and the number
of positions passed. It is a nested tuple of tensors, and gradients flow through it. `stage(x)` takes a whole sequence.
"""

# torch leaves many of its functions' parameters untyped; what comes out of them is given a type where it matters.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import hashlib
import math
import sysconfig
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from stageloom.errors import InputError

Carry: TypeAlias = "Tensor | tuple[Carry, ...] | None"

# ------------------------------------------------------------------------------------------------- slices of a sequence


class _Whole(Enum):
    """Says "no carry was given". None cannot say it: it stands for the carry of the first slice."""

    WHOLE = "whole"


# Modules that treat every position by itself, hence every slice too.
_POSITIONWISE: Final = (
    nn.Identity,
    nn.Linear,
    nn.Embedding,
    nn.Dropout,
    nn.GELU,
    nn.ReLU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Tanh,
)


class Sliceable(nn.Module):
    """A module that can take a sequence whole or slice by slice."""

    @abstractmethod
    def forward_slice(self, x: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """Output of this slice, and the carry of the next one. `carry` is None for the first slice."""

    def forward(self, x: Tensor, carry: Carry | _Whole = _Whole.WHOLE) -> Any:
        if isinstance(carry, _Whole):
            return self.forward_slice(x, None)[0]
        return self.forward_slice(x, carry)


class StageSequence(Sliceable):
    """Modules called one after the other, each under the name it has in the model they were taken from.

    A name may have dots ("decoder.layers.3"), so `state_dict` says of a parameter what the whole model's would.
    Without modules it returns its input.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        super().__init__()
        named = list(modules)
        self._names = tuple(name for name, _ in named)
        for name, module in named:
            self._place(name, module)

    def _place(self, name: str, module: nn.Module) -> None:
        *path, last = name.split(".")
        holder: nn.Module = self
        for part in path:
            if part not in holder._modules:  # pyright: ignore[reportPrivateUsage]
                holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        holder.add_module(last, module)

    def forward(self, x: Tensor, carry: Carry | _Whole = _Whole.WHOLE) -> Any:
        if not isinstance(carry, _Whole):
            return self.forward_slice(x, carry)
        for name in self._names:
            x = self.get_submodule(name)(x)
        return x

    def forward_slice(self, x: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        before = (None,) * len(self._names) if carry is None else cast("tuple[Carry, ...]", carry)
        after: list[Carry] = []
        for name, own in zip(self._names, before, strict=True):
            x, own = _slice_through(name, self.get_submodule(name), x, own)
            after.append(own)
        return x, tuple(after)


def _slice_through(name: str, module: nn.Module, x: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
    if isinstance(module, Sliceable):
        return module(x, carry=carry)
    norm = isinstance(module, nn.LayerNorm | nn.RMSNorm) and len(module.normalized_shape) == 1
    if norm or isinstance(module, _POSITIONWISE):
        return module(x), ()
    raise InputError(
        f"{name} ({type(module).__name__}): cannot take a slice of a sequence; "
        "make it a stageloom.execute.language.Sliceable, or use a schedule without slices"
    )


# ------------------------------------------------------------------------------------------------------------ the model


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of the model: `layers` blocks of `width`, sequences of at most `context` bytes."""

    layers: int
    width: int
    heads: int
    context: int
    dropout: float = 0.0
    vocabulary: int = 256

    def __post_init__(self) -> None:
        if self.layers < 0:
            raise InputError(f"layers: {self.layers} is negative; expected 0 or more")
        for name in ("width", "heads", "context", "vocabulary"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: {getattr(self, name)} is too small; expected 1 or more")
        if self.width % self.heads:
            raise InputError(f"heads: {self.heads} heads do not divide width {self.width}; heads have equal widths")
        if not 0.0 <= self.dropout < 1.0:
            raise InputError(f"dropout: {self.dropout} is no probability below 1; expected 0 or more and less than 1")


def _dropout(probability: float) -> nn.Module:
    # nn.Dropout(0.0) keeps a mask for the backward all the same.
    return nn.Dropout(probability) if probability else nn.Identity()


class Embedding(Sliceable):
    """Bytes [batch, length] to vectors [batch, length, width]: what the byte is plus where it stands."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.dropout = _dropout(config.dropout)

    def forward_slice(self, x: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        length, context = x.shape[1], self.position.num_embeddings
        if length > context:
            raise InputError(f"a sequence of {length} bytes is longer than the model's context, {context}")
        positions = torch.arange(length, device=x.device)
        if carry is not None:
            positions = positions + cast(Tensor, carry)
        vectors = self.token(x) + self.position(positions)
        return self.dropout(vectors), positions[-1] + 1


class Attention(Sliceable):
    """Causal self-attention. Carries keys and values of all earlier positions, [batch, heads, length, head width]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.probability = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward_slice(self, x: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        batch, length, width = x.shape
        heads: Tensor = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        seen = None
        if carry is not None:
            earlier_keys, earlier_values = cast("tuple[Tensor, Tensor]", carry)
            earlier = earlier_keys.shape[2]
            key = torch.cat([earlier_keys, key], dim=2)
            value = torch.cat([earlier_values, value], dim=2)
            # SDPA's own causal mask lets the first query see the first key only, whatever came before this slice.
            seen = torch.ones(length, earlier + length, dtype=torch.bool, device=x.device).tril(earlier)
        probability = self.probability if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, dropout_p=probability, is_causal=seen is None
        )
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width)), (key, value)


class Block(Sliceable):
    """Pre-norm attention and MLP, each added to what came in. Its carry is its attention's."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        inner = 4 * config.width
        self.mlp = nn.Sequential(nn.Linear(config.width, inner), nn.GELU(), nn.Linear(inner, config.width))
        self.dropout = _dropout(config.dropout)

    def forward_slice(self, x: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        attended, carry = self.attention(self.attention_norm(x), carry=carry)
        x = x + self.dropout(attended)
        return x + self.dropout(self.mlp(self.mlp_norm(x))), carry


class Head(Sliceable):
    """Vectors to the logits of the next byte, [batch, length, vocabulary]. Carries nothing."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.linear = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward_slice(self, x: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        return self.linear(self.norm(x)), ()


def language_model(config: Config, seed: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """The model with weights drawn from `seed` alone; PyTorch's global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        blocks = [Block(config) for _ in range(config.layers)]
        model = nn.Sequential(Embedding(config), *blocks, Head(config))
    generator = torch.Generator().manual_seed(seed)
    # The last layer of a branch adds to the residual stream 2 * layers times; its variance shares that sum.
    into_residual = 0.02 / math.sqrt(2 * max(config.layers, 1))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.ndim > 1:
                narrow = name.endswith(("attention.output.weight", "mlp.2.weight"))
                parameter.normal_(0.0, into_residual if narrow else 0.02, generator=generator)
    # Converted after drawing, so that every dtype starts from the same numbers.
    return model.to(dtype)


def next_byte_loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy of logits [batch, length, vocabulary] and bytes [batch, length], in at least float32."""
    logits = output.flatten(0, -2)
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return functional.cross_entropy(logits, target.flatten())


# ------------------------------------------------------------------------------------------------------------- the data


def bytes_of_library(limit: int) -> Tensor:
    """Up to `limit` bytes of the Python standard library's sources, file after file in the order of their names."""
    if limit < 1:
        raise InputError(f"limit: {limit} bytes are too few; expected 1 or more")
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted((file.relative_to(root) for file in root.rglob("*.py")), key=Path.as_posix)
    text = bytearray()
    for file in files:
        # What is installed besides Python differs from one environment to the next.
        if {"site-packages", "dist-packages"} & set(file.parts):
            continue
        if len(text) >= limit:
            break
        try:
            text += (root / file).read_bytes()
        except OSError:
            continue
    if not text:
        raise InputError(f"{root}: holds no readable sources of the standard library; give data of your own")
    return torch.frombuffer(text, dtype=torch.uint8)[:limit].clone()


def batches(data: Tensor, microbatches: int, size: int, context: int, step: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one training step, [microbatches * size, context] int64 each; a target is the next byte.

    They follow from (seed, step) alone: a run resumed at a step sees what it would have seen.
    """
    for name, value in (("microbatches", microbatches), ("size", size), ("context", context)):
        if value < 1:
            raise InputError(f"{name}: {value} is too small; expected 1 or more")
    if len(data) <= context:
        raise InputError(f"data: {len(data)} bytes are too few for a context of {context}; {context + 1} are needed")
    # Hashed, since sums of seed and step would meet: (0, 1) has to differ from (1, 0).
    digest = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    starts = torch.randint(len(data) - context, (microbatches * size, 1), generator=generator)
    windows = data[(starts + torch.arange(context + 1)).to(data.device)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
