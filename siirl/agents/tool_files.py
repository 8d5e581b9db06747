"""The tools of a rollout node, read from the YAML file that multi_turn.tool_config_path names, and their use
after a turn: those that it names are called, and what they answer is read.
"""

import ast
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from siirl.agents.builtin_tools import BUILTIN_TOOLS
from siirl.agents.episode import Episode, Message
from siirl.agents.mcp_tools import check_mcp, check_mcp_here, mcp_tools
from siirl.agents.message_form import OwnTurn
from siirl.agents.tool_schema import check_schema
from siirl.agents.tools import Tool, Toolbox, ToolLimits, run_tools
from siirl.agents.transcript import Transcript
from siirl.compiler.interactions.stages import assistant_turns
from siirl.config.rollout import MultiTurnConfig
from siirl.dialect.tool_formats import ToolCall, ToolParser, tool_parser
from siirl.errors import ConfigError, UserError
from siirl.observe.printable import encodable
from siirl.user_code.load_object import load_object, read_text
from siirl.user_code.signatures import Call, misfits, needed_names, signature_of
from siirl.user_code.source import (
    check_call,
    check_init,
    check_loaded,
    check_reference,
    methods_of,
    split_reference,
)

KEY = "rollout.multi_turn.tool_config_path"


def load_tools(multi_turn: MultiTurnConfig, who: str) -> Toolbox:
    """The tools of a configuration: those of its tool file. ConfigError or DagError if one cannot be used.

    The file lists tools as {builtin, class_name or function; config; tool_schema}, and servers that have some
    as {mcp}; docs/tools.md. who: the node that names the file, for messages.
    """
    tools: dict[str, Tool] = {}
    names: set[str] = set()
    for entry, where, folder in _entries(multi_turn, who):
        for tool in _load_tools(entry, where, folder, multi_turn.tool_timeout_s):
            _check_name(tool.schema, names, where)
            tools[tool.schema["function"]["name"]] = tool
    return Toolbox(tools)


def check_tool_file(multi_turn: MultiTurnConfig, who: str) -> None:
    """What load_tools would refuse, as far as it shows without running code of the user's."""
    names: set[str] = set()
    for entry, where, folder in _entries(multi_turn, who):
        _check_entry(entry, where)
        schema = entry.get("tool_schema")
        if schema is not None:
            check_schema(schema, where)
            _check_name(schema, names, where)
        _check_source(entry, where, folder)


def check_tools_here(multi_turn: MultiTurnConfig, who: str) -> None:
    """ConfigError if this machine lacks what a server of the tool file needs."""
    try:
        check_tool_file(multi_turn, who)
    except UserError:
        return  # that is said without a look at the machine
    for entry, where, _ in _entries(multi_turn, who):
        if "mcp" in entry:
            check_mcp_here(entry["mcp"], where)


def code_of_tools(multi_turn: MultiTurnConfig) -> list[str]:
    """The references of tools that are code of the user's. Errors of check_tool_file."""
    return [
        _reference(entry[kind], where, folder, "function" if kind == "function" else "class")
        for entry, where, folder in _entries(multi_turn, "the run")
        for kind in ("function", "class_name")
        if kind in entry
    ]


def servers_of_tools(multi_turn: MultiTurnConfig) -> list[dict[str, Any]]:
    """The settings of servers that have tools. Errors of check_tool_file."""
    return [entry["mcp"] for entry, _, _ in _entries(multi_turn, "the run") if "mcp" in entry]


def _check_source(entry: dict[str, Any], who: str, folder: Path) -> None:
    """DagError or ConfigError unless the code of a tool, by its source, takes its config and its calls."""
    config = _config(entry)
    if "mcp" in entry:
        return
    if "builtin" in entry:
        check_loaded(BUILTIN_TOOLS[entry["builtin"]], who, Call(keywords=tuple(config), more="config"))
    elif "function" in entry:
        reference = _reference(entry["function"], who, folder, "function")
        function = check_reference(reference, f"{who}: function")
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            where = f"{who}: {function.name}{signature_of(function)} of {reference!r}"
            _check_arguments(signature_of(function), config, entry.get("tool_schema"), where)
    else:
        reference = _reference(entry["class_name"], who, folder, "class")
        cls, where = check_reference(reference, f"{who}: class_name", kind="class"), f"{who}: {reference!r}"
        if not isinstance(cls, ast.ClassDef) or cls.bases:
            return
        methods = methods_of(cls)
        check_init(methods.get("__init__"), config, where, "config")
        if "__call__" not in methods:
            raise ConfigError(f"{where} cannot be called. Give it __call__(self, arguments, episode).")
        check_call(methods["__call__"], where, CALL, bound=True)


