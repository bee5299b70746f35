"""Schedule -> Program: what every rank executes, messages and gradient reductions included."""

from stageloom.lower.faults import Fault, problems
from stageloom.lower.lowering import lower
from stageloom.lower.program import STREAMS, Code, Instruction, Program

__all__ = ["STREAMS", "Code", "Fault", "Instruction", "Program", "lower", "problems"]
