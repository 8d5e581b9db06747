"""What an agent has read and said, as tokens: rows that only grow at their end. No torch.

Text becomes tokens once. What the model produced is kept as it is; what follows it is what the chat template
writes there (siirl/agents/renderer.py), so that a row is what the template makes of its messages. Where the
template rewrites what a row holds already, a new row begins.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from siirl.agents.message_form import OwnTurn
from siirl.agents.renderer import Chat, ChatRenderer, Spoken, TokenizedText
from siirl.agents.shown import images_in
from siirl.data.completions import Completion, longer
from siirl.data.seen import NO_IMAGES, Seen
from siirl.dialect.tool_formats import ToolParser
from siirl.errors import EpisodeFailed

PROMPT_END = 64
"""Characters of a prompt that show whether it opens the reasoning of the turn after it."""


class ContextFull(Exception):
    """A message does not fit any more, and episodes end there. Its text continues "what NODE reads"."""


@dataclass(frozen=True)
class Limits:
    """Most tokens of a row's prompt, of its response (turns, and what is read between them), of a turn."""

    prompt: int
    response: int
    turn: int | None = None
    long_context: Literal["end", "truncate"] = "end"
    history: Literal["as_template", "grow"] = "as_template"
    """What becomes of a row whose beginning the template rewrites: see rollout.agent.history."""


@dataclass(eq=False)
class TokenSequence:
    """A token context: a prompt and what followed, of which the agent produced a part."""

    messages: Chat
    """What the prompt says."""
    prompt_ids: list[int]
    tools: Sequence[dict] = ()
    """What the prompt tells of tools, where they are not the same in all rows."""
    seen: Seen = NO_IMAGES
    """The images among the tokens of the prompt and those after it."""
    shown: Chat = field(default_factory=list)
    """All messages that it holds, its turns included, as others name them."""
    spoken: Spoken | None = None
    """The same for the template, the last turn apart; None before the first."""
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
    by_tokens: bool = False
    """It began with tokens, not messages: it goes on where others begin with all of its own."""

    def read(self, tokens: list[int], seen: Seen = NO_IMAGES) -> None:
        """Add tokens that the agent did not produce, and the images among them."""
        self.seen = self.seen_after(seen)
        self._add(tokens, False, [0.0] * len(tokens), -1, [-1] * len(tokens))

    def speak(self, turn: Completion, number: int) -> None:
        """Add the tokens of a turn."""
        self.finish_reason = turn.finish_reason
        self.experts = longer(self.experts, turn.experts)
        self._add(turn.token_ids, True, turn.log_probs, number, turn.token_versions)

    def read_before(self, turn: int) -> None:
        """The tokens of earlier turns are read, not produced: they are those of another episode's row."""
        for place, number in enumerate(self.turn_ids):
            if number < turn:
                self.assistant_mask[place], self.turn_ids[place], self.versions[place] = False, -1, -1
                self.log_probs[place] = self.rewards[place] = 0.0

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
class TurnPrompt:
    """What an agent reads before a turn. It becomes part of its row when the turn has been spoken."""

    row: TokenSequence
    """One that goes on, or a new one."""
    read: TokenizedText
    """What follows what the row holds."""
    shown: Chat
    """All messages that the agent has read then."""
    room: int
    """Most tokens of the turn."""
    spelled: Chat = field(default_factory=list)
    """The messages as templates get them."""
    text: str | None = None
    """What the template makes of them; None: that is not known yet."""

    @property
    def tokens(self) -> list[int]:
        """What the turn is generated after."""
        return self.row.prompt_ids + self.row.ids + self.read.tokens

    @property
    def seen(self) -> Seen:
        """The images among these."""
        return self.row.seen_after(self.read.seen)


AsMessage = Callable[[str, OwnTurn], dict[str, Any]]
"""The text of a turn, and its parts -> how messages will name it later."""


def as_said(text: str, own: OwnTurn | None = None) -> dict[str, Any]:
    """A turn as a message, word for word."""
    return {"role": "assistant", "content": text}


