"""The tools of a rollout node, read from the YAML file that multi_turn.tool_config_path names."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from siirl.agents.builtin_tools import BUILTIN_TOOLS
from siirl.agents.tool_schema import check_schema
from siirl.agents.tools import Tool, Toolbox
from siirl.config.rollout import MultiTurnConfig
from siirl.dag.spec import load_object
from siirl.dag.user_code import check_reference
from siirl.errors import ConfigError

KEY = "actor_rollout_ref.rollout.multi_turn.tool_config_path"


def load_tools(multi_turn: MultiTurnConfig) -> Toolbox:
    """The tools of a configuration: those of its tool file. ConfigError or DagError if one cannot be used.

    The file lists tools as {builtin, class_name or function; config; tool_schema}; docs/tools.md.
    """
    tools: dict[str, Tool] = {}
    for entry, who, folder in _entries(multi_turn):
        tool = _load_tool(entry, who, folder)
        name = tool.schema["function"]["name"]
        if name in tools:
            raise ConfigError(
                f"{KEY}={multi_turn.tool_config_path}: two tools are called {name!r}. Rename one in its "
                "tool_schema."
            )
        tools[name] = tool
    return Toolbox(tools)


def check_tool_file(multi_turn: MultiTurnConfig) -> None:
    """What load_tools would refuse, as far as it shows without running code of the user's."""
    for entry, who, folder in _entries(multi_turn):
        _check_entry(entry, who)
        if entry.get("tool_schema") is not None:
            check_schema(entry["tool_schema"], who)
        for source in ("class_name", "function"):
            if source in entry:
                check_reference(_reference(entry[source], who, folder), who)


def _entries(multi_turn: MultiTurnConfig) -> list[tuple[Any, str, Path]]:
    """(entry, its name in messages, folder of the file) of each tool of a configuration."""
    if multi_turn.tool_config_path is None:
        return []
    path = Path(multi_turn.tool_config_path).expanduser()
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{KEY}={path}: it cannot be read as YAML: {error}. Correct it.") from error
    entries = content.get("tools") if isinstance(content, dict) else content
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{KEY}={path}: it lists no tools. Write tools: [{{builtin: calculator}}, ...].")
    return [(entry, f"{KEY}={path}, tool {number}", path.parent) for number, entry in enumerate(entries, 1)]


SOURCES = ("builtin", "class_name", "function")


def _check_entry(entry: Any, who: str) -> None:
    if not isinstance(entry, dict) or sum(source in entry for source in SOURCES) != 1:
        raise ConfigError(
            f"{who}: {entry!r} must have one of {', '.join(SOURCES)}. Write e.g. builtin: python."
        )
    unknown = set(entry) - {*SOURCES, "config", "tool_schema"}
    if unknown:
        known = ", ".join((*SOURCES, "config", "tool_schema"))
        raise ConfigError(f"{who}: unknown keys {sorted(unknown)}. Known: {known}.")
    if "builtin" in entry and entry["builtin"] not in BUILTIN_TOOLS:
        raise ConfigError(
            f"{who}: unknown builtin {entry['builtin']!r}. Choose of {', '.join(BUILTIN_TOOLS)}."
        )


def _load_tool(entry: Any, who: str, folder: Path) -> Tool:
    _check_entry(entry, who)
    config = dict(entry.get("config") or {})
    config.pop("type", None)  # verl's files say `type: native`
    schema = entry.get("tool_schema")
    if "function" in entry:
        tool: Any = FunctionTool(_object(entry["function"], who, folder), config, schema)
    else:
        tool = _made(_tool_class(entry, who, folder), config, who)
        if schema is not None:
            tool.schema = schema
    if getattr(tool, "schema", None) is None:
        raise ConfigError(
            f"{who}: it has no schema. Give it a tool_schema, or the class an attribute schema."
        )
    check_schema(tool.schema, who)
    return tool


def _tool_class(entry: dict[str, Any], who: str, folder: Path) -> Any:
    if "class_name" in entry:
        cls = _object(entry["class_name"], who, folder)
        if not inspect.isclass(cls):
            raise ConfigError(f"{who}: {entry['class_name']} is no class. Name one, or write function: ...")
        return cls
    return BUILTIN_TOOLS[entry["builtin"]]


def _object(reference: Any, who: str, folder: Path) -> Any:
    return load_object(_reference(reference, who, folder), who)


def _reference(reference: Any, who: str, folder: Path) -> str:
    """ "file.py:name" (also beside the tool file), "pkg.mod:name", or "pkg.mod.name" as verl writes it."""
    if not isinstance(reference, str):
        raise ConfigError(f"{who}: {reference!r} is no text. Write file.py:name or pkg.mod:name.")
    if ":" not in reference:
        reference = ":".join(reference.rsplit(".", 1))
    where, _, name = reference.rpartition(":")
    if where.endswith(".py") and not Path(where).expanduser().is_file() and (folder / where).is_file():
        reference = f"{folder / where}:{name}"
    return reference


def _made(cls: Callable[..., Any], config: dict[str, Any], who: str) -> Any:
    try:
        inspect.signature(cls).bind(**config)
    except TypeError as error:
        raise ConfigError(f"{who}: its config {config} does not fit {cls}: {error}. Correct it.") from error
    tool = cls(**config)
    try:
        inspect.signature(tool).bind({}, None)
    except TypeError as error:
        raise ConfigError(
            f"{who}: {cls.__name__} cannot be called as tool(arguments, episode): {error}. Give it "
            "__call__(self, arguments, episode)."
        ) from error
    return tool


class FunctionTool:
    """A plain function, or a coroutine, as a tool: fn(**arguments, **config) -> text."""

    def __init__(self, function: Callable[..., Any], config: dict[str, Any], schema: Any):
        self.schema = schema
        self._function = function
        self._config = config

    def __call__(self, arguments: dict[str, Any], episode: Any) -> Any:
        """Call it; the episode is handed over as `episode` if it has an argument of that name."""
        wants = "episode" in inspect.signature(self._function).parameters
        return self._function(**arguments, **self._config, **({"episode": episode} if wants else {}))
