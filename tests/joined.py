"""What torchrun starts in test_execute_torchrun.py: training in which a rank fails as the argument says."""

from __future__ import annotations

import os
import signal
import sys
import time

import stageloom as sl
from stageloom.execute import training
from stageloom.execute.joining import invitation, join
from stageloom.execute.language import Config
from stageloom.execute.training import Trained, Work, train
from stageloom.execute.workers import Seat, doing

OP = 9  # at which the fault comes, counted in names of ops


def faulty(seat: Seat, work: Work, how: str, victim: int) -> Trained:
    seen = 0

    def see(what: str) -> None:
        nonlocal seen
        doing(what)
        seen += 1
        if seat.rank != victim or seen != OP:
            return
        if how == "raise":
            raise ValueError("no such shape")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            time.sleep(600)

    training.doing = see
    return train(seat, work, None, 1, False, False)


def main() -> None:
    how, victim, timeout = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    invited = invitation()
    assert invited is not None
    config = Config(layers=2, width=16, heads=2, context=16)
    work = Work(sl.build("zb-h1", invited.size, 4), config, steps=3, data_bytes=100_000)
    trained = join(invited, faulty, work, how, victim, timeout=timeout)
    assert (trained is not None) == (invited.rank == 0)
    if trained is not None:
        print("losses", *trained[0].losses)


if __name__ == "__main__":
    main()
