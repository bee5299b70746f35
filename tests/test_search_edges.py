"""The optimiser at the edges: ops of no time, stages without layers, as little memory as can be, and Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import stageloom as sl
from stageloom.placement import Placement
from stageloom.search.bounds import lower_bound, smallest_limits
from stageloom.search.limits import check_limits
from stageloom.search.optimize import search
from stageloom.search.order import evaluate
from stageloom.search.problem import Problem, pose, to_schedule
from stageloom.search.serial import serial
from stageloom.search.settled import checked


@pytest.mark.parametrize("placement", [sl.line(4), sl.zigzag(4, 2), sl.two_way(4)])
@pytest.mark.parametrize(
    ("at", "in_bytes"), [("F", False), ("B", True), ("BW", False), ("FW", True), ("holes", False), ("holes", True)]
)
def test_ops_that_take_no_time_and_stages_that_hold_nothing(placement: Placement, at: str, in_bytes: bool) -> None:
    times: dict[str, object] = {kind: 0.0 if kind in at else 1.0 for kind in "FBW"}
    if at == "holes":
        times = {kind: [1.0, 0.0, 0.0, 0.0] for kind in "FBW"}
    costs = sl.Costs(**times, activation_bytes=[3.0, 0.0, 1.0, 0.0])
    problem = pose(placement, 8, costs, **({"limit_bytes": 9.0} if in_bytes else {"limit": 2.0}))
    for objective in ("makespan", "cost"):
        found = search(problem, objective=objective, seconds=0.02)
        assert lower_bound(problem, objective) <= found.best * (1 + 1e-9)
    assert sl.problems(checked(found)[0]) == []


def least(placement: Placement, microbatches: int, costs: sl.Costs) -> Problem:
    """With just the memory that the search says is feasible."""
    free = pose(placement, microbatches, costs)
    need = smallest_limits(free) / free.unit
    return pose(placement, microbatches, costs, limit=need.tolist())


@pytest.mark.parametrize("placement", [sl.line(3), sl.zigzag(3, 2), sl.loop(4, 3), sl.two_way(2), sl.two_way(4)])
@pytest.mark.parametrize("w_share", [0.5, 1.7])
def test_with_as_little_memory_as_can_be_micro_batches_go_one_by_one(placement: Placement, w_share: float) -> None:
    problem = least(placement, 5, sl.Costs(F=1.1, latency=0.1, w_share=w_share))
    check_limits(problem)
    assert evaluate(problem, serial(problem)) is not None
    assert sl.problems(to_schedule(problem, serial(problem), "one by one")) == []
    found = search(problem, seconds=0.02)
    peaks = np.array(checked(found)[1].peak_activations)
    assert (peaks <= problem.limit / problem.unit + 1e-9).all()


def test_ctrl_c_ends_the_exact_search_at_once() -> None:
    sizes = ["-p", "3", "-m", "5", "--placement", "v", "--memory", "0.67"]
    words = ["optimize", *sizes, "--f", "1.3", "--w", "0.7", "--seconds", "9000"]
    program = f"""
import sys
from stageloom.cli import main
from stageloom.search import steps

solve = steps.exact.solve_all

def told(*arguments, **more):
    print("solving", flush=True)
    return solve(*arguments, **more)

steps.exact.solve_all = told
# What comes before the exact solver has had its turn.
steps.climb.__code__ = steps.anneal.__code__ = (lambda run: None).__code__
sys.argv[1:] = {words!r}
main()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        late = threading.Timer(120, process.kill)
        late.start()
        assert process.stdout is not None
        assert process.stdout.readline() == "solving\n"
        time.sleep(0.5)
        began = time.perf_counter()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        late.cancel()
    assert process.returncode == 130
    assert time.perf_counter() - began < 10  # it has been given 20 s of effort


def test_ctrl_c_while_the_solver_is_being_imported_is_not_taken_for_a_missing_solver() -> None:
    """Within the start of a compiled module an interrupt becomes an ImportError; the search would go on without it."""
    program = """
import signal, sys
from stageloom.search import exact

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "ortools.util.python.sorted_interval_list":
            print("importing", flush=True)
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
try:
    exact.load()
except KeyboardInterrupt:
    print("interrupted")
assert exact.load() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "importing\ninterrupted\n"), done.stderr
