"""Without PyTorch the tests of what needs it are left out, and pytest says so."""

from __future__ import annotations

import signal
from importlib.util import find_spec

HAS_TORCH = find_spec("torch") is not None
collect_ignore_glob = [] if HAS_TORCH else ["test_execute_*.py", "test_pytorch_orders.py"]

# A shell has the jobs in its background ignore Ctrl-C, and so would the programs that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    return "PyTorch: there" if HAS_TORCH else "PyTorch: missing, so the tests of the runtime are left out"
