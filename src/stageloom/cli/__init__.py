"""The command line: one thin function a verb; it reads flags, calls the library and prints."""

from __future__ import annotations

import os
import sys

import typer

from stageloom.cli import commands
from stageloom.cli.app import app
from stageloom.errors import StageloomError

__all__ = ["app", "commands", "main"]


# typer brings its own copy of click or uses the installed one; either way this is the base of its usage errors.
USAGE_ERROR: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def main() -> None:
    """Run the command line. Wrong input is one message on standard error and exit status 2, without a traceback."""
    try:
        status = app(standalone_mode=False)
        sys.stdout.flush()
    except USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error)
            sys.exit(2)
        _complain(error.format_message().replace("Value error, ", ""))  # type: ignore[attr-defined]
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except StageloomError as error:
        _complain(str(error))
    except BrokenPipeError:
        # The reader (head, less) has gone; nothing is wrong, and nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except MemoryError:
        _complain("not enough memory for a schedule of this size; try fewer ranks or micro-batches")
    else:
        sys.exit(status if isinstance(status, int) else 0)


def _complain(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)
