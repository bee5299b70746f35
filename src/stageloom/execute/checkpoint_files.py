"""Files of a checkpoint: torch's writer and reader that say what failed, and what is looked at before they run."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false
# (torch leaks unknown types)
from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from stageloom.errors import InputError, StageloomError
from stageloom.execute.workers import one_line
from stageloom.files import read_mapping

T = TypeVar("T")

SETTINGS: Final = "settings.json"


class Writer(FileSystemWriter):
    """torch's writer; where it fails, it says what failed at the bottom, not at each of the layers above."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        return _saying_why(super().write_data, *args, **kwargs)

    def finish(self, *args: Any, **kwargs: Any) -> None:
        _saying_why(super().finish, *args, **kwargs)


class Reader(FileSystemReader):
    """torch's reader; where it fails, it says in which file."""

    def read_data(self, plan: Any, planner: Any) -> Any:
        files: dict[str, list[Any]] = {}
        for item in plan.items:
            files.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in files.items():
            try:
                super().read_data(replace(plan, items=items), planner).wait()
            except OSError:
                raise
            except Exception as error:  # whatever reading other bytes comes to
                raise _Cause(f"{name}: cannot be read ({type(error).__name__})") from None
        done: Any = torch.futures.Future()
        done.set_result(None)
        return done


class _Cause(StageloomError):
    """The innermost cause of a failure, as text: on its way to other ranks an error loses what it came from."""


def _saying_why(act: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    try:
        return act(*args, **kwargs)
    except Exception as error:
        raise _Cause(one_line(_innermost(error))) from None


def told(error: BaseException) -> str:
    """What an error comes from, in one line."""
    below = _innermost(error)
    return str(below) if isinstance(below, StageloomError) else one_line(below)


def _innermost(error: BaseException) -> BaseException:
    """The first of a chain of errors; if the system refused something, that."""
    chain = [error]
    while not isinstance(chain[-1], StageloomError):  # those are meant for the user as they are
        last = chain[-1]
        below = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if below is None or below in chain:
            break
        chain.append(below)
    return next((each for each in reversed(chain) if isinstance(each, OSError)), chain[-1])


def require_file(path: Path) -> None:
    """Raise OSError where it cannot be opened."""
    path.open("rb").close()


def read_metadata(path: Path) -> Any:
    """What torch says of a checkpoint: the tensors in it, and the files in which they lie."""
    file = path / ".metadata"
    try:
        found = FileSystemReader(path).read_metadata()
        names = found.state_dict_metadata
    except OSError:
        raise  # says the file by itself
    except Exception as error:  # whatever unpickling other bytes comes to
        raise InputError(f"{file.name}: cannot be read ({type(error).__name__})") from None
    if not isinstance(names, dict):  # pyright: ignore[reportUnnecessaryIsInstance] (from a file)
        raise InputError(f"{file.name}: is no description of a checkpoint")
    return found


def require_fit(state: Mapping[str, Any], saved: Any) -> None:
    """Raise InputError naming the first tensor that the checkpoint has not, or has in another shape."""
    for name, tensor in state.items():
        there = saved.state_dict_metadata.get(name)
        if there is None:
            raise InputError(f"{name} is not in it")
        size = getattr(there, "size", None)
        if size is not None and tuple(size) != tuple(tensor.shape):
            raise InputError(f"{name} has the shape {tuple(size)} there and {tuple(tensor.shape)} here")


def require_whole(path: Path, saved: Any, state: Mapping[str, Any]) -> None:
    """Raise InputError naming the first file that is shorter than what lies in it, of what this rank needs."""
    for index, info in (saved.storage_data or {}).items():
        if index.fqn not in state:
            continue
        file = path / info.relative_path
        if file.stat().st_size < info.offset + info.length:
            raise InputError(f"{file.name}: ends before {index.fqn} does")


def write_settings(folder: Path, settings: Mapping[str, float]) -> None:
    """Beside the weights, and on the disk."""
    with (folder / SETTINGS).open("w", encoding="utf-8") as file:
        json.dump(dict(settings), file)
        file.flush()
        os.fsync(file.fileno())


def read_settings(folder: Path) -> dict[str, float]:
    """{} for a checkpoint that was saved without."""
    file = folder / SETTINGS
    return read_mapping(file) if file.is_file() else {}
