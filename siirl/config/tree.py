"""Reading and rebuilding the configuration tree: overrides by full name, JSON form, what was changed."""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from siirl.config.aliases import ALIASES, RANGES
from siirl.config.foreign import foreign, foreign_hint
from siirl.config.keys import AUTO
from siirl.config.meant import meant_key
from siirl.config.resolve import FOLLOWS, expand_aliases, followed_value, get, is_set
from siirl.config.root import Config, all_groups, all_keys
from siirl.config.unused_keys import unused_keys
from siirl.config.values import SECRET_KEYS, check_available, closest_name, convert, plain
from siirl.errors import ConfigError, UserError
from siirl.findings import Broken, Findings, ReadsBroken, is_broken

RANGE = re.compile(r"(\d+):(\d+)")
EXPLICIT = "explicit"
"""In a written configuration: the keys that somebody set."""
WRITTEN = (
    "# explicit: what somebody set. auto: the plan chooses. null: as another key (docs/configuration/).\n"
)
PLACE = "trainer.output_dir"
"""A key that follows others, and is written as it is: the run lies there."""
FILLED = (
    *("trainer.device", "trainer.nnodes", "trainer.n_gpus_per_node", "trainer.experiment_name"),
    "data.template_date",
)
"""Keys that a start fills in by where and when it is, if nobody set them."""


@functools.cache
def default_config() -> Config:
    """The configuration in which nobody set anything."""
    return _follow(Config())


def with_overrides(cfg: Config, updates: Mapping[str, Any]) -> Config:
    """A new configuration with some keys (full dotted names) set; shares all that did not change with `cfg`.

    Values are typed and checked as on the command line. Maps are merged. A null for a key that follows
    another makes it follow again, and auto for one that the plan chooses has it chosen. ConfigError for
    unknown keys and wrong values, NotSupportedError for a feature that does not exist: all at once.
    """
    found = Findings()
    result = overridden(cfg, updates, found)
    found.close()
    return result


def filled(cfg: Config, updates: Mapping[str, Any]) -> Config:
    """`with_overrides` by what siirl itself chose: who asks what the user set is told the same as before."""
    return dataclasses.replace(with_overrides(cfg, updates), explicit=cfg.explicit)


def overridden(cfg: Config, updates: Mapping[str, Any], found: Findings) -> Config:
    """`with_overrides` that goes on: what is wrong goes to `found`; a key with a wrong value is broken."""
    given, maps = _flatten(updates, found)
    given = _without_ranges(given)
    flat, problems = expand_aliases(given)
    for problem in problems:
        found.add(problem)
    values, unset = {}, set()
    for name, value in flat.items():
        if (name in FOLLOWS and value is None) or (value == AUTO and all_keys()[name].rule.auto):
            unset.add(name)
        elif name not in given and any(is_broken(values[alias]) for alias in _older_names(name, given)):
            values[name] = Broken(name)
        else:
            with found.at():
                values[name] = Broken(name)
                whole = _merged(get(cfg, name), value) if name in maps else value
                values[name] = _typed(name, whole)
    explicit = tuple(sorted((set(cfg.explicit) | values.keys()) - unset))
    unset_values = {name: all_keys()[name].default for name in unset - FOLLOWS.keys()}
    result = _follow(dataclasses.replace(_with(cfg, values | unset_values), explicit=explicit))
    suspects = {name for problem in found.problems for name in problem.breaks}
    return with_broken(result, suspects - values.keys())


def _without_ranges(given: Mapping[str, Any]) -> dict[str, Any]:
    """MIN:MAX as the two keys that it stands for."""
    split = dict(given)
    for name, least in RANGES.items():
        if isinstance(value := given.get(name), str) and (found := RANGE.fullmatch(value.strip())):
            split |= {least: int(found[1]), name: int(found[2])}
    return split


def with_broken(cfg: Config, names: Iterable[str]) -> Config:
    """The configuration with the values of some keys unknown, and of those that follow them."""
    broken = {name: Broken(name) for name in names}
    return _follow(_with(cfg, broken)) if broken else cfg


def _typed(name: str, value: Any) -> Any:
    """The typed value of a key, which may have it."""
    typed = convert(all_keys()[name], value)
    check_available(all_keys()[name], typed)
    return typed


def _older_names(name: str, given: Iterable[str]) -> list[str]:
    return [alias for alias in given if name in ALIASES.get(alias, ())]


def to_dict(cfg: Config) -> dict[str, Any]:
    """The configuration as JSON has it: nested maps, plus "explicit"; `from_dict` gives back an equal one."""
    tree = dataclasses.asdict(cfg, dict_factory=lambda items: {name: plain(value) for name, value in items})
    for name, value in tree.pop("unused").items():
        put(tree, name, value)
    return tree


def from_dict(data: Mapping[str, Any]) -> Config:
    """The configuration that `to_dict` turned into `data`.

    Strict like the command line. Absent keys have defaults; without "explicit", the keys given count as set.
    """
    groups = {name: value for name, value in data.items() if name != "explicit"}
    cfg = with_overrides(Config(), groups)
    return _follow(dataclasses.replace(cfg, explicit=tuple(sorted(data.get("explicit", cfg.explicit)))))


