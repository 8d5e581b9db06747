"""From the command line to a `Config`: hydra composes preset and overrides, the schema types the result.

hydra is imported by the functions that use it: it takes half a second, and workers get a composed
configuration.
"""

import copy
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from siirl.config.keys import Key
from siirl.config.resolve import FOLLOWS
from siirl.config.root import Config, all_groups, all_keys
from siirl.config.tree import EXPLICIT, as_recorded, default_config, overridden, put, split_name, with_broken
from siirl.config.values import closest, plain
from siirl.errors import ConfigError, Place
from siirl.findings import Findings

PRESETS = Path(__file__).parent
OVERRIDE = re.compile(r"(?P<sign>~|\+\+|\+|)(?P<name>[^=]*)(?:=(?P<value>.*))?", re.DOTALL)
NEEDS_HYDRA = re.compile(r"^\s*#\s*@package|\b(defaults|hydra)\b", re.MULTILINE)
"""Of a preset's text: a package of its own, a list of defaults, or settings of hydra, wherever they are."""


@dataclass(frozen=True)
class _Override:
    """One override as it was written: sign "", "+", "++" or "~", full name, text after the "=" (None if
    absent).
    """

    sign: str
    name: str
    value: str | None


def load_config(overrides: Sequence[str] = (), config_name: str = "ppo_dag_trainer") -> Config:
    """The configuration of a command line: `key=value` overrides over a preset over the schema's defaults.

    config_name: a preset of siirl/config, or the path of a YAML file of the user's own. Works in any
    directory and any number of times in a process. ConfigError for unknown keys, wrong types and malformed
    overrides, NotSupportedError for a feature that does not exist yet: all of them at once. Cross-checks
    between keys are those of `check_config`.
    """
    found = Findings()
    cfg = read_config(overrides, config_name, found)
    found.close()
    return cfg


def read_config(overrides: Sequence[str], config_name: str, found: Findings) -> Config:
    """`load_config` that goes on: what is wrong goes to `found`, and the keys that it concerns are broken.

    ConfigError for a preset that cannot be read: without it, no key has a value.
    """
    _check_list(overrides)
    written: list[_Override] = []
    for text in overrides:
        with found.at(Place.COMMAND_LINE):
            written.append(_read_override(text))
    refused: set[str] = set()
    settings: dict[str, str] = {}
    for item in (item for item in written if item.sign != "~"):
        refused.add(item.name)
        settings.pop(item.name, None)
        with found.at(Place.COMMAND_LINE):
            settings[item.name] = _for_hydra(item)
            refused.remove(item.name)
    composed = _composed(settings, config_name, found, refused)
    recorded = composed.pop(EXPLICIT, None)
    for position, item in enumerate(written):
        set_later = any(later.name == item.name and later.sign != "~" for later in written[position:])
        if item.sign == "~" and not set_later:
            _remove(composed, item.name)
    wrong = Findings()
    cfg = overridden(default_config(), composed, wrong)
    named = [item.name for item in written]
    if isinstance(recorded, list):
        cfg = as_recorded(cfg, map(str, recorded), named)
    for problem in wrong.problems:
        text = str(problem)
        here = any(text.removeprefix("not supported yet: ").startswith(f"{name}=") for name in named)
        problem.place = Place.COMMAND_LINE if here else Place.CONFIGURATION
        found.add(problem)
    unknown = {name for problem in found.problems for name in problem.breaks} | refused
    return with_broken(cfg, (name for name in unknown if name in all_keys() and name not in cfg.explicit))


def _check_list(overrides: object) -> None:
    """ConfigError for what people write in Python in place of a list of texts."""
    if isinstance(overrides, str):
        raise ConfigError(f"settings are a list of texts, not one text. Write {overrides.split()!r}.")
    if isinstance(overrides, Mapping):
        listed = [f"{name}={value}" for name, value in overrides.items()]
        raise ConfigError(f"settings are a list of texts, not a map. Write {listed!r}.")


def _composed(
    settings: dict[str, str], config_name: str, found: Findings, refused: set[str]
) -> dict[str, Any]:
    """`_compose` that goes on without the settings that cannot be composed; their names are `refused`."""
    try:
        return _compose(list(settings.values()), config_name)
    except ConfigError:
        composed, good = _compose([], config_name), []
    for name, text in settings.items():
        refused.add(name)
        with found.at(Place.COMMAND_LINE):
            composed = _compose([*good, text], config_name)
            good.append(text)
            refused.remove(name)
    return composed


def _read_override(text: str) -> _Override:
    match = OVERRIDE.fullmatch(text.strip())
    name = match["name"].strip() if match else ""
    if match is None or not name or (match["value"] is None and match["sign"] != "~"):
        raise ConfigError(
            f"{text!r} is not an override: write key=value, without blanks around the sign (+key=value adds "
            "to a map, ~key removes)."
        )
    if name.split(".")[0] == "hydra":
        raise ConfigError(f"{text!r}: hydra's own settings are not used. Outputs go to trainer.output_dir.")
    if name not in all_groups():
        split_name(name)
    return _Override(match["sign"], name, match["value"])


