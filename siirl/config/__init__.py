"""Configuration: a typed, read-only tree of every key, composed from presets and `key=value` overrides."""

from siirl.config.checks import check_config
from siirl.config.effects import effect_warnings
from siirl.config.load import load_config
from siirl.config.root import Config
from siirl.config.tree import diff_keys, from_dict, print_config, to_dict, with_overrides

__all__ = [
    "Config",
    "check_config",
    "diff_keys",
    "effect_warnings",
    "from_dict",
    "load_config",
    "print_config",
    "to_dict",
    "with_overrides",
]
