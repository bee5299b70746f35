"""What passes cost: time, memory and links, in one value that a flag, a file, a profile or a model can make.

A number is for a whole rank's layers: a schedule with v chunks a rank divides it by v, one with two paths uses it as it
is. A list is for equal, consecutive pieces of the model, first piece first: usually one number a stage. A schedule
with more stages than numbers cuts each piece evenly, one with fewer joins neighbours.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from stageloom.anatomy import Anatomy, Parts, anatomy
from stageloom.errors import InputError

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=False)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Pieces = Amount | Annotated[list[Amount], Field(min_length=1)]
Unit = Literal["s", "ms", "us"]
SECONDS: Final[dict[str, float]] = {"s": 1.0, "ms": 1e-3, "us": 1e-6}

Floats = NDArray[np.float64]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Link(_Model):
    """One directed link between two ranks that differs from the rest."""

    source: int = Field(alias="from", ge=0)
    target: int = Field(alias="to", ge=0)
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
    layers: int = Field(default=1, ge=1, le=10_000)
    sm_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
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
    stragglers: dict[Annotated[int, Field(ge=0)], Rate] = Field(default_factory=dict[int, float])
    activation_bytes: Pieces = 0.0
    w_share: Amount = 0.5
    parameter_bytes: Pieces = 0.0
    gradient_bytes: Pieces = 0.0
    optimizer_bytes: Pieces = 0.0
    tokens: Rate | None = None
    anatomy: ChunkAnatomy | None = None

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
        if self.overlap_time is not None and any(len(t) > 1 for t in times):
            raise ValueError("overlap_time is one number and F, B, W are lists; give overlap_fraction instead")
        if self.bandwidth is None and any(link.bandwidth for link in self.links) and not self.message_bytes:
            raise ValueError("links give a bandwidth but message_bytes is 0, so it would mean nothing")
        if self.message_bytes and self.bandwidth is None and not any(link.bandwidth for link in self.links):
            raise ValueError("message_bytes is given without a bandwidth (bytes a second), so it would mean nothing")
        return self

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
            f"costs: {key} has {len(given)} values and the schedule has {stages} stages; "
            f"give one number, {stages} numbers, or a number that divides {stages} or is a multiple of it"
        )

    def link_times(self, ranks: int) -> tuple[Floats, Floats]:
        """(latency, transfer) of one micro-batch's message, `[from rank, to rank]`, in time units."""
        latency = np.full((ranks, ranks), self.latency)
        bandwidth = np.full((ranks, ranks), np.inf if self.bandwidth is None else self.bandwidth)
        for at, link in enumerate(self.links):
            if max(link.source, link.target) >= ranks:
                raise InputError(
                    f"costs: links.{at}: from {link.source} to {link.target}; the schedule has ranks 0 to {ranks - 1}"
                )
            if link.latency is not None:
                latency[link.source, link.target] = link.latency
            if link.bandwidth is not None:
                bandwidth[link.source, link.target] = link.bandwidth
        transfer = self.message_bytes / bandwidth / (self.seconds or 1.0)
        np.fill_diagonal(latency, 0.0)
        np.fill_diagonal(transfer, 0.0)
        return latency, transfer

    def rank_factors(self, ranks: int) -> Floats:
        """The straggler factor of every rank."""
        factors = np.ones(ranks)
        for rank, factor in self.stragglers.items():
            if rank >= ranks:
                raise InputError(f"costs: stragglers.{rank}: the schedule has ranks 0 to {ranks - 1}")
            factors[rank] = factor
        return factors


def load_costs(path: str | Path, **override: Any) -> Costs:
    """Read costs from a YAML or JSON file; `override` replaces keys. Raises InputError naming file, key and value."""
    return costs_from(read_mapping(path), str(path), **override)


def read_mapping(path: str | Path) -> dict[str, Any]:
    """A YAML or JSON file whose top level is a mapping. Raises InputError naming file and line."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8 text; a YAML or JSON file is needed") from None
    try:
        data: object = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: line {error.lineno}, column {error.colno}: is not JSON: {error.msg}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}: " if mark is not None else ""
        raise InputError(f"{path}: {place}is not YAML: {getattr(error, 'problem', None) or error}") from None
    except RecursionError:
        raise InputError(f"{path}: is nested too deeply to be a cost file") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: holds no mapping; expected lines of `key: value`, such as `F: 1.0`")
    return {str(key): value for key, value in data.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def costs_from(data: dict[str, Any], place: str = "costs", **override: Any) -> Costs:
    """Costs from a mapping; keys given as None in `override` are left alone."""
    given = {key: value for key, value in override.items() if value is not None}
    merged = {**data, **given}
    if "overlap_time" in given:
        merged.pop("overlap_fraction", None)
    try:
        return Costs.model_validate(merged)
    except ValidationError as error:
        raise InputError(f"{place}: {_explain(error)}") from None


def _explain(error: ValidationError, key: str = "", model: type[_Model] | None = None) -> str:
    """The first thing wrong, as `key: what, got value`; `key` and `model` say where in the costs we are."""
    # A number-or-list key fails once as a number and once as a list: for a list or anything deep the latter says more.
    errors = error.errors()
    problem = max(errors, key=lambda e: (len(e["loc"]), isinstance(e["input"], list) and e["type"] != "float_type"))
    alternatives = ("list[", "constrained", "float", "[key]")
    where = [key] * bool(key) + [str(part) for part in problem["loc"] if not str(part).startswith(alternatives)]
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        within = model or (Costs if len(where) == 1 else Link)
        message = f"unknown key; known keys: {', '.join(f.alias or name for name, f in within.model_fields.items())}"
    value = problem.get("input")
    got = "" if isinstance(value, dict) or problem["type"] in ("extra_forbidden", "missing") else f", got {value!r}"
    return f"{'.'.join(where)}: {message}{got}" if where else message
