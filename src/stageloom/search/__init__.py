"""Searches for an order: the published ones, known by name like any schedule, and the optimiser."""

from stageloom.search.published import SEARCHES

__all__ = ["SEARCHES"]
