"""A launch script or a YAML file of siiRL or verl, read and translated; the result as a script of bash: a
command whose settings carry comments.
"""

import ast
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from siirl.config.foreign import foreign
from siirl.config.keys import Key
from siirl.config.resolve import FOLLOWS, get
from siirl.config.root import all_keys
from siirl.config.tree import default_config
from siirl.config.values import convert, show
from siirl.errors import ConfigError, UserError
from siirl.migrate.defaults import OWN
from siirl.migrate.hydra_files import FILL_IN, Composed, leaves_of, read_tree, settings_of, with_named_file
from siirl.migrate.script import read_script
from siirl.migrate.shell_words import UNKNOWN
from siirl.migrate.translate import MEGATRON_NAMES, translate
from siirl.migrate.translation import Kind, Setting, Translation, typed

PLACEHOLDER = re.compile(r"(?<!\$)\{[A-Za-z][\w ]*\}")
SETTING = re.compile(r"[~+]*[\w.]+=")


@dataclass(frozen=True)
class Source:
    """What a file asks for: its origin, the arguments of its command, and what it leaves open."""

    origin: str
    arguments: tuple[str, ...]
    open: Mapping[str, tuple[str, ...]]
    """Text -> the settings that hold it: places to fill in, or variables that nobody set."""
    whole: bool = False
    """Whether it is a tree of all settings: a YAML file."""
    missing: tuple[str, ...] = ()
    """Files whose settings belong to it, and that are not there."""


def read_source(path: Path, given: Mapping[str, str], settings: Sequence[str]) -> Source:
    """The settings of a script (anything but .yaml and .yml) or of a YAML file: keys, or a workflow's nodes.

    given: environment variables of the script. settings: what is put behind it. ConfigError if it cannot be
    read or holds no settings.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Name a launch script or a YAML file.") from None
    if path.suffix in (".yaml", ".yml"):
        return _from_yaml(path, settings)
    if path.suffix == ".py":
        raise ConfigError(_of_python(path, text))
    launch = read_script(text, given, settings)
    left: dict[str, list[str]] = {
        f"${name}, which nobody set": ["the script: it is empty below"]
        for name in sorted(launch.variables.empty)
    }
    arguments = []
    unread = [word for word in settings if SETTING.match(word) and word not in launch.arguments]
    for argument in (*launch.arguments, *unread):
        name = argument.partition("=")[0].lstrip("+")
        for found in UNKNOWN.finditer(argument):
            left.setdefault(launch.variables.unknown[int(found[1])], []).append(name)
        argument = UNKNOWN.sub(FILL_IN, argument)
        for found in PLACEHOLDER.finditer(argument):
            left.setdefault(found[0], []).append(name)
        arguments.append(argument)
    for name in sorted(launch.variables.defaulted & {*filter(os.environ.get, os.environ)}):
        taken = f"{name}, which this shell sets and the script takes when it runs, is not"
        left[taken] = [f"the command below: siirl migrate {path.name} {name}=${name}"]
    for guess in launch.variables.guesses:
        left[guess] = ["the script's conditions: give the variable if it is not so"]
    composed = Composed()
    if launch.origin != "siirl":
        arguments, composed = with_named_file(arguments, path)
    return Source(
        launch.origin,
        tuple(arguments),
        {text: tuple(names) for text, names in left.items()},
        whole=composed.has_groups,
        missing=tuple(composed.missing),
    )


def _of_python(path: Path, text: str) -> str:
    """Why a file of Python is not read, and how a pipeline of siiRL in it is named."""
    try:
        functions = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    except (SyntaxError, ValueError):
        functions = []
    named = " or ".join(f"dag.custom_pipeline_fn={path}:{name}" for name in functions[-3:])
    return f"{path} is Python, which only running it would read. Name the launch script that calls it" + (
        f"; a function that builds a workflow is {named} behind it." if named else "."
    )


def translate_source(source: Source) -> Translation:
    """The settings of a source for siirl; of a YAML file, those that differ from siirl's defaults."""
    result = translate(source.origin, source.arguments)
    for file in source.missing:
        result.add(
            "impossible",
            file,
            "it is not there: name the script where it lies in its repository, or set what the file sets",
        )
    if source.whole:
        _leave_out_defaults(result)
    return result


def _leave_out_defaults(result: Translation) -> None:
    """What a whole tree of settings sets to what siirl does without it, and does not choose by itself."""
    defaults = default_config()
    written = result.written()
    twice = {setting.name for setting in result.of("kept", "changed", "added") if setting not in written}
    for place, setting in enumerate(result.settings):
        key = all_keys().get(setting.name)
        if key is None or setting.name in {*twice, *OWN, *FOLLOWS} or key.rule.auto or key.is_map:
            continue
        if show(key, _converted(key, setting.value)) == show(key, get(defaults, setting.name)):
            kind, why = "dropped", "siirl's default, too"
            result.settings[place] = Setting(kind, "", "", setting.there or setting.name, why)


