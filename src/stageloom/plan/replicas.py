"""What the second replica of the weights costs where a schedule has two (DualPipe, Chimera)."""

from __future__ import annotations

from dataclasses import dataclass

from stageloom.placement import two_way
from stageloom.plan.cluster import Cluster
from stageloom.plan.constants import Constants, fitted
from stageloom.plan.cost import setting
from stageloom.plan.layout import Layout
from stageloom.plan.memory_stage import stage_bytes
from stageloom.plan.model import Model
from stageloom.plan.software import MODERN, Software
from stageloom.plan.training import Training


@dataclass(frozen=True, slots=True)
class Replication:
    """Bytes that one GPU holds more, on the mean over ranks, where each holds the mirrored rank's stage as well; and
    which parameters they are. Optimiser state that is sharded (ZeRO 1) is so over both replicas, and adds nothing.

    dense, routed: parameters of one replica on a GPU, without and of routed experts; share: of the GPU's memory.
    """

    parameters: float
    gradients: float
    optimizer: float
    dense: float
    routed: float
    share: float

    @property
    def extra(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def replication(
    model: Model,
    cluster: Cluster,
    training: Training,
    layout: Layout,
    constants: Constants | None = None,
    software: Software = MODERN,
) -> Replication:
    """The cost of two replicas in this layout (one chunk a rank)."""
    s = setting(model, cluster, training, layout, constants or fitted(), software)
    one, two = (stage_bytes(model, training, layout, s, paths) for paths in (1, 2))
    ranks = layout.pipeline
    sums: dict[str, float] = {}
    for key in ("parameters", "gradients", "optimizer"):
        both = sum(getattr(two[stage], key) for path in two_way(ranks).table for stage, _ in enumerate(path))
        sums[key] = (both - sum(getattr(stage, key) for stage in one)) / ranks
    extra = sum(sums.values())
    return Replication(
        parameters=sums["parameters"],
        gradients=sums["gradients"],
        optimizer=sums["optimizer"],
        dense=sum(stage.dense for stage in one) / ranks,
        routed=sum(stage.routed for stage in one) / ranks,
        share=extra / cluster.gpu.memory,
    )
