"""What an agent has read and said, as tokens: rows that only grow at their end. No torch.

Text becomes tokens once. What the model produced is kept as it is; what others said is rendered by the chat
template behind a stand-in for the model's turn, and added.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from jinja2 import TemplateError

from siirl.agents.policy import Generated, Vocabulary
from siirl.errors import DataError, EpisodeFailed

Chat = list[dict[str, Any]]

STAND_IN = "STANDINFORTHETURN"
"""Stands for the model's own turn in templates; no letter of it is changed by trimming or escaping."""
MOST_KNOWN = 512


def alternating(messages: Chat) -> Chat:
    """The conversation for a template that knows users and assistants only, in turn (Gemma, Mistral).

    What others say is the user's; neighbours of one role become one message, a blank line between them.
    """
    plain: Chat = []
    for message in messages:
        role = "assistant" if message["role"] == "assistant" else "user"
        if plain and plain[-1]["role"] == role:
            plain[-1]["content"] += f"\n\n{message['content']}"
        else:
            plain.append({"role": role, "content": message["content"]})
    return plain


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
        self, tokenizer: Vocabulary, template_kwargs: Mapping[str, Any], tools: Sequence[dict] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self._options = {**template_kwargs, **({"tools": list(tools)} if tools else {})}
        self._name = getattr(tokenizer, "name_or_path", "") or "a tokenizer"
        self._known: dict[Any, list[int]] = {}
        self._taken: dict[str, bool] = {}
        self._end: list[int] | None = None

    def start(self, messages: Chat) -> list[int]:
        """The tokens of a conversation, up to where the agent's turn begins."""
        return list(self._once(False, messages))

    def follow(self, messages: Chat, last_token: int | None) -> list[int]:
        """The tokens that come after the agent's turn: its end, the messages, the beginning of its next turn.

        last_token: the one that the agent ended its turn by, which then is not repeated, nor what a template
        writes before it at the end of a turn (Cohere: <|END_RESPONSE|><|END_OF_TURN_TOKEN|>).
        """
        tokens = self._once(True, messages)
        end = self._turn_end() if last_token is not None else []
        if last_token in end:
            said = end.index(last_token) + 1
            if tokens[:said] == end[:said]:
                return tokens[said:]
        return tokens[1:] if tokens and tokens[0] == last_token else list(tokens)

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

    def _once(self, follows: bool, messages: Chat) -> list[int]:
        """Tokens of a conversation, or of what follows a turn; the caller does not write to them."""
        key = follows, tuple(tuple(message.items()) for message in messages)
        if not all(isinstance(value, str) for message in messages for value in message.values()):
            return self._rendered(follows, messages)
        if key not in self._known:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[key] = self._rendered(follows, messages)
        return self._known[key]

    def _rendered(self, follows: bool, messages: Chat) -> list[int]:
        if not follows:
            return self._tokens(self._text(messages))
        before = [{"role": "user", "content": "..."}, {"role": "assistant", "content": STAND_IN}]
        text = self._text([*before, *messages])
        if STAND_IN not in text:
            raise DataError(
                f"the chat template of {self._name} leaves out what an assistant has said as plain text: an "
                "agent cannot go on after its turn. Give the tokenizer another template."
            )
        return self._tokens(text[text.index(STAND_IN) + len(STAND_IN) :])

    def _text(self, messages: Chat) -> str:
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


@dataclass
class Row:
    """A token context: a prompt and what followed, of which the agent produced a part."""

    messages: Chat
    """What the prompt says."""
    prompt_ids: list[int]
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
    finish_reason: str = ""
    """That of the last turn."""

    def read(self, tokens: list[int]) -> None:
        """Add tokens that the agent did not produce."""
        self._add(tokens, False, [0.0] * len(tokens), -1, [-1] * len(tokens))

    def speak(self, turn: Generated, number: int) -> None:
        """Add the tokens of a turn."""
        self.finish_reason = turn.finish_reason
        self._add(turn.token_ids, True, turn.log_probs, number, turn.token_versions)

    def _add(
        self, tokens: list[int], produced: bool, log_probs: list[float], number: int, versions: list[int]
    ) -> None:
        self.ids += tokens
        self.assistant_mask += [produced] * len(tokens)
        self.log_probs += log_probs
        self.turn_ids += [number] * len(tokens)
        self.rewards += [0.0] * len(tokens)
        self.versions += versions


