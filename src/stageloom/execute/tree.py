"""Nested values between stages: tensors in tuples, lists and dicts, taken apart for sending and put together again."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# (what a user nests has no static type)
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from stageloom.errors import InputError

TENSOR = "tensor"
"""Stands for a tensor in a structure; every other leaf stands for itself."""

ONE = (TENSOR,)
"""The structure of a tensor by itself."""


def flatten(value: Any) -> tuple[list[Tensor], Any]:
    """(tensors in order, structure). Leaves that are no tensors (None, numbers, text) are part of the structure."""
    if isinstance(value, Tensor):  # nearly always
        return [value], ONE
    tensors: list[Tensor] = []
    return tensors, _taken_apart(value, tensors)


# Functions of their own: one within another that calls itself is a cycle, and what it refers to (tensors with their
# graphs) would stay until the garbage collector comes by.


def _taken_apart(part: Any, tensors: list[Tensor]) -> Any:
    if isinstance(part, Tensor):
        tensors.append(part)
        return (TENSOR,)
    if isinstance(part, tuple) and hasattr(part, "_fields"):
        return ("named", [_taken_apart(each, tensors) for each in part], type(part))
    if isinstance(part, (tuple, list)):
        name = type(part).__name__ if type(part) in (tuple, list) else "tuple"
        return (name, [_taken_apart(each, tensors) for each in part])
    if isinstance(part, dict):
        return ("dict", [(key, _taken_apart(each, tensors)) for key, each in part.items()])
    return ("value", part)


def unflatten(tensors: list[Tensor], structure: Any) -> Any:
    """The value that `flatten` took apart, with these tensors."""
    if structure == ONE:
        return tensors[0]
    return _built(iter(tensors), structure)


def _built(rest: Iterator[Tensor], part: Any) -> Any:
    if part[0] == TENSOR:
        return next(rest)
    if part[0] == "named":
        return part[2](*(_built(rest, each) for each in part[1]))
    if part[0] == "tuple":
        return tuple(_built(rest, each) for each in part[1])
    if part[0] == "list":
        return [_built(rest, each) for each in part[1]]
    if part[0] == "dict":
        return {key: _built(rest, each) for key, each in part[1]}
    return part[1]


def leaves(structure: Any) -> list[Any]:
    """The leaves of a structure that are no tensors."""
    if structure[0] == TENSOR:
        return []
    if structure[0] == "value":
        return [structure[1]]
    parts = [each for _, each in structure[1]] if structure[0] == "dict" else structure[1]
    return [leaf for part in parts for leaf in leaves(part)]


def cut(value: Any, parts: int, dim: int, what: str) -> list[Any]:
    """The value in `parts` equal parts along `dim` of each of its tensors. Raises InputError where that cannot be."""
    tensors, structure = flatten(value)
    for tensor in tensors:
        # unequal parts would weigh alike in the loss, which then is not the mean over the whole
        if tensor.dim() <= dim or tensor.shape[dim] < parts or tensor.shape[dim] % parts:
            raise InputError(
                f"{what}: a tensor of shape {tuple(tensor.shape)} cannot be cut in {parts} equal parts along "
                f"dimension {dim}"
            )
    columns = [torch.tensor_split(tensor, parts, dim=dim) for tensor in tensors]
    return [unflatten([column[part] for column in columns], structure) for part in range(parts)]


def join(parts: list[Any], dim: int) -> Any:
    """The opposite of `cut`; tensors without that dimension make it a list of the parts."""
    flat = [flatten(part) for part in parts]
    if any(tensor.dim() <= dim for tensors, _ in flat for tensor in tensors):
        return parts
    columns = zip(*(tensors for tensors, _ in flat), strict=True)
    return unflatten([torch.cat(column, dim=dim) for column in columns], flat[0][1])
