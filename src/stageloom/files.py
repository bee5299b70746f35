"""Reading what users give: text, and YAML or JSON whose every key is said once."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Hashable
from pathlib import Path
from typing import Any, Final, cast

import yaml

from stageloom.errors import InputError


def read_text(path: Path, wanted: str) -> str:
    """The UTF-8 text of a regular file. Raises InputError saying why it cannot be read, or that `wanted` is needed."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise InputError(f"{path}: is not a regular file; {wanted} is needed (keep in one what a pipe gives)")
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8 text; {wanted} is needed") from None
    except ValueError as error:
        raise InputError(f"{str(path)!r}: cannot be read: {error}") from None


def short(value: object, most: int = 60) -> str:
    """A value as a message shows it."""
    text = _SHOWN.repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


# A few lines of YAML make lists of lists with more entries than memory holds, so nothing is written out whole.
_SHOWN: Final = reprlib.Repr()
_SHOWN.maxlevel = 3
_SHOWN.maxlist = _SHOWN.maxdict = 40
_SHOWN.maxstring = _SHOWN.maxlong = _SHOWN.maxother = 250


def parse_json(text: str, place: str) -> object:
    """JSON in which no object says a key twice. Raises InputError naming line and column, or the key."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise InputError(f"{place}: line {error.lineno}, column {error.colno}: is not JSON: {error.msg}") from None
    except RecursionError:
        raise InputError(f"{place}: is nested too deeply") from None
    except ValueError as error:
        raise InputError(f"{place}: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} is said twice")
        found[key] = value
    return found


def read_mapping(path: str | Path, example: str = "F: 1.0") -> dict[str, Any]:
    """A YAML or JSON file whose top level is a mapping, of lines such as `example`.

    Raises InputError naming file and line.
    """
    file = Path(path)
    text = read_text(file, "a YAML or JSON file")
    data = parse_json(text, str(path)) if file.suffix == ".json" else _parse_yaml(text, str(path))
    if not isinstance(data, dict):
        raise InputError(f"{path}: holds no mapping; expected lines of `key: value`, such as `{example}`")
    return {str(key): value for key, value in data.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


MOST_YAML: Final = 1_000_000
"""Characters of YAML that are read, which takes some ten seconds."""


def _parse_yaml(text: str, place: str) -> object:
    if len(text) > MOST_YAML:
        raise InputError(
            f"{place}: has {len(text):,} characters; at most {MOST_YAML:,} of YAML are read, so a shorter file is "
            "needed, or a .json file, of any length"
        )
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark is not None else ""
        raise InputError(f"{place}: {line}is not YAML: {getattr(error, 'problem', None) or error}") from None
    except RecursionError:
        raise InputError(f"{place}: is nested too deeply") from None
    except ValueError as error:
        raise InputError(f"{place}: {error}") from None


class _Loader(yaml.SafeLoader):
    """YAML with the scalars of version 1.2, and no repeated key.

    1e3 is a number there and 010 is ten; 1:30, yes and dates are text. Merges, which it no longer has, are refused.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        said: set[Hashable] = set()
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise ValueError(f"line {line}: merges (`<<`) are not read; write out the keys that are meant")
            key = cast("object", self.construct_object(key_node, deep=True))  # pyright: ignore[reportUnknownMemberType]
            if isinstance(key, Hashable):  # what is not is no key, as is said below
                if key in said:
                    raise ValueError(f"line {line}: key {short(key)} is said twice")
                said.add(key)
        return super().construct_mapping(node, deep)


def _number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float | int:
    text = node.value
    if text.lower().lstrip("+-") in (".inf", ".nan"):
        return float(text.lower().replace(".", ""))
    return int(text) if re.fullmatch(r"[-+]?[0-9]+", text) else float(text)


_SCALARS: Final = (
    ("!number", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$", "-+.0123456789"),
    ("!number", r"([-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$", "-+."),
    ("tag:yaml.org,2002:bool", r"(true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("tag:yaml.org,2002:null", r"(~|null|Null|NULL)$", "~nN"),
    ("tag:yaml.org,2002:merge", r"<<$", "<"),
)
_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {"": [("tag:yaml.org,2002:null", re.compile("$"))]}
for _tag, _pattern, _firsts in _SCALARS:
    for _first in _firsts:
        _resolvers.setdefault(_first, []).append((_tag, re.compile(_pattern)))
_Loader.yaml_implicit_resolvers = _resolvers
_Loader.add_constructor("!number", _number)
