"""Turns that go on: what an engine had sampled of a turn when it was paused is kept, and continued later."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from siirl.agents.policy import PAUSED, Generated
from siirl.agents.stream_client import StreamClient
from siirl.data.chosen_experts import longer
from siirl.data.seen import NO_IMAGES, Seen


class StreamGate:
    """The way to one engine: open during a rollout, closed between two. Of one event loop."""

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
        """Take back what is asked; see StreamClient.pause. Whoever asks from now on waits. Outside the
        event loop."""
        self._opened.clear()
        if self._client is not None:
            self._client.pause()

    async def ask(
        self,
        key: str,
        prompt: list[int],
        params: Any,
        seed: int,
        seen: Seen,
        start: int,
        kv_version: int | None,
    ) -> Generated:
        """See StreamClient.generate; waits until the line is open."""
        await self._opened.wait()
        assert self._client is not None
        self.num_asked += 1
        try:
            return await self._client.generate(prompt, params, seed, seen, start, key, kv_version)
        finally:
            self.num_asked -= 1


@dataclass(frozen=True)
class ResumablePolicy:
    """The Policy of one episode, whose turns outlive a rollout."""

    line: StreamGate

    key: str
    """The episode, unique among those of the line."""

    heard: Callable[[Generated], None]
    """Is told each part of a turn, when it comes."""

    async def generate(self, prompt: list[int], params: Any, seed: int, seen: Seen = NO_IMAGES) -> Generated:
        """See Policy. Under equal weights the turn is what it would have been without pauses."""
        turn = Generated([], [], PAUSED, -1)
        while turn.finish_reason == PAUSED:
            done = len(turn.token_ids)
            rest = replace(params, max_tokens=params.max_tokens - done)
            begun = turn.weight_version if done else None
            tokens = [*prompt, *turn.token_ids]
            part = await self.line.ask(self.key, tokens, rest, seed, seen, done, begun)
            self.heard(part)
            turn = joined(turn, part)
        return turn


def joined(turn: Generated, part: Generated) -> Generated:
    """A turn and the part of it that was sampled after that."""
    versions = turn.token_versions + part.token_versions
    return Generated(
        turn.token_ids + part.token_ids,
        turn.log_probs + part.log_probs,
        part.finish_reason,
        min(versions, default=part.weight_version),
        versions if len(set(versions)) > 1 else [],
        longer(turn.experts, part.experts),
    )
