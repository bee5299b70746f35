"""Searches for an order: the published ones, known by name like any schedule, and the optimiser.

`pose` a problem, `search` it, and make a schedule of what was found with `to_schedule`.
"""

from stageloom.search.optimize import Outcome, Progress, search
from stageloom.search.problem import Problem, pose, to_schedule
from stageloom.search.published import SEARCHES

__all__ = ["SEARCHES", "Outcome", "Problem", "Progress", "pose", "search", "to_schedule"]
