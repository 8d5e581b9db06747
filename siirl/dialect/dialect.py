"""A model's dialect: where a turn of it ends, what in it is reasoning, how it calls tools. No torch.

Derived once for each model, from its files and by probing its chat template; completed by tables of families,
and overridden by keys. Contexts, parsers, rewards, the endpoint, samples and all rollout engines ask it.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

from siirl.config import Config
from siirl.config.common import ModelConfig
from siirl.config.rollout import STOP_SOURCES
from siirl.dialect.call_style import ARGUMENTS, NAMES, TOOLS, CallStyle, call_style, told_format, turn_of
from siirl.dialect.marks import KNOWN, ReasoningMarks
from siirl.dialect.template import CLOCK, PROBE, ChatTemplate, Vocabulary, clock, template_options
from siirl.dialect.tool_formats import AUTO, FORMAT, ToolCall, tool_parser
from siirl.errors import ConfigError
from siirl.models.config_json import config_json
from siirl.models.overridden import overridden

TURN_ENDS = ("<|call|>", "<|eom_id|>", "<|observation|>")
"""Marks by which families end a turn that calls a tool, where their templates write them."""
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
USER, OTHER = {"role": "user", "content": "..."}, {"role": "user", "content": "!!!"}
CALL_ID = "abcdef123"
"""Nine letters and digits, which Mistral's templates demand."""


class Marked(Vocabulary, Protocol):
    """A tokenizer that says which tokens were added to it."""

    def get_added_vocab(self) -> dict[str, int]: ...


@dataclass(frozen=True)
class StopToken:
    """A token that ends a response."""

    id: int
    text: str
    sources: tuple[str, ...]
    """Who says so: tokenizer, config.json, generation_config.json, template, family, key."""


@dataclass(frozen=True)
class Dialect:
    """How a model speaks."""

    name: str
    """Of its tokenizer."""
    stops: tuple[StopToken, ...] = ()
    said_stops: frozenset[int] = frozenset()
    """Those that are words of the response: rollout.stop_token_ids alone names them."""
    end_id: int | None = None
    """The stop token that ends a turn in the template, else the tokenizer's end of sequence."""
    end_text: str = ""
    """All that the template writes behind a last turn."""
    reasoning: ReasoningMarks | None = None
    tool_format: str | None = None
    """How it writes calls of tools (siirl/dialect/tool_formats.py); None: its template writes none."""
    calls: CallStyle | None = None
    """What its template does with them; None: it writes none that can be read."""
    tools_by: str | None = None
    """What tells the model of tools: "template", "system message"; None: nothing does."""
    drops_reasoning: bool = False
    """The template leaves out the reasoning of turns before the last question."""
    dated: bool = False
    """The template writes today's date into prompts."""
    findings: tuple[str, ...] = ()
    """What a user should know of it, a sentence each."""

    template: ChatTemplate | None = field(default=None, compare=False, repr=False)
    """That by which it was found."""

    def of_row(self, options: Mapping[str, Any]) -> "Dialect":
        """How it speaks behind the prompt of a row with such arguments of its template: these may open or
        close the reasoning."""
        if not options or self.template is None:
            return self
        template = self.template.with_options(options)
        marks = self.reasoning and _opened(self.reasoning, _generation(template))
        return replace(self, reasoning=marks, template=template)

    @property
    def opens(self) -> bool:
        """Whether its prompts end inside of the reasoning."""
        return self.reasoning is not None and self.reasoning.opened

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return tuple(stop.id for stop in self.stops)

    def unsaid_end(self, token_ids: Sequence[int]) -> int | None:
        """The stop token that they end by, if it is none of the words; None: there is none."""
        last = token_ids[-1] if len(token_ids) else None
        return last if last in self.stop_ids and last not in self.said_stops else None

    @classmethod
    def of_service(cls, vocabulary: Vocabulary) -> "Dialect":
        """That of a service, which takes turns apart itself."""
        end = vocabulary.eos_token_id
        stops = () if end is None else (StopToken(end, _text(vocabulary, end), ("tokenizer",)),)
        return cls("a service", stops, end_id=end)


@dataclass(frozen=True)
class Probe:
    """What a template answered when it was asked, as texts."""

    prompt: str = ""
    """What it writes where the assistant's turn begins."""
    last: str = ""
    """After what an assistant said last."""
    followed: str = ""
    """After what an assistant said before a user's message."""
    called: str = ""
    """After the arguments of a call, up to the tool's answer."""
    calls_twice: str = ""
    """After the arguments of the first of two calls."""


