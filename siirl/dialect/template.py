"""A model's chat template: messages to text. The one place that calls it. No torch.

Whatever a template raises is TemplateRefused, and the date that it may write is the run's.
"""

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from jinja2 import TemplateError

from siirl.config import Config
from siirl.errors import DataError

Messages = Sequence[Mapping[str, Any]]

REFUSALS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    RecursionError,
    ArithmeticError,
)
"""What templates raise: on purpose, and by reading what messages do not have."""
CONTINUE, GENERATION = "continue_final_message", "add_generation_prompt"
"""Arguments that say where a prompt ends."""
PROBE = "STANDINFORTHETURN"
"""Stands for what somebody says; no letter of it is changed by trimming or escaping."""
ROW_OPTIONS = "chat_template_kwargs"
"""In a row's extra_info: further arguments of the chat template for its prompt."""
CLOCK = "strftime_now"
"""The function by which templates ask for today's date."""
SHOW_TOOLS = "siirl_show_tools"
"""Among the arguments of a template: who shows tools to the model, see rollout.multi_turn.show_tools."""
TOOL_NAMES = re.compile(r"\b\w*(?:tools|functions)\b")
"""Variables of templates that may hold tools: tools, xml_tools, functions."""
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": PROBE,
        "description": "...",
        "parameters": {
            "type": "object",
            "properties": {"q": {"type": "string", "description": "..."}},
            "required": ["q"],
        },
    },
}
TOOLS_TEXT = """# Tools

You may call the following functions. Each line is a JSON object that describes one of them:
<tools>
{tools}
</tools>

To call a function, write a JSON object with its name and its arguments between these tags:
<tool_call>
{{"name": "the name of the function", "arguments": {{"the name of an argument": "its value"}}}}
</tool_call>"""
"""What a system message says of tools where the template does not."""


class Vocabulary(Protocol):
    """What siirl needs of a tokenizer; every transformers tokenizer has it."""

    eos_token_id: int | None
    chat_template: Any

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def encode(self, text: str, **options: Any) -> list[int]: ...

    def decode(self, token_ids: Any, **options: Any) -> Any: ...


class TemplateRefused(Exception):
    """The template has no text for a conversation. Its text says why, in the template's words."""


class ChatTemplate:
    """The chat template of a tokenizer, with the arguments that a run gives it."""

    def __init__(self, tokenizer: Vocabulary, options: Mapping[str, Any]) -> None:
        self.tokenizer, self.options = tokenizer, dict(options)
        self.in_system = self.options.pop(SHOW_TOOLS, "template") == "system"
        """Tools are shown in the system message, whatever the template does with them."""
        self.name = getattr(tokenizer, "name_or_path", "") or "a tokenizer"

    def with_options(self, options: Mapping[str, Any]) -> "ChatTemplate":
        """The same with further arguments."""
        found = ChatTemplate(self.tokenizer, {**self.options, **options})
        found.in_system = self.in_system
        return found

    def render(
        self,
        messages: Messages,
        tools: Messages = (),
        generation: bool = False,
        **more: Any,
    ) -> str:
        """The text of a conversation; generation: up to where the assistant's turn begins.

        more: further arguments of the template. TemplateRefused.
        """
        if tools and self.in_system:
            messages, tools = self._telling(messages, tools), ()
        return self._called(
            messages, generation, {**({self.tools_key or "tools": list(tools)} if tools else {}), **more}
        )

    def _called(self, messages: Messages, generation: bool, more: Mapping[str, Any]) -> str:
        given = {name: value for name, value in self.options.items() if name not in (CONTINUE, GENERATION)}
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=generation, **{**given, **more}
            )
        except REFUSALS as error:
            raise TemplateRefused(str(error) or type(error).__name__) from error

    def prompt(self, messages: Messages, tools: Messages = ()) -> str:
        """The text of a prompt, up to where the model goes on. TemplateRefused.

        A last message of the assistant is the beginning of its answer, behind which the model goes on. The
        arguments continue_final_message and add_generation_prompt say otherwise, if they are given.
        """
        given = {name: self.options[name] for name in (CONTINUE, GENERATION) if name in self.options}
        continues = given.get(CONTINUE, messages[-1]["role"] == "assistant" and not given.get(GENERATION))
        if not continues:
            return self.render(messages, tools, given.get(GENERATION, True))
        *before, last = messages
        if given.get(GENERATION) or not isinstance(last.get("content"), str):
            why = f"with {GENERATION}, too" if given.get(GENERATION) else "that is no text"
            raise TemplateRefused(f"{CONTINUE} of a last message {why}: the model can do one of both")
        text = self.render([*before, {**last, "content": last["content"] + PROBE}], tools)
        if PROBE not in text:
            raise TemplateRefused(f"{CONTINUE}: the template leaves out what the last message says")
        return text[: text.rindex(PROBE)]

    @cached_property
    def tools_key(self) -> str | None:
        """The argument by which the template takes tools; None: it never shows any to the model."""
        source = str(getattr(self.tokenizer, "chat_template", ""))
        for key in dict.fromkeys(["tools", *TOOL_NAMES.findall(source)]):
            for content in ("...", [{"type": "text", "text": "..."}]):
                try:
                    text = self._called([{"role": "user", "content": content}], True, {key: [PROBE_TOOL]})
                except TemplateRefused:
                    continue
                if PROBE in text:
                    return key
        return None

    @property
    def tools_by(self) -> str | None:
        """What tells the model of tools; None: nothing does."""
        if self.in_system:
            return "system message"
        return None if self.tools_key is None else "template"

    def _telling(self, messages: Messages, tools: Messages) -> list[Mapping[str, Any]]:
        """The messages with one that tells of tools: that of the system, else the first of the user."""
        text = TOOLS_TEXT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        first, *rest = messages
        if first["role"] == "system":
            return [_with_text(first, "", f"\n\n{text}"), *rest]
        system = {"role": "system", "content": PROBE}
        parts = {"role": "system", "content": [{"type": "text", "text": PROBE}]}
        for probe in (system, parts):
            if PROBE in self.attempt([probe, first]):
                content = text if probe is system else [{"type": "text", "text": text}]
                return [{"role": "system", "content": content}, *messages]
        return [_with_text(first, f"{text}\n\n", ""), *rest]

    def attempt(self, messages: Messages, tools: Messages = (), generation: bool = False, **more: Any) -> str:
        """What `render` gives, and "" where the template refuses."""
        try:
            return self.render(messages, tools, generation, **more)
        except TemplateRefused:
            return ""


