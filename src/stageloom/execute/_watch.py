"""What stands in for the parent of local workers where another launcher has started the ranks: signs of life go through
the store, the first rank reads them, and says in one message which rank failed first, at what and why.

Each rank has a watcher thread. It writes the rank's last sign, and the end of the rank where it is told to end. The
first rank's watcher ends the run where a rank has failed, is gone or gives no signs.
"""

# torch re-exports its stores without saying so.
# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NoReturn

import torch.distributed as dist

from stageloom.execute._failure import Died, Failure, first
from stageloom.execute._worker import At, Raised, keep_signs, last_sign, place_of, report_of

PERIOD: Final = 0.5  # seconds between two signs, where a store has no more than so many ranks to serve:
FEW: Final = 32
SETTLE: Final = 0.3  # seconds in which a failure before the one first heard of may still be reported
SECOND_HAND: Final = 6  # periods in which the cause of a broken connection may still be reported
PATIENCE: Final = 24  # periods in which the first rank tells of a failure, before another does
STATUS: Final = 2


@dataclass(frozen=True)
class _Sign:
    """A rank's last sign: which one, seconds since it named an op, the op, and where it is."""

    number: int
    age: float
    what: str
    at: At


class Watch:
    """Watches over one rank of a run from `start` to `stop`."""

    def __init__(self, rank: int, size: int, store: dist.Store, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self._store = store
        self._period = PERIOD * max(1.0, size / FEW)
        self._slot = keep_signs()
        self._main = threading.get_ident()
        self._stopped = threading.Event()
        self._failed = threading.Event()
        self._signs: dict[int, tuple[_Sign, float]] = {}  # on the first rank: the last of each rank, and since when
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="stageloom watch", daemon=True)

    def start(self) -> None:
        """To be called before any other thread is started, which would be ended by the signal that this one takes."""
        if hasattr(signal, "sigtimedwait"):
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        self._thread.start()

    def stop(self) -> None:
        """The run has ended well."""
        self._stopped.set()
        self._thread.join()
        if hasattr(signal, "sigtimedwait"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def fail(self, error: BaseException) -> NoReturn:
        """This rank has failed: tell the others. It does not return."""
        self._tell(report_of(error))
        self._failed.set()
        if self.rank == 0:
            self._thread.join()
        with suppress(Exception):  # the store may be gone
            until = time.monotonic() + PATIENCE * self._period
            while time.monotonic() < until:
                if self._store.check(["told"]):
                    os._exit(STATUS)
                time.sleep(0.05)
        # nobody else has told of it
        _complain(str(first([(self.rank, report_of(error))])))
        os._exit(STATUS)

    # ------------------------------------------------------------------------------------------------ the watcher

    def _run(self) -> None:
        number = 0
        while not self._stopped.is_set():
            number += 1
            try:
                self._sign(number)
                if self.rank == 0:
                    self._look()
            except (RuntimeError, OSError) as error:
                # The store is gone: so is the rank or launcher that holds it.
                if self._stopped.is_set() or self._failed.is_set():
                    return
                if self.rank == 0:
                    _complain(f"the run has ended: the store of its ranks is gone ({type(error).__name__})")
                os._exit(STATUS)
            if self._told_to_end(self._period):
                self._end()

    def _told_to_end(self, seconds: float) -> bool:
        """Sleep so long, or until the launcher ends this process."""
        if not hasattr(signal, "sigtimedwait"):
            self._stopped.wait(seconds)
            return False
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._stopped.is_set():
            if self.rank == 0 and self._failed.is_set():
                return False
            if signal.sigtimedwait({signal.SIGTERM}, min(left, 0.1)) is not None:
                return True
        return False

    def _end(self) -> NoReturn:
        """The launcher ends this process: because another rank is gone, most likely."""
        with suppress(Exception):
            if self.rank == 0:
                self._report()
            else:
                self._put(f"ended/{self.rank}")
        os._exit(STATUS)

    def _sign(self, number: int) -> None:
        when, what = last_sign(self._slot)
        frame = sys._current_frames()[self._main]  # pyright: ignore[reportPrivateUsage] (no other way)
        sign = _Sign(number, time.monotonic() - max(when, self._began), what, place_of(frame))
        self._put(f"sign/{self.rank}", pickle.dumps(sign))

    def _put(self, key: str, value: bytes = b"") -> None:
        self._store.set(key, value)  # pyright: ignore[reportArgumentType] (it takes bytes, and its stub says str)

    def _tell(self, report: Raised) -> None:
        with suppress(Exception):
            self._put(f"failed/{self.rank}", pickle.dumps(report))
            self._put("failed")

    # ---------------------------------------------------------------------------------------------- the first rank

    def _look(self) -> None:
        if self._store.check(["failed"]):
            self._report()
        now = time.monotonic()
        for rank in range(self.size):
            sign = self._sign_of(rank)
            if sign is not None and (rank not in self._signs or self._signs[rank][0].number != sign.number):
                self._signs[rank] = sign, now
        failure = self._silence(now)
        if failure is not None:
            self._finish(failure)

    def _silence(self, now: float) -> Failure | None:
        """The rank that hangs, if one does. One that waits for others is not to blame as long as one of them works."""
        silent = {rank: sign.age + now - since for rank, (sign, since) in self._signs.items()}
        overdue = [rank for rank, seconds in silent.items() if seconds > self.timeout]
        mute = [rank for rank in overdue if now - self._signs[rank][1] > self.timeout]
        busy = [rank for rank in overdue if rank not in mute and not self._signs[rank][0].at.waits]
        if not overdue or (not mute and not busy and len(overdue) < self.size):
            return None
        rank = max(mute or busy or overdue, key=lambda rank: silent[rank])
        sign = self._signs[rank][0]
        detail = "it does not answer" if rank in mute else sign.at.line
        return Failure(rank, sign.what, f"gave no sign for {self.timeout:g} s", "silent", detail)

    def _report(self) -> NoReturn:
        """A rank has failed or is gone: say which was the first."""
        heard = self._heard(SETTLE)
        if not any(isinstance(report, Raised) and not report.second_hand for _, report in heard):
            before = {rank: self._sign_of(rank) for rank in range(1, self.size)}
            heard = self._heard(SECOND_HAND * self._period)
            for rank, sign in before.items():
                if sign is not None and self._is_gone(rank, sign):
                    seen = [f"rank {by} was at {told.where}" for by, told in heard[:1] if told.where]
                    self._finish(Failure(rank, sign.what, "is gone", "died", "".join(seen)))
        if heard:
            self._finish(first(heard))
        os._exit(STATUS)

    def _heard(self, seconds: float) -> list[tuple[int, Raised | Died]]:
        """What ranks say of their failures in so many seconds, or until one knows its cause."""
        until = time.monotonic() + seconds
        while True:
            failed = [rank for rank in range(self.size) if self._store.check([f"failed/{rank}"])]
            heard = [(rank, pickle.loads(self._store.get(f"failed/{rank}"))) for rank in failed]
            if time.monotonic() > until or (seconds > SETTLE and not all(told.second_hand for _, told in heard)):
                return heard
            time.sleep(0.05)

    def _sign_of(self, rank: int) -> _Sign | None:
        return pickle.loads(self._store.get(f"sign/{rank}")) if self._store.check([f"sign/{rank}"]) else None

    def _is_gone(self, rank: int, before: _Sign) -> bool:
        """Has the rank neither told of a failure, nor of its end, nor given a sign since `before`?"""
        if any(self._store.check([f"{how}/{rank}"]) for how in ("failed", "ended")):
            return False
        after = self._sign_of(rank)
        return after is not None and after.number == before.number

    def _finish(self, failure: Failure) -> NoReturn:
        _complain(str(failure))
        with suppress(Exception):
            self._put("told")
            time.sleep(0.2)  # the others leave first; the launcher would end them
        os._exit(STATUS)


def _complain(message: str) -> None:
    with suppress(OSError):
        print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)