def dialect_of(cfg: Config, tokenizer: Marked) -> Dialect:
    """The dialect of the policy of a node's configuration, as its keys complete it."""
    rollout, options = cfg.actor_rollout_ref.rollout, template_options(cfg)
    derived = dialect_of_model(cfg.actor_rollout_ref.model, tokenizer, options, rollout.stop_sources)
    marks = rollout.reasoning_marks
    if marks is not None:
        prompt = "" if derived.template is None else _generation(derived.template)
        derived = replace(derived, reasoning=_opened(ReasoningMarks(*marks), prompt) if marks else None)
    extra = [StopToken(id, _text(tokenizer, id), ("key",)) for id in rollout.stop_token_ids]
    own = derived
    if extra and set(rollout.stop_sources) != set(STOP_SOURCES):
        own = dialect_of_model(cfg.actor_rollout_ref.model, tokenizer, options)
    said = frozenset(rollout.stop_token_ids) - set(own.stop_ids)
    return replace(derived, stops=_merged([*derived.stops, *extra]), said_stops=said)


def dialect_of_model(
    model: ModelConfig,
    tokenizer: Marked,
    options: Mapping[str, Any] = MappingProxyType({}),
    sources: Sequence[str] = STOP_SOURCES,
) -> Dialect:
    """That of a model with this tokenizer. options: arguments of its chat template. sources: see derive."""
    files = {
        "config.json": overridden(config_json(model), model.override_config),
        "generation_config.json": config_json(model, "generation_config.json"),
    }
    template = ChatTemplate(tokenizer, options) if tokenizer.chat_template else None
    return derive(tokenizer, template, files, sources)


def derive(
    tokenizer: Marked,
    template: ChatTemplate | None,
    files: Mapping[str, Mapping[str, Any]],
    sources: Sequence[str] = STOP_SOURCES,
) -> Dialect:
    """What a tokenizer, the files of a model and its chat template say of its dialect.

    files: the contents of config.json and generation_config.json, {} where there is none. sources: what may
    say which tokens end a response.
    """
    named = [("tokenizer", "tokenizer", [tokenizer.eos_token_id])]
    named += [(file.removesuffix(".json"), file, end_ids(content)) for file, content in files.items()]
    stops = _merged(
        StopToken(id, _text(tokenizer, id), (who,))
        for source, who, ids in named
        if source in sources
        for id in ids
        if id is not None
    )
    if template is None:
        return Dialect(_name(tokenizer), stops, end_id=tokenizer.eos_token_id, reasoning=KNOWN[0])
    probe, added = _probed(template), tokenizer.get_added_vocab()
    style = None if template.in_system else call_style(template)
    ends = list(_turn_ends(probe, added, {stop.id for stop in stops}))
    if "template" in sources:
        source = str(tokenizer.chat_template)
        ends += [("family", mark) for mark in TURN_ENDS if mark in added and mark in source]
        stops = _merged([*stops, *(StopToken(added[mark], mark, (who,)) for who, mark in ends)])
    ids = {stop.id for stop in stops}
    marks = itertools.chain(_closing(probe.last, added, ids), _leading(probe.followed, added))
    end = next((mark for mark in marks if added[mark] in ids), None)
    dialect = Dialect(
        _name(tokenizer),
        stops,
        end_id=tokenizer.eos_token_id if end is None else added[end],
        end_text=probe.last,
        reasoning=reasoning_marks(template, probe, added),
        tool_format=_tool_format(template, style, added),
        calls=style,
        tools_by=template.tools_by,
        dated=_is_dated(template),
        template=template,
    )
    dialect = replace(dialect, drops_reasoning=_drops_reasoning(template, dialect.reasoning))
    return replace(dialect, findings=tuple(_findings(dialect, end)))


def end_ids(config: Mapping[str, Any]) -> list[int]:
    """The tokens that end a text by a config.json or generation_config.json: none, one or a list of them."""
    value = config.get("eos_token_id")
    if value is None and isinstance(config.get("text_config"), Mapping):
        value = config["text_config"].get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    return [id for id in ids if isinstance(id, int) and not isinstance(id, bool) and id >= 0]


def _merged(stops: "Iterator[StopToken] | Sequence[StopToken]") -> tuple[StopToken, ...]:
    """Each token once, with all who name it."""
    found: dict[int, StopToken] = {}
    for stop in stops:
        known = found.setdefault(stop.id, replace(stop, sources=()))
        found[stop.id] = replace(known, sources=tuple(dict.fromkeys([*known.sources, *stop.sources])))
    return tuple(found.values())


