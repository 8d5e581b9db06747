"""Reading and rebuilding the configuration tree: overrides by full name, JSON form, what was changed."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from siirl.config.foreign import foreign, foreign_hint
from siirl.config.resolve import ALIASES, FOLLOWS, expand_aliases, followed_value, get
from siirl.config.root import Config, all_groups, all_keys
from siirl.config.values import SECRET_KEYS, check_available, closest, convert, plain
from siirl.errors import ConfigError


@functools.cache
def default_config() -> Config:
    """The configuration in which nobody set anything."""
    return _follow(Config())


def with_overrides(cfg: Config, updates: Mapping[str, Any]) -> Config:
    """A new configuration with some keys (full dotted names) set; shares all that did not change with `cfg`.

    Values are typed and checked as on the command line. Maps are merged. A null for a key that follows
    another makes it follow again. ConfigError for an unknown key or a wrong value, NotSupportedError for a
    feature that does not exist.
    """
    flat, maps = _flatten(updates)
    flat, problems = expand_aliases(flat)
    if problems:
        raise ConfigError("\n".join(problems))
    values, unset = {}, set()
    for name, value in flat.items():
        if name in FOLLOWS and value is None:
            unset.add(name)
        elif name in maps:
            values[name] = convert(all_keys()[name], _merged(get(cfg, name), value))
        else:
            values[name] = convert(all_keys()[name], value)
    _check_available(values)
    explicit = tuple(sorted((set(cfg.explicit) | values.keys()) - unset))
    return _follow(dataclasses.replace(_rebuild(cfg, values), explicit=explicit))


def to_dict(cfg: Config) -> dict[str, Any]:
    """The configuration as JSON has it: nested maps, plus "explicit"; `from_dict` gives back an equal one."""
    return dataclasses.asdict(cfg, dict_factory=lambda items: {name: plain(value) for name, value in items})


def from_dict(data: Mapping[str, Any]) -> Config:
    """The configuration that `to_dict` turned into `data`.

    Strict like the command line. Absent keys have defaults; without "explicit", the keys given count as set.
    """
    groups = {name: value for name, value in data.items() if name != "explicit"}
    flat, _ = _flatten(groups)
    values = {
        name: convert(all_keys()[name], value)
        for name, value in flat.items()
        if not (name in FOLLOWS and value is None)
    }
    explicit = tuple(sorted(data.get("explicit", values)))
    _check_available({name: values[name] for name in explicit if name in values})
    return _follow(dataclasses.replace(_rebuild(Config(), values), explicit=explicit))


def diff_keys(cfg: Config) -> dict[str, tuple[Any, Any]]:
    """Key -> (default, value) of each key that is not at its default; one that follows others only if set."""
    changed = {}
    for name in all_keys():
        default, value = get(default_config(), name), get(cfg, name)
        if value != default and (name not in FOLLOWS or name in cfg.explicit):
            changed[name] = (default, value)
    return changed


def print_config(cfg: Config) -> str:
    """All keys with their values as YAML, a preset as it stands; older names and secrets are left out."""
    import yaml

    tree: dict[str, Any] = {}
    for name in all_keys():
        if name in ALIASES or name.endswith(SECRET_KEYS):
            continue
        *groups, last = name.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[last] = plain(get(cfg, name))
    return yaml.safe_dump(tree, sort_keys=False, default_flow_style=False, width=110)


def split_name(name: str) -> tuple[str, str]:
    """The key that a full name means, and the path within it for a free-form map. ConfigError if unknown."""
    keys = all_keys()
    if name in keys:
        return name, ""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        head = ".".join(parts[:end])
        if head in keys and keys[head].is_map:
            moved = foreign(name)
            if moved is not None and (moved[1] or moved[0].harmless):
                raise ConfigError(f"{name} would have no effect.{foreign_hint(name)}")
            return head, ".".join(parts[end:])
    hint = foreign_hint(name) or closest(name, keys)
    raise ConfigError(f"unknown key {name!r}: no key or map of this name exists.{hint}")


def _flatten(updates: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Any], set[str]]:
    """Key -> value, with groups taken apart and paths within maps put together; and which keys are maps."""
    flat: dict[str, Any] = {}
    maps: set[str] = set()
    for part, value in updates.items():
        name = f"{prefix}{part}"
        if name in all_groups():
            if not isinstance(value, Mapping):
                raise ConfigError(f"{name}={value}: {name} is a group of keys: set the keys below it.")
            inner, inner_maps = _flatten(value, name + ".")
            flat.update(inner)
            maps |= inner_maps
            continue
        key, path = split_name(name)
        for step in reversed(path.split(".")) if path else ():
            value = {step: value}
        if all_keys()[key].is_map and isinstance(value, Mapping):
            maps.add(key)
            value = _merged(flat.get(key), value)
        flat[key] = value
    return flat, maps


def _merged(base: Any, update: Any) -> dict[str, Any]:
    result = dict(base or {})
    for name, value in update.items():
        both_maps = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
        result[name] = _merged(result[name], value) if both_maps else value
    return result


def _check_available(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        check_available(all_keys()[name], value)


def _rebuild(node: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a schema dataclass with the values at relative dotted names; untouched groups are shared."""
    own: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        head, _, rest = name.partition(".")
        if rest:
            below.setdefault(head, {})[rest] = value
        else:
            own[head] = value
    for head, inner in below.items():
        own[head] = _rebuild(getattr(node, head), inner)
    return dataclasses.replace(node, **own) if own else node


def _follow(cfg: Config) -> Config:
    for name in FOLLOWS:
        if name in cfg.explicit:
            continue
        value = followed_value(cfg, name)
        if get(cfg, name) != value:
            cfg = _rebuild(cfg, {name: value})
    return cfg
