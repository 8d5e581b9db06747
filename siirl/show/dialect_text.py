"""A model's dialect as a user reads it: five lines, and an example conversation. No torch."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from siirl.compiler.plan import Plan
from siirl.config import Config
from siirl.dialect.dialect import Dialect, dialect_of, tool_findings
from siirl.dialect.file_vocabulary import FileVocabulary
from siirl.dialect.template import ChatTemplate, TemplateRefused, chosen_template, template_options
from siirl.dialect.tool_formats import AUTO

STOP, TRAINED, PLAIN = "\x1b[1;31m", "\x1b[32m", "\x1b[0m"
EXAMPLE = (
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "6."},
)
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "...",
        "parameters": {"type": "object", "properties": {"q": {"type": "string", "description": "..."}}},
    },
}

Spoken = tuple[str, Dialect, ChatTemplate | None]
"""A policy, how it speaks, and its template."""


def dialects_here(plan: Plan, node_cfgs: Mapping[str, Config]) -> Iterator[Spoken]:
    """Those of the policies whose tokenizer.json is on this machine."""
    for name, model in plan.models.items():
        cfg = node_cfgs.get(model.node)
        if cfg is None or not model.generates or model.role != "rollout":
            continue
        folder = Path(cfg.data.tokenizer or cfg.actor_rollout_ref.model.path).expanduser()
        if not (folder / "tokenizer.json").is_file():
            continue
        try:
            vocabulary = FileVocabulary(folder)
        except (OSError, ValueError, KeyError):  # said by the checks of model files
            continue
        vocabulary.chat_template = chosen_template(vocabulary.chat_template, cfg, str(folder))
        template = ChatTemplate(vocabulary, template_options(cfg)) if vocabulary.chat_template else None
        dialect = dialect_of(cfg, vocabulary)
        multi_turn = cfg.actor_rollout_ref.rollout.multi_turn
        if multi_turn.enable:
            findings = (*dialect.findings, *tool_findings(dialect, multi_turn.format))
            read_as = dialect.tool_format if multi_turn.format == AUTO else multi_turn.format
            dialect = replace(dialect, findings=findings, tool_format=read_as)
        yield name.partition(".")[0], dialect, template


def dialect_lines(policy: str, dialect: Dialect) -> list[str]:
    """What a policy's turns are made of: five lines, and one for each finding."""
    named = [f"{_seen(x.text) or x.id} ({', '.join(x.sources)})" for x in dialect.stops]
    marks = dialect.reasoning
    reasoning = "none" if marks is None else f"{marks.begin} ... {marks.end}{_opening(dialect)}"
    tools = "not shown to the model" if dialect.tools_by is None else f"shown by the {dialect.tools_by}"
    calls = f"calls are read as {dialect.tool_format}" if dialect.tool_format else "no calls that it writes"
    history = "kept" if not dialect.drops_reasoning else "reasoning of turns before the last question skipped"
    date = "today's date (data.template_date)" if dialect.dated else "no date"
    return [
        f"{policy} ends a turn by: {', '.join(named) or 'no token'}",
        f"  reasoning: {reasoning}",
        f"  tools: {tools}; {calls}",
        f"  history: {history}",
        f"  prompt: {date}",
        *(f"  note: {finding}" for finding in dialect.findings),
    ]


def _seen(text: str) -> str:
    """A token as one can see it: white space as Python writes it."""
    return text if text.isprintable() and not text.isspace() else repr(text)


def _opening(dialect: Dialect) -> str:
    assert dialect.reasoning is not None
    if dialect.reasoning.opened:
        return ", opened by the prompt"
    return ", closed by the prompt: it does not reason" if dialect.reasoning.closed else ""


def example_text(dialect: Dialect, template: ChatTemplate, colour: bool) -> str:
    """A conversation as the template writes it.

    What is trained is green, stop tokens red; without colours they are in guillemets and in brackets.
    """
    tools = [TOOL] if dialect.tools_by else []
    parts = []
    for turn in (1, 3):
        try:
            prompt = template.prompt(EXAMPLE[:turn], tools)
            whole = template.render(EXAMPLE[: turn + 1], tools)
        except TemplateRefused as error:
            return "\n".join([*parts, f"(the template refuses this conversation: {error})"])
        if not whole.startswith(prompt):  # the prompt opens reasoning, which the history leaves out
            parts.append(f"{prompt}{_marked('...', TRAINED, colour)}")
            continue
        parts.append(prompt + _said(whole[len(prompt) :], dialect, colour))
    return "\n---\n".join(parts)


def _said(text: str, dialect: Dialect, colour: bool) -> str:
    found = [(text.find(stop.text), stop.text) for stop in dialect.stops if stop.text and stop.text in text]
    if not found:
        return _marked(text, TRAINED, colour)
    at, mark = min(found)
    return _marked(text[:at], TRAINED, colour) + _marked(mark, STOP, colour)


def _marked(text: str, style: str, colour: bool) -> str:
    if colour:
        return f"{style}{text}{PLAIN}"
    return f"\u00ab{text}\u00bb" if style == TRAINED else f"[{text}]"
