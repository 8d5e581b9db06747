"""What an agent has read and said, as tokens: rows that only grow at their end. No torch.

Text becomes tokens once. What the model produced is kept as it is; what others said is rendered by the chat
template behind a stand-in for the model's turn, and added.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from jinja2 import TemplateError

from siirl.agents.policy import Generated
from siirl.agents.shown import for_template, images_in, parts_of
from siirl.data.chosen_experts import longer
from siirl.data.seen import NO_IMAGES, Seen
from siirl.dialect.template import Vocabulary
from siirl.errors import DataError, EpisodeFailed

Chat = list[dict[str, Any]]

STAND_IN = "STANDINFORTHETURN"
"""Stands for the model's own turn in templates; no letter of it is changed by trimming or escaping."""
IMAGES = "images"
"""Kind of EpisodeFailed: what an agent is shown has images that it cannot see, or no places for them."""
MOST_KNOWN = 512
MOST_TOOL_LISTS = 64


def alternating(messages: Chat) -> Chat:
    """The conversation for a template that knows users and assistants only, in turn (Gemma, Mistral).

    What others say is the user's; neighbours of one role become one message, a blank line between them.
    """
    plain: Chat = []
    for message in messages:
        role = "assistant" if message["role"] == "assistant" else "user"
        if plain and plain[-1]["role"] == role:
            plain[-1]["content"] = _together(plain[-1]["content"], message["content"])
        else:
            plain.append({"role": role, "content": message["content"]})
    return plain


def _together(one: Any, other: Any) -> Any:
    if isinstance(one, str) and isinstance(other, str):
        return f"{one}\n\n{other}"
    return [*parts_of(one), {"type": "text", "text": "\n\n"}, *parts_of(other)]


class Sight(Protocol):
    """What renders images: the ImageReader of a model."""

    def expand(self, ids: Sequence[int], images: Sequence[str], where: str) -> tuple[list[int], Seen]: ...


class Read(NamedTuple):
    """Tokens, and the images among them."""

    tokens: list[int]
    seen: Seen = NO_IMAGES


class ContextFull(Exception):
    """A message does not fit any more, and episodes end there. Its text continues "what NODE reads"."""