def diff_keys(cfg: Config) -> dict[str, tuple[Any, Any]]:
    """Key -> (default, value) of each key that is not at its default; followers and older names if set."""
    changed, if_set = {}, FOLLOWS.keys() | ALIASES.keys()
    for name in all_keys():
        default, value = get(default_config(), name), get(cfg, name)
        if value != default and (name in cfg.explicit or name not in if_set):
            changed[name] = (default, value)
    return changed


def print_config(cfg: Config) -> str:
    """All keys with their values as YAML, a preset as it stands; older names and secrets are left out.

    A key that nobody has set is auto where the plan chooses it, and null where it follows others.
    """
    names = [name for name in all_keys() if name not in ALIASES and not name.endswith(SECRET_KEYS)]
    tree: dict[str, Any] = {EXPLICIT: [name for name in names if name in cfg.explicit]}
    for name in names:
        value = plain(get(cfg, name))
        if all_keys()[name].rule.auto and not is_set(cfg, name):
            value = AUTO
        elif name in FOLLOWS and name not in (*cfg.explicit, PLACE):
            value = None
        put(tree, name, value)
    return WRITTEN + yaml_text(tree)


def yaml_text(tree: Mapping[str, Any]) -> str:
    """Plain values as YAML in their order, by libyaml where PyYAML has it: ten times as fast."""
    import yaml

    dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return yaml.dump(tree, Dumper=dumper, sort_keys=False, default_flow_style=False, width=110)


def as_recorded(cfg: Config, recorded: Iterable[str], typed: Iterable[str]) -> Config:
    """The configuration of a file that `print_config` wrote, in which only those keys count as set that
    were (`recorded`), that are typed now, or whose value somebody has changed in the file.
    """
    known = {target for name in typed for target in (name, *ALIASES.get(name, ()))} | set(recorded)
    heads = tuple(f"{name}." for name in known)

    def counts(name: str) -> bool:
        value, default = get(cfg, name), all_keys()[name].default
        by_itself = name in FILLED or is_broken(value) or (name not in FOLLOWS and value == default)
        return name in known or name.startswith(heads) or not by_itself

    return dataclasses.replace(cfg, explicit=tuple(filter(counts, cfg.explicit)))


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
    meant = meant_key(name) or closest_name(name, keys)
    hint = foreign_hint(name) or (
        f" Did you mean {meant!r}?" if meant else " docs/configuration/ has all keys."
    )
    error = ConfigError(f"unknown key {name!r}: no key or map of this name exists.{hint}")
    error.breaks = (meant,) if meant else ()
    raise error


def is_known(name: str) -> bool:
    """Whether a full name is that of a key, or of a group of keys, or lies within a map."""
    keys, parts = all_keys(), name.split(".")
    heads = (".".join(parts[:end]) for end in range(1, len(parts)))
    return name in keys or name in all_groups() or any(head in keys and keys[head].is_map for head in heads)


def _flatten(
    updates: Mapping[str, Any], found: Findings, prefix: str = ""
) -> tuple[dict[str, Any], set[str]]:
    """Key -> value, with groups taken apart and paths within maps put together; and which keys are maps."""
    flat: dict[str, Any] = {}
    maps: set[str] = set()
    for part, value in updates.items():
        name = f"{prefix}{part}"
        if name in all_groups():
            if not isinstance(value, Mapping):
                found.add(_no_group(name, value))
                continue
            inner, inner_maps = _flatten(value, found, name + ".")
            flat.update(inner)
            maps |= inner_maps
            continue
        with found.at():
            key, path = split_name(name)
            for step in reversed(path.split(".")) if path else ():
                value = {step: value}
            if all_keys()[key].is_map and isinstance(value, Mapping):
                maps.add(key)
                value = _merged(flat.get(key), value)
            flat[key] = value
    return flat, maps


def _no_group(name: str, value: Any) -> UserError:
    error = ConfigError(f"{name}={value}: {name} is a group of keys: set the keys below it.")
    error.breaks = tuple(key for key in all_keys() if key.startswith(f"{name}."))
    return error


def _merged(base: Any, update: Any) -> dict[str, Any]:
    result = dict(base or {})
    for name, value in update.items():
        both_maps = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
        result[name] = _merged(result[name], value) if both_maps else value
    return result


def put(tree: dict[str, Any], name: str, value: Any) -> None:
    """Set a value by its full name in nested maps."""
    *groups, last = name.split(".")
    for group in groups:
        tree = tree.setdefault(group, {})
    tree[last] = value


def _with(cfg: Config, values: Mapping[str, Any]) -> Config:
    """The configuration with the values of some keys; an older name has none of its own."""
    own = {name: value for name, value in values.items() if name not in ALIASES}
    unused = {name: own.pop(name) for name in own.keys() & unused_keys().keys()}
    cfg = _rebuild(cfg, own)
    if not unused:
        return cfg
    changed = {
        name: value
        for name, value in sorted({**cfg.unused, **unused}.items())
        if is_broken(value) or value != unused_keys()[name].default
    }
    return dataclasses.replace(cfg, unused=changed)


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
        if name in cfg.explicit or is_broken(get(cfg, name)):
            continue
        try:
            value = followed_value(cfg, name)
        except ReadsBroken:
            value = Broken(name)
        if is_broken(value) or get(cfg, name) != value:
            cfg = _rebuild(cfg, {name: value})
    return cfg
