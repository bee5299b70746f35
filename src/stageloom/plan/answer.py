"""The answer: one value with the plan, what it was chosen from, and when to give it up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from stageloom.costs import Costs
from stageloom.errors import InputError
from stageloom.plan.alternatives import (
    Alternative,
    cut_of,
    nearest,
    neighbours,
    schedules_on,
    too_large,
)
from stageloom.plan.cluster import Cluster
from stageloom.plan.constants import Constants
from stageloom.plan.floors import Setup, set_up
from stageloom.plan.mesh import all_to_all, mesh, mixed_nodes
from stageloom.plan.model import Model
from stageloom.plan.predict import Prediction
from stageloom.plan.replicas import Replication, replication
from stageloom.plan.rollback import Rollback, rollback
from stageloom.plan.score import Scored, predicted
from stageloom.plan.search import SLACK, Found, Progress, searched
from stageloom.plan.shortage import shortage
from stageloom.plan.software import MODERN, Software
from stageloom.plan.space import Refusal, Space
from stageloom.plan.thumb import Disagreement, disagreements
from stageloom.plan.training import Training

TRILLION = 1e12


@dataclass(frozen=True)
class Plan:
    """A plan for one job. best: the chosen layout and schedule with its figures; prediction: with its timeline.

    tokens: that GPU-hours are for (the job's target, or a trillion). baseline: 1F1B in the same layout; baseline_best:
    1F1B in the layout that suits it best, None where it fits nowhere. same_layout: every schedule in this layout.
    alternatives: the nearest that lost; too_large: one that would be faster and does not fit. replication: where there
    are two replicas. rollback: None where nothing simpler fits. found: the search.
    """

    model: Model
    cluster: Cluster
    training: Training
    space: Space
    best: Scored
    prediction: Prediction
    tokens: float
    baseline: Scored | None
    baseline_best: Scored | None
    same_layout: tuple[Scored, ...]
    alternatives: tuple[Alternative, ...]
    too_large: Scored | None
    disagreements: tuple[Disagreement, ...]
    replication: Replication | None
    rollback: Rollback | None
    mesh: str
    mixed: str | None
    all_to_all: str | None
    found: Found

    def hours(self, seconds: float) -> float:
        """GPU-hours for `tokens` at this step time."""
        return seconds * self.cluster.gpus / 3600 * self.tokens / self.training.step_tokens

    @property
    def gpu_hours(self) -> float:
        return self.hours(self.best.seconds)

    @property
    def saved(self) -> float | None:
        """GPU-hours saved against 1F1B in the same layout (whether that fits or not); None where there is none."""
        return None if self.baseline is None else self.hours(self.baseline.seconds) - self.gpu_hours

    @property
    def limit(self) -> float:
        """Bytes of a GPU's memory."""
        return self.cluster.gpu.memory


def plan(
    model: Model,
    cluster: Cluster,
    training: Training,
    space: Space | None = None,
    constants: Constants | None = None,
    software: Software = MODERN,
    *,
    measured: Costs | None = None,
    slack: float = SLACK,
    workers: int = 1,
    progress: Callable[[Progress], None] | None = None,
) -> Plan:
    """The fastest plan that fits, explained. Arguments as for `search`.

    Raises Refusal with its `reason`: the model fits one GPU and a pipeline has not been asked for ("one GPU"), nothing
    fits ("memory"), the batch or other sizes cannot be cut ("batch", "sizes", "depth"), no schedule can be built.
    """
    space = Space() if space is None else space
    setup = set_up(model, cluster, training, constants, software, measured)
    try:
        found = searched(setup, space, slack=slack, workers=workers, progress=progress)
    except Refusal as refusal:
        if refusal.reason != "memory" or measured is not None:
            raise
        short = shortage(setup, space)
        raise (short if short.reason == "memory" else Refusal(short.reason, str(refusal))) from None
    best = found.best
    at = best.layout
    if space.pipeline is None and (at.tensor, at.pipeline, at.expert) == (1, 1, 1):
        raise _one_gpu(model, cluster, training, best)
    return _explained(setup, space, found)


def _explained(setup: Setup, space: Space, found: Found) -> Plan:
    best = found.best
    prediction = predicted(setup, best.layout, best.form, best.order)
    same = schedules_on(setup, cut_of(best), space)
    near = neighbours(setup, best, space)
    everything = (*found.scored, *same, *near)
    training = setup.training
    plain = _best_of_1f1b(setup, space)
    baseline = next((one for one in same if one.schedule == "1f1b"), None)
    return Plan(
        model=setup.model,
        cluster=setup.cluster,
        training=training,
        space=space,
        best=best,
        prediction=prediction,
        tokens=training.tokens or TRILLION,
        baseline=baseline,
        baseline_best=plain,
        same_layout=same,
        alternatives=nearest(best, everything),
        too_large=too_large(best, everything),
        disagreements=disagreements(best, everything, setup.cluster, lambda kept: _best_of(setup, kept(space))),
        replication=_replication(setup, best),
        rollback=rollback(setup, best, prediction, (*same, *([] if plain is None else [plain]))),
        mesh=mesh(best.layout, setup.cluster),
        mixed=mixed_nodes(setup.cluster, training),
        all_to_all=all_to_all(setup.model, setup.cluster, training, best.layout),
        found=found,
    )


def _best_of_1f1b(setup: Setup, space: Space) -> Scored | None:
    """1F1B in the layout that suits it best."""
    return _best_of(setup, replace(space, schedules=("1f1b",), chunks=None))


def _best_of(setup: Setup, space: Space) -> Scored | None:
    """The best plan of a part of the space; None where nothing in it fits."""
    try:
        return searched(setup, replace(space, optimised=0.0), slack=0.0).best
    except InputError:
        return None


def _replication(setup: Setup, best: Scored) -> Replication | None:
    if best.form.paths < 2 or setup.measured is not None:
        return None
    return replication(setup.model, setup.cluster, setup.training, best.layout, setup.constants, setup.software)


def _one_gpu(model: Model, cluster: Cluster, training: Training, best: Scored) -> Refusal:
    one = cluster.gpus == 1
    shared = "" if one or not training.zero else f" with ZeRO {training.zero} over {cluster.gpus:,} GPUs"
    limit = f"{cluster.gpu.memory / 1e9:.1f} GB"
    how = "no pipeline" if one else f"no pipeline: data parallelism over {cluster.gpus:,} GPUs"
    recompute = "" if best.layout.recompute == "none" else f", recompute {best.layout.recompute},"
    slower = "" if one else ", and no pipeline is faster; give --pp to plan one all the same"
    return Refusal(
        "one GPU",
        f"{model.name} fits one {cluster.gpu.name} ({best.memory / 1e9:.1f} of {limit}{shared}), "
        f"so it needs {how}{':' if one else ''} with micro-batches of {best.layout.microbatch}{recompute} a step takes "
        f"{best.seconds:.4g} s (MFU {100 * best.mfu:.1f} %){slower}",
    )
