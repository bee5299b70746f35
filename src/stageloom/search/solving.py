"""A solver that Ctrl-C can end: it has a thread of its own, and the one that Python tells of signals only waits."""
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

PAUSE: Final = 0.05


@contextmanager
def held_interrupts() -> Generator[None]:
    """Ctrl-C waits for the end of the block. For imports of compiled modules: those that import others while they
    begin turn an interrupt into "initialization failed", which reads as if they were not installed."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield  # Python tells only its main thread of signals, and can put back only a handler of its own
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def solve(solver: Any, model: Any) -> Any:
    """`solver.solve(model)`. An interrupt stops the solver and is raised here."""
    found: list[Any] = []
    wrong: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            found.append(solver.solve(model))
        except BaseException as error:
            wrong.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=run, name="solver", daemon=True)
    try:
        thread.start()
        while not done.wait(PAUSE):
            pass
    except BaseException:
        _stop(solver, thread, done)
        raise
    if wrong:
        raise wrong[0]
    return found[0]


def _stop(solver: Any, thread: threading.Thread, done: threading.Event) -> None:
    """Wait until the solver has stopped: a thread that is within it when the program ends would abort the program."""
    pauses = 0
    while not done.wait(PAUSE):
        solver.stop_search()  # again and again: asked before it has begun, it does not hear
        pauses += 1
        if thread.ident is None and pauses > 10:
            return  # the interrupt came before there was a thread
