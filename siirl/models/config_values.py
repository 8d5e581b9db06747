"""A value of config.json as transformers takes it: by another name, by its default, or not at all. No torch.

config_values.json has a row for each accepted type: the default of every key that its configuration declares,
other names of keys, those that may be null ("null"), what its sizes must agree on ("hidden_is"), and whether
its embedding has a place for the padding ("pads"). tests/support/config_values.py makes it of transformers,
by building and running a small model with each key null.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from siirl.models.families import Latent, family_of
from siirl.models.sizes import OLDER_KINDS, head_size

SLIDING = "sliding_attention"
"""The kind of layer that needs a sliding_window."""


@cache
def _table() -> dict[str, dict[str, Any]]:
    return json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def _row(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the table has of a config.json's type, in whose place a file may have anything."""
    kind = config.get("model_type")
    return _table().get(kind) if isinstance(kind, str) else None


def as_read(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a decoder's config.json says, with the default of each key that it does not have.

    A key with two names has both. Of types that the table does not have: as it is.
    """
    row = _row(config)
    if row is None:
        return config
    renamed = {own: config[name] for name, own in row["aliases"].items() if name in config}
    found = row["defaults"] | renamed | dict(config)
    if isinstance(kinds := found.get("layer_types"), list):
        found["layer_types"] = [OLDER_KINDS.get(kind, kind) for kind in kinds]
    return found | {name: found[own] for name, own in row["aliases"].items()}


def without_value(config: Mapping[str, Any]) -> str:
    """Which key of an accepted type's config.json, as read, has no value that transformers computes with, and
    the fix; empty if none."""
    kind = config.get("model_type")
    row = _row(config) or {"defaults": {}, "null": ()}
    absent = (x for x in row["defaults"] if config[x] is None and x not in row["null"])
    name = next((name for name in absent if not _unread(name, config)), "")
    return name and (
        f"no {name} (null in config.json, or absent, for which a {kind} has no default). Set "
        f"model.override_config.{name}"
    )


def why_not_built(written: Mapping[str, Any]) -> str:
    """Why transformers computes nothing with a decoder's config.json, as it is written, and the fix; empty if
    it does.

    What is absent is judged in whole files only: a model has a vocab_size.
    """
    row, config = _row(written), as_read(written)
    if row is None:
        return ""
    if "vocab_size" not in written and all(value is not None for value in written.values()):
        return ""
    misfit = without_value(config) or next(_misfits(config, row), "")
    fix = "" if misfit.startswith("no ") else ". Correct config.json, or set model.override_config"
    return misfit and f"{config['model_type']} with {misfit}{fix}."


def _unread(name: str, config: Mapping[str, Any]) -> bool:
    """Whether nothing reads a value for which there would otherwise have to be one."""
    if name == "rope_parameters":  # older files have it by another name
        return bool(config.get("rope_scaling"))
    if name in ("n_group", "topk_group"):
        return config.get("topk_method") == "greedy"
    kinds, when = config.get("layer_types"), family_of(config["model_type"]).window_unread
    return name == "sliding_window" and (
        (when == "without windowed layers" and bool(kinds) and SLIDING not in kinds)
        or (when == "without layer_types" and not kinds)
    )


def _misfits(config: Mapping[str, Any], row: Mapping[str, Any]) -> Iterator[str]:
    """Sizes, maybe defaults that nobody wrote, that do not go together."""

    def size(*names: str) -> int:
        found = (config[name] for name in names if isinstance(config.get(name), int))
        return next(found, 0)

    heads, kv_heads = size("num_attention_heads"), size("num_key_value_heads")
    hidden, words, pad = size("hidden_size"), size("vocab_size"), size("pad_token_id")
    experts = size("num_experts", "num_local_experts", "n_routed_experts")
    chosen, kinds = size("num_experts_per_tok"), config.get("layer_types")
    latent = family_of(config["model_type"]).latent
    if heads and kv_heads and heads % kv_heads and (latent is None or latent.reads_kv_heads):
        yield f"num_key_value_heads={kv_heads} with num_attention_heads={heads}, which it does not divide"
    if "whole heads" in row["hidden_is"] and heads and hidden % heads:
        yield f"hidden_size={hidden} with num_attention_heads={heads}, which do not divide it"
    if "even heads" in row["hidden_is"] and head_size(config) % 2:
        yield f"num_attention_heads={heads} of {head_size(config)} features: they are rotated in pairs"
    if "all heads" in row["hidden_is"] and heads * size("head_dim") != hidden:
        yield f"head_dim={size('head_dim')} with num_attention_heads={heads}, not hidden_size={hidden} in all"
    if experts and chosen > experts:
        yield f"num_experts_per_tok={chosen} with {experts} experts"
    if row["pads"] and words and pad >= words:
        yield f"pad_token_id={pad} with vocab_size={words}: the embedding has no such token"
    mlps, layers = config.get("mlp_layer_types"), config.get("num_hidden_layers")
    if (
        isinstance(mlps, list)
        and "mlp_layer_types" in row["defaults"]
        and len(mlps) < size("num_hidden_layers")
    ):
        yield f"mlp_layer_types of {len(mlps)} layers with num_hidden_layers={layers}"
    if isinstance(kinds, list) and "layer_types" in row["defaults"]:
        if isinstance(layers, int) and len(kinds) != layers:
            yield f"layer_types of {len(kinds)} layers with num_hidden_layers={layers}"
        for name, none in (("sliding_window", None), ("use_sliding_window", False)):
            if SLIDING in kinds and name in row["defaults"] and config[name] is none:
                yield f"{SLIDING} among layer_types with {name}={json.dumps(none)}"
    section = (config.get("rope_parameters") or {}).get("mrope_section")
    if section and 2 * sum(section) > head_size(config):
        yield f"mrope_section={section} with heads of {head_size(config)} features"
    state_keys, states = size("linear_num_key_heads"), size("linear_num_value_heads")
    if state_keys and states % state_keys:
        yield f"linear_num_value_heads={states}, no multiple of linear_num_key_heads={state_keys}"
    if family_of(config["model_type"]).mamba2:
        wide, scans, each = config["mamba_expand"] * hidden, size("mamba_n_heads"), config["mamba_d_head"]
        if scans and (wide % scans or each not in ("auto", wide // scans)):
            yield f"mamba_n_heads={scans} of mamba_d_head={each}, not mamba_expand * hidden_size={wide}"
    if config.get("kv_lora_rank"):
        yield from _latent_misfits(config, latent, heads, kv_heads)
    if config.get("n_group") and config.get("topk_method") != "greedy":
        groups, best = size("n_group"), size("topk_group")
        if experts % groups or best > groups:
            yield f"n_group={groups} and topk_group={best} with {experts} experts"


def _latent_misfits(
    config: Mapping[str, Any], latent: Latent | None, heads: int, kv_heads: int
) -> Iterator[str]:
    turned, width = config.get("qk_rope_head_dim"), config.get("head_dim")
    if 0 < kv_heads < heads or (kv_heads > heads and latent is not None and latent.reads_kv_heads):
        yield f"num_key_value_heads={kv_heads} with num_attention_heads={heads}: compressed keys need as many"
    if latent is not None and latent.turns_head_dim and width not in (None, turned):
        yield f"head_dim={width} with qk_rope_head_dim={turned}, by which its positions turn"