@dataclass(frozen=True)
class Limits:
    """Most tokens of a row's prompt, of its response (turns, and what is read between them), of a turn."""

    prompt: int
    response: int
    turn: int | None = None
    long_context: Literal["end", "truncate"] = "end"


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
    ) -> None:
        """sight: of a model that sees images."""
        self.tokenizer, self._sight = tokenizer, sight
        self._template_kwargs = dict(template_kwargs)
        self._options = {**template_kwargs, **({"tools": list(tools)} if tools else {})}
        self._name = getattr(tokenizer, "name_or_path", "") or "a tokenizer"
        self._known: dict[Any, Read] = {}
        self._taken: dict[str, bool] = {}
        self._end: list[int] | None = None
        self._with_tools: dict[str, ChatRenderer] = {}

    def with_tools(self, tools: Sequence[dict]) -> "ChatRenderer":
        """One that tells the template of these tools; itself without any. MOST_TOOL_LISTS are kept."""
        if not tools:
            return self
        key = json.dumps(tools, sort_keys=True)
        if key not in self._with_tools:
            if len(self._with_tools) >= MOST_TOOL_LISTS:
                self._with_tools.clear()
            made = ChatRenderer(self.tokenizer, self._template_kwargs, tools, self._sight)
            self._with_tools[key] = made
        return self._with_tools[key]

    @property
    def takes_calls(self) -> bool:
        """Whether the template writes the tool calls of an assistant's message."""
        if "calls" not in self._taken:
            call = {"type": "function", "function": {"name": STAND_IN, "arguments": {}}}
            said = {"role": "assistant", "content": "", "tool_calls": [call]}
            try:
                text = self._templated([{"role": "user", "content": "..."}, said])
            except (TemplateError, TypeError):
                text = ""
            self._taken["calls"] = STAND_IN in text
        return self._taken["calls"]

    def start(self, messages: Chat) -> Read:
        """The tokens of a conversation, up to where the agent's turn begins."""
        tokens, seen = self._once(False, messages)
        return Read(list(tokens), seen)

    def follow(self, messages: Chat, last_token: int | None) -> Read:
        """The tokens that come after the agent's turn: its end, the messages, the beginning of its next turn.

        last_token: the one that the agent ended its turn by, which then is not repeated, nor what a template
        writes before it at the end of a turn (Cohere: <|END_RESPONSE|><|END_OF_TURN_TOKEN|>).
        """
        tokens, seen = self._once(True, messages)
        end, said = self._turn_end() if last_token is not None else [], 0
        if last_token in end:
            said = end.index(last_token) + 1
        if not said or tokens[:said] != end[:said]:
            said = int(bool(tokens) and tokens[0] == last_token)
        return Read(tokens[said:], seen.after(-said))

    def _turn_end(self) -> list[int]:
        """The tokens that the template writes after what an agent has said, if it does so by itself."""
        if self._end is None:
            asked = [{"role": "user", "content": "..."}, {"role": "assistant", "content": STAND_IN}]
            try:
                text = self._templated(asked, add_generation_prompt=False)
            except TemplateError:
                text = ""
            self._end = self._tokens(text.partition(STAND_IN)[2])
        return self._end

    def text(self, token_ids: Sequence[int]) -> str:
        """What was said, special tokens left out."""
        array = np.array(token_ids, np.int64)  # of a list, transformers would look at each token first
        return self.tokenizer.decode(array, skip_special_tokens=True)

    def shortened(self, content: str, num_tokens: int) -> str:
        """A text without its last num_tokens tokens."""
        tokens = self._tokens(content)
        return self.text(tokens[: max(0, len(tokens) - num_tokens)])

    def _once(self, follows: bool, messages: Chat) -> Read:
        """Tokens of a conversation, or of what follows a turn; the caller does not write to them."""
        key = follows, tuple(tuple(message.items()) for message in messages)
        if not all(isinstance(value, str) for message in messages for value in message.values()):
            return self._rendered(follows, messages)
        if key not in self._known:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[key] = self._rendered(follows, messages)
        return self._known[key]

    def _rendered(self, follows: bool, messages: Chat) -> Read:
        tokens, images = self._tokens(self._rendered_text(follows, messages)), images_in(messages)
        if self._sight is not None:
            try:
                return Read(*self._sight.expand(tokens, images, "what an agent reads"))
            except DataError as error:
                raise EpisodeFailed(str(error), IMAGES) from error
        if images:
            raise EpisodeFailed(
                f"an agent is shown {len(images)} images, and its model is given tokens alone. Set "
                "data.dataset_type=vlm, with a vision model.",
                IMAGES,
            )
        return Read(tokens)

    def _rendered_text(self, follows: bool, messages: Chat) -> str:
        if not follows:
            return self._text(messages)
        before = [{"role": "user", "content": "..."}, {"role": "assistant", "content": STAND_IN}]
        text = self._text([*before, *messages])
        if STAND_IN not in text:
            raise DataError(
                f"the chat template of {self._name} leaves out what an assistant has said as plain text: an "
                "agent cannot go on after its turn. Give the tokenizer another template."
            )
        return text[text.index(STAND_IN) + len(STAND_IN) :]

    def _text(self, messages: Chat) -> str:
        messages = for_template(messages)
        messages = [one if self._takes(one["role"]) else {**one, "role": "user"} for one in messages]
        try:
            return self._templated(messages)
        except TemplateError:
            plain = alternating(messages)
        try:
            return self._templated(plain)
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in plain)
            raise DataError(
                f"the chat template of {self._name} refuses a conversation of the roles {roles}: {error}. "
                "Have the agent's pre_process give it one that it takes, or give the tokenizer another one."
            ) from error

    def _takes(self, role: str) -> bool:
        """Whether what a message of this role says is in the text: some templates leave it out or refuse."""
        if role in ("user", "assistant"):
            return True
        if role not in self._taken:
            asked, said, probe = (
                {"role": one, "content": text}
                for one, text in (("user", "..."), ("assistant", "..."), (role, STAND_IN))
            )
            try:
                text = self._templated([probe, asked] if role == "system" else [asked, said, probe])
            except TemplateError:
                text = ""
            self._taken[role] = STAND_IN in text
        return self._taken[role]

    def _templated(self, messages: Chat, add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **self._options
        )

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