class Context:
    """All rows of one agent in one episode; the last one is written."""

    def __init__(self, renderer: ChatRenderer, limits: Limits) -> None:
        self._renderer, self._limits = renderer, limits
        self.rows: list[Row] = []
        self.texts: dict[int, str] = {}  # turn -> what the agent said, before any post-processing
        self.num_truncated = 0
        self._shown: Chat = []
        self._where: dict[int, tuple[Row, int]] = {}  # turn -> its row, and position of its last token there

    def begin(self, messages: Chat, prompt_ids: list[int] | None = None) -> tuple[list[int], int]:
        """Read what is new in a conversation: (tokens so far, most tokens of the turn that follows them).

        messages: all that the agent sees, its own turns as it said them. They extend the row if they begin
        with what is in it, and there is room; else a new row begins. prompt_ids: tokens of exactly these
        messages, where they are known. ContextFull if they fit nowhere, and are not to be cut.
        """
        if not (self.rows and self._extend(messages)):
            self._start(messages, prompt_ids)
        row = self.rows[-1]
        room = self._limits.response - len(row.ids)
        return row.prompt_ids + row.ids, min(room, self._limits.turn or room)

    def speak(self, generated: Generated, turn: int) -> str:
        """Keep a turn; returns its text."""
        if not generated.token_ids or len(generated.token_ids) != len(generated.log_probs):
            raise EpisodeFailed(
                f"the policy gave {len(generated.token_ids)} tokens and {len(generated.log_probs)} log-probs",
                "policy",
            )
        row = self.rows[-1]
        row.speak(generated, turn)
        self._where[turn] = row, len(row.ids) - 1
        self.texts[turn] = text = self._renderer.text(generated.token_ids)
        self._shown.append({"role": "assistant", "content": text})
        return text

    @property
    def shown(self) -> Chat:
        """The messages that its last row holds, the last turn included."""
        return self._shown

    def reward(self, turn: int, value: float) -> None:
        """Add what the environment gave for a turn, at its last token."""
        row, position = self._where[turn]
        row.rewards[position] += value

    def _extend(self, messages: Chat) -> bool:
        known = len(self._shown)
        if messages[:known] != self._shown:
            return False
        row = self.rows[-1]
        last = row.ids[-1] if row.finish_reason == "stop" else None
        tokens = self._renderer.follow(messages[known:], last)
        if len(row.ids) + len(tokens) >= self._limits.response:
            return False
        row.read(tokens)
        self._shown = list(messages)
        return True

    def _start(self, messages: Chat, prompt_ids: list[int] | None) -> None:
        tokens = self._renderer.start(messages) if prompt_ids is None else prompt_ids
        shown = messages
        while (excess := len(tokens) - self._limits.prompt) > 0:
            last = shown[-1]
            content = self._renderer.shortened(last["content"], excess)
            if self._limits.long_context == "end" or content == last["content"]:
                raise ContextFull(self._too_long(len(tokens), messages))
            shown = [*shown[:-1], {**last, "content": content}]
            tokens = self._renderer.start(shown)
        self.num_truncated += shown is not messages
        self.rows.append(Row(shown, tokens))
        self._shown = list(messages)

    def _too_long(self, num_tokens: int, messages: Chat) -> str:
        """What is too long for what, by the keys of the configuration."""
        why = f"({num_tokens} tokens) does not fit data.max_prompt_length={self._limits.prompt}"
        if self.rows and messages[: len(self._shown)] == self._shown:
            why += f", and what is new in it not the rest of data.max_response_length={self._limits.response}"
        return why