def _check_arguments(
    signature: inspect.Signature, config: dict[str, Any], schema: dict[str, Any] | None, who: str
) -> None:
    """ConfigError unless a function can be called with what the schema allows, and its config."""
    if schema is None:
        raise ConfigError(f"{who}: it has no schema. Give it a tool_schema, which says what it takes.")
    parameters = schema["function"].get("parameters") or {}
    properties, required = parameters.get("properties") or {}, parameters.get("required") or ()
    given = [*properties, *config, *(["episode"] if "episode" in signature.parameters else [])]
    twice = sorted({name for name in given if given.count(name) > 1})
    problems = [f"{name} is given twice, by the schema, config or siirl (episode)" for name in twice]
    problems += misfits(signature, Call(keywords=tuple(dict.fromkeys(given))))
    problems += [
        f"{name} has no default, and the schema does not require it"
        for name in needed_names(signature)
        if name in properties and name not in required
    ]
    if problems:
        named = f"the arguments of its tool_schema ({', '.join(properties) or 'none'})"
        more = f" and config ({', '.join(config)})" if config else ""
        raise ConfigError(
            f"{who} cannot be called with {named}{more}: {'; '.join(problems)}. Change the function, or the "
            "tool file."
        )


def _check_name(schema: dict[str, Any], names: set[str], who: str) -> None:
    """ConfigError if another tool has the name of this one, which is added to `names`."""
    name = schema["function"]["name"]
    if name in names:
        raise ConfigError(f"{who}: two tools are called {name!r}. Rename one in its tool_schema.")
    names.add(name)


def _entries(multi_turn: MultiTurnConfig, who: str) -> list[tuple[Any, str, Path]]:
    """(entry, its name in messages, folder of the file) of each tool of a configuration."""
    if multi_turn.tool_config_path is None:
        return []
    path = Path(multi_turn.tool_config_path).expanduser()
    try:
        content = yaml.safe_load(read_text(path))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{who}: {KEY}={path}: it cannot be read as YAML: {error}. Correct it.") from error
    entries = content.get("tools") if isinstance(content, dict) else content
    if not isinstance(entries, list) or not entries:
        raise ConfigError(
            f"{who}: {KEY}={path}: it lists no tools. Write tools: [{{builtin: calculator}}, ...]."
        )
    return [
        (entry, f"{who}: {KEY}={path}, tool {number}", path.parent) for number, entry in enumerate(entries, 1)
    ]


SOURCES = ("builtin", "class_name", "function", "mcp")
CALL = Call(("arguments", "episode"), awaits=True)
"""How an object of a class is called as a tool."""


def _check_entry(entry: Any, who: str) -> None:
    if not isinstance(entry, dict) or sum(source in entry for source in SOURCES) != 1:
        raise ConfigError(
            f"{who}: {entry!r} must have one of {', '.join(SOURCES)}. Write e.g. builtin: python."
        )
    if "mcp" in entry:
        check_mcp(entry["mcp"], who)
        if extra := set(entry) - {"mcp"}:
            raise ConfigError(f"{who}: a server says itself what its tools are. Remove {sorted(extra)}.")
        return
    unknown = set(entry) - {*SOURCES, "config", "tool_schema"}
    if unknown:
        known = ", ".join((*SOURCES, "config", "tool_schema"))
        raise ConfigError(f"{who}: unknown keys {sorted(unknown)}. Known: {known}.")
    if "builtin" in entry and entry["builtin"] not in BUILTIN_TOOLS:
        raise ConfigError(
            f"{who}: unknown builtin {entry['builtin']!r}. Choose of {', '.join(BUILTIN_TOOLS)}."
        )
    if not isinstance(entry.get("config") or {}, dict):
        raise ConfigError(
            f"{who}: config = {entry['config']!r} is no mapping of arguments. Write config: {{name: value}}."
        )


