"""What a script leaves to the defaults of siiRL or verl, written out where siirl's are others.

The table is siirl.config.foreign.OTHER_DEFAULTS; here is what no table of single keys says.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from siirl.compiler.checks.megatron_options import Kind as MegatronMap
from siirl.compiler.checks.megatron_options import refusal
from siirl.config.aliases import ALIASES
from siirl.config.foreign import OTHER_DEFAULTS, POLICY, ROLLOUT
from siirl.config.resolve import GROUP_SAMPLES, REF_SIZES
from siirl.config.root import all_keys
from siirl.config.values import show
from siirl.migrate.translation import Translation, scalar, value_of
from siirl.models.families import family_of, types_with

ORIGINS: Mapping[str, tuple[str, str]] = {
    "siirl": ("siiRL", "siirl"),
    "siirl_preset": ("siiRL", "preset"),
    "verl": ("verl", "verl"),
}
"""Origin of a script -> its name for the reader, and whose defaults hold there (of OTHER_DEFAULTS)."""
ACTOR, REF = f"{POLICY}.actor.megatron", f"{POLICY}.ref.megatron"
EXPERTS = re.compile(r"(^|[^a-z])a\d+(\.\d+)?b|moe|mixtral|moonlight|deepseek-?v[23]")
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")


def add_defaults(origin: str, values: Mapping[str, str | None], result: Translation) -> None:
    """Settings for what `origin` would do with keys that nobody set. values: what the script set, by name."""
    name, column = ORIGINS[origin]
    if column == "verl":
        _expert_tensor_sizes(result)
        _adapters(values, result)
    written = _written(result)
    for key_name, other in OTHER_DEFAULTS.items():
        there = getattr(other, column)
        if there is None or key_name in written or not _acts(other.when, result):
            continue
        key, ours = all_keys()[key_name], value_of(result, key_name)
        if other.same:
            why = f"{name}'s default is {show(key, there)}: {other.changes}"
            result.add("added", "", why, key_name, show(key, ours))
            continue
        followed = isinstance(there, str) and there.startswith("${")
        value = value_of(result, there[2:-1]) if followed else there
        bound = value_of(result, other.at_most) if other.at_most else value
        cut = type(bound) is int and bound < value
        value = bound if cut else value
        if value == ours and key_name not in OWN:
            continue
        follows = f", which follows {there[2:-1]}" if followed else ""
        follows = f" of {show(key, there)}, at most {other.at_most}" if cut else follows
        why = f"{name}'s default{follows}; siirl's is {OWN.get(key_name, show(key, ours))}: {other.changes}"
        result.add("added", "", why, key_name, show(key, value))
    if column == "verl":
        _reference(result)


OWN = {"trainer.n_gpus_per_node": "what the machine has", f"{ROLLOUT}.n": str(GROUP_SAMPLES)}
"""Keys whose default is not the one in the table of keys: they are always written."""


def _written(result: Translation) -> set[str]:
    return {name for setting in result.written() for name in (setting.name, *ALIASES.get(setting.name, ()))}


COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    ">": lambda value, bound: isinstance(value, int | float) and value > bound
}


def _acts(when: str, result: Translation) -> bool:
    """Whether each part of a condition holds: "key=a|b" or "key>1", joined by " and "."""
    for part in filter(None, when.split(" and ")):
        name, sign, wanted = re.split(r"(=|>)", part, maxsplit=1)
        value = value_of(result, name)
        if sign in COMPARE and not COMPARE[sign](value, scalar(wanted)):
            return False
        if sign == "=" and show(all_keys()[name], value) not in wanted.split("|"):
            return False
    return True


def _expert_tensor_sizes(result: Translation) -> None:
    """verl cuts an expert over as many ranks as the rest of a layer, unless told; here it is whole."""
    if not has_experts(str(value_of(result, f"{POLICY}.model.path") or "")):
        return
    groups = {ACTOR: f"{POLICY}.actor.strategy", "critic.megatron": "critic.strategy"}
    if _written(result) & set(REF_SIZES) and f"{ACTOR}.expert_tensor_parallel_size" not in _written(result):
        groups[REF] = groups[ACTOR]
    for group, strategy in groups.items():
        name, tensor = f"{group}.expert_tensor_parallel_size", f"{group}.tensor_model_parallel_size"
        size = value_of(result, tensor)
        if value_of(result, strategy) != "megatron" or size == 1 or name in _written(result):
            continue
        why = "verl's default, also for null, is tensor_model_parallel_size; siirl's is 1: experts are cut"
        null = (name, f"+{name}")
        places = [at for at, item in enumerate(result.settings) if item.there.partition("=")[0] in null]
        for place in places:
            result.settings[place] = replace(
                result.settings[place], kind="changed", name=name, value=str(size), why=why
            )
        if not places:
            result.add("added", "", why, name, str(size))


def _adapters(values: Mapping[str, str | None], result: Translation) -> None:
    """verl's group model.lora has a scale of its own by default."""
    for model in (f"{POLICY}.model", "critic.model"):
        rank = scalar(values.get(f"{model}.lora.rank") or "0")
        if type(rank) is int and rank > 0 and f"{model}.lora_alpha" not in _written(result):
            why = "verl's default of lora.alpha; siirl's is 16: scale of the adapters"
            result.add("added", "", why, f"{model}.lora_alpha", "32")


def _reference(result: Translation) -> None:
    """verl's reference follows the actor size by size; siirl's as a whole, until one of its own is set."""
    written = _written(result)
    if not written & set(REF_SIZES):
        return
    why = "verl's reference follows the actor in each size that it is not given"
    for name in REF_SIZES:
        actor = name.replace(REF, ACTOR)
        value = value_of(result, actor)
        if name not in written and value != all_keys()[name].default:
            result.add("added", "", why, name, show(all_keys()[name], value))
    options = f"{ACTOR}.override_transformer_config."
    if any(name.startswith(options.replace(ACTOR, REF)) for name in written):
        return
    for setting in result.written():
        option = setting.name.removeprefix(options)
        name = options.replace(ACTOR, REF) + option
        needed = option != setting.name and not option.startswith("recompute")  # it has no backward pass
        if needed and not refused_by_megatron(name, setting.value):
            result.add("added", "", "verl's reference has the actor's options", name, setting.value)


def refused_by_megatron(name: str, value: str) -> str:
    """Why an option of Megatron-Core, by its whole name, cannot have a value; "" if it can, or is none."""
    maps: dict[str, MegatronMap] = {"transformer_config": "transformer", "ddp_config": "ddp"}
    role, _, rest = name.rpartition(".megatron.override_")
    kind, _, option = rest.partition(".")
    if not role or kind not in maps:
        return ""
    return (refusal(maps[kind], option, scalar(value), role) or "").removeprefix("=")


def names_vision_model(path: str) -> bool:
    """Whether a model sees images, by its config.json if it is here, else by its name."""
    config = _model_config(path)
    if config is not None:
        return family_of(config.get("model_type")).sees_images
    name = re.sub(r"[^a-z0-9]", "", Path(path).name.lower())
    return any(kind.replace("_", "") in name for kind in types_with(lambda row: row.sees_images))


def has_experts(path: str) -> bool:
    """Whether a model is a mixture of experts, by its config.json if it is here, else by its name."""
    config = _model_config(path)
    if config is None:
        return EXPERTS.search(Path(path).name.lower()) is not None
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    return any(text.get(name) for name in EXPERT_COUNTS)


def _model_config(path: str) -> dict[str, Any] | None:
    """The config.json in a folder; None if it is not here, or no JSON."""
    try:
        found = json.loads((Path(path).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
