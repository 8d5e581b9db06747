"""What generates the turns of an agent: an engine here, one on other ranks, or a script in a test; one whose
turns go on in a later step, and one of which a turn is asked in parts: it ends at a text of the program's, or
is told as it grows.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from siirl.agents.stream_client import StreamClient
from siirl.agents.transcript import Transcript
from siirl.data.completions import Completion, Key, PartialCompletion, Request, SamplingParams
from siirl.data.seen import NO_IMAGES, Seen

STOP_STRING = "stop_string"
"""finish_reason of a turn that ended at a text that a program named: no stop token is in it."""
ENDED = ("stop", STOP_STRING)
"""finish_reason of turns that came to an end of their own."""


class Policy(Protocol):
    """Generates turns; many calls are open at once. The result depends on weights and arguments alone."""

    async def generate(
        self, prompt: list[int], params: SamplingParams, seed: int, seen: Seen = NO_IMAGES
    ) -> Completion:
        """One turn after the tokens `prompt`. params: with n = 1. seen: the images among the tokens.

        EpisodeFailed costs the episode; any other error ends the run.
        """
        ...


class StreamGate:
    """The way to one engine: open while it may be asked. Used in one event loop."""

    def __init__(self) -> None:
        self.num_asked = 0
        """Turns that the engine has been asked for and whose answer nobody has read."""
        self._client: StreamClient | None = None
        self._opened = asyncio.Event()

    def open(self, client: StreamClient) -> None:
        """Let those who wait ask."""
        self._client = client
        self._opened.set()

    def close(self) -> None:
        """Whoever asks from now on waits."""
        self._opened.clear()

    def take_back(self) -> None:
        """Take back what is asked; see StreamClient.pause. Of a gate that is closed, outside the event
        loop."""
        if self._client is not None:
            self._client.pause()

    async def ask(self, request: Request, asked: Callable[[Key], None]) -> Completion:
        """See StreamClient; waits until the gate is open. asked: is called then."""
        while not self._opened.is_set():  # it may have closed again before who waited comes to run
            await self._opened.wait()
        assert self._client is not None
        asked(request.key)
        self.num_asked += 1
        try:
            return await self._client.ask(request)
        finally:
            self.num_asked -= 1


@dataclass(frozen=True)
class ResumablePolicy:
    """The Policy of one episode, whose turns outlive a rollout."""

    gate: StreamGate

    keys: Iterator[str]
    """One for each turn, unique among those of the gate."""

    asked: Callable[[Key], None]
    """Is called when a turn, or the rest of one, is asked for."""

    heard: Callable[[Key, Completion], None]
    """Is told each part of a turn, when it comes."""

    transcript: Transcript
    """Of the episode: what it has of a turn is not asked for."""

    async def generate(
        self, prompt: list[int], params: SamplingParams, seed: int, seen: Seen = NO_IMAGES
    ) -> Completion:
        """See Policy. Under equal weights the turn is what it would have been without pauses."""
        so_far, version = self.transcript.turn(seed, prompt, seen, params.max_tokens), -1
        turn = Request(next(self.keys), prompt, params, seed, seen=seen)
        while so_far.finish_reason is None:
            part = await self.gate.ask(so_far.rest(turn), self.asked)
            self.heard(turn.key, part)
            so_far.extend(part)
            version = part.weight_version
        return so_far.completion(version)


@dataclass(frozen=True)
class RecordedPolicy:
    """The Policy of one episode: what its transcript has of a turn is not asked for."""

    policy: Policy
    transcript: Transcript

    async def generate(
        self, prompt: list[int], params: SamplingParams, seed: int, seen: Seen = NO_IMAGES
    ) -> Completion:
        """See Policy."""
        so_far, version = self.transcript.turn(seed, prompt, seen, params.max_tokens), -1
        if so_far.finish_reason is None:
            said = await self.policy.generate(prompt, params, seed, seen)
            so_far.extend(said)
            version = said.weight_version
        return so_far.completion(version)


FIRST_PART = 64
"""Tokens."""
FIRST_TOLD, MOST_TOLD = 8, 64
"""Tokens of the first part of a turn that is told as it grows, and of later ones, which may be an eighth of
what was said before."""
Decode = Callable[[Sequence[int]], str]


class StoppedPolicy:
    """Policy for one turn of an episode, which it keeps.

    A policy samples token after token, each given those before it, so the first tokens of a turn are
    distributed as if it had ended there: what follows the token that completes a text of `stop` is dropped.
    What is left is what was sampled, the text of the stop included, with its log-probs, and is trained on.
    So that not much is, the turn is asked of an engine in parts, each twice as long as the one before: the
    numbers by which tokens are drawn are those of the whole turn. A turn that is told as it grows is asked in
    smaller parts.
    """

    def __init__(
        self, policy: Policy, stop: Sequence[str], decode: Decode, tell: Callable[[str], None] | None = None
    ) -> None:
        """stop: texts. decode: tokens of a turn to its text. tell: gets the text, each time there is more."""
        self._policy, self._stop, self._decode, self._tell = policy, tuple(stop), decode, tell
        self.generated: Completion | None = None
        self.ended_by: str | None = None
        """Which text ended it."""

    async def generate(
        self, prompt: list[int], params: SamplingParams, seed: int, seen: Seen = NO_IMAGES
    ) -> Completion:
        """See Policy. finish_reason is "stop_string" where a text ended the turn."""
        policy, so_far = self._policy, PartialCompletion()
        size = FIRST_PART if self._stop else params.max_tokens
        size = size if self._tell is None else FIRST_TOLD
        while self.generated is None:
            if isinstance(policy, StreamClient):
                done = len(so_far.token_ids)
                wanted = replace(params, max_tokens=min(size, params.max_tokens - done))
                tokens = [*prompt, *so_far.token_ids]
                part = await policy.generate(tokens, wanted, seed, seen, start=done)
            else:
                part, wanted = await policy.generate(prompt, params, seed, seen), params
            so_far.extend(part)
            turn = so_far.completion(part.weight_version)
            cut = self._cut(turn, len(prompt)) if self._stop else turn
            goes_on = part.finish_reason == "length" and len(turn.token_ids) < params.max_tokens
            if self.ended_by is not None or not goes_on or wanted is params:
                self.generated = cut
            elif self._tell is not None:
                self._tell(self._decode(turn.token_ids))
            size *= 2
            if self._tell is not None:
                size = max(min(size, MOST_TOLD), len(turn.token_ids) // 8)
        return self.generated

    def _cut(self, turn: Completion, num_read: int) -> Completion:
        ids = turn.token_ids[:-1] if turn.finish_reason == "stop" else turn.token_ids
        text = self._decode(ids)
        found = [stop for stop in self._stop if stop in text]
        if not found:
            return turn
        length = min(num_tokens_with(stop, ids, self._decode) for stop in found)
        said = self._decode(turn.token_ids[:length])
        _, self.ended_by = min((said.find(stop), stop) for stop in self._stop if stop in said)
        experts = turn.experts
        if experts is not None:
            width = len(experts) // (
                num_read + len(turn.token_ids) - 1
            )  # bytes of a token; the last has none
            experts = experts[: width * (num_read + length - 1)]
        return replace(
            turn,
            token_ids=turn.token_ids[:length],
            log_probs=turn.log_probs[:length],
            versions=turn.versions[:length],
            finish_reason=STOP_STRING,
            experts=experts,
        )


def num_tokens_with(text: str, token_ids: Sequence[int], decode: Decode) -> int:
    """How many of the first tokens say a text that all of them do."""
    low, high = 0, len(token_ids)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if text in decode(token_ids[:middle]) else (middle, high)
    return high
