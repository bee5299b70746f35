"""A model by its preset's name, from a Hugging Face `config.json`, or from the short form."""

from __future__ import annotations

import os
from pathlib import Path

from stageloom.errors import InputError
from stageloom.files import read_mapping
from stageloom.plan import presets
from stageloom.plan.huggingface import from_config, is_config
from stageloom.plan.model import Model
from stageloom.plan.short_form import from_short_form


def load_model(text: str | Path) -> Model:
    """The model named `text`, or of the file there; a folder stands for the `config.json` in it.

    A file is a Hugging Face configuration where it has `architectures` or `model_type`, and the short form otherwise.
    Raises InputError naming the file, the key, its value and what would be right.
    """
    name = str(text)
    if name.lower() in presets.names("models"):
        return from_short_form(presets.read("models", name.lower()), name, name.lower())
    if not name:
        raise presets.nothing("model", name, presets.names("models"), "a config.json, or a YAML file in the short form")
    path = Path(name)
    if os.path.isdir(path):
        if not (path / "config.json").is_file():
            raise InputError(f"{name}: is a folder without a config.json; a model's file is needed")
        path = path / "config.json"
    if not os.path.exists(path) and path.suffix not in (".json", ".yaml", ".yml"):
        raise presets.nothing("model", name, presets.names("models"), "a config.json, or a YAML file in the short form")
    data = read_mapping(path, "hidden: 4096")
    if is_config(data):
        return from_config(data, str(path), path.parent.name if path.stem == "config" else path.stem)
    return from_short_form(data, str(path), path.stem)
