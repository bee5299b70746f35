"""The task of `stageloom profile` on every rank: measure the stages of the model that `stageloom run` trains, or those
of a decoder of transformers that a configuration file describes."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# (torch leaks unknown types, and transformers is known by names only)
from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stageloom.errors import InputError
from stageloom.execute.device_choice import settle
from stageloom.execute.language import bytes_of_library, language_model, next_byte_loss
from stageloom.execute.partition import DECODERS, split
from stageloom.execute.profile import Profile, profile
from stageloom.execute.progress import Line
from stageloom.execute.training import Work, data_of, optimizer_of, stages_of
from stageloom.execute.workers import Seat, doing
from stageloom.files import read_mapping
from stageloom.schedule import Schedule


@dataclass(frozen=True)
class Decoder:
    """A decoder of transformers with random weights: what its configuration file says."""

    file: str
    settings: dict[str, Any]


def read_decoder(file: Path, schedule: Schedule, context: int) -> Decoder:
    """The decoder that a config.json describes. Raises InputError where it is none of `partition.DECODERS`, or does not
    fit the schedule or the context."""
    settings = read_mapping(file)
    names: object = settings.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in DECODERS:
        raise InputError(f"{file}: architectures is {names}; expected one of {', '.join(sorted(DECODERS))}")
    if find_spec("transformers") is None:
        raise InputError(f"{file}: describes a model of transformers, which is not installed: pip install transformers")
    found = Decoder(str(file), settings)
    config = _configuration(found)
    longest: int = getattr(config, "max_position_embeddings", context)
    if context > longest:
        raise InputError(f"--context {context}: {file} allows up to {longest} positions")
    layers: int = config.num_hidden_layers
    if layers < schedule.stages:
        raise InputError(f"{file}: {layers} layers are too few for {schedule.name}'s {schedule.stages} stages")
    if schedule.sequence:
        raise InputError(f"{schedule.name}: decoders of transformers take whole sequences; use one without slices")
    return found


def _configuration(decoder: Decoder) -> Any:
    import transformers

    name = decoder.settings["architectures"][0]
    kind: Any = getattr(transformers, name).config_class
    try:
        return kind(**{key: value for key, value in decoder.settings.items() if key != "model_type"})
    except Exception as error:
        raise InputError(f"{decoder.file}: is no configuration of {name}: {' '.join(str(error).split())}") from None


def measure(seat: Seat, work: Work, decoder: Decoder | None, repeats: int, show: bool) -> Profile:
    """Measure this rank's stages, all ranks at once."""
    schedule = work.schedule
    device, group = settle(seat, work.device)
    if decoder is None:
        model = language_model(work.config, work.seed, getattr(torch, work.dtype))
        stages = stages_of(work, seat.rank, model)
        inputs, targets = data_of(work, bytes_of_library(work.data_bytes), 0)
    else:
        stages, vocabulary = _stages(seat, work, decoder)
        inputs, targets = _tokens(work, vocabulary)
    line = Line(show and seat.rank == 0)
    try:
        return profile(
            {key: stage.to(device) for key, stage in stages.items()},
            inputs.to(device),
            next_byte_loss,
            targets.to(device),
            schedule=schedule,
            group=group,
            repeats=repeats,
            optimizer=optimizer_of(work),
            tokens=work.size * work.config.context,
            on_task=doing,
            on_step=lambda done, of: line.at(done, of, "measuring steps"),
        )
    finally:
        line.end()


def _stages(seat: Seat, work: Work, decoder: Decoder) -> tuple[dict[tuple[int, int], nn.Module], int]:
    """This rank's stages, and the size of the vocabulary.

    The whole model is made by one rank after the other, so that it need not fit in memory once a rank.
    """
    import transformers

    config = _configuration(decoder)
    stages = work.schedule.stages
    counts = [b - a for a, b in pairwise(stage * config.num_hidden_layers // stages for stage in range(stages + 1))]
    found: dict[tuple[int, int], nn.Module] = {}
    for rank in range(seat.size):
        if rank == seat.rank:
            torch.manual_seed(work.seed)
            model = getattr(transformers, decoder.settings["architectures"][0])(config).to(getattr(torch, work.dtype))
            for path, own in enumerate(work.schedule.placement.stages_of[rank]):
                parts = split(model, counts) if own else []
                found |= {(path, stage): parts[stage].train() for stage in own}
            del model
        dist.barrier(seat.group)
    return found, int(config.vocab_size)


def _tokens(work: Work, vocabulary: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(work.seed)
    shape = (work.schedule.microbatches * work.size, work.config.context + 1)
    tokens = torch.randint(vocabulary, shape, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
