"""Turns that go on: what an engine had sampled of a turn when it was paused is kept, and continued later."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from siirl.agents.stream_client import StreamClient
from siirl.data.completions import Completion, PartialCompletion, Request, SamplingParams
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

    async def ask(self, request: Request) -> Completion:
        """See StreamClient; waits until the gate is open."""
        await self._opened.wait()
        assert self._client is not None
        self.num_asked += 1
        try:
            return await self._client.ask(request)
        finally:
            self.num_asked -= 1


@dataclass(frozen=True)
class ResumablePolicy:
    """The Policy of one episode, whose turns outlive a rollout."""

    gate: StreamGate

    key: str
    """The episode, unique among those of the gate."""

    heard: Callable[[Completion], None]
    """Is told each part of a turn, when it comes."""

    async def generate(
        self, prompt: list[int], params: SamplingParams, seed: int, seen: Seen = NO_IMAGES
    ) -> Completion:
        """See Policy. Under equal weights the turn is what it would have been without pauses."""
        turn, so_far = Request(self.key, prompt, params, seed, seen=seen), PartialCompletion()
        while True:
            part = await self.gate.ask(so_far.rest(turn))
            self.heard(part)
            so_far.extend(part)
            if so_far.finish_reason is not None:
                return so_far.completion(part.weight_version)
