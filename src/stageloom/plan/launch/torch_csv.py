"""PyTorch's schedule CSV for a plan: what torch.distributed.pipelining runs where no framework has the schedule by
name.
"""

from __future__ import annotations

from typing import Final

from stageloom.formats.torch_csv import dumps, refusal
from stageloom.placement import Placement, zigzag
from stageloom.plan.launch.job import Job, Launch, refuse
from stageloom.schedule import Schedule

FRAMEWORK: Final = "PyTorch"


def launch(job: Job, schedule: Schedule) -> Launch:
    """The CSV of `schedule`, which is the job's, built. Raises InputError with the reason where PyTorch cannot run
    it.
    """
    refuse(FRAMEWORK, job, refusal(schedule) or _mismatch(job, schedule))
    notes = ("read by torch.distributed.pipelining.schedules._PipelineScheduleRuntime._load_csv(file, 'compute_only')",)
    return Launch(FRAMEWORK, "schedule.csv", dumps(schedule), notes)


def folded(placement: Placement) -> bool:
    """Whether stages lie in a V: two a rank, there and back."""
    return placement == zigzag(placement.ranks, 2) and placement.ranks > 1


def _mismatch(job: Job, schedule: Schedule) -> str | None:
    if (schedule.ranks, schedule.stages) != (job.layout.pipeline, job.layout.pipeline * job.layout.chunks):
        return f"the schedule has {schedule.stages} stages on {schedule.ranks} ranks, the plan {len(job.layout.layers)}"
    if schedule.microbatches != job.microbatches:
        return f"the schedule has {schedule.microbatches} micro-batches, and the plan {job.microbatches}"
    return None
