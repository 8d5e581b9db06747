"""The config.json of a model that a configuration names. No torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from siirl.models.config_values import as_read
from siirl.models.families import OTHER_NAMES, family_of
from siirl.models.overridden import overridden

PARTS = ("vision_config", "audio_config", "text_config")
"""Values that are configurations of models themselves."""


class NamedModel(Protocol):
    """What a group `model` says of it."""

    @property
    def path(self) -> str: ...

    @property
    def override_config(self) -> Mapping[str, Any]: ...


def config_json(model: NamedModel, file: str = "config.json") -> dict[str, Any]:
    """What the file of a model's directory says; nothing where it cannot be read.

    A type that transformers knows by another name has that, and no code of its own.
    """
    try:
        raw = json.loads((Path(model.path).expanduser() / file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(raw, dict):
        return {}
    if not isinstance(kind := raw.get("model_type"), str):
        raw.pop("model_type", None)  # the directory is refused for it
    elif kind in OTHER_NAMES:
        raw.pop("auto_map", None)
        raw["model_type"] = OTHER_NAMES[kind]
    return raw


def as_built(model: NamedModel) -> Mapping[str, Any]:
    """What config.json says of the decoder, with override_config; nothing where it cannot be read."""
    return language_part(overridden(config_json(model), model.override_config))


def model_type_of(model: NamedModel) -> str:
    """What config.json calls it; empty where it cannot be read."""
    return str(config_json(model).get("model_type") or "")


def language_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What transformers reads of the decoder in a config.json, defaults of absent keys included: of all of
    it, or of a vision model, old or new, of its text part."""
    return as_read(of_decoder(config))


def of_decoder(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is written there of it."""
    if not family_of(config.get("model_type")).sees_images:
        return config
    text = {**config, **(config.get("text_config") or {}), "model_type": config["model_type"]}
    return {name: value for name, value in text.items() if name not in PARTS}
