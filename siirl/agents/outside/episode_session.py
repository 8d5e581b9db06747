"""One episode that a program plays: its requests become turns of the agents, and rows as all turns do.

consumes: requests, on the event loop of the endpoint. produces: turns, on the loop of the episode. waits for:
the program between its requests, up to a deadline. unblocked by: a reward, its end, or what it does wrong.
"""

import asyncio
import secrets
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from siirl.agents.outside.asked_turns import AskedTurns
from siirl.agents.outside.chat_wire import UNREWARDED
from siirl.agents.outside.content import BadRequest
from siirl.agents.outside.exchange import Asked, Said, Tell
from siirl.agents.outside.task_sandbox import TaskSandbox
from siirl.agents.runner import Game, Played
from siirl.compiler.plan import AgentStage
from siirl.dialect.tool_formats import ToolParser
from siirl.errors import EpisodeFailed

Answer = TypeVar("Answer")
HUNG, FLOODED, SILENT, LEFT = "program_hung", "program_flooded", "program_silent", "program_left"
"""Kinds of EpisodeFailed: under these names failed episodes are counted."""


class Session:
    """What the endpoint knows of an episode. `turn` and `finish` are for the episode's own event loop."""

    def __init__(self, game: Game, played: Played, parse: ToolParser | None, max_requests: int) -> None:
        """parse: reads the tool calls of all models; None: each model's are read by its own dialect."""
        self.token = f"siirl-{secrets.token_urlsafe(32)}"
        self.loop = asyncio.get_running_loop()
        self.rewards: dict[int, float] | float | None = None
        self.changed = asyncio.Event()
        """Of the endpoint's loop: a request has come or gone, or it is over."""
        self.failure: BaseException | None = None
        self.sandbox: TaskSandbox | None = None
        self.left = False
        """Its client has gone without a word."""
        self._played = played
        self._speaking = {stage.node: stage for stage in game.plan.speaking}
        self._max_requests, self._num_requests = max_requests, 0
        self._num_open, self._own_s, self._since_s, self._heard_s = 0, 0.0, time.monotonic(), 0.0
        self._turning: set[asyncio.Task[list[Said]]] = set()
        self._asked = AskedTurns(game, played, parse)
        self._over, self._ended = False, ""

    @property
    def models(self) -> dict[str, int]:
        """Names that a request may have as its model, and the agents that they are."""
        return {node: stage.agent for node, stage in self._speaking.items()}

    @property
    def task(self) -> dict[str, Any]:
        """What the program is told of its episode."""
        episode = self._played.episode
        seed = episode.seed if episode.env_seed is None else episode.env_seed
        return {**episode.task, "seed": seed, "models": list(self._speaking)}

    @property
    def over(self) -> bool:
        """Whether no more requests are answered."""
        return bool(self._over or self._ended or self.rewards is not None or self.failure is not None)

    @property
    def waits_for_us(self) -> bool:
        """Whether a request is being answered."""
        return self._num_open > 0

    @property
    def own_s(self) -> float:
        """Seconds that the program has taken by itself, while none of its requests was being answered."""
        return self._own_s + (0.0 if self._num_open else time.monotonic() - self._since_s)

    @property
    def idle_s(self) -> float:
        """Seconds since the program was last heard of, or answered."""
        return 0.0 if self._num_open else time.monotonic() - max(self._since_s, self._heard_s)

    def begin(self) -> None:
        """The program starts now."""
        self._own_s, self._since_s, self._heard_s = 0.0, time.monotonic(), 0.0

    def count_requests(self, number: int = 1) -> None:
        """That many more have come. BadRequest, and the end, if there have been too many."""
        self._num_requests, self._heard_s = self._num_requests + number, time.monotonic()
        if self._num_requests > self._max_requests:
            reason = f"it has sent more than serve.max_requests={self._max_requests} requests"
            self.fail(EpisodeFailed(reason, FLOODED))
            raise BadRequest(reason, "rate_limit_exceeded", 429)

    def fail(self, error: BaseException) -> None:
        """End the episode by an error."""
        self.failure = self.failure or error
        self.changed.set()

    def reward(self, rewards: dict[int, float] | float) -> None:
        """End the episode with what the program says of it."""
        self.rewards = rewards
        self.changed.set()

    def close(self) -> None:
        """End the episode without a word about its worth."""
        self._ended = "its program ended it"
        self.changed.set()

    def leave(self, idle_s: float) -> None:
        """Its client has been silent for too long: what was said is all there will be."""
        self._ended = f"its client was silent for serve.idle_s={idle_s:g} seconds"
        self.left = True

    async def answer(self, asked: Asked, tell: Tell | None = None) -> list[Said]:
        """The turns that a request asks for. On the endpoint's loop; a cancelled one leaves no trace.

        tell: see turns; it is called on the episode's loop.

        BadRequest; errors of policies end the episode, and are a BadRequest here.
        """

        async def turns() -> list[Said]:
            future = asyncio.run_coroutine_threadsafe(self.turns(asked, tell), self.loop)
            return await asyncio.wrap_future(future)

        return await self.while_open(turns())

    async def while_open(self, answer: Coroutine[Any, Any, Answer]) -> Answer:
        """An answer to the program, whose own time stands still from its beginning; errors: see answer."""
        if not self._num_open:
            self._own_s = self.own_s
        self._num_open += 1
        self.changed.set()
        try:
            return await answer
        except (BadRequest, asyncio.CancelledError):
            raise
        except Exception as error:  # raised again by whoever plays the episode
            self.fail(error)
            raise BadRequest("the episode has failed", "episode_over", 410) from error
        finally:
            self._num_open -= 1
            self._since_s = time.monotonic()
            self.changed.set()

    async def turns(self, asked: Asked, tell: Tell | None = None) -> list[Said]:
        """Generate turns, and add them to the episode. BadRequest, or errors of the policy.

        tell: gets what is certain of each turn, while it is being generated.
        """
        task = asyncio.current_task()
        assert task is not None
        if self._over:
            raise BadRequest("the episode is over", "episode_over", 410)
        self._turning.add(task)
        try:
            return await self._asked.speak(self._stage_of(asked.model), asked, tell)
        finally:
            self._turning.discard(task)

    async def finish(self) -> None:
        """Take no more turns, and give up those that are being generated."""
        self._over = True
        for task in self._turning:
            task.cancel()
        await asyncio.gather(*self._turning, return_exceptions=True)

    def settle(self, needs_reward: bool) -> None:
        """Say how the episode ended, and give its rewards. EpisodeFailed if nothing can be learnt from it.

        needs_reward: nobody but the program scores it.
        """
        episode, contexts = self._played.episode, self._played.contexts
        is_silent = not any(context.rows for context in contexts.values())
        if self.left and (is_silent or needs_reward):
            raise EpisodeFailed(self._ended, LEFT)
        if is_silent:
            raise EpisodeFailed("its program ended without a turn of an agent", SILENT)
        if self.rewards is None and needs_reward:
            raise EpisodeFailed(
                "its program ended without a reward, and the workflow has no reward node", UNREWARDED
            )
        if self.rewards is None:
            episode.ended = f"{self._ended or 'its program ended'}{self._asked.too_long}"
            return
        for agent, context in contexts.items():
            value = self.rewards.get(agent, 0.0) if isinstance(self.rewards, dict) else self.rewards
            context.reward_rows(value)
            if (last := episode.last_turn(agent)) is not None:
                last.reward += value
                last.info["rewarded"] = True
        episode.done, episode.ended = True, f"its program gave a reward{self._asked.too_long}"

    def _stage_of(self, model: str) -> AgentStage:
        """The agent that a model's name picks; any name will do for a single one."""
        if model in self._speaking:
            return self._speaking[model]
        if len(self._speaking) == 1:
            return next(iter(self._speaking.values()))
        known = ", ".join(self._speaking)
        raise BadRequest(f"there is no model {model!r}. Models: {known}", "model_not_found", 404)
