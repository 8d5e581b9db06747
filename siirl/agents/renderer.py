"""Messages to text and tokens, as a model's chat template writes them. No torch.

What the model produced is kept as it is. What follows a turn is what the template writes behind it in the
whole conversation, so that a row equals the template's own rendering; where the template writes what the row
holds in another way (it drops earlier reasoning), there is nothing that could follow.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from siirl.agents.message_form import ANSWERED, ASKED, STAND_IN, Chat, MessageForm, OwnTurn
from siirl.agents.shown import images_in, parts_of
from siirl.data.seen import NO_IMAGES, Seen
from siirl.dialect.dialect import Dialect
from siirl.dialect.parts import opens_reasoning, raw_text, read_turn
from siirl.dialect.template import ChatTemplate, TemplateRefused, Vocabulary, row_options
from siirl.dialect.tool_formats import ToolCall, ToolParser
from siirl.errors import DataError, EpisodeFailed, SiirlError
from siirl.observe.printable import encodable

log = logging.getLogger(__name__)

IMAGES = "images"
"""Kind of EpisodeFailed: what an agent is shown has images that it cannot see, or no places for them."""
MOST_KNOWN = 512
MOST_KEPT = 64


def alternating(messages: Sequence[Mapping[str, Any]], keeps_system: bool = False) -> Chat:
    """The conversation for a template that knows users and assistants only, in turn (Gemma, Mistral).

    What others say is the user's; neighbours of one role become one message, a blank line between them.
    keeps_system: a system message that comes first stays one.
    """
    plain: Chat = []
    for message in messages:
        role = "assistant" if message["role"] == "assistant" else "user"
        if keeps_system and not plain and message["role"] == "system":
            role = "system"
        apart = isinstance(message, OwnTurn) and len(message) > 2  # in the order of the words
        content = message.said.raw if apart else message["content"]
        if plain and plain[-1]["role"] == role:
            plain[-1]["content"] = _together(plain[-1]["content"], content)
        else:
            plain.append({"role": role, "content": content})
    return plain


def _together(one: Any, other: Any) -> Any:
    if isinstance(one, str) and isinstance(other, str):
        return f"{one}\n\n{other}"
    return [*parts_of(one), {"type": "text", "text": "\n\n"}, *parts_of(other)]


def _behind(whole: str, opened: str, said: str) -> str | None:
    """What stands in a text behind its beginning and what was said there; None: it goes on otherwise.

    Tokenizers may leave out a blank that comes first when they decode.
    """
    rest = whole.removeprefix(opened) if whole.startswith(opened) else None
    for text in (rest, rest and rest.lstrip(" ")):
        if text is not None and text.startswith(said):
            return text[len(said) :]
    return None


def _says_something(turn: Mapping[str, Any]) -> bool:
    said = (value for key, value in turn.items() if key != "role")
    return any(value.strip() if isinstance(value, str) else value for value in said)


class Sight(Protocol):
    """What renders images: the ImageReader of a model."""

    def expand(self, ids: Sequence[int], images: Sequence[str], where: str) -> tuple[list[int], Seen]: ...


class TokenizedText(NamedTuple):
    """Tokens, and the images among them."""

    tokens: list[int]
    seen: Seen = NO_IMAGES


@dataclass
class Spoken:
    """The end of a row: a turn, and what came before it, as the template writes it."""

    messages: Chat
    """All before the turn."""
    own: OwnTurn
    opened: str | None
    """The template's text up to where the turn begins; None: it is the rendering of `messages`."""
    stop: int | None
    """The token that ended it; None: it was cut off."""


