"""The command line: one thin function a verb; it reads flags, calls the library and prints."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from typing import NoReturn

import typer

from stageloom.cli import commands, optimizing, planning, profiling, running
from stageloom.cli.app import app
from stageloom.errors import StageloomError
from stageloom.execute.joining import leave_the_word

__all__ = ["app", "commands", "main", "optimizing", "planning", "profiling", "running"]


# typer brings its own copy of click or uses the installed one; either way this is the base of its usage errors.
USAGE_ERROR: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def main() -> None:
    """Run the command line. Wrong input is one message on standard error and exit status 2, without a traceback."""
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]
        _complain("standard output is closed; nothing can be shown")
    columns = os.environ.get("COLUMNS", "")
    if columns and not (columns.isascii() and columns.isdigit()):
        del os.environ["COLUMNS"]  # no width; rich would fail over it
    # A terminal or pipe that cannot show a bar or a dot shows something else instead of ending the program.
    codecs.register_error("stageloom", _plainer)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="stageloom")
    try:
        status = app(standalone_mode=False)
        sys.stdout.flush()
    except USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error)
            sys.exit(2)
        leave_the_word()
        _complain(error.format_message().replace("Value error, ", ""))  # type: ignore[attr-defined]
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except StageloomError as error:
        leave_the_word()
        _complain(str(error))
    except BrokenPipeError:
        # The reader (head, less) has gone; nothing is wrong, and nothing more can be said.
        _silence()
        sys.exit(0)
    except OSError as error:
        _silence()
        _complain(f"standard output: cannot be written: {error.strerror}")
    except MemoryError:
        _complain("not enough memory for a schedule of this size; try fewer ranks or micro-batches")
    else:
        sys.exit(status if isinstance(status, int) else 0)


def _plainer(error: UnicodeError) -> tuple[str, int]:
    """Marks for a stream that knows no block letters: # for bars, = for half blocks, . for dots, ? for the rest."""
    assert isinstance(error, UnicodeEncodeError)
    marks = {"·": ".", "▀": "=", "×": "x"} | dict.fromkeys("█▉▊▋▌▍▎▏", "#")
    return "".join(marks.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


def _silence() -> None:
    """What is still to be written at exit goes nowhere, instead of failing once more."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str) -> NoReturn:
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    sys.exit(2)
