"""Split a model into stages whose parameters keep the names they have in the unsplit model.

    split(model, [3, 4, 3])                                 # an nn.Sequential: counts of its children
    split(model, 2, layers="blocks", before=["embed"], after=["norm", "head"])
    split(LlamaForCausalLM(config), [8, 8, 0])              # a decoder of transformers: counts of its layers

A stage takes the tensor that the stage before returned, and returns one tensor. Stages hold the model's own parameters,
but copies of its modules and buffers: moving or changing one stage leaves the other stages and the model alone. A
parameter that several stages use is the model's own in the first of them and a copy in the others: `tied` lists such
groups, and whoever trains the stages gives every member of a group the sum of the group's gradients.
"""

# transformers' models are known by the names of their classes and attributes only, and torch leaks unknown types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import torch
from torch import Tensor, nn

from stageloom.errors import InputError
from stageloom.execute.language import StageSequence


@dataclass(frozen=True, slots=True)
class _Parts:
    """Names of the modules that a model calls one after the other; `layers` may be divided between stages."""

    before: tuple[str, ...]
    layers: tuple[str, ...]
    after: tuple[str, ...]

    def of_stages(self, counts: Sequence[int]) -> list[list[str]]:
        rest = iter(self.layers)
        stages = [list(islice(rest, count)) for count in counts]
        stages[0][:0] = self.before
        stages[-1] += self.after
        return stages


def split(
    model: nn.Module,
    layers_per_stage: Sequence[int] | int,
    *,
    layers: str | None = None,
    before: Sequence[str] = (),
    after: Sequence[str] = (),
) -> list[nn.Module]:
    """The stages of `model`, with so many layers each: one count a stage, or one for all. A count may be 0.

    An nn.Sequential and the decoders of transformers in `DECODERS` are known. For another model `layers` names its
    nn.ModuleList, and `before` and `after` the modules that its forward calls before and after them, tensor to tensor.
    A decoder's first stage also has the embedding and its last one the norm and the head.
    """
    family = None if layers is not None else DECODERS.get(_transformers_class(model))
    parts = _parts(model, family, layers, tuple(before), tuple(after))
    names_of_stages = parts.of_stages(_counts(layers_per_stage, len(parts.layers)))
    owners = _owners(model, names_of_stages)
    ties = _ties(model)

    stages: list[nn.Module] = []
    for index, names in enumerate(names_of_stages):
        # Whatever is in the memo stands for its own copy: deepcopy then makes new modules around the same parameters.
        memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
        for group in ties:
            users = {owners[name] for name in group}
            if index in users and index > min(users):
                del memo[id(model.get_parameter(group[0]))]
        twin = copy.deepcopy(model, memo)
        if family is None or not names:
            stages.append(StageSequence([(name, twin.get_submodule(name)) for name in names]))
        else:
            stages.append(DecoderStage(twin, family, names, first=index == 0, last=names is names_of_stages[-1]))
        stages[-1].ties = ties  # pyright: ignore[reportArgumentType]
    return stages