def _for_hydra(item: _Override) -> str:
    """The override in hydra's grammar.

    Names are checked by now, so every one is forced. Texts are quoted, because paths hold characters that
    hydra's grammar refuses without quotes.
    """
    if item.sign == "~":
        return f"~{item.name}" if item.value is None else f"~{item.name}={item.value}"
    raw = (item.value or "").strip()
    if item.name not in all_groups():
        key_name, path = split_name(item.name)
        raw = _in_map(raw) if path else _as_text(all_keys()[key_name], raw)
    text = f"++{item.name}={raw}"
    parsed = _parsed(text)
    if parsed is None:
        raise ConfigError(
            f"{item.name}={item.value}: malformed value. Quote it: {item.name}=\"'...'\" in a shell."
        )
    if parsed.is_sweep_override():
        raise ConfigError(
            f"{item.name}={item.value}: several values: write a list, [a,b], or quote the text."
        )
    return text


def _as_text(key: Key, raw: str) -> str:
    """The value of a key, quoted if it is text."""
    if not key.takes_text or raw.startswith("${") or raw.lower() == "null":
        return raw
    if key.type == bool | str and raw.lower() in ("true", "false"):
        return raw
    if key.is_map and raw.startswith("{"):
        return raw
    is_list = "tuple" in str(key.type)
    if is_list and raw.startswith("[") and raw.endswith("]"):
        items = [item.strip() for item in raw[1:-1].split(",")]
        return "[" + ",".join(_quoted(item) for item in items if item) + "]"
    if is_list and "," in raw and raw[0] not in "'\"":
        return raw
    return _quoted(raw)


def _in_map(raw: str) -> str:
    """A value within a free-form map: hydra's grammar decides its type; what it refuses is text."""
    return raw if _parsed(f"++a={raw}") is not None else _quoted(raw)


def _quoted(raw: str) -> str:
    if len(raw) > 1 and raw[0] in "'\"" and raw[-1] == raw[0]:
        return raw
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), raw)
    return f"'{escaped}'"


@functools.lru_cache(4096)
def _parsed(text: str) -> Any:
    """hydra's reading of an override, or None if it is malformed."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    try:
        return OverridesParser.create().parse_override(text)
    except Exception:  # noqa: BLE001 - the edge to hydra, which raises whatever it trips over
        return None


def _compose(overrides: list[str], config_name: str) -> dict[str, Any]:
    """What preset and overrides set, as plain Python; interpolations resolved, against the defaults too.

    overrides: of `_for_hydra`, put onto the composed preset as hydra would: it takes ten times as long, and
    composes its own settings, too, each time.
    """
    from omegaconf import OmegaConf

    file = _preset_file(config_name)
    try:
        composed = copy.deepcopy(_packaged(file)) if file.parent == PRESETS else _of_file(file)
        for override in map(_parsed, overrides):
            OmegaConf.update(composed, override.key_or_group, override.value(), merge=True, force_add=True)
        written = OmegaConf.to_container(composed)
        if "${" in str(written):
            everything = OmegaConf.merge(_schema_defaults(), composed)
            written = _pick(written, OmegaConf.to_container(everything, resolve=True))
    except Exception as error:  # the edge to hydra and YAML, which raise whatever they trip over
        raise ConfigError(
            f"config {config_name!r} cannot be composed: {type(error).__name__}: {error}"
        ) from error
    return {str(name): value for name, value in written.items()} if isinstance(written, dict) else {}


def _of_file(file: Path) -> Any:
    """A preset as hydra composes it, with those that its list of defaults names.

    One that names none, as the configuration that a run records, is what its file says: hydra would take
    three times as long for the same.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    if not NEEDS_HYDRA.search(file.read_text(errors="replace")) and OmegaConf.is_dict(
        alone := OmegaConf.load(file)
    ):
        return alone
    searchpath = f"hydra.searchpath=[{_quoted('file://' + str(PRESETS))}]"
    outer, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    try:
        with initialize_config_dir(str(file.parent), version_base="1.3"):
            return compose(file.name, [searchpath])
    finally:
        GlobalHydra.instance().hydra = outer


_packaged = functools.cache(_of_file)
"""Of one that comes with siirl: it does not change while a process runs."""


def _preset_file(config_name: str) -> Path:
    packaged = PRESETS / f"{config_name.removesuffix('.yaml')}.yaml"
    if packaged.is_file():
        return packaged
    presets = sorted(path.stem for path in PRESETS.glob("*.yaml"))
    if not config_name.endswith((".yaml", ".yml")):
        hint = closest(config_name, presets)
        raise ConfigError(
            f"unknown config {config_name!r}: give a YAML file or one of {', '.join(presets)}.{hint}"
        )
    file = Path(config_name).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(
            f"config file {config_name} does not exist (looked at {file}); presets: {', '.join(presets)}."
        )
    return file


@functools.cache
def _schema_defaults() -> dict[str, Any]:
    """The defaults of all keys as a nested plain dict, for interpolations to read."""
    tree: dict[str, Any] = {}
    for name, key in all_keys().items():
        put(tree, name, FOLLOWS.get(name, plain(key.default)))
    return tree


def _pick(shape: Any, values: Any) -> Any:
    """The part of a nested dict that has the keys of `shape`."""
    if not isinstance(shape, dict):
        return values
    return {name: _pick(inner, values[name]) for name, inner in shape.items()}


def _remove(tree: dict[str, Any], name: str) -> None:
    """Drop a key from a nested dict, if it is there."""
    *groups, last = name.split(".")
    node: Any = tree
    for group in groups:
        node = node.get(group) if isinstance(node, dict) else None
    if isinstance(node, dict):
        node.pop(last, None)