@dataclass(eq=False)
class Row:
    """A token context: a prompt and what followed, of which the agent produced a part."""

    messages: Chat
    """What the prompt says."""
    prompt_ids: list[int]
    tools: Sequence[dict] = ()
    """What the prompt tells of tools, where they are not the same in all rows."""
    seen: Seen = NO_IMAGES
    """The images among the tokens of the prompt and those after it."""
    shown: Chat = field(default_factory=list)
    """All messages that it holds, its turns included."""
    ids: list[int] = field(default_factory=list)
    """The tokens after the prompt; the lists that follow have an entry for each."""
    assistant_mask: list[bool] = field(default_factory=list)
    """Whether the agent produced the token."""
    log_probs: list[float] = field(default_factory=list)
    turn_ids: list[int] = field(default_factory=list)
    """The turn that the token is of; -1 where it is not the agent's."""
    rewards: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Of the weights that produced the token; -1 where it is not the agent's."""
    experts: bytes | None = None
    """What each token of prompt and response but the last was computed by, when it was first read."""
    finish_reason: str = ""
    """That of the last turn; empty before the first."""
    busy: bool = False
    """Its next turn is being generated."""

    def read(self, tokens: list[int], seen: Seen = NO_IMAGES) -> None:
        """Add tokens that the agent did not produce, and the images among them."""
        self.seen = self.seen_after(seen)
        self._add(tokens, False, [0.0] * len(tokens), -1, [-1] * len(tokens))

    def speak(self, turn: Generated, number: int) -> None:
        """Add the tokens of a turn."""
        self.finish_reason = turn.finish_reason
        self.experts = longer(self.experts, turn.experts)
        self._add(turn.token_ids, True, turn.log_probs, number, turn.token_versions)

    def seen_after(self, seen: Seen) -> Seen:
        """The images of the row, and those among tokens that follow."""
        return self.seen.joined(seen.after(len(self.prompt_ids) + len(self.ids)))

    def _add(
        self, tokens: list[int], produced: bool, log_probs: list[float], number: int, versions: list[int]
    ) -> None:
        self.ids += tokens
        self.assistant_mask += [produced] * len(tokens)
        self.log_probs += log_probs
        self.turn_ids += [number] * len(tokens)
        self.rewards += [0.0] * len(tokens)
        self.versions += versions


@dataclass(frozen=True)
class Opening:
    """What an agent reads before a turn. It becomes part of its row when the turn has been spoken."""

    row: Row
    """One that goes on, or a new one."""
    read: Read
    """What follows what the row holds."""
    shown: Chat
    """All messages that the agent has read then."""
    room: int
    """Most tokens of the turn."""

    @property
    def tokens(self) -> list[int]:
        """What the turn is generated after."""
        return self.row.prompt_ids + self.row.ids + self.read.tokens

    @property
    def seen(self) -> Seen:
        """The images among these."""
        return self.row.seen_after(self.read.seen)


def as_said(text: str) -> dict[str, Any]:
    """A turn as a message, word for word."""
    return {"role": "assistant", "content": text}


