"""Local worker processes that run a task together, one rank each, in a Gloo process group.

    def task(seat, number):                # seat: a `Seat`, this rank's place
        total = torch.tensor(seat.rank * number)
        torch.distributed.all_reduce(total, group=seat.group)
        return int(total)

    if __name__ == "__main__":
        sums = launch(task, 4, 10)         # task(seat, 10) on ranks 0..3: what they returned, by rank
        with Pool(4) as pool:              # for more than one run
            sums = pool.run(task, 10)
            pool.run(task, 10, size=2)     # the same processes, ranks 0 and 1

Whatever goes wrong on one rank ends the run on all of them, with one `Failure` that names the rank that failed first,
the op it had in hand (see `doing`) and why. The workers end with it, and the next run starts new ones.

A task and its arguments are pickled, so a task is a function that a worker can import. A script that starts workers
does so below `if __name__ == "__main__":`, since they import it as well.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from stageloom.errors import InputError
from stageloom.execute._crew import Crew
from stageloom.execute._failure import Failure
from stageloom.execute._worker import Seat, doing, one_line

__all__ = ["Failure", "Pool", "Seat", "doing", "launch"]

T = TypeVar("T")


class Pool:
    """`size` worker processes, started once and used for run after run; the first starts take a few seconds.

    timeout   seconds a rank may go without a sign (the start of the task, a `doing`, its end) before the run fails;
              one that waits for another rank is given as long as any rank still gives signs
    threads   torch's threads in each worker
    """

    def __init__(self, size: int, *, timeout: float = 60.0, threads: int = 1) -> None:
        if size < 1:
            raise InputError(f"a pool needs at least 1 worker, not {size}")
        if not timeout > 0:
            raise InputError(f"the timeout must be above 0 seconds, not {timeout}")
        if threads < 1:
            raise InputError(f"a worker needs at least 1 thread, not {threads}")
        self.size = size
        self.timeout = timeout
        self.threads = threads
        self._one_at_a_time = threading.Lock()
        self._closed = False
        self._crew: Crew | None = Crew(size, timeout, threads)

    def run(self, task: Callable[..., T], *args: object, size: int | None = None) -> list[T]:
        """task(seat, *args) on ranks 0..size-1 (default: all) at once: what they returned, by rank.

        `seat` is a `Seat`: its rank, how many there are, and the process group of this run (also torch's default one).
        Task, arguments and results are pickled; tensors that come back are copies. Raises Failure, with rank, op and
        cause, where one rank fails; InputError for a size that the pool has not.
        """
        size = self.size if size is None else size
        if not 1 <= size <= self.size:
            raise InputError(f"a pool of {self.size} workers runs 1 to {self.size} ranks, not {size}")
        try:
            body = pickle.dumps((task, args))
        except Exception as error:
            raise Failure(None, "sending the task", one_line(error)) from error
        with self._one_at_a_time:
            if self._closed:
                raise InputError("this pool is closed: make a new one")
            if self._crew is not None and not self._crew.alive():
                self._end()
            if self._crew is None:
                self._crew = Crew(self.size, self.timeout, self.threads)
            try:
                return self._crew.run(body, size)
            except BaseException:  # Ctrl-C too: workers in the middle of a task are of no further use
                self._end()
                raise

    def close(self) -> None:
        """End the workers, at once and without their exit handlers. A second call does nothing."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.end()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def launch(task: Callable[..., T], size: int, *args: object, timeout: float = 60.0, threads: int = 1) -> list[T]:
    """task(seat, *args) on `size` local processes, one rank each, that end with it: what they returned, by rank.

    `seat`, `timeout` and `threads` are those of `Pool`, and so is what it raises. For one run after the other a Pool
    starts its processes only once. From a script it is called below `if __name__ == "__main__":`.
    """
    with Pool(size, timeout=timeout, threads=threads) as pool:
        return pool.run(task, *args)