class ChatRenderer:
    """Messages to tokens, by the tokenizer's chat template. One for each agent.

    Samples of a prompt often hear the same: the tokens of up to MOST_KNOWN plain messages are kept.
    """

    def __init__(
        self,
        tokenizer: Vocabulary,
        template_kwargs: Mapping[str, Any],
        tools: Sequence[dict] = (),
        sight: Sight | None = None,
        dialect: Dialect | None = None,
    ) -> None:
        """sight: of a model that sees images. dialect: its own; None: all that is known is its end token."""
        self.tokenizer, self._sight = tokenizer, sight
        self._template_kwargs, self._tools = dict(template_kwargs), list(tools)
        self.dialect = dialect or Dialect.of_service(tokenizer)
        self._name = getattr(tokenizer, "name_or_path", "") or "a tokenizer"
        self._known: dict[Any, Any] = {}
        self._asked_form: MessageForm | None = None
        self._around: tuple[str, str, str] | None = None
        self._end_text = ""
        self._end: list[int] | None = None
        self._others: dict[str, ChatRenderer] = {}
        self._told = False

    def with_tools(self, tools: Sequence[dict]) -> "ChatRenderer":
        """One that tells the template of these tools; itself without any. MOST_KEPT are kept."""
        if not tools:
            return self
        return self._other({}, tools)

    def for_row(self, extra_info: Any) -> "ChatRenderer":
        """One for an episode of a row that gives the template arguments of its own; itself without any."""
        options = row_options(extra_info)
        return self._other(options, self._tools) if options else self

    def _other(self, options: Mapping[str, Any], tools: Sequence[dict]) -> "ChatRenderer":
        key = json.dumps([options, tools], sort_keys=True, default=str)
        if key not in self._others:
            if len(self._others) >= MOST_KEPT:
                self._others.clear()
            kwargs, dialect = {**self._template_kwargs, **options}, self.dialect.of_row(options)
            self._others[key] = ChatRenderer(self.tokenizer, kwargs, tools, self._sight, dialect)
        return self._others[key]

    @property
    def form(self) -> MessageForm:
        """How the template takes messages."""
        if self._asked_form is None:
            self._asked_form = MessageForm(ChatTemplate(self.tokenizer, self._template_kwargs), self._tools)
        return self._asked_form

    @property
    def takes_calls(self) -> bool:
        """Whether the template writes the tool calls of an assistant's message."""
        return self.form.calls is not None

    def start(self, messages: Chat) -> TokenizedText:
        """The tokens of a conversation, up to where the agent's turn begins."""
        tokens, seen = self._once(False, messages)
        return TokenizedText(list(tokens), seen)

    def opened(self, messages: Chat) -> str:
        """The text of a conversation, up to where the agent's turn begins. DataError if it has none.

        Where the template refuses turns in which nothing was said, it is that of the others.
        """
        return self._kept("text", messages, lambda: self._opening_text(messages))

    def own_turn(
        self,
        token_ids: Sequence[int],
        stopped: bool,
        turn: int,
        parse: ToolParser | None = None,
        prompt_end: str = "",
    ) -> OwnTurn:
        """What an agent said as a message. parse: reads its calls. prompt_end: of what it was said after."""
        ids = token_ids[:-1] if stopped else token_ids
        raw = raw_text(self.dialect, self.tokenizer, np.array(ids, np.int64), False)
        marks = self.dialect.reasoning
        opens = opens_reasoning(self.dialect, prompt_end) if prompt_end else self.dialect.opens
        said = read_turn(self.dialect, raw, opens, parse)
        understood = all(isinstance(call, ToolCall) for call in said.calls)
        plain = None
        if said.calls and not (understood and self.takes_calls):
            plain = read_turn(self.dialect, raw, opens)
        return OwnTurn(said, marks, turn, parse, plain, self._frame())

    def continued(self, spoken: Spoken, messages: Chat) -> tuple[TokenizedText | None, str | None]:
        """What comes after a turn: its end, the messages, the beginning of the agent's next turn; and the
        template's text up to there.

        None: the template rewrites what came before it. The turn becomes word for word where the template
        does not write its parts. After a turn that the template refuses (it is empty) comes what follows
        any turn, and the text is None.
        """
        try:
            whole, tokens = self._continued(spoken, messages)
        except DataError:
            return self.follow(messages, spoken.stop), None
        if tokens is not None:
            return self._seen(tokens, images_in(messages)), whole
        self._following_text([ASKED])  # refuses a template that leaves out all turns
        return None, whole

    def _continued(self, spoken: Spoken, messages: Chat) -> tuple[str, list[int] | None]:
        """The text of a conversation that goes on after a turn, and its tokens from the turn's end on."""
        opened, own = self._opened(spoken), spoken.own
        whole, rest = self._in_form(spoken, messages, opened)
        if rest is None and not own.settled:
            self.settle(spoken)
            whole, rest = self._in_form(spoken, messages, opened)
        tokens = None if rest is None else self._after_end(rest, self._turn_end(), spoken.stop)
        if tokens is None and whole.startswith(opened):
            tokens = self._after_other_words(whole[len(opened) :], spoken)
        return whole, tokens

    def follow(self, messages: Chat, last_token: int | None) -> TokenizedText:
        """What comes after any turn, by the template alone: see continued, which knows the conversation.

        last_token: the one that the agent ended its turn by, which then is not repeated, nor what a template
        writes before it at the end of a turn (Cohere: <|END_RESPONSE|><|END_OF_TURN_TOKEN|>).
        """
        tokens, seen = self._once(True, messages)
        end, said = self._turn_end() if last_token is not None else [], 0
        if last_token in end:
            said = end.index(last_token) + 1
        if not said or tokens[:said] != end[:said]:
            said = int(bool(tokens) and tokens[0] == last_token)
        return TokenizedText(tokens[said:], seen.after(-said))

    def words(self, spoken: Spoken) -> str:
        """The text of a row up to the end of its last turn."""
        return self._opened(spoken) + spoken.own.said.raw

    def read(self, text: str) -> TokenizedText:
        """The tokens of a part of what the template has written, which has no images."""
        return TokenizedText(self._tokens(text))

    def shortened(self, content: str, num_tokens: int) -> str:
        """A text without its last num_tokens tokens."""
        tokens = self._tokens(content)
        kept = np.array(
            tokens[: max(0, len(tokens) - num_tokens)], np.int64
        )  # of lists each token is looked at
        return self.tokenizer.decode(kept, skip_special_tokens=False)

    def settle(self, spoken: Spoken) -> None:
        """Find the form of a turn in which the template writes it as the agent did; else the first that says
        the same; else word for word."""
        own = spoken.own
        if own.settled:
            return
        taken, same = [], []
        for form in own.forms:
            own.be(form)
            turn = self._as_last(spoken)
            if turn is not None and turn.startswith(own.said.raw):
                return
            taken += [form] if turn is not None else []
            if turn is not None and self._says_the_same(self._before_end(turn), own, reasoning=False):
                same.append(form)
        own.be(own.word_for_word)
        if same or self._as_last(spoken) is None:
            own.be([*same, *taken, own.forms[0]][0])

    def _in_form(self, spoken: Spoken, messages: Chat, opened: str) -> tuple[str, str | None]:
        """The text of a conversation that goes on after a turn, and what stands behind the agent's words;
        None: they are not there. It is that of the form of the turn in which they are, else of the first that
        the template takes. DataError if it takes none."""
        own, refused, first = spoken.own, None, None
        for form in [dict(own)] if own.settled else own.forms:
            own.be(form, own.settled)
            try:
                whole = self._text([*spoken.messages, own, *messages])
            except DataError as error:
                refused = refused or error
                continue
            first = first or (form, whole)
            rest = _behind(whole, opened, own.said.raw)
            if rest is not None:
                own.settled = True
                return whole, rest
        if first is None:
            raise refused or DataError(f"the chat template of {self._name} takes no turn")
        own.be(first[0], own.settled)
        return first[1], None

    def _after_other_words(self, rest: str, spoken: Spoken) -> list[int] | None:
        """What follows a turn that the template writes in other words than the agent did.

        rest: what the template writes from the turn's beginning on. None: it writes it in yet another way
        where something follows.
        """
        turn, own = self._as_last(spoken), spoken.own
        if turn is None:
            return None
        written = self._before_end(turn)
        end = self._tokens(turn[len(written) :])
        as_written = written == own.said.raw and (spoken.stop is None or spoken.stop in end)
        if as_written or not rest.startswith(written) or not self._says_the_same(written, own):
            return None
        return self._after_end(rest[len(written) :], end, spoken.stop, True)

    def _after_end(
        self, text: str, end: list[int], stop: int | None, by_any: bool = False
    ) -> list[int] | None:
        """The tokens of what follows a turn without what ended it already; None: it does not end so.

        end: the tokens by which the template ends it. by_any: the agent may have ended it by another one.
        """
        tokens = self._tokens(text)
        if stop is None:
            return tokens
        ends = [place for place, token in enumerate(end) if token in self.dialect.stop_ids]
        said = end.index(stop) + 1 if stop in end else 0
        if said and tokens[:said] == end[:said]:
            return tokens[said:]
        if tokens and tokens[0] == stop:
            return tokens[1:]
        if not ends:
            return tokens  # a template that ends turns by no token
        said = ends[0] + 1
        return tokens[said:] if by_any and tokens[:said] == end[:said] else None

    def _as_last(self, spoken: Spoken) -> str | None:
        """How the template writes the turn, and its end, if nothing follows; None: it rewrites even then."""
        try:
            whole = self.form.text(self._roles([*spoken.messages, spoken.own]), generation=False)
        except TemplateRefused:
            return None
        opened = self._opened(spoken)
        return whole[len(opened) :] if whole.startswith(opened) else None

    def _before_end(self, turn: str) -> str:
        """A turn without what ends it."""
        end = self._turn_end_text()
        if end and turn.endswith(end):
            return turn[: -len(end)]
        places = [turn.rfind(stop.text) for stop in self.dialect.stops if stop.text]
        last = max(places, default=-1)
        return turn if last < 0 else turn[:last]

    def _says_the_same(self, written: str, own: OwnTurn, reasoning: bool = True) -> bool:
        """Whether two spellings of a turn have the same parts. reasoning: whether it counts."""
        mine, marks = own.said, self.dialect.reasoning
        if written.split() == mine.raw.split():
            return True
        opened = bool(mine.opened) and marks is not None and marks.end in written
        its = read_turn(self.dialect, written, opened, own.parse)
        if reasoning and (mine.reasoning or "").strip() != (its.reasoning or "").strip():
            return False
        named = [
            [replace(x, id=None) if isinstance(x, ToolCall) else x for x in y.calls] for y in (mine, its)
        ]
        return mine.answer.strip() == its.answer.strip() and named[0] == named[1]

    def _opened(self, spoken: Spoken) -> str:
        if spoken.opened is None:
            spoken.opened = self.opened(spoken.messages)
        return spoken.opened

    def _frame(self) -> tuple[str, str, str]:
        """What the template writes before a plain answer, behind the prompt, and behind it up to its end; and
        by what it lets a turn begin."""
        if self._around is None:
            try:
                prompt, asked = (self.form.text([ASKED], generation) for generation in (True, False))
                text = self.form.text([ASKED, {**ANSWERED, "content": STAND_IN}], generation=False)
            except TemplateRefused:
                prompt = asked = text = ""
            before, _, self._end_text = text.partition(STAND_IN)
            ends = [self._end_text.find(stop.text) for stop in self.dialect.stops if stop.text]
            first = min((end for end in ends if end >= 0), default=0)
            opens = before.startswith(prompt)
            begun = prompt.removeprefix(asked) if prompt.startswith(asked) else ""
            self._around = before[len(prompt) :] if opens else "", self._end_text[:first], begun
        return self._around

    def _turn_end_text(self) -> str:
        """What the template writes after what an agent has said, if it does so by itself."""
        self._frame()
        return self._end_text

    def _turn_end(self) -> list[int]:
        """The tokens of that."""
        if self._end is None:
            self._end = self._tokens(self._turn_end_text())
        return self._end

    def _once(self, follows: bool, messages: Chat) -> TokenizedText:
        """Tokens of a conversation, or of what follows a turn; the caller does not write to them."""
        return self._kept(follows, messages, lambda: self._rendered(follows, messages))

    def _kept(self, what: Any, messages: Chat, make: Callable[[], Any]) -> Any:
        """What is made of messages, from the last time if they are plain."""
        if not all(isinstance(value, str) for message in messages for value in message.values()):
            return make()
        key = what, tuple(tuple(message.items()) for message in messages)
        if key not in self._known:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[key] = make()
        return self._known[key]

    def _rendered(self, follows: bool, messages: Chat) -> TokenizedText:
        text = self._following_text(messages) if follows else self.opened(messages)
        return self._seen(self._tokens(text), images_in(messages))

    def _seen(self, tokens: list[int], images: list[str]) -> TokenizedText:
        """Tokens of a text with the places of these images."""
        if self._sight is not None:
            try:
                return TokenizedText(*self._sight.expand(tokens, images, "what an agent reads"))
            except DataError as error:
                raise EpisodeFailed(str(error), IMAGES) from error
        if images:
            raise EpisodeFailed(
                f"an agent is shown {len(images)} images, and its model is given tokens alone. Set "
                "data.dataset_type=vlm, with a vision model.",
                IMAGES,
            )
        return TokenizedText(tokens)

    def _following_text(self, messages: Chat) -> str:
        text = self._text([ASKED, {**ANSWERED, "content": STAND_IN}, *messages])
        if STAND_IN not in text:
            raise DataError(
                f"the chat template of {self._name} leaves out what an assistant has said as plain text: an "
                "agent cannot go on after its turn. Give the tokenizer another template."
            )
        return text[text.index(STAND_IN) + len(STAND_IN) :]

    def _opening_text(self, messages: Chat) -> str:
        try:
            return self._text(messages)
        except DataError:
            spoken = [one for one in messages if one["role"] != "assistant" or _says_something(one)]
            if not 0 < len(spoken) < len(messages):
                raise
        return self._text(spoken)

    def _text(self, messages: Chat) -> str:
        """What the template makes of a conversation; where it refuses one, of its closest relative."""
        taken, first = self._roles(messages), None
        users = [{**one, "role": "user"} if one["role"] == "tool" else one for one in taken]
        keeps_system = taken[0]["role"] == "system"
        for chat in (taken, users, alternating(taken, keeps_system), alternating(taken)):
            try:
                text = self.form.text(chat)
            except TemplateRefused as error:
                if isinstance(error.__cause__, SiirlError):  # of a vocabulary of ours
                    raise error.__cause__ from None
                first = first or error
                continue
            if chat is not taken:
                self._tell(first)
            return text
        roles = ", ".join(message["role"] for message in alternating(taken))
        raise DataError(
            f"the chat template of {self._name} refuses a conversation of the roles {roles}: {first}. "
            "Have the agent's pre_process give it one that it takes, or give the tokenizer another one."
        ) from first

    def _roles(self, messages: Chat) -> Chat:
        """The messages, those of roles that the template does not know as the user's."""
        return [one if self.form.takes(one["role"]) else {**one, "role": "user"} for one in messages]

    def _tell(self, refused: TemplateRefused | None) -> None:
        """Say once that the model reads other roles than were written."""
        if not self._told:
            self._told = True
            log.warning(
                "the chat template of %s refuses a conversation (%s): what tools and others say is read as "
                "the user's, neighbours of one role as one message. This is said once for each agent.",
                self._name,
                refused,
            )

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(encodable(text), add_special_tokens=False))
