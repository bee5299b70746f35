"""Launch files of a plan, for the framework that is named."""

from __future__ import annotations

from typing import Final

from stageloom.errors import InputError
from stageloom.plan.answer import Plan
from stageloom.plan.launch import Job, Launch, megatron, torch_csv, torchtitan

FRAMEWORKS: Final = ("megatron", "torchtitan", "torch-csv")
RUN: Final = {"megatron": megatron.SCHEDULES}
"""Schedules that a framework has, where it takes no others."""


def launches(plan: Plan, framework: str) -> tuple[Launch, ...]:
    """The files that run a plan: one, or for torchtitan the TOML and the schedule's CSV beside it where it has no name
    for the schedule. Raises InputError with the reason where the framework cannot run it."""
    try:
        return _launches(plan, framework)
    except InputError as error:
        able = RUN.get(framework, ())
        if not able or plan.best.form.name in able:  # the schedule is not what stands in the way
            raise
        words = " --schedule ".join(able)
        raise InputError(f"{error}; plan for what it runs with --schedule {words}") from None


def _launches(plan: Plan, framework: str) -> tuple[Launch, ...]:
    best = plan.best
    job = Job(plan.model, plan.cluster, plan.training, best.layout, best.form.name)
    schedule = plan.prediction.timeline.schedule
    if framework == "megatron":
        return (megatron.launch(job),)
    if framework == "torch-csv":
        return (torch_csv.launch(job, schedule),)
    if framework != "torchtitan":
        raise InputError(f"{framework!r}: no launch file of this kind; there are {', '.join(FRAMEWORKS)}")
    if torchtitan.refusal(job) is None or best.layout.pipeline == 1:
        return (torchtitan.launch(job),)
    csv = torch_csv.launch(job, schedule)
    folded = torch_csv.folded(schedule.placement)
    return torchtitan.launch(job, csv.file, folded), csv
