"""How many features a head of a model has, by its config.json as transformers reads it. No torch."""

from collections.abc import Mapping
from typing import Any

SHARES = ("gpt2", "gpt_bigcode", "opt", "persimmon", "qwen2_5_vl")
"""Whose heads are shares of the hidden size, whatever head_dim says."""
HIDDEN = ("hidden_size", "n_embd")
HEADS = ("num_attention_heads", "n_head")
"""What a config.json calls the query heads of a layer."""


def num_heads(config: Mapping[str, Any]) -> int:
    """Query heads of a layer; 0 where config.json does not tell."""
    return _first(config, HEADS)


def head_size(config: Mapping[str, Any]) -> int:
    """Features of a head as transformers builds it; 0 where config.json does not tell. Not of latent ones."""
    own = config.get("head_dim")
    if isinstance(own, int) and own > 0 and config.get("model_type") not in SHARES:
        return own
    return share_of_hidden(config)


def share_of_hidden(config: Mapping[str, Any]) -> int:
    """The hidden size over the heads; 0 where config.json does not tell."""
    heads = num_heads(config)
    return _first(config, HIDDEN) // heads if heads > 0 else 0


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    return next((config[name] for name in names if isinstance(config.get(name), int)), 0)
