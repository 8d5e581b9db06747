"""YAML files of settings as hydra composes them: a file, what its `defaults:` list names, and values that
name other keys. Files are read, never imported.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from siirl.errors import ConfigError
from siirl.migrate.translate import EMBODIED_NAMES, MEGATRON_NAMES, PRESET_NAMES, split_options

FILL_IN = "FILL_IN"
INTERPOLATION = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,([^}]*))?\}")
SELECTION = re.compile(r"\$\{oc\.select:([\w.]+)(?:,(.*))?\}", re.DOTALL)
PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)
SCALARS = {True: "true", False: "false", None: "null"}
THEIR_FOLDERS = ("verl/trainer/config", "siirl/client/config")
"""Where the trainers have files of their own, below the root of their repositories."""


@dataclass
class Composed:
    """What a file and those that it names come to."""

    tree: dict[str, Any] = field(default_factory=dict)
    presets: list[str] = field(default_factory=list)
    """The trainer's own files that are named: their settings are known defaults."""
    missing: list[str] = field(default_factory=list)
    """Files that are named and not there."""
    has_groups: bool = False
    """Whether it is put together of groups: then it has all settings, not those alone that differ."""


def with_named_file(arguments: Sequence[str], script: Path) -> tuple[tuple[str, ...], Composed]:
    """The arguments with the settings of the file that --config-path and --config-name name, in their place.

    script: its folder, and those above it, are searched, as is the current one; verl's own files are named
    from the root of its repository. What the arguments set themselves counts, also in values of the file.
    """
    options, left = split_options(arguments)
    name = options.get("--config-name", "").removesuffix(".yaml")
    if not name or name in (*PRESET_NAMES, *EMBODIED_NAMES):
        return tuple(arguments), Composed()
    folder = options.get("--config-path") or options.get("--config-dir") or THEIR_FOLDERS[0]
    bases = (Path(), *script.expanduser().absolute().parents)
    found = Composed()
    path = _find(f"{folder.removeprefix(f'{FILL_IN}/')}/{name}", bases)
    if path is None:
        found.missing.append(f"{folder}/{name}.yaml")
    else:
        _compose(path, "", [path.parent], bases, found)
    found.tree.pop("hydra", None)
    parts = (argument.lstrip("+~").partition("=") for argument in left if not argument.startswith("-"))
    given = {name: value for name, _, value in parts}
    of_file = settings_of(found.tree, given)
    preset = next((name for name in found.presets if name in MEGATRON_NAMES), None)
    strategy = (f"--config-name={preset}",) if preset else ()
    return (*strategy, *of_file, *left), found


def _find(name: str, folders: Sequence[Path]) -> Path | None:
    paths = (folder / f"{name}.yaml" for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def _compose(
    path: Path,
    package: str,
    roots: Sequence[Path],
    bases: Sequence[Path],
    found: Composed,
    above: tuple[Path, ...] = (),
) -> None:
    """Merge a file below `package` into what is found, with those that it names before and after itself.

    above: the files that have named it, one after the other.
    """
    above = (*above, path.resolve())
    text, tree = read_tree(path)
    header = PACKAGE.search(text)
    if header:
        package = "" if header[1] == "_global_" else header[1]
    items = tree.pop("defaults", None) or []
    searched = (tree.get("hydra") or {}).get("searchpath") or []
    named = [
        rest.replace(".", "/") if kind == "pkg" else rest
        for kind, _, rest in (str(one).partition("://") for one in searched)
    ]
    roots = [*roots, *(base / one for one in (*named, *THEIR_FOLDERS) for base in bases)]
    for item in items if "_self_" in items else [*items, "_self_"]:
        if item == "_self_":
            _merge(found.tree, _below(package, tree))
            continue
        for name, place in _named(item, package):
            if name in PRESET_NAMES:
                found.presets.append(name)
                continue
            other = _find(name, [path.parent, *roots])
            found.has_groups |= isinstance(item, dict)
            if other is None or other.resolve() in above:
                found.missing.append(f"{name}.yaml, which {path} names")
            else:
                _compose(other, place, roots, bases, found, above)


def _named(item: Any, package: str) -> Iterator[tuple[str, str]]:
    """(file without its ending, package) of an item of a defaults list: a name, or group@package: option."""
    if not isinstance(item, dict):
        yield str(item).lstrip("/"), package
        return
    for key, options in item.items():
        group, _, place = str(key).split()[-1].partition("@")  # optional, override
        group = group.lstrip("/")
        place = {"": group.replace("/", "."), "_here_": "", "_global_": ""}.get(place, place)
        inside = package if "_global_" not in str(key) else ""
        for option in options if isinstance(options, list) else [options]:
            if option is not None:
                yield f"{group}/{option}", ".".join(filter(None, (inside, place)))


def _below(package: str, tree: dict[str, Any]) -> dict[str, Any]:
    for part in reversed(package.split(".") if package else []):
        tree = {part: tree}
    return tree


def _merge(into: dict[str, Any], tree: Mapping[str, Any]) -> None:
    for name, value in tree.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value


def read_tree(path: Path) -> tuple[str, dict[str, Any]]:
    """The text of a YAML file, and the mapping that it holds. ConfigError if it holds none."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path} holds no mapping of keys. Name a launch script, or a YAML file of settings."
        )
    return text, tree


def settings_of(tree: Mapping[str, Any], given: Mapping[str, str]) -> list[str]:
    """key=value of each leaf that is not given, with ${key} of the tree and of what is given put in."""
    leaves = {name: _absolute(value, name) for name, value in leaves_of(tree)}
    known = {**leaves, **given}
    return [
        f"{name}={_text(_resolved(value, known, 0))}"
        for name, value in leaves.items()
        if name not in given and not name.endswith("_target_")
    ]


def leaves_of(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(whole name, value) of each key of a tree."""
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from leaves_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _absolute(value: Any, name: str) -> Any:
    """The value with ${.key}, which is beside it in its group, under the whole name."""
    group = name.rpartition(".")[0]
    return (
        re.sub(r"(\$\{(?:oc\.select:)?)\.(?=\w)", rf"\1{group}.", value) if isinstance(value, str) else value
    )


def _resolved(value: Any, leaves: Mapping[str, Any], depth: int) -> Any:
    """The value with ${key} of the same file put in; what is not there stays."""
    if not isinstance(value, str) or depth > 20:
        return value
    whole = INTERPOLATION.fullmatch(value)
    if whole and whole[1] in leaves:
        return _resolved(leaves[whole[1]], leaves, depth + 1)
    selection = SELECTION.fullmatch(value)
    if selection and selection[1] in leaves:
        return _resolved(leaves[selection[1]], leaves, depth + 1)
    if selection:  # what is not there has the default, or no value
        return _resolved(yaml.safe_load(selection[2] or "null"), leaves, depth + 1)

    def put_in(found: re.Match[str]) -> str:
        inner = leaves.get(found[1])
        return found[0] if inner is None else _text(_resolved(inner, leaves, depth + 1))

    return INTERPOLATION.sub(put_in, value)


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return SCALARS[value]
    if isinstance(value, list):
        return "[" + ",".join(_text(item) for item in value) + "]"
    return "{}" if value == {} else str(value)
