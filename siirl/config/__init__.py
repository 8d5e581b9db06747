"""Configuration: a typed, read-only tree of every key, composed from presets and `key=value` overrides."""

from siirl.config.load import load_config
from siirl.config.root import Config
from siirl.config.tree import diff_keys, from_dict, to_dict, with_overrides

__all__ = ["Config", "diff_keys", "from_dict", "load_config", "to_dict", "with_overrides"]