def _name(tokenizer: Vocabulary) -> str:
    return getattr(tokenizer, "name_or_path", "") or "a tokenizer"


def _text(tokenizer: Vocabulary, id: int) -> str:
    return str(tokenizer.decode([id], skip_special_tokens=False))


def _probed(template: ChatTemplate) -> Probe:
    said = {"role": "assistant", "content": PROBE}
    call = {"id": CALL_ID, "type": "function", "function": {"name": "look", "arguments": {"q": PROBE}}}
    calls = {"role": "assistant", "content": "", "tool_calls": [call]}
    answer = {"role": "tool", "name": "look", "tool_call_id": CALL_ID, "content": "!!!"}
    ended = template.attempt([USER, calls]).partition(PROBE)[2]
    answered = template.attempt([USER, calls, answer]).partition(PROBE)[2]
    return Probe(
        _generation(template),
        template.attempt([USER, said]).partition(PROBE)[2],
        template.attempt([USER, said, OTHER], generation=True).partition(PROBE)[2],
        _common(ended, answered) or ended,
        template.attempt([USER, {**calls, "tool_calls": [call, call]}]).partition(PROBE)[2],
    )


def _generation(template: ChatTemplate) -> str:
    """What it writes where the assistant's turn begins."""
    asked, prompt = template.attempt([USER]), template.attempt([USER], generation=True)
    return prompt[len(_common(asked, prompt)) :]


def _common(one: str, other: str) -> str:
    """What both begin with."""
    length = min(len(one), len(other))
    length = next((n for n in range(length) if one[n] != other[n]), length)
    return one[:length]


def _leading(text: str, added: Mapping[str, int]) -> Iterator[str]:
    """The added tokens that a text begins with, one at the other; blanks may come before the first."""
    rest = text.lstrip()
    while mark := max((x for x in added if x and rest.startswith(x)), key=len, default=""):
        yield mark
        rest = rest[len(mark) :]


def _closing(text: str, added: Mapping[str, int], known: set[int]) -> list[str]:
    """The tokens by which a turn ends, of which this stands behind its words.

    Those that it begins with; where words follow these at once, they close a part of the turn that has a
    name, and the end is what is known to be one, else what the text ends with.
    """
    leading = list(_leading(text, added))
    behind = text.lstrip()[len("".join(leading)) :]
    if not leading or not behind[:1].isalpha():
        return leading
    places = sorted((behind.rfind(mark), mark) for mark in added if mark and mark in behind)
    ends = [mark for _, mark in places if added[mark] in known]
    return ends or [mark for _, mark in places[-1:]] or leading


def _turn_ends(probe: Probe, added: Mapping[str, int], known: set[int]) -> Iterator[tuple[str, str]]:
    """("template", token) that ends a turn of text, and one with a call, where no known one does so there."""
    ends = list(_closing(probe.last, added, known)) or list(_leading(probe.followed, added))
    if ends and not any(added[mark] in known for mark in ends):
        yield "template", ends[0]
    inside = [mark for mark in added if mark in probe.called]
    closes = probe.called.rstrip()
    last = max((mark for mark in inside if closes.endswith(mark)), key=len, default=None)
    covered = known | {added[mark] for mark in ends[:1]}
    if last is None or any(added[mark] in covered for mark in inside):
        return
    if probe.calls_twice.count(last) <= 1 and not last.startswith(("</", "[/")):
        yield "template", last


def reasoning_marks(template: ChatTemplate, probe: Probe, added: Mapping[str, int]) -> ReasoningMarks:
    """Between which marks the model reasons: those around reasoning that the template is given, else those of
    the table that stand in the template or among the tokens, else those that most prompts ask for."""
    for key in REASONING_KEYS:
        said = {"role": "assistant", "content": "ANSWER", key: PROBE}
        before, found, after = template.attempt([USER, said]).partition(PROBE)
        if not found or "ANSWER" not in after:
            continue
        between = after.partition("ANSWER")[0]
        for marks in KNOWN:
            if marks.begin in before and marks.end in between and all(x in between for x in marks.answer[:1]):
                return _opened(replace(marks, key=key), probe.prompt)
    source = str(template.tokenizer.chat_template)
    for marks in KNOWN:
        wanted = (marks.begin, marks.end, *filter(None, marks.answer))
        if all(mark in source or mark in added for mark in wanted) or marks.begin in probe.prompt:
            return _opened(marks, probe.prompt)
    return KNOWN[0]


