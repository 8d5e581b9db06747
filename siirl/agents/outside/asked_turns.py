"""Turns that a program asks for: where each begins, what the policy says, and what the program is told of it.

Runs on the loop of the episode. A turn of the agent is known again in a later request by its answer and its
calls: programs strip texts, drop reasoning, and name calls anew. Where several turns say the same, what else
there is decides: ids, reasoning, what came before. While a turn is said, what begins its parts is told, and
what may be the beginning of something else waits.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from dataclasses import replace as changed
from functools import partial
from typing import Any

from siirl.agents.contexts import PROMPT_END, Context, ContextFull, TokenSequence, TurnPrompt
from siirl.agents.episode import Message
from siirl.agents.message_form import Chat, OwnTurn, call_id
from siirl.agents.outside.chat_wire import as_message
from siirl.agents.outside.content import BadRequest, understood
from siirl.agents.outside.exchange import REASONING, Asked, Said, Tell, Token, calls_of
from siirl.agents.policy import Decode, StoppedPolicy, num_tokens_with
from siirl.agents.renderer import ChatRenderer
from siirl.agents.runner import Game, Played, Speaker, take_turn
from siirl.agents.shown import as_written, images_in
from siirl.compiler.plan import AgentStage
from siirl.data.chat import to_continue
from siirl.dialect.dialect import Dialect
from siirl.dialect.marks import OPENINGS, ReasoningMarks, split_reasoning
from siirl.dialect.parts import Said as Parts
from siirl.dialect.parts import opens_reasoning, raw_text, read_turn
from siirl.dialect.tool_formats import AUTO, Parsed, ToolParser, call_begins, text_alone, tool_parser

UNFINISHED = "\ufffd"
"""What tokenizers decode bytes to that are no character, or none yet."""


@dataclass(frozen=True)
class ToldText:
    """What decides where the parts of a turn begin and end."""

    marks: ReasoningMarks | None
    opened: bool | None
    """The prompt has opened the reasoning; None: perhaps."""
    stop: tuple[str, ...] = ()
    begins: tuple[str, ...] | None = ()
    """With what calls begin, if there may be any; None: nobody knows, so that no answer is told."""
    is_raw: bool = False
    """The answer is the text as it was said."""

    def parts(self, raw: str) -> tuple[str | None, str]:
        """(reasoning, answer) as far as they are certain, of a turn that begins with `raw`."""
        raw = _without_begun(raw.rstrip(UNFINISHED), self.stop)
        if self.is_raw:
            return None, raw
        if self.marks is None:
            return None, self._answer(raw, raw)
        text = _without_begun(raw, (self.marks.begin, self.marks.end))
        if not self._is_certain(text, self.marks):
            return None, ""
        split = split_reasoning(text, self.marks, self.opened)
        if not split.reasoning:
            return None, self._answer(self._beside(split.rest, self.marks), raw)
        rest = self._beside(split.rest, self.marks)
        return "\n\n".join(split.reasoning).strip(), self._answer(rest, rest)

    def _is_certain(self, text: str, marks: ReasoningMarks) -> bool:
        """Whether it is known if the turn begins inside of the reasoning, and where."""
        if self.opened:  # it may repeat what the prompt has written
            head = text.lstrip()
            return head.startswith(marks.begin) or not marks.begin.startswith(head)
        return self.opened is False or marks.begin in text or marks.end in text

    def _beside(self, rest: str, marks: ReasoningMarks) -> str:
        """What is certain of an answer that may have marks of its own."""
        begin, end = marks.answer
        head = rest.strip()
        if any(mark.startswith(head) for mark in (begin, OPENINGS.get(begin, begin)) if mark):
            return ""
        return _without_begun(head, (end + " ",)) if end else rest

    def _answer(self, rest: str, raw: str) -> str:
        """What is certain of an answer with calls. raw: what is told where they cannot be read."""
        if self.begins is None:
            return ""
        rest = rest.strip()
        found = [at for mark in self.begins if (at := rest.find(mark)) >= 0]
        rest = rest[: min(found)] if found else _without_begun(rest, self.begins)
        return rest.rstrip() if not self.begins or raw.strip().startswith(rest.rstrip()) else ""


def _without_begun(text: str, marks: Iterable[str]) -> str:
    """A text without what stands at its end and may be the beginning of a mark."""
    begun = 0
    for mark in marks:
        lengths = range(min(len(mark) - 1, len(text)), begun, -1)
        begun = next((length for length in lengths if text.endswith(mark[:length])), begun)
    return text[: len(text) - begun]


@dataclass(frozen=True)
class _Turn:
    number: int
    message: dict[str, Any]
    """As rows name it."""
    own: OwnTurn
    reasoning: str
    before: str
    """Key of what came before it."""


class OwnTurns:
    """The turns of one agent in an episode, and what programs make of them."""

    def __init__(self) -> None:
        self._turns: defaultdict[str, list[_Turn]] = defaultdict(list)  # by what a program may call them

    def add(
        self,
        before: Chat,
        message: dict[str, Any],
        own: OwnTurn,
        number: int,
        reasoning: str | None,
        also: Mapping[str, Any] | None = None,
    ) -> None:
        """A turn was said after `before`; rows name it `message`.

        reasoning: what the program was told of it. also: another message that means this turn.
        """
        turn = _Turn(number, message, own, (reasoning or "").strip(), _key(before))
        for name in {_name(one) for one in (message, also) if one is not None}:
            self._turns[name].append(turn)

    def read(self, messages: Chat) -> tuple[Chat, Chat]:
        """The messages of a request as rows name them, and as templates get them."""
        named: Chat = []
        spelled: Chat = []
        ids: dict[str, str] = {}
        for message in messages:
            turn = self._find(message, named) if message["role"] == "assistant" else None
            if turn is not None:
                theirs, ours = calls_of(message), calls_of(turn.message)
                ids |= {its["id"]: our["id"] for its, our in zip(theirs, ours, strict=True) if "id" in its}
                named.append(turn.message)
                spelled.append(turn.own)
                continue
            if (id := message.get("tool_call_id")) in ids:
                message = message | {"tool_call_id": ids[id]}
            named.append(message)
            spelled.append(message)
        return named, spelled

    def _find(self, message: Mapping[str, Any], before: Chat) -> _Turn | None:
        """The turn that a message is."""
        reasoning = message.get(REASONING, "").strip()
        turns = [one for one in self._turns.get(_name(message), ()) if reasoning in ("", one.reasoning)]
        if len(turns) < 2:
            return turns[0] if turns else None
        ids, key = [call.get("id") for call in calls_of(message)], _key(before)
        return max(
            turns,
            key=lambda one: (
                bool(ids) and ids == [call["id"] for call in calls_of(one.message)],
                bool(reasoning),
                one.before == key,
                one.number,
            ),
        )


def _name(message: Mapping[str, Any]) -> str:
    """What a message says: answer, and calls without their ids."""
    return _key([message["content"].strip(), [call["function"] for call in calls_of(message)]])


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


UNREADABLE = "the chat template and the tokenizer do not take it"


@dataclass(frozen=True)
class Beginning:
    """Where one turn begins."""

    opening: TurnPrompt
    named: Chat
    """The conversation as rows name it."""
    heard: Chat
    """What of it is in no row."""
    prompt: int = 0
    """Which prompt of the request it follows."""


class AskedTurns:
    """What programs ask of the agents of one episode."""

    def __init__(self, game: Game, played: Played, parse: ToolParser | None) -> None:
        """parse: reads the tool calls of all models; None: each model's are read by its own dialect."""
        self._game, self._played, self._parse = game, played, parse
        self._own: defaultdict[int, OwnTurns] = defaultdict(OwnTurns)  # of each agent
        self._texts: defaultdict[int, list[tuple[TokenSequence, str]]] = defaultdict(
            list
        )  # of rows that go on by text
        self.too_long = ""
        """What was too long to be read, to continue why the episode ended; empty if nothing was."""

    async def speak(self, stage: AgentStage, asked: Asked, tell: Tell | None = None) -> list[Said]:
        """All choices, each in a row of its own: one of them at most goes on in a row that is there.

        Nothing is generated unless there is room for all. BadRequest, or errors of the policy.
        tell: gets what is certain of each turn, while it is being generated; first of all turns that they
        have begun.
        """
        speaker = self._game.speakers[stage.node]
        context = self._played.contexts.setdefault(stage.agent, speaker.context_of(self._played.episode))
        try:
            begun = understood(UNREADABLE, self._begun, stage, context, asked)
        except ContextFull as error:
            self._played.full = True
            self.too_long = f", after what {stage.node} should have read {error}"
            reason = f"the conversation {error}, the model's context length"
            raise BadRequest(reason, "context_length_exceeded") from error
        turns = [
            self._turn(stage, context, asked, one, partial(tell, index) if tell is not None else None)
            for index, one in enumerate(begun)
        ]
        return list(await asyncio.gather(*turns))

    def _begun(self, stage: AgentStage, context: Context, asked: Asked) -> list[Beginning]:
        """Where the turns begin: what comes from the request is read by templates and tokenizers here."""
        begun: list[Beginning] = []
        begin = self._after_texts if asked.prompts else self._after_messages
        try:
            for one in begin(stage, context, asked):
                begun.append(one)
        except BaseException:
            for one in begun:
                context.give_up(one.opening)
            raise
        return begun

    def _after_messages(self, stage: AgentStage, context: Context, asked: Asked) -> Iterator[Beginning]:
        renderer = self._game.speakers[stage.node].renderer
        named, spelled = self._own[stage.agent].read(asked.messages)
        for index, message in enumerate(spelled):
            if not isinstance(message, OwnTurn) and calls_of(message) and not renderer.takes_calls:
                raise BadRequest(
                    f"messages[{index}] has tool_calls that the model has not made, and its chat template "
                    "does not show calls"
                )
        heard = named[context.num_known(named) :]
        for _ in range(asked.choices):
            opening = context.begin(named, tools=asked.tools, spelled=spelled)
            yield Beginning(opening, named, heard)

    def _after_texts(self, stage: AgentStage, context: Context, asked: Asked) -> Iterator[Beginning]:
        renderer = self._game.speakers[stage.node].renderer
        for index, prompt in enumerate(asked.prompts):
            tokens, text = self._tokens(stage.agent, renderer, prompt)
            for _ in range(asked.choices):
                opening = context.begin_tokens(tokens, text)
                new = opening.read.tokens if opening.row.finish_reason else tokens
                heard = [{"role": "user", "content": _decode(renderer)(new)}] if new else []
                yield Beginning(opening, opening.shown, heard, index)

    def _tokens(
        self, agent: int, renderer: ChatRenderer, prompt: str | tuple[int, ...]
    ) -> tuple[list[int], str]:
        """The tokens of a prompt, and its text. One that begins with the text of a row has its tokens."""
        vocabulary = renderer.tokenizer
        if not isinstance(prompt, str):
            size = len(vocabulary) if isinstance(vocabulary, Sized) else 1 << 31
            if max(prompt) >= size:
                raise BadRequest(f"prompt has token {max(prompt)}: there are tokens 0 to {size - 1}")
            return list(prompt), _decode(renderer)(prompt)
        known = [(row, text) for row, text in self._texts[agent] if not row.busy and prompt.startswith(text)]
        if known:
            row, text = max(known, key=lambda one: len(one[1]))
            rest = vocabulary.encode(prompt[len(text) :], add_special_tokens=False)
            return [*row.prompt_ids, *row.ids, *rest], prompt
        if not (tokens := to_continue(vocabulary, prompt, list(vocabulary.encode(prompt)))):
            raise BadRequest("prompt has no token")
        return tokens, prompt

    async def _turn(
        self,
        stage: AgentStage,
        context: Context,
        asked: Asked,
        begun: Beginning,
        tell: Callable[[Said], None] | None,
    ) -> Said:
        episode, speaker = self._played.episode, self._game.speakers[stage.node]
        renderer, read = speaker.renderer, begun.opening.tokens
        decode = _decode(renderer)
        parse = self._parser(speaker, asked)
        so_far = self._so_far(renderer.dialect, asked, begun, parse, tell) if tell is not None else None
        policy = StoppedPolicy(speaker.policy_of(episode), asked.stop, decode, so_far)
        asking = changed(speaker, policy=policy, more=(), shares=())
        told: list[tuple[dict[str, Any], Parts, dict[str, Any]]] = []

        def as_named(text: str, own: OwnTurn) -> dict[str, Any]:
            whole = _message(asked, renderer.dialect, own, own.said, text)
            if policy.ended_by is None:
                told.append((whole, own.said, whole))
                return whole
            raw = own.said.raw[: own.said.raw.index(policy.ended_by)]
            parts = read_turn(renderer.dialect, raw, own.said.opened, parse)
            cut = _message(asked, renderer.dialect, own, parts, raw)
            # What stood before the stop is told to the letter: programs may write the stop behind it again.
            if not calls_of(cut) and not asked.prompts:
                cut["content"] = _answer(renderer.dialect, parts).lstrip()
            told.append((cut, parts, whole))
            return told[0][0] if speaker.limits.history == "grow" else whole

        turn = await take_turn(
            asking, stage, episode, context, begun.opening, asked.most_tokens, as_named, parse
        )
        assert turn.turn is not None and policy.generated is not None
        at = len(episode.messages) - 1  # before the turn
        episode.messages[at:at] = [_heard(one, stage) for one in begun.heard]
        (message, parts, whole), row, own = told[0], begun.opening.row, context.own_turns[turn.turn]
        if asked.prompts:
            self._add_text(stage.agent, row, begun.opening.text or "", own.said.raw)
        else:
            self._own[stage.agent].add(begun.named, row.shown[-1], own, turn.turn, parts.reasoning, whole)
        generated = policy.generated
        reason = "length" if generated.finish_reason == "length" else "stop"
        wants = asked.with_log_probs or asked.with_token_ids
        return Said(
            f"{episode.episode_id}-{turn.turn}",
            asked.model,
            turn.turn,
            message,
            "tool_calls" if calls_of(message) else reason,
            len(read),
            len(generated.token_ids),
            None if asked.prompts else parts.reasoning,
            policy.ended_by,
            _tokens_of(generated.token_ids, generated.log_probs, decode) if wants else (),
            tuple(read) if asked.with_token_ids else (),
            _num_reasoned(renderer, own.said, generated.token_ids, decode),
            begun.prompt,
            asked.with_log_probs,
        )

    def _so_far(
        self,
        dialect: Dialect,
        asked: Asked,
        begun: Beginning,
        parse: ToolParser,
        tell: Callable[[Said], None],
    ) -> Callable[[str], None]:
        """What tells a turn that begins now from as much of its text as there is."""
        turn, marks, end = self._played.episode.turns, dialect.reasoning, begun.opening.text or ""
        opened = opens_reasoning(dialect, end[-PROMPT_END:]) if end else dialect.opens
        certain = ToldText(marks, opened, asked.stop, call_begins(parse), bool(asked.prompts))
        read = tuple(begun.opening.tokens)
        key, ids = f"{self._played.episode.episode_id}-{turn}", read if asked.with_token_ids else ()

        def so_far(text: str) -> None:
            reasoning, answer = certain.parts(text)
            message = {"role": "assistant", "content": answer}
            tell(Said(key, asked.model, turn, message, "stop", len(read), 0, reasoning, read_ids=ids))

        so_far("")
        return so_far

    def _parser(self, speaker: Speaker, asked: Asked) -> ToolParser:
        """What reads the calls of a turn."""
        if not asked.tools:
            return text_alone
        return self._parse or tool_parser(AUTO, dialect=speaker.renderer.dialect.tool_format)

    def _add_text(self, agent: int, row: TokenSequence, prompt: str, said: str) -> None:
        """A row that goes on by text holds a turn more."""
        self._texts[agent] = [(one, text) for one, text in self._texts[agent] if one is not row]
        if row.finish_reason != "stop":  # no text says a stop token
            self._texts[agent].append((row, prompt + said))


