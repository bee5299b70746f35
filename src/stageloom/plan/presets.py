"""The models and nodes that ship with Stageloom, by name: one YAML file each, with its source in it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from stageloom.errors import InputError
from stageloom.files import read_mapping

Kind = Literal["models", "nodes"]


def names(kind: Kind) -> list[str]:
    """The presets of a kind, sorted."""
    return sorted(path.stem for path in _folder(kind).glob("*.yaml"))


def read(kind: Kind, name: str) -> dict[str, Any]:
    """What the file of a preset says. The name is one of `names(kind)`."""
    return read_mapping(_folder(kind) / f"{name}.yaml")


def nothing(what: str, text: str, known: Iterable[str], else_: str) -> InputError:
    """The error for a name that is neither a preset nor a file; for the caller to raise."""
    known = list(known)
    near = difflib.get_close_matches(text.lower(), known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return InputError(
        f"{text!r}: there is no {what} of this name and no such file; {hint}known: {', '.join(known)}, or {else_}"
    )


def _folder(kind: Kind) -> Path:
    return Path(str(resources.files("stageloom") / "data" / "plan" / kind))
