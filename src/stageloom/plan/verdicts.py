"""Why classes of candidates lost: by tensor x pipeline, and by schedule."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from stageloom.plan.floors import Setup
from stageloom.plan.forms import Form
from stageloom.plan.score import Scored
from stageloom.plan.space import Cut


@dataclass(frozen=True, slots=True)
class Verdict:
    """A class of candidates. what: its name; best: its fastest that fits; floor: seconds, the least that those which
    were not simulated can take; least: bytes, the least that one which does not fit needs; refused: why it cannot be
    built, where it never can. reason: in words, the first of these that tells."""

    what: str
    best: Scored | None
    floor: float | None
    least: float | None
    refused: str | None
    reason: str


class _Class:
    def __init__(self) -> None:
        self.best: Scored | None = None
        self.floor: float | None = None
        self.least: float | None = None
        self.refused: str | None = None


class Verdicts:
    """Collects what happened to candidates."""

    def __init__(self) -> None:
        self.layouts: dict[tuple[int, int], _Class] = {}
        self.schedules: dict[str, _Class] = {}

    def scored(self, one: Scored) -> None:
        for each in self._both((one.layout.tensor, one.layout.pipeline), one.schedule):
            if not one.fits:
                each.least = _less(each.least, one.memory)
            elif each.best is None or one.place < each.best.place:
                each.best = one

    def slow(self, cut: Cut, form: Form | None, floor: float) -> None:
        for each in self._both(cut.group, None if form is None else form.label):
            each.floor = _less(each.floor, floor)

    def short(self, cut: Cut, form: Form | None, memory: float) -> None:
        for each in self._both(cut.group, None if form is None else form.label):
            each.least = _less(each.least, memory)

    def refused(self, form: Form, why: str) -> None:
        each = _of(self.schedules, form.label)
        each.refused = each.refused or why

    def _both(self, group: tuple[int, int], label: str | None) -> Iterable[_Class]:
        yield _of(self.layouts, group)
        if label is not None:
            yield _of(self.schedules, label)

    def by_layout(self, setup: Setup) -> tuple[Verdict, ...]:
        names = {group: f"TP {group[0]}, PP {group[1]}" for group in sorted(self.layouts)}
        return _told(self.layouts, names, setup)

    def by_schedule(self, setup: Setup) -> tuple[Verdict, ...]:
        return _told(self.schedules, {name: name for name in sorted(self.schedules)}, setup)

    def why_nothing(self, setup: Setup) -> str:
        refused = [f"{name}: {each.refused}" for name, each in self.schedules.items() if each.refused]
        sizes = [each.least for each in self.layouts.values() if each.least is not None]
        if not sizes and refused:
            return refused[0]
        least = min(sizes, default=0.0)
        return (
            f"no configuration fits: the least that was found needs {least / 1e9:.1f} GB a GPU, and "
            f"{setup.cluster.gpu.name} has {setup.cluster.gpu.memory / 1e9:.1f} GB"
        )


def _of(classes: dict[Any, _Class], key: Hashable) -> _Class:
    return classes.setdefault(key, _Class())


def _less(one: float | None, other: float) -> float:
    return other if one is None else min(one, other)


def _told(classes: dict[Any, _Class], names: dict[Any, str], setup: Setup) -> tuple[Verdict, ...]:
    """Verdicts, the fastest class first, then by floor, then what does not fit."""
    found = [_verdict(name, classes[key], setup) for key, name in names.items()]
    big = float("inf")
    return tuple(
        sorted(found, key=lambda v: (v.best.seconds if v.best else big, v.floor or big, v.least or big, v.what))
    )


def _verdict(name: str, one: _Class, setup: Setup) -> Verdict:
    limit = setup.cluster.gpu.memory
    if one.best is not None:
        reason = f"{one.best.seconds:.4g} s"
        if one.least is not None:
            reason += "; others do not fit"
    elif one.floor is not None:
        reason = f"not below {one.floor:.4g} s"
        if one.least is not None and one.least > limit:
            reason += "; others do not fit"
    elif one.least is not None:
        reason = f"needs {(one.least - limit) / 1e9:.1f} GB a GPU more than there are"
    else:
        reason = one.refused or "nothing to try"
    return Verdict(name, one.best, one.floor, one.least, one.refused, reason)