def _counts(layers_per_stage: Sequence[int] | int, layers: int) -> list[int]:
    if isinstance(layers_per_stage, int):
        if layers_per_stage < 1 or layers == 0 or layers % layers_per_stage:
            fitting = ", ".join(str(count) for count in range(1, layers + 1) if layers % count == 0) or "nothing"
            raise InputError(
                f"layers_per_stage: {layers_per_stage} on every stage do not make up the model's {layers} layers; "
                f"what divides them is {fitting}; or give a list, one count a stage"
            )
        return [layers_per_stage] * (layers // layers_per_stage)
    counts = list(layers_per_stage)
    if not counts:
        raise InputError(f"layers_per_stage: names no stage; expected counts that sum to the model's {layers} layers")
    if min(counts) < 0:
        raise InputError(f"layers_per_stage: a stage of {min(counts)} layers; expected 0 or more on each")
    if sum(counts) != layers:
        raise InputError(
            f"layers_per_stage: {' + '.join(map(str, counts))} = {sum(counts)}, but the model has {layers} layers; "
            f"expected counts that sum to {layers}"
        )
    return counts


# ------------------------------------------------------------------------------------------------ the parts of a model


def _parts(
    model: nn.Module, family: _Family | None, layers: str | None, before: tuple[str, ...], after: tuple[str, ...]
) -> _Parts:
    if layers is not None:
        *_, listed = [_module(model, name) for name in (*before, *after, layers)]
        if not isinstance(listed, nn.ModuleList | nn.Sequential):
            raise InputError(f"layers: {layers} is a {type(listed).__name__}; expected the name of an nn.ModuleList")
        return _Parts(before, _children(listed, f"{layers}."), after)
    if before or after:
        raise InputError("before and after: say nothing without layers, the name of the model's nn.ModuleList")
    if family is not None:
        return family.parts(model)
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        return _Parts((), _children(model, ""), ())
    raise InputError(
        f"{type(model).__name__}: is neither an nn.Sequential nor one of {', '.join(sorted(DECODERS))}; "
        "name its nn.ModuleList as layers, and the modules called before and after it"
    )


def _children(module: nn.Module, prefix: str) -> tuple[str, ...]:
    # named_children() would leave out a module's second occurrence.
    return tuple(prefix + name for name in module._modules)  # pyright: ignore[reportPrivateUsage]


def _module(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise InputError(f"{type(model).__name__}: has no module {name!r}") from None


def _owners(model: nn.Module, names_of_stages: Sequence[Sequence[str]]) -> dict[str, int]:
    """The stage of each entry of the model's state."""
    named = [(name, stage) for stage, names in enumerate(names_of_stages) for name in names]
    owners: dict[str, int] = {}
    for entry in model.state_dict():
        holders = [(name, stage) for name, stage in named if entry.startswith(f"{name}.")]
        if len(holders) != 1:
            where = " and ".join(name for name, _ in holders) or "no module of a stage"
            raise InputError(f"{type(model).__name__}: {entry} is in {where}; before and after name its modules once")
        owners[entry] = holders[0][1]
    return owners


def _ties(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of names under which the model knows one and the same parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


# ----------------------------------------------------------------------------------------------- transformers' decoders


@dataclass(frozen=True, slots=True)
class _Family:
    """Where models of one kind keep their parts: `backbone` holds all but the head."""

    backbone: str
    layers: str
    embeddings: tuple[str, ...]
    norm: str
    head: str = "lm_head"
    positions: str | None = None  # the embedding that its forward adds to hidden states given from outside, too
    dropout: str | None = None

    def parts(self, model: nn.Module) -> _Parts:
        prefix = f"{self.backbone}."
        layers = _children(model.get_submodule(prefix + self.layers), f"{prefix}{self.layers}.")
        return _Parts(tuple(prefix + name for name in self.embeddings), layers, (prefix + self.norm, self.head))


_LLAMA: Final = _Family("model", "layers", ("embed_tokens",), "norm")
_GPT2: Final = _Family("transformer", "h", ("wte", "wpe"), "ln_f", positions="wpe", dropout="drop")

# Known are models that do nothing else between and after these parts: no scaling of logits, no losses of routers.
DECODERS: Final[Mapping[str, _Family]] = {
    "GPT2LMHeadModel": _GPT2,
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
}


def _transformers_class(model: nn.Module) -> str:
    """The class's name where transformers defined it; a class derived from it may compute something else."""
    return type(model).__name__ if type(model).__module__.startswith("transformers.") else ""


class _NoPositions(nn.Module):
    """Takes the place of a position embedding where the hidden states already have it."""

    def forward(self, positions: Tensor) -> Tensor:
        return positions.new_zeros(())


class DecoderStage(nn.Module):
    """Some layers of a decoder. The model's own forward runs over them: it makes masks and rotary embeddings."""

    def __init__(self, twin: nn.Module, family: _Family, names: Sequence[str], *, first: bool, last: bool) -> None:
        """Takes `twin` apart, a copy of the model."""
        super().__init__()
        self._backbone, self._head = family.backbone, family.head
        self._first, self._last = first, last
        backbone = twin.get_submodule(family.backbone)
        _keep_layers(backbone, family, names)
        if not first:
            for name in family.embeddings:
                setattr(backbone, name, None)
            if family.positions is not None:
                setattr(backbone, family.positions, _NoPositions())
            if family.dropout is not None:
                setattr(backbone, family.dropout, nn.Identity())
        if not last:
            setattr(backbone, family.norm, nn.Identity())
        self.add_module(family.backbone, backbone)
        if last:
            self.add_module(family.head, twin.get_submodule(family.head))

    def forward(self, x: Tensor, **slices: object) -> Tensor:
        """Logits on the last stage, else hidden states; of token ids on the first stage, else of hidden states."""
        if slices:
            raise InputError("a decoder of transformers takes whole sequences only; use a schedule without slices")
        given = {"input_ids" if self._first else "inputs_embeds": x}
        hidden = self.get_submodule(self._backbone)(**given, use_cache=False, return_dict=True).last_hidden_state
        return self.get_submodule(self._head)(hidden) if self._last else hidden


def _keep_layers(backbone: nn.Module, family: _Family, names: Sequence[str]) -> None:
    layers = backbone.get_submodule(family.layers)
    wanted = [name in names for name in _children(layers, f"{family.backbone}.{family.layers}.")]
    for keep, name in zip(wanted, _children(layers, ""), strict=True):
        if not keep:
            delattr(layers, name)  # unlike `del layers[i]`, this leaves the names of the others
    # Some forwards look up a layer's kind of attention by its index among the layers they find.
    config: Any = backbone.config
    kinds: Sequence[str] | None = getattr(config, "layer_types", None)
    if kinds is not None:
        config.layer_types = [kind for keep, kind in zip(wanted, kinds, strict=True) if keep]
    config.num_hidden_layers = sum(wanted)


# ------------------------------------------------------------------------------------------------ parameters by name


def tied(stages: Sequence[nn.Module]) -> list[tuple[tuple[int, str], ...]]:
    """Groups of (stage, name) that are one parameter in the unsplit model, on two or more stages of `split`."""
    names = [{name for name, _ in stage.named_parameters(remove_duplicate=False)} for stage in stages]
    groups: list[tuple[tuple[int, str], ...]] = []
    for group in dict.fromkeys(group for stage in stages for group in getattr(stage, "ties", ())):
        # Within a stage the names still are one parameter; the first stands for it.
        firsts = [(index, next((name for name in group if name in own), None)) for index, own in enumerate(names)]
        members = tuple((index, name) for index, name in firsts if name is not None)
        if len(members) > 1:
            groups.append(members)
    return groups


def stage_state_dict(stage: nn.Module) -> dict[str, Tensor]:
    """The stage's parameters and buffers under the names of the unsplit model."""
    return dict(stage.state_dict())


def merge_state(stages_state: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The state of the unsplit model. Raises InputError where two stages have different tensors for one name."""
    merged: dict[str, Tensor] = {}
    for stage, state in enumerate(stages_state):
        for name, tensor in state.items():
            if name in merged and not torch.equal(merged[name], tensor):
                raise InputError(
                    f"{name}: stage {stage} has another tensor than a stage before it; expected one tensor"
                )
            merged.setdefault(name, tensor)
    return merged


def load_stage(stage: nn.Module, full_state: Mapping[str, Tensor]) -> None:
    """Copy what the stage has from the state of the unsplit model, and leave the rest of it unread."""
    chosen: dict[str, Tensor] = {}
    for name, own in stage.state_dict().items():
        # Files often have a tied parameter under one of its names only.
        aliases = [name, *(alias for group in getattr(stage, "ties", ()) if name in group for alias in group)]
        found = next((full_state[alias] for alias in aliases if alias in full_state), None)
        if found is None:
            raise InputError(f"{name}: is not in the given state; expected the state of the unsplit model")
        if found.shape != own.shape:
            raise InputError(f"{name}: has shape {tuple(found.shape)}; the stage needs {tuple(own.shape)}")
        chosen[name] = found
    stage.load_state_dict(chosen)
