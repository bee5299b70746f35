"""Can this schedule run to its end, and does it do every part of the work exactly once? All problems at once.

What is checked, by code:

    malformed   columns that do not fit together
    unknown     an op of a stage, micro-batch or slice that does not exist
    misplaced   an op on a rank that does not hold its stage
    missing     a part (F, B or W) of a micro-batch that no op does
    double      a part done again; BW does both B and W
    orphan      an op whose forerunner on its own stage is nowhere: a W without its B
    order       an op before what it waits for, on one rank
    pair-open, pair-chain, pair-self
                an overlap mark on a rank's last op; three ops overlapped; an op overlapped with what it waits for
    pair-cycle  an overlapped pair that waits for itself through other ranks
    deadlock    ranks that wait for one another in a circle
    version     weight versions of an asynchronous schedule that do not go together (rule in `versions`)
    fifo        sends="fifo": messages of one directed pair of ranks are not used in the order they are sent
    rendezvous  sends="blocking": ranks that wait for one another's send or receive in a circle
"""

from stageloom.validate.check import SENDS, Sends, problems, sound_on_ranks
from stageloom.validate.explain import explain
from stageloom.validate.problem import Problem

__all__ = ["SENDS", "Problem", "Sends", "explain", "problems", "sound_on_ranks"]