def _with_text(message: Mapping[str, Any], before: str, after: str) -> dict[str, Any]:
    """A message that says more, in text or as a part."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": f"{before}{content}{after}"}
    parts = ([{"type": "text", "text": text}] if text else [] for text in (before, after))
    return {**message, "content": [*next(parts), *(content or ()), *next(parts)]}


def chosen_template(found: Any, cfg: Config, name: str) -> str | None:
    """The template that a run uses, of those that a tokenizer has: a text, texts by name, or None.

    DataError where data.chat_template names none, and where there are several and none is the default.
    """
    wanted, named = cfg.data.chat_template, found if isinstance(found, Mapping) else {}
    if wanted is not None:
        if wanted in named:
            return named[wanted]
        file = Path(wanted).expanduser()
        if file.is_file():
            return file.read_text(encoding="utf-8")
        known = f"; {name} names {', '.join(named)}" if named else ""
        raise DataError(
            f"data.chat_template={wanted}: there is no such file{known}. Give a file, or leave it out for "
            "the tokenizer's own."
        )
    if not isinstance(found, Mapping):
        return found
    if cfg.actor_rollout_ref.rollout.multi_turn.enable and "tool_use" in named:
        return named["tool_use"]
    if "default" not in named:
        raise DataError(
            f"the tokenizer of {name} has chat templates called {', '.join(named)}, and none called default. "
            "Set data.chat_template to one of these names."
        )
    return named["default"]


def row_options(extra_info: Any) -> dict[str, Any]:
    """The arguments of the chat template that a row has of its own: extra_info.chat_template_kwargs, but for
    the empty ones, by which files of columns fill what a row leaves out. DataError unless they are a mapping.
    """
    options = extra_info.get(ROW_OPTIONS) if isinstance(extra_info, Mapping) else None
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise DataError(
            f"extra_info.{ROW_OPTIONS} = {options!r:.80}: these are arguments of the chat template, by name. "
            "Write a mapping, e.g. {enable_thinking: false}."
        )
    return {str(name): value for name, value in options.items() if value is not None}


def template_options(cfg: Config) -> dict[str, Any]:
    """What the chat template of a node is called with: the user's arguments, and the date of the run."""
    options = dict(cfg.data.apply_chat_template_kwargs)
    if cfg.data.template_date is not None:
        options.setdefault(CLOCK, clock(cfg.data.template_date))
    if cfg.actor_rollout_ref.rollout.multi_turn.show_tools == "system":
        options[SHOW_TOOLS] = "system"
    return options


def today(format: str) -> str:
    """The clock of templates in a run without a date of its own."""
    return datetime.datetime.now().strftime(format)


def clock(date: str) -> Callable[[str], str]:
    """A clock for templates that stands at noon of an ISO date."""
    noon = datetime.datetime.combine(datetime.date.fromisoformat(str(date)), datetime.time(12))
    return noon.strftime
