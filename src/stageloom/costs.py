"""What passes cost: time, memory and links, in one value that a flag, a file, a profile or a model can make.

A number is for a whole rank's layers: a schedule with v chunks a rank divides it by v, one with two paths uses it as it
is. A list is for equal, consecutive pieces of the model, first piece first: usually one number a stage. A schedule
with more stages than numbers cuts each piece evenly, one with fewer joins neighbours.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from stageloom.anatomy import Anatomy, Parts, anatomy
from stageloom.errors import InputError
from stageloom.files import read_mapping, short


def _no_truth(value: object) -> object:
    """`yes`, `on` and `true` are no numbers, though Python would take them for one."""
    if isinstance(value, bool):
        raise ValueError(f"Input should be a number, not {str(value).lower()}")
    return value


def _number(value: object) -> object:
    """Nor is text, whatever it looks like."""
    if isinstance(value, str):
        raise ValueError("Input should be a valid number, not text")
    return _no_truth(value)


# The bounds keep sums and products of any of them within what a number can hold.
LARGEST: Final = 1e100
SMALLEST: Final = 1e-100


def _in_bounds(value: float) -> float:
    if value > LARGEST or 0 < value < SMALLEST:
        raise ValueError(f"Input should be 0 or from {SMALLEST:g} to {LARGEST:g}")
    return value


Amount = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(_number), AfterValidator(_in_bounds)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(_number), AfterValidator(_in_bounds)]
Whole = Annotated[int, Field(ge=0), BeforeValidator(_number)]
Rank = Annotated[int, Field(ge=0), BeforeValidator(_no_truth)]  # a key, which is text in JSON
Pieces = Amount | Annotated[list[Amount], Field(min_length=1)]
Unit = Literal["s", "ms", "us"]
SECONDS: Final[dict[str, float]] = {"s": 1.0, "ms": 1e-3, "us": 1e-6}

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Link(_Model):
    """One directed link between two ranks that differs from the rest."""

    source: Whole = Field(alias="from")
    target: Whole = Field(alias="to")
    latency: Amount | None = None
    bandwidth: Rate | None = None


class ChunkAnatomy(_Model):
    """A rank's layers as parts (see `stageloom.anatomy`): F, B, W and the overlapped pair are computed from them."""

    attention: Amount
    dispatch: Amount
    mlp: Amount
    combine: Amount
    attention_b: Amount | None = None
    attention_w: Amount | None = None
    mlp_b: Amount | None = None
    mlp_w: Amount | None = None
    dispatch_b: Amount | None = None
    combine_b: Amount | None = None
    layers: Annotated[int, Field(ge=1, le=10_000), BeforeValidator(_number)] = 1
    sm_share: Annotated[float, Field(ge=0, lt=1), BeforeValidator(_number)] = 0.0
    boundary: Amount = 0.0

    @cached_property
    def result(self) -> Anatomy:
        parts = Parts(**self.model_dump(exclude={"layers", "sm_share", "boundary"}))
        return anatomy(parts, layers=self.layers, sm_share=self.sm_share, boundary=self.boundary)