def _config(entry: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a tool that its file gives; verl's files say `type: native` among them."""
    return {name: value for name, value in (entry.get("config") or {}).items() if name != "type"}


def _load_tools(entry: Any, who: str, folder: Path, timeout_s: float) -> list[Tool]:
    _check_entry(entry, who)
    if "mcp" not in entry:
        return [_load_tool(entry, who, folder)]
    tools = mcp_tools(entry["mcp"], who, folder, timeout_s)
    for tool in tools:
        check_schema(tool.schema, who)
    return list(tools)


def _load_tool(entry: Any, who: str, folder: Path) -> Tool:
    config, schema = _config(entry), entry.get("tool_schema")
    if "function" in entry:
        function = _object(entry["function"], who, folder, "function")
        if inspect.isfunction(function):
            where = f"{who}: {function.__name__}{inspect.signature(function)}"
            if schema is not None:
                check_schema(schema, who)
            _check_arguments(inspect.signature(function), config, schema, where)
        tool: Any = FunctionTool(function, config, schema)
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
        cls = _object(entry["class_name"], who, folder, "class")
        if not inspect.isclass(cls):
            raise ConfigError(f"{who}: {entry['class_name']} is no class. Name one, or write function: ...")
        return cls
    return BUILTIN_TOOLS[entry["builtin"]]


def _object(reference: Any, who: str, folder: Path, kind: str) -> Any:
    key = "class_name" if kind == "class" else kind
    return load_object(_reference(reference, who, folder, kind), f"{who}: {key}", kind)


def _reference(reference: Any, who: str, folder: Path, kind: str) -> str:
    """ "file.py:name" (also beside the tool file), "pkg.mod:name", or "pkg.mod.name" as verl writes it."""
    if isinstance(reference, str) and ":" not in reference:
        reference = ":".join(reference.rsplit(".", 1))
    where, name = split_reference(reference, f"{who}: {'class_name' if kind == 'class' else kind}", kind)
    if where.endswith(".py") and not Path(where).expanduser().is_file() and (folder / where).is_file():
        reference = f"{folder / where}:{name}"
    return reference


def _made(cls: Callable[..., Any], config: dict[str, Any], who: str) -> Any:
    check_loaded(cls, who, Call(keywords=tuple(config), more="config"))
    tool = cls(**config)
    check_loaded(tool, who, CALL)
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


@dataclass(frozen=True)
class ToolUse:
    """The tools of a rollout node."""

    toolbox: Toolbox
    parse: ToolParser
    limits: ToolLimits
    most_rounds: int
    """How often an agent goes on after answers."""

    async def answer(
        self, turn: Message, own: OwnTurn, episode: Episode, transcript: Transcript | None = None
    ) -> list[Message]:
        """The answers to the calls in a turn, which its agent alone reads; none if it calls nothing.

        own: the turn before any post-processing. A turn with calls is no longer read by others.
        transcript: of an episode that may be brought back.
        """
        calls = own.said.calls
        if not calls:
            return []
        ask = functools.partial(run_tools, calls, self.toolbox, episode, self.limits)
        if transcript is None:
            responses = await ask()
        else:
            responses = await transcript.answers(turn.turn or 0, episode.state, ask)
        turn.to = turn.agent
        turn.info["tool_calls"] = len(calls)
        turn.info["tool_errors"] = [response.error for response in responses if response.error]
        ids = iter(own.ids)
        return [
            Message(
                "tool",
                encodable(response.text),
                node=turn.node,
                to=turn.agent,
                images=response.images,
                name=call.name if isinstance(call, ToolCall) else None,
                call_id=next(ids) if isinstance(call, ToolCall) else None,
                info={"tool": response.tool, **({"error": response.error} if response.error else {})},
            )
            for call, response in zip(calls, responses, strict=True)
        ]


def tool_use(multi_turn: MultiTurnConfig, who: str, sees: bool = False) -> ToolUse | None:
    """What rollout.multi_turn of a node says; None unless enabled. ConfigError or DagError for a bad file.

    sees: whether its model sees images.
    """
    if not multi_turn.enable:
        return None
    return ToolUse(
        load_tools(multi_turn, who),
        tool_parser(multi_turn.format),
        ToolLimits.of(multi_turn, sees),
        assistant_turns(multi_turn) - 1,
    )
