"""Files are written whole or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from stageloom.errors import InputError


def write_whole(path: str | Path, data: str | bytes) -> None:
    """Write `data` to `path` through a temporary file beside it: a reader sees the old file or the whole new one.

    Raises InputError where the folder is missing, the path is a folder, or it cannot be written.
    """
    target = Path(path)
    check_target(target)
    # A name may hold what is no character (half a surrogate pair, bytes of a file's name): shown as a question mark.
    content = data.encode("utf-8", errors="replace") if isinstance(data, str) else data
    temporary = ""
    try:
        # A link is followed, so that what it points to is replaced and the link stays.
        target = target.resolve()
        if target.exists() and not target.is_file():
            # A device or a pipe (/dev/stdout) is written to, never replaced.
            target.write_bytes(content)
            return
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name[:100]}.", dir=target.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, _mode(target))
        os.replace(temporary, target)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None


def check_target(path: str | Path) -> None:
    """Raise InputError, before there is anything to write, where `write_whole` could not write to `path`."""
    target = Path(path)
    if os.path.isdir(target):
        raise InputError(f"{path}: is a folder; give the name of a file in it")
    try:
        os.stat(target)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise InputError(f"{path}: is a loop of links; give another path") from None
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise InputError(f"{path}: cannot be written: {error.strerror}") from None
    if not os.path.isdir(target.parent):
        raise InputError(f"{path}: there is no folder {target.parent}; create it or give another path")


def _mode(target: Path) -> int:
    """The mode of the file that is replaced, else what the process's umask gives a new file."""
    if target.exists():
        return target.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