def _converted(key: Key, text: str) -> Any:
    try:
        return convert(key, typed(key, text))
    except UserError:
        return text


def _from_yaml(path: Path, settings: Sequence[str]) -> Source:
    _, tree = read_tree(path)
    if "nodes" in tree:
        return Source("siirl", (f"dag.workflow_path={path}", *settings), {})
    defaults = [str(item) for item in tree.pop("defaults", []) or []]
    tree.pop("hydra", None)
    if not any(_is_known(name) for name, _ in leaves_of(tree)):
        raise ConfigError(_of_others(path, tree))
    origin = "siirl" if "dag" in tree or "ppo_dag_trainer" in defaults or "ray_init" in tree else "verl"
    named = next((name for name in defaults if name in MEGATRON_NAMES), None)
    options = [f"--config-name={named}"] if named else []
    return Source(origin, (*options, *settings_of(tree, {}), *settings), {}, whole=True)


def _is_known(name: str) -> bool:
    return name in all_keys() or foreign(name) is not None


OTHERS = {"actor_train": ("ROLL", "#roll"), "training": ("Oumi", "#oumi")}
"""A group that a file of another framework has -> the framework, and its table on the page."""


def _of_others(path: Path, tree: Mapping[str, Any]) -> str:
    """Why a YAML file without any key of siiRL and verl is not read."""
    for group, (name, place) in OTHERS.items():
        if group in tree:
            return (
                f"{path} is a configuration of {name}: siirl migrate reads those of siiRL and verl. "
                f"docs/migration_reference.md{place} has what its keys are called here: write a command."
            )
    groups = ", ".join(list(tree)[:5])
    return f"{path} has no key of siiRL or verl, but {groups}. Name a launch script or a YAML file of theirs."


WIDTH = 44
KINDS: dict[Kind, str] = {
    "kept": "kept",
    "changed": "changed",
    "added": "added",
    "dropped": "skipped",
    "impossible": "not supported",
}
HEADINGS: dict[Kind, str] = {
    "impossible": "not supported (the command below runs without)",
    "dropped": "skipped",
}


def page(
    title: str, translation: Translation, left: Mapping[str, tuple[str, ...]], outcome: Sequence[str]
) -> str:
    """The whole text; running it in bash starts the run. outcome: what `siirl check` said, line by line."""
    counts = ", ".join(f"{len(translation.of(kind))} {word}" for kind, word in KINDS.items())
    lines = ["#!/usr/bin/env bash", f"# {title}: {counts}."]
    for kind, heading in HEADINGS.items():
        found = translation.of(kind)
        if found:
            lines += ["#", f"# {heading}:", *(f"#   {line}" for line in _by_reason(found))]
    if left:
        lines += ["#", "# to fill in:"]
        lines += [f"#   {one_line(text)} in {', '.join(names)}" for text, names in left.items()]
    lines += ["#", *(f"# {one_line(line)}" for line in outcome), "SETTINGS=("]
    for setting in translation.written():
        word = "  " + quoted(f"{setting.name}={setting.value}")
        comment = (
            "" if setting.kind == "kept" else f"  # {_comment(setting.name, setting.there, setting.why)}"
        )
        lines.append(word.ljust(WIDTH) + comment if comment else word)
    options = "".join(f" {shlex.quote(option)}" for option in translation.options)
    lines += [")", f'siirl run{options} "${{SETTINGS[@]}}" "$@"']
    return "\n".join(lines)


def _by_reason(settings: Sequence[Setting]) -> Iterator[str]:
    """A line for each setting; one for all that share a reason, if they are many."""
    shared: dict[str, list[str]] = {}
    for setting in settings:
        shared.setdefault(setting.why, []).append(one_line(setting.there))
    for why, there in shared.items():
        yield from [f"{', '.join(there)}: {why}"] if len(there) > 3 else [f"{one}: {why}" for one in there]


def one_line(text: str) -> str:
    """A text without line breaks and control characters, for a comment."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def _comment(name: str, there: str, why: str) -> str:
    """What the script had, its value alone under an equal name, and why it is another here."""
    before = there.lstrip("+").removeprefix(f"{name}=")
    was = f"was {before}" if there else ""
    return one_line(": ".join(filter(None, (was, why))))


def quoted(word: str) -> str:
    """A word for bash, in the quotes that leave it readable."""
    plain = shlex.quote(word)
    return f'"{word}"' if "'" in word and not set(word) & set('"$`\\!') else plain
