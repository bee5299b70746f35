"""Stageloom: the workbench for pipeline parallelism.

import stageloom as sl

schedule = sl.build("zb-h1", ranks=8, microbatches=32)
timeline = sl.simulate(schedule, sl.Costs(F=1, B=1, W=1, latency=0.05))
print(sl.measure(timeline).bubble_rate)
"""

from stageloom.compare import Comparison, compare
from stageloom.costs import Costs, load_costs
from stageloom.errors import ConstraintError, InputError, MissingExtra, ScheduleError, StageloomError
from stageloom.metrics import Metrics, critical_path, gaps, measure, memory_curve, rank_memory
from stageloom.op import Kind, Op
from stageloom.placement import Placement, line, loop, two_way, zigzag
from stageloom.schedule import Schedule, assemble, dumps, from_json, loads, to_json
from stageloom.schedules import Record, build, find, records
from stageloom.search import SEARCHES
from stageloom.simulate import Timeline, monte_carlo, simulate
from stageloom.tape import BW, EMPTY, B, F, Tape, W, alternate, in_slots, numbered
from stageloom.validate import Problem, problems

__version__ = "0.1.0"

__all__ = [
    "BW",
    "EMPTY",
    "SEARCHES",
    "B",
    "Comparison",
    "ConstraintError",
    "Costs",
    "F",
    "InputError",
    "Kind",
    "Metrics",
    "MissingExtra",
    "Op",
    "Placement",
    "Problem",
    "Record",
    "Schedule",
    "ScheduleError",
    "StageloomError",
    "Tape",
    "Timeline",
    "W",
    "alternate",
    "assemble",
    "build",
    "compare",
    "critical_path",
    "dumps",
    "find",
    "from_json",
    "gaps",
    "in_slots",
    "line",
    "load_costs",
    "loads",
    "loop",
    "measure",
    "memory_curve",
    "monte_carlo",
    "numbered",
    "problems",
    "rank_memory",
    "records",
    "simulate",
    "to_json",
    "two_way",
    "zigzag",
]