def _opened(marks: ReasoningMarks, prompt: str) -> ReasoningMarks:
    """The same, with what the end of a prompt does."""
    begin, end = prompt.rfind(marks.begin), prompt.rfind(marks.end)
    return replace(marks, opened=begin > end, closed=0 <= begin < end)


def _tool_format(template: ChatTemplate, style: CallStyle | None, added: Mapping[str, int]) -> str | None:
    if template.in_system:
        return "hermes"
    return told_format(template, added) if style is None else style.format


def tool_findings(dialect: Dialect, format: str = AUTO) -> Iterator[str]:
    """What a user should know who gives a model tools, a sentence each.

    format: rollout.multi_turn.format. ConfigError for a function of the user that raises, or returns
    no Parsed, for a call as the chat template writes it.
    """
    if untold := untold_tools(dialect):
        yield untold
    if unread := _unread_calls(dialect, format):
        yield unread
    style = dialect.calls
    kept = "turns with others stay in the history word for word"
    if style is not None and not style.exact:
        lost = "some arguments (quotes, line ends, nested values)"
        yield f"{style.format} calls, as the chat template writes them, lose {lost}: {kept}"
    if style is not None and not style.several:
        yield f"the chat template writes turns of one call alone: {kept}"
    if style is not None and not style.keeps_text:
        yield f"the chat template writes calls without what is said beside them: {kept}"


def _unread_calls(dialect: Dialect, format: str) -> str:
    """That the user's format reads no call in what the chat template writes for one; "" where it does."""
    if dialect.calls is None or dialect.template is None or format == AUTO:
        return ""
    written = turn_of(dialect.template, dialect.calls.message([(NAMES[0], ARGUMENTS[-1])]), TOOLS)
    parse = tool_parser(format)
    try:
        found = parse(written)
    except ConfigError:
        raise
    except Exception as error:  # the edge to user code
        raise ConfigError(
            f"{FORMAT}={format} raised {type(error).__name__}: {error} for a call as the chat template of "
            f"{dialect.name} writes it: {written!r}. Return Parsed(content, calls), with a MalformedCall for "
            "what cannot be read (docs/tools.md)."
        ) from error
    if any(isinstance(call, ToolCall) and call.name == NAMES[0] for call in found.calls):
        return ""
    around = max(0, written.find(NAMES[0]) - 40)
    return (
        f"{FORMAT}={format} reads no call in what the chat template of {dialect.name} writes for one "
        f"({written[around : around + 80]!r}): tools that the model calls so are never run. Leave it at "
        f"auto, which reads {dialect.calls.format}"
    )


def untold_tools(dialect: Dialect) -> str:
    """What a user should know who gives a model tools of which its template never tells; "" where it does."""
    if dialect.tools_by is not None:
        return ""
    return (
        f"the chat template of {dialect.name} shows no tools: with rollout.multi_turn.enable the model hears "
        "of none, unless its prompts do. Set rollout.multi_turn.show_tools=system, or give a template that "
        "shows them (data.chat_template)"
    )


def _drops_reasoning(template: ChatTemplate, marks: ReasoningMarks | None) -> bool:
    """Whether reasoning of a turn is gone once a user has said more."""
    if marks is None:
        return False
    said = {"role": "assistant", "content": f"{marks.begin}\n{PROBE}\n{marks.end}\n\nANSWER"}
    if marks.key:
        said = {"role": "assistant", "content": "ANSWER", marks.key: PROBE}
    text = template.attempt([USER, said, OTHER], generation=True)
    return "ANSWER" in text and PROBE not in text


def _is_dated(template: ChatTemplate) -> bool:
    texts = set()
    for date in ("2001-02-03", "2004-05-06"):
        texts.add(template.with_options({CLOCK: clock(date)}).attempt([USER], generation=True))
    return len(texts) > 1


def _findings(dialect: Dialect, mark: str | None) -> Iterator[str]:
    if not dialect.stops:
        yield (
            "no token ends a response: neither the tokenizer, config.json nor generation_config.json names "
            "one, so each goes on to data.max_response_length. Set rollout.stop_token_ids."
        )
    elif mark is None and dialect.end_text.strip():
        yield (
            f"the template ends a turn by {dialect.end_text!r}, which is no token: a response ends by "
            f"{dialect.stops[0].text!r} alone. Train the model on it first, or add a token for it."
        )
