"""Timeline -> numbers: bubble, utilisation, memory, critical path, and the cause of every gap."""

from stageloom.metrics.idle import Gaps, Window, gaps, whole_windows
from stageloom.metrics.measure import Metrics, critical_path, measure
from stageloom.metrics.memory import MemoryCurve, RankMemory, memory_curve, rank_memory, weight_versions
from stageloom.metrics.path import Step
from stageloom.metrics.survey import CAUSES

__all__ = [
    "CAUSES",
    "Gaps",
    "MemoryCurve",
    "Metrics",
    "RankMemory",
    "Step",
    "Window",
    "critical_path",
    "gaps",
    "measure",
    "memory_curve",
    "rank_memory",
    "weight_versions",
    "whole_windows",
]