class Context:
    """All rows of one agent in one episode."""

    def __init__(self, renderer: ChatRenderer, limits: Limits) -> None:
        self._renderer, self._limits = renderer, limits
        self.rows: list[TokenSequence] = []
        self.texts: dict[int, str] = {}  # turn -> all that the agent said, before any post-processing
        self.num_truncated = 0
        self.num_rewritten = 0
        """Rows that began because the template rewrites what another one holds."""
        self.own_turns: dict[int, OwnTurn] = {}
        self._own: dict[str, OwnTurn] = {}  # text -> the turn as templates get it
        self._where: dict[
            int, tuple[TokenSequence, int]
        ] = {}  # turn -> its row, and position of its last token there

    def begin(
        self,
        messages: Chat,
        prompt: TokenizedText | None = None,
        tools: Sequence[dict] = (),
        spelled: Chat | None = None,
    ) -> TurnPrompt:
        """Where the turn after a conversation begins; `speak` or `give_up` follows.

        messages: all that the agent sees, its own turns as it said them. They extend the row that holds most
        of their beginning, if there is room, and the template writes that as the row has it; else a new row
        begins. prompt: what exactly these messages are, where it is known. tools: those that the agent is
        told of, if they are not the renderer's. spelled: the messages as templates get them, if not as
        `spell` has them. ContextFull if they fit nowhere, and are not to be cut.
        """
        renderer, spelled = self._renderer.with_tools(tools), spelled or self.spell(messages)
        opening = self._extended(renderer, messages, tools, spelled)
        if isinstance(opening, list):  # as the template has it, in a row of its own
            self.num_rewritten += 1
            opening, spelled, prompt = None, opening, None
        elif opening is None:
            opening = self._lengthened(renderer, messages, tools, spelled)
        if opening is None:
            opening = self._started(renderer, messages, prompt, tools, spelled)
        opening.row.busy = True
        return opening

    def begin_tokens(self, tokens: Sequence[int], text: str) -> TurnPrompt:
        """Where the turn after these very tokens begins: in the row that holds most of them, or a new one.

        text: what they say. ContextFull if they fit nowhere.
        """
        best: TokenSequence | None = None
        for row in self.rows:
            held = [*row.prompt_ids, *row.ids] if row.by_tokens and not row.busy else []
            room = self._limits.response - (len(tokens) - len(row.prompt_ids))
            longest = len(best.prompt_ids) + len(best.ids) if best is not None else 0
            if len(held) > longest and room > 0 and list(tokens[: len(held)]) == held:
                best = row
        shown: Chat = [{"role": "prompt", "content": text}]  # a role that no chat has
        if best is not None:
            read = TokenizedText(list(tokens[len(best.prompt_ids) + len(best.ids) :]))
            opening = TurnPrompt(
                best,
                read,
                shown,
                self._most(self._limits.response - len(best.ids) - len(read.tokens)),
                text=text,
            )
        elif len(tokens) > self._limits.prompt:
            raise ContextFull(self._too_long(len(tokens), shown))
        else:
            row = TokenSequence([{"role": "user", "content": text}], list(tokens), by_tokens=True)
            opening = TurnPrompt(row, TokenizedText([]), shown, self._most(self._limits.response), text=text)
        opening.row.busy = True
        return opening

    def spell(self, messages: Chat) -> Chat:
        """Messages with the agent's own turns as templates get them."""
        return [
            self._own.get(message["content"], message)
            if message["role"] == "assistant" and len(message) == 2 and isinstance(message["content"], str)
            else message
            for message in messages
        ]

    def give_up(self, opening: TurnPrompt) -> None:
        """There is no turn: the row stays as it was."""
        opening.row.busy = False

    def speak(
        self,
        opening: TurnPrompt,
        generated: Completion,
        turn: int,
        as_message: AsMessage = as_said,
        parse: ToolParser | None = None,
    ) -> str:
        """Keep a turn; returns its text. as_message: gives how messages will name it later. parse: reads the
        calls of tools in it.
        """
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
        stopped, ids = generated.finish_reason == "stop", generated.token_ids
        stop = ids[-1] if stopped and ids[-1] not in self._renderer.dialect.said_stops else None
        end = (opening.text or "")[-PROMPT_END:]
        own = self._renderer.own_turn(generated.token_ids, stop is not None, turn, parse, end)
        self.texts[turn] = text = own.said.raw
        self.own_turns[turn] = self._own[text] = own
        row.shown = [*opening.shown, as_message(text, own)]
        row.spoken = Spoken(opening.spelled, own, opening.text, stop)
        return text

    def num_known(self, messages: Chat) -> int:
        """How many of the messages, from the first on, are in a row."""
        return max((_num_shared(row.shown, messages) for row in self.rows), default=0)

    def reward(self, turn: int, value: float) -> None:
        """Add what the environment gave for a turn, at its last token."""
        row, position = self._where[turn]
        row.rewards[position] += value

    def keep_from(self, turn: int) -> None:
        """Of the rows, those with this turn or later ones, of which alone they are."""
        for row in self.rows:
            row.read_before(turn)
        self.rows = [row for row in self.rows if any(row.assistant_mask)]

    def reward_rows(self, value: float) -> None:
        """Add what an episode as a whole is worth, at the end of each row, which is that of a turn."""
        for row in self.rows:
            row.rewards[-1] += value

    def _extended(
        self, renderer: ChatRenderer, messages: Chat, tools: Sequence[dict], spelled: Chat
    ) -> TurnPrompt | Chat | None:
        """After the row that holds most of the messages' beginning; None: there is none with room.

        The conversation as templates get it, if the template does not write it as the row goes on.
        """
        going_on = [
            row
            for row in self.rows
            if not row.busy and row.tools == tools and messages[: len(row.shown)] == row.shown
        ]
        if not going_on:
            return None
        row = max(going_on, key=lambda row: len(row.shown))
        spoken, new = row.spoken, spelled[len(row.shown) :]
        assert spoken is not None, "a row is kept with its first turn"
        chat = [*spoken.messages, spoken.own, *new]
        read, text = renderer.continued(spoken, new)
        if read is None and self._limits.history == "as_template":
            return chat
        read = read or renderer.follow(new, spoken.stop)
        room = self._limits.response - len(row.ids) - len(read.tokens)
        return TurnPrompt(row, read, list(messages), self._most(room), chat, text) if room > 0 else None

    def _lengthened(
        self, renderer: ChatRenderer, messages: Chat, tools: Sequence[dict], spelled: Chat
    ) -> TurnPrompt | None:
        """After the row whose last turn was cut off, where somebody has written more behind its words.

        None: there is none with room whose words the template begins with.
        """
        cut = [
            (row, renderer.words(row.spoken))
            for row in self.rows
            if row.spoken is not None and row.spoken.stop is None and row.tools == tools
            if not row.busy and not row.by_tokens and not images_in(spelled)
        ]
        text = renderer.opened(spelled) if cut else ""
        row, words = max(
            ((row, words) for row, words in cut if text.startswith(words)),
            key=lambda one: len(one[1]),
            default=(None, ""),
        )
        if row is None:
            return None
        read = renderer.read(text[len(words) :])
        room = self._limits.response - len(row.ids) - len(read.tokens)
        return TurnPrompt(row, read, list(messages), self._most(room), spelled, text) if room > 0 else None

    def _started(
        self,
        renderer: ChatRenderer,
        messages: Chat,
        prompt: TokenizedText | None,
        tools: Sequence[dict],
        spelled: Chat,
    ) -> TurnPrompt:
        """In a new row."""
        for row in self.rows:
            if row.spoken is not None and any(one is row.spoken.own for one in spelled):
                renderer.settle(row.spoken)
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
        plain = [as_said(one.said.raw) if isinstance(one, OwnTurn) else one for one in shown]
        row = TokenSequence(plain, tokens, tools, seen)
        return TurnPrompt(row, TokenizedText([]), list(messages), self._most(self._limits.response), shown)

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