class Context:
    """All rows of one agent in one episode."""

    def __init__(self, renderer: ChatRenderer, limits: Limits) -> None:
        self._renderer, self._limits = renderer, limits
        self.rows: list[Row] = []
        self.texts: dict[int, str] = {}  # turn -> what the agent said, before any post-processing
        self.num_truncated = 0
        self._where: dict[int, tuple[Row, int]] = {}  # turn -> its row, and position of its last token there

    def begin(
        self,
        messages: Chat,
        prompt: Read | None = None,
        tools: Sequence[dict] = (),
        spelled: Chat | None = None,
    ) -> Opening:
        """Where the turn after a conversation begins; `speak` or `give_up` follows.

        messages: all that the agent sees, its own turns as it said them. They extend the row that holds most
        of their beginning, if there is room; else a new row begins. prompt: what exactly these messages
        are, where it is known. tools: those that the agent is told of, if they are not the
        renderer's. spelled: the messages as templates get them. ContextFull if they fit nowhere, and are not
        to be cut.
        """
        renderer, spelled = self._renderer.with_tools(tools), spelled or messages
        opening = self._extended(renderer, messages, tools, spelled)
        if opening is None:
            opening = self._started(renderer, messages, prompt, tools, spelled)
        opening.row.busy = True
        return opening

    def give_up(self, opening: Opening) -> None:
        """There is no turn: the row stays as it was."""
        opening.row.busy = False

    def speak(
        self,
        opening: Opening,
        generated: Generated,
        turn: int,
        as_message: Callable[[str], dict[str, Any]] = as_said,
    ) -> str:
        """Keep a turn; returns its text. as_message: gives how messages will name it later."""
        row = opening.row
        row.busy = False
        if not generated.token_ids or len(generated.token_ids) != len(generated.log_probs):
            raise EpisodeFailed(
                f"the policy gave {len(generated.token_ids)} tokens and {len(generated.log_probs)} log-probs",
                "policy",
            )
        if not row.finish_reason:
            self.rows.append(row)
        row.read(*opening.read)
        row.speak(generated, turn)
        self._where[turn] = row, len(row.ids) - 1
        self.texts[turn] = text = self._renderer.text(generated.token_ids)
        row.shown = [*opening.shown, as_message(text)]
        return text

    def num_known(self, messages: Chat) -> int:
        """How many of the messages, from the first on, are in a row."""
        return max((_num_shared(row.shown, messages) for row in self.rows), default=0)

    def reward(self, turn: int, value: float) -> None:
        """Add what the environment gave for a turn, at its last token."""
        row, position = self._where[turn]
        row.rewards[position] += value

    def reward_rows(self, value: float) -> None:
        """Add what an episode as a whole is worth, at the end of each row, which is that of a turn."""
        for row in self.rows:
            row.rewards[-1] += value

    def _extended(
        self, renderer: ChatRenderer, messages: Chat, tools: Sequence[dict], spelled: Chat
    ) -> Opening | None:
        """After the row that holds most of the messages' beginning; None: there is none with room."""
        going_on = [
            row
            for row in self.rows
            if not row.busy and row.tools == tools and messages[: len(row.shown)] == row.shown
        ]
        if not going_on:
            return None
        row = max(going_on, key=lambda row: len(row.shown))
        last = row.ids[-1] if row.finish_reason == "stop" else None
        read = renderer.follow(spelled[len(row.shown) :], last)
        room = self._limits.response - len(row.ids) - len(read.tokens)
        return Opening(row, read, list(messages), self._most(room)) if room > 0 else None

    def _started(
        self,
        renderer: ChatRenderer,
        messages: Chat,
        prompt: Read | None,
        tools: Sequence[dict],
        spelled: Chat,
    ) -> Opening:
        """In a new row."""
        tokens, seen = renderer.start(spelled) if prompt is None else prompt
        shown = spelled
        while (excess := len(tokens) - self._limits.prompt) > 0:
            last = shown[-1]
            cut = self._limits.long_context != "end" and isinstance(last["content"], str)
            content = renderer.shortened(last["content"], excess) if cut else last["content"]
            if content == last["content"]:
                raise ContextFull(self._too_long(len(tokens), messages))
            shown = [*shown[:-1], {**last, "content": content}]
            tokens, seen = renderer.start(shown)
        self.num_truncated += shown is not spelled
        row = Row(shown, tokens, tools, seen)
        return Opening(row, Read([]), list(messages), self._most(self._limits.response))

    def _most(self, room: int) -> int:
        return min(room, self._limits.turn or room)

    def _too_long(self, num_tokens: int, messages: Chat) -> str:
        """What is too long for what, by the keys of the configuration."""
        why = f"({num_tokens} tokens) does not fit data.max_prompt_length={self._limits.prompt}"
        if any(messages[: len(row.shown)] == row.shown for row in self.rows):
            why += f", and what is new in it not the rest of data.max_response_length={self._limits.response}"
        return why


def _num_shared(one: Chat, other: Chat) -> int:
    """How many messages both begin with."""
    count = 0
    for mine, its in zip(one, other, strict=False):
        if mine != its:
            break
        count += 1
    return count
