"""A solver that Ctrl-C can end: it has a thread of its own, and the one that Python tells of signals only waits."""
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import threading
from typing import Any, Final

PAUSE: Final = 0.05


def solve(solver: Any, model: Any) -> Any:
    """`solver.solve(model)`. An interrupt stops the solver and is raised here."""
    found: list[Any] = []
    wrong: list[BaseException] = []

    def run() -> None:
        try:
            found.append(solver.solve(model))
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=run, name="solver", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(PAUSE)
    except BaseException:
        while thread.is_alive():  # asked before it had begun, it would not hear
            solver.stop_search()
            thread.join(PAUSE)
        raise
    if wrong:
        raise wrong[0]
    return found[0]
