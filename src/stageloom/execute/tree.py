"""Nested values between stages: tensors in tuples, lists and dicts, taken apart for sending and put together again."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# (what a user nests has no static type)
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stageloom.errors import InputError

TENSOR = "tensor"
"""Stands for a tensor in a structure; every other leaf stands for itself."""


def flatten(value: Any) -> tuple[list[Tensor], Any]:
    """(tensors in order, structure). Leaves that are no tensors (None, numbers, text) are part of the structure."""
    tensors: list[Tensor] = []

    def walk(part: Any) -> Any:
        if isinstance(part, Tensor):
            tensors.append(part)
            return (TENSOR,)
        if isinstance(part, (tuple, list)):
            return (type(part).__name__ if type(part) in (tuple, list) else "tuple", [walk(each) for each in part])
        if isinstance(part, dict):
            return ("dict", [(key, walk(each)) for key, each in part.items()])
        return ("value", part)

    return tensors, walk(value)


def unflatten(tensors: list[Tensor], structure: Any) -> Any:
    """The value that `flatten` took apart, with these tensors."""
    rest = iter(tensors)

    def build(part: Any) -> Any:
        if part[0] == TENSOR:
            return next(rest)
        if part[0] == "tuple":
            return tuple(build(each) for each in part[1])
        if part[0] == "list":
            return [build(each) for each in part[1]]
        if part[0] == "dict":
            return {key: build(each) for key, each in part[1]}
        return part[1]

    return build(structure)


def cut(value: Any, parts: int, dim: int, what: str) -> list[Any]:
    """The value in `parts` parts along `dim` of each of its tensors. Raises InputError where one is too short."""
    tensors, structure = flatten(value)
    for tensor in tensors:
        if tensor.dim() <= dim or tensor.shape[dim] < parts:
            raise InputError(
                f"{what}: a tensor of shape {tuple(tensor.shape)} cannot be cut in {parts} parts along dimension {dim}"
            )
    columns = [torch.tensor_split(tensor, parts, dim=dim) for tensor in tensors]
    return [unflatten([column[part] for column in columns], structure) for part in range(parts)]
