"""Launch files: what another framework is given to run a plan, or the reason why it cannot."""

from stageloom.plan.launch.job import Job, Launch, Layout

__all__ = ["Job", "Launch", "Layout"]
