"""Without PyTorch the tests of what needs it are left out, and pytest says so."""

from __future__ import annotations

from importlib.util import find_spec

HAS_TORCH = find_spec("torch") is not None
collect_ignore_glob = [] if HAS_TORCH else ["test_execute_*.py", "test_pytorch_orders.py"]


def pytest_report_header() -> str:
    return "PyTorch: there" if HAS_TORCH else "PyTorch: missing, so the tests of the runtime are left out"