def _decode(renderer: ChatRenderer) -> Decode:
    """Gives the text of tokens, special ones too."""
    return partial(raw_text, renderer.dialect, renderer.tokenizer, stopped=False)


def _answer(dialect: Dialect, parts: Parts) -> str:
    """What was said beside reasoning and calls, also before reasoning that was not ended."""
    if parts.closed or dialect.reasoning is None:
        return parts.answer
    return split_reasoning(parts.raw, dialect.reasoning, parts.opened).rest


def _message(asked: Asked, dialect: Dialect, own: OwnTurn, parts: Parts, text: str) -> dict[str, Any]:
    """A turn, or its beginning, as a message: its answer and calls, these with ids. text: all of it."""
    if asked.prompts:
        return {"role": "assistant", "content": parts.raw}
    answer = text if parts.calls and parts.reasoning is None else _answer(dialect, parts)
    message = as_message(Parsed(parts.answer, parts.calls), answer, asked.tools)
    if not (calls := calls_of(message)):
        return message
    ids = (
        own.ids if len(set(own.ids)) == len(own.ids) else [call_id(own.turn, i) for i in range(len(own.ids))]
    )
    return message | {"tool_calls": [{"id": id, **call} for id, call in zip(ids, calls, strict=False)]}


def _heard(message: dict[str, Any], stage: AgentStage) -> Message:
    """What a program has an agent read, as a message of the episode."""
    (written,), images = as_written([message]), tuple(images_in([message]))
    said = Message(message["role"], written["content"], node=stage.node, to=stage.agent, images=images)
    return changed(said, name=message.get("name"), call_id=message.get("tool_call_id"))


def _tokens_of(ids: Sequence[int], log_probs: Sequence[float], decode: Decode) -> tuple[Token, ...]:
    return tuple(Token(id, decode([id]), value) for id, value in zip(ids, log_probs, strict=True))


def _num_reasoned(renderer: ChatRenderer, said: Parts, ids: Sequence[int], decode: Decode) -> int:
    """How many of the tokens of a turn come before the end of its reasoning."""
    marks = renderer.dialect.reasoning
    if marks is None or said.reasoning is None:
        return 0
    return num_tokens_with(marks.end, ids, decode) if said.closed else len(ids)
