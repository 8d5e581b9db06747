"""The configuration of a model directory as transformers reads it, with what a run puts in its place.

Importing this needs no transformers: it takes seconds, and torch; `siirl check` calls what does where a model
has an override_config.
"""

import copy
import importlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from siirl.config import Config
from siirl.config.common import ModelConfig
from siirl.config.roles import role_model
from siirl.config.values import closest
from siirl.errors import ConfigError, DataError
from siirl.model_files.directory import model_dir
from siirl.models.config_json import config_json
from siirl.models.families import OTHER_NAMES
from siirl.models.overridden import PARTS, TURNING, TYPE, names, overridden

if TYPE_CHECKING:
    from transformers import PretrainedConfig

QUANTISED = "quantization_config"
FIXED = {
    "model_type": "it says which model the files are of. Set model.path to one of that type.",
    "auto_map": "it names the code of the files. Set model.path to others.",
    "attn_implementation": "siirl's engines have attention of their own. Set model.attention_kernels.",
    "_attn_implementation": "siirl's engines have attention of their own. Set model.attention_kernels.",
    QUANTISED: "it says how the weights are stored. Set rollout.quantization, or model.path.",
}
"""What no change of a value can mean, and the fix."""


def load_hf_config(model: ModelConfig) -> "PretrainedConfig":
    """config.json of model.path with model.override_config applied, of plain numbers whatever the files have.

    DataError if there is none, or none that transformers can build; ConfigError for changes of values that it
    does not have, or that it does not take.
    """
    config = _as_stored(model)
    changes = model.override_config
    if not changes:
        return config
    raw = config_json(model)
    _check_names(config, raw, changes, f"{model.path}/config.json")
    merged = overridden(raw, changes)
    merged.pop(QUANTISED, None)
    try:
        built = type(config).from_dict(copy.deepcopy(merged))  # it writes into what it is given
    except (TypeError, KeyError, *_not_built()) as error:
        wanted = ", ".join(f"{name}={value!r}" for name, value in changes.items())
        raise ConfigError(
            f"override_config: transformers builds no {config.model_type} with {wanted}: {_one_line(error)}. "
            "Correct it."
        ) from error
    built.name_or_path = config.name_or_path
    _check_taken(built, merged, changes)
    return built


def engine_overrides(model: ModelConfig, config: "PretrainedConfig") -> dict[str, Any]:
    """The values of `config` that those of the files have to be set to, for an engine that reads the files.

    More than override_config: a model's rotary settings are whole, and lists of layers as long as they are.
    And it gets plain numbers, also where the files have others.
    """
    plain = {QUANTISED: None} if config_json(model).get(QUANTISED) else {}
    if not model.override_config:
        return plain
    return plain | _differing(_as_stored(model).to_dict(), config.to_dict())


def written_changes(model: ModelConfig) -> dict[str, Any]:
    """What config.json of a copy of the model has to say in place of its own, so that it means this model.

    Null for what it must not say any more.
    """
    raw = config_json(model)
    merged = overridden(raw, model.override_config)
    gone: dict[str, Any] = dict.fromkeys(name for name in raw if name not in merged)
    return gone | {name: value for name, value in merged.items() if name not in raw or raw[name] != value}


def check_overrides(cfg: Config, role: str) -> None:
    """ConfigError for a model.override_config that a run could not apply. Runs no code of the user's."""
    model = role_model(cfg, role)
    own_code = model.external_lib or (model.trust_remote_code and "auto_map" in config_json(model))
    if model.override_config and not own_code:
        load_hf_config(model)


def _as_stored(model: ModelConfig) -> "PretrainedConfig":
    from transformers import CONFIG_MAPPING, AutoConfig

    if model.external_lib:
        importlib.import_module(model.external_lib)
    path = model_dir(model.path)
    try:
        raw = json.loads((path / "config.json").read_text(encoding="utf-8"))
        if raw.get("model_type") in OTHER_NAMES:
            config = CONFIG_MAPPING[OTHER_NAMES[raw["model_type"]]].from_dict(config_json(model))
            config.name_or_path = str(path)
        else:
            config = AutoConfig.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    except (OSError, *_not_built()) as error:
        raise DataError(
            f"{path / 'config.json'} describes no model that transformers can build: {error}. Correct it."
        ) from error
    if hasattr(config, QUANTISED):
        delattr(config, QUANTISED)
    return config


def _not_built() -> tuple[type[Exception], ...]:
    """What transformers raises for values that it does not take."""
    from huggingface_hub.errors import StrictDataclassError

    return ValueError, StrictDataclassError


def _check_names(config: Any, raw: Mapping[str, Any], changes: Mapping[str, Any], where: str) -> None:
    """ConfigError for a name that is no value of a configuration, or of a part of it, or must stay."""
    for name, value in changes.items():
        if name in FIXED:
            raise ConfigError(f"override_config.{name}={value!r}: {FIXED[name]}")
        part = getattr(config, name, None) if name in PARTS else None
        if part is not None and isinstance(value, Mapping):
            inner = raw.get(name)
            _check_names(part, inner if isinstance(inner, Mapping) else {}, value, f"{name} of {where}")
            continue
        if config.attribute_map.get(name, name) in raw and name not in raw:
            raise ConfigError(
                f"override_config.{name}={value!r}: {where} calls it {config.attribute_map[name]}. Set that."
            )
        known = {*names(raw), *names(config.to_dict()), *config.attribute_map}
        plain = hasattr(config, name) and not callable(getattr(config, name)) and not name.startswith("_")
        if name not in known and not plain:
            raise ConfigError(
                f"override_config.{name}={value!r}: a {config.model_type} config has no such value. Check "
                f"the spelling against {where}.{closest(name, sorted(known))}"
            )


def _check_taken(built: Any, merged: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """ConfigError for a value that transformers drops, or makes another of."""
    for name, value in changes.items():
        if name in PARTS and isinstance(value, Mapping):
            _check_taken(getattr(built, name), merged[name], value)
        elif name in merged and isinstance(value, bool | int | float | str | list):
            got = getattr(built, name, None)
            if name not in (*TYPE, *TURNING) and got != merged[name]:
                raise ConfigError(
                    f"override_config.{name}={value!r}: transformers makes {got!r} of it, by the other "
                    f"values of a {built.model_type} config. Set these, too, or leave it out."
                )


def _differing(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in wanted.items():
        before = stored.get(name)
        if name in PARTS and isinstance(before, Mapping) and isinstance(value, Mapping):
            if part := _differing(before, value):
                found[name] = part
        elif name not in ("_name_or_path", "transformers_version") and value != before:
            found[name] = value
    return found


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
