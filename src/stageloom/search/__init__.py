"""Searches for an order: the published ones, known by name like any schedule, and the optimiser.

`pose` a problem, `search` it (`search_pairs` where forwards may be overlapped with backwards), and make a schedule of
what was found with its `schedule(name)`.
"""

from stageloom.search.optimize import Outcome, Progress, search
from stageloom.search.pairs import search_pairs
from stageloom.search.problem import Problem, pose, to_schedule
from stageloom.search.published import SEARCHES

__all__ = ["SEARCHES", "Outcome", "Problem", "Progress", "pose", "search", "search_pairs", "to_schedule"]
