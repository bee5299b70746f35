"""What a launch file is made from, and what it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from stageloom.errors import InputError
from stageloom.plan.cluster import Cluster
from stageloom.plan.model import Model
from stageloom.plan.training import Recompute, Training


class Layout(Protocol):
    """How a job is laid out over GPUs: sizes of the parallel groups, chunks a rank, sequences in a micro-batch.

    `layers[stage]` is the number of layers on each stage, in the order in which the model meets the stages. expert:
    over how many GPUs the routed experts of a layer are spread, taken out of the tensor and data groups.
    """

    @property
    def tensor(self) -> int: ...
    @property
    def pipeline(self) -> int: ...
    @property
    def data(self) -> int: ...
    @property
    def expert(self) -> int: ...
    @property
    def chunks(self) -> int: ...
    @property
    def microbatch(self) -> int: ...
    @property
    def zero(self) -> int: ...
    @property
    def recompute(self) -> Recompute | tuple[Recompute, ...]: ...
    @property
    def sequence_parallel(self) -> bool: ...
    @property
    def layers(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Job:
    """A plan as launch files need it; `schedule` is the schedule's name.

    Raises InputError where the numbers do not fit together: GPUs, layers, batch.
    """

    model: Model
    cluster: Cluster
    training: Training
    layout: Layout
    schedule: str

    def __post_init__(self) -> None:
        at, gpus = self.layout, self.layout.tensor * self.layout.pipeline * self.layout.data
        if gpus != self.cluster.gpus:
            raise InputError(
                f"tensor {at.tensor} x pipeline {at.pipeline} x data {at.data} is {gpus} GPUs; "
                f"{self.cluster.name} has {self.cluster.gpus}"
            )
        if len(at.layers) != at.pipeline * at.chunks or sum(at.layers) != len(self.model.layers):
            raise InputError(
                f"layers: {sum(at.layers)} on {len(at.layers)} stages; {self.model.name} has {len(self.model.layers)}, "
                f"to lie on pipeline {at.pipeline} x chunks {at.chunks} = {at.pipeline * at.chunks} stages"
            )
        if self.training.global_batch % (at.data * at.microbatch):
            raise InputError(
                f"global_batch: {self.training.global_batch} sequences are no multiple of data {at.data} x "
                f"micro-batch {at.microbatch}"
            )

    @property
    def microbatches(self) -> int:
        """Micro-batches in a step of one pipeline."""
        return self.training.global_batch // (self.layout.data * self.layout.microbatch)

    @property
    def even(self) -> bool:
        """Every stage has as many layers as every other."""
        return len(set(self.layout.layers)) == 1


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch file. notes: what it leaves open, or does otherwise than the plan, to be shown beside it."""

    framework: str
    file: str
    text: str
    notes: tuple[str, ...] = ()


def recomputed(job: Job) -> Recompute:
    """What is recomputed of every layer, for a framework that recomputes all alike."""
    words = job.layout.recompute
    return words if isinstance(words, str) else words[0]


def comments(notes: tuple[str, ...]) -> str:
    """Notes as the first lines of a file, so that they are still there when the screen is not."""
    return "".join(f"# {note}\n" for note in notes)


def refuse(framework: str, job: Job, reason: str | None) -> None:
    """Raise InputError where there is a reason why `framework` cannot run the job."""
    if reason is not None:
        raise InputError(f"{framework} cannot run {job.model.name} with {job.schedule}: {reason}")