class Costs(_Model):
    """Times in one unit (`unit`, or any), memory in bytes, for one micro-batch.

    F, B, W: forward, input gradient, weight gradient; BW: both in one, B + W unless given.
    overlap_time: a forward overlapped with a full backward, on a whole rank's layers; or overlap_fraction of the sum.
    It may be less than the backward alone, where that waits for all-to-alls which the pair hides.
    latency: of every message between two ranks; bandwidth: bytes a second (a time unit where `unit` is not given);
    message_bytes: what one micro-batch sends across a stage boundary; occupancy: messages of one directed link queue
    behind one another while they are being sent (else a link carries any number at once); blocking: the sender stands
    still until its message has arrived. links: exceptions, by directed pair of ranks.
    overhead: added to every op, for starting it. stragglers: a factor on all times of a rank.
    activation_bytes: allocated by F; w_share: the part of them that only W frees (above 1: B allocates more than it
    frees, as PyTorch's graph split was measured to do).
    parameter_bytes, gradient_bytes, optimizer_bytes: of a rank's layers; a rank with two paths holds them twice.
    tokens: tokens of a micro-batch.
    Raises InputError naming the key and value that is wrong.
    """

    unit: Unit | None = None
    F: Pieces = 1.0
    B: Pieces = 1.0
    W: Pieces = 1.0
    BW: Pieces | None = None
    overlap_time: Rate | None = None
    overlap_fraction: Rate | None = None
    latency: Amount = 0.0
    bandwidth: Rate | None = None
    message_bytes: Amount = 0.0
    occupancy: bool = False
    blocking: bool = False
    links: tuple[Link, ...] = ()
    overhead: Amount = 0.0
    stragglers: dict[Rank, Rate] = Field(default_factory=dict[int, float])
    activation_bytes: Pieces = 0.0
    w_share: Annotated[float, Field(ge=0, le=100), BeforeValidator(_number)] = 0.5
    parameter_bytes: Pieces = 0.0
    gradient_bytes: Pieces = 0.0
    optimizer_bytes: Pieces = 0.0
    tokens: Rate | None = None
    anatomy: ChunkAnatomy | None = None

    if not TYPE_CHECKING:  # type checkers see the fields; at run time a wrong one is an InputError

        def __init__(self, **data: Any) -> None:
            try:
                super().__init__(**data)
            except ValidationError as error:
                raise InputError(f"costs: {_explain(error)}") from None

    @model_validator(mode="before")
    @classmethod
    def _from_anatomy(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not data.get("anatomy"):  # pyright: ignore[reportUnknownMemberType]
            return data  # pyright: ignore[reportUnknownVariableType]
        given: dict[str, Any] = dict(data)  # pyright: ignore[reportUnknownArgumentType]
        clash = sorted({"F", "B", "W", "BW", "overlap_time", "overlap_fraction"} & given.keys())
        if clash:
            raise ValueError(f"anatomy gives the times of F, B, W and the pair, so {clash[0]} cannot be given as well")
        chunk = given["anatomy"]
        try:
            chunk = chunk if isinstance(chunk, ChunkAnatomy) else ChunkAnatomy.model_validate(chunk)
        except ValidationError as error:
            raise ValueError(_explain(error, "anatomy", ChunkAnatomy)) from None
        result = chunk.result
        given |= {"anatomy": chunk, "F": result.forward, "B": result.backward_input, "W": result.backward_weight}
        return given | {"overlap_time": result.pair}

    @model_validator(mode="after")
    def _check(self) -> Costs:
        if self.overlap_time is not None and self.overlap_fraction is not None:
            raise ValueError("overlap_time and overlap_fraction say the same thing twice; give one of them")
        times = [np.atleast_1d(np.asarray(value, dtype=float)) for value in (self.F, self.B, self.W)]
        backward = np.atleast_1d(np.asarray(self.BW, dtype=float)) if self.BW is not None else None
        if not any(t.any() for t in times) and (backward is None or not backward.any()):
            raise ValueError("F, B and W are all 0, so there is nothing to simulate; give at least one of them a time")
        if self.overlap_time is not None and any(isinstance(x, list) for x in (self.F, self.B, self.W, self.BW)):
            raise ValueError("overlap_time is one number and F, B, W or BW is a list; give overlap_fraction instead")
        self._check_links()
        return self

    def _check_links(self) -> None:
        edges = [(link.source, link.target) for link in self.links]
        for at, (source, target) in enumerate(edges):
            if source == target:
                raise ValueError(f"links.{at}: goes from rank {source} to itself; a link joins two ranks")
            if (source, target) in edges[:at]:
                raise ValueError(f"links.{at}: the link from rank {source} to {target} is given twice")
        with_bandwidth = self.bandwidth is not None or any(link.bandwidth for link in self.links)
        if with_bandwidth and not self.message_bytes:
            raise ValueError("a bandwidth is given but message_bytes is 0, so it would mean nothing")
        if self.message_bytes and not with_bandwidth:
            raise ValueError("message_bytes is given without a bandwidth (bytes a second), so it would mean nothing")

    @cached_property
    def place(self) -> str:
        """Where they come from, as an error says it: a file, or just "costs"."""
        return "costs"

    @property
    def seconds(self) -> float | None:
        """Seconds in one time unit, or None where no unit is given."""
        return None if self.unit is None else SECONDS[self.unit]

    def overlap_factor(self) -> float:
        """Time of an overlapped pair over the sum of its two ops."""
        if self.overlap_fraction is not None:
            return self.overlap_fraction
        if self.overlap_time is None:
            return 1.0
        forward, backward, weight = (float(np.ravel(x)[0]) for x in (self.F, self.B, self.W))
        full = backward + weight if self.BW is None else float(np.ravel(self.BW)[0])
        return self.overlap_time / (forward + full) if forward + full else 1.0

    def stage_times(self, stages: int, ranks: int) -> Floats:
        """`times[kind, stage]` of one micro-batch, by `op.Kind`. Raises InputError where a list does not fit."""
        table = np.empty((4, stages))
        for row, key in enumerate(("F", "B", "W")):
            table[row] = self.pieces(key, stages, ranks)
        table[3] = table[1] + table[2] if self.BW is None else self.pieces("BW", stages, ranks)
        return table

    def pieces(self, key: str, stages: int, ranks: int) -> Floats:
        """The values of `key` for every stage: a number is a rank's, a list is cut or joined to `stages` values."""
        value = getattr(self, key)
        if not isinstance(value, list):
            return np.full(stages, value * ranks / stages)
        given = np.asarray(value, dtype=float)
        if stages % len(given) == 0:
            finer = stages // len(given)
            return np.repeat(given / finer, finer)
        if len(given) % stages == 0:
            return given.reshape(stages, -1).sum(axis=1)
        raise InputError(
            f"{self.place}: {key} has {len(given)} values and the schedule has {stages} stages; "
            f"give one number, {stages} numbers, or a number that divides {stages} or is a multiple of it"
        )

    def link_times(self, ranks: int, source: Ints, target: Ints) -> tuple[Floats, Floats]:
        """(latency, transfer) of one micro-batch's message from rank source[i] to rank target[i], in time units.

        Both are 0 where the two are one rank. Raises InputError for a link between ranks that are not there.
        """
        apart = source != target
        latency = np.where(apart, self.latency, 0.0)
        second = self.message_bytes / (self.seconds or 1.0)
        transfer = np.where(apart, 0.0 if self.bandwidth is None else second / self.bandwidth, 0.0)
        for at, link in enumerate(self.links):
            if max(link.source, link.target) >= ranks:
                raise InputError(
                    f"{self.place}: links.{at}: from {link.source} to {link.target}; the schedule has ranks 0 to "
                    f"{ranks - 1}: take the link out, or use more ranks"
                )
            here = (source == link.source) & (target == link.target)
            if link.latency is not None:
                latency[here] = link.latency
            if link.bandwidth is not None:
                transfer[here] = second / link.bandwidth
        return latency, transfer

    def rank_factors(self, ranks: int) -> Floats:
        """The straggler factor of every rank."""
        factors = np.ones(ranks)
        for rank, factor in self.stragglers.items():
            if rank >= ranks:
                raise InputError(f"{self.place}: stragglers.{rank}: the schedule has ranks 0 to {ranks - 1}")
            factors[rank] = factor
        return factors


def load_costs(path: str | Path, **override: Any) -> Costs:
    """Read costs from a YAML or JSON file; `override` replaces keys. Raises InputError naming file, key and value."""
    return costs_from(read_mapping(path), str(path), **override)


def costs_from(data: dict[str, Any], place: str = "costs", **override: Any) -> Costs:
    """Costs from a mapping; keys given as None in `override` are left alone."""
    given = {key: value for key, value in override.items() if value is not None}
    merged = {**data, **given}
    if "overlap_time" in given:
        merged.pop("overlap_fraction", None)
    try:
        costs = Costs(**merged)
    except InputError as error:
        raise InputError(f"{place}{str(error).removeprefix('costs')}") from None
    vars(costs)["place"] = place  # as a cached property keeps it: no key of a file, and no part of equality
    return costs


def _explain(error: ValidationError, key: str = "", model: type[_Model] | None = None) -> str:
    """The first thing wrong, as `key: what, got value`; `key` and `model` say where in the costs we are."""
    # A number-or-list key fails once as a number and once as a list: for a list or anything deep the latter says more.
    errors = error.errors()
    problem = max(errors, key=lambda e: (len(e["loc"]), isinstance(e["input"], list) and e["type"] != "float_type"))
    where = [key] * bool(key) + [str(part) for part in problem["loc"] if _is_key(part)]
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        within = model or (Costs if len(where) == 1 else Link)
        message = f"unknown key; known keys: {', '.join(f.alias or name for name, f in within.model_fields.items())}"
    value = problem.get("input")
    got = (
        ""
        if isinstance(value, dict) or problem["type"] in ("extra_forbidden", "missing")
        else f", got {short(value, 80)}"
    )
    return f"{'.'.join(where)}: {message}{got}" if where else message


def _is_key(part: object) -> bool:
    """A key or position of the file, rather than pydantic's name for one way to read a value."""
    return isinstance(part, int) or (part != "float" and str(part).isidentifier())
