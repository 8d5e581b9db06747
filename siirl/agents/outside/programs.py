"""Lets a program play the episodes of an interaction: what Game.play_outside is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from siirl.agents.outside.endpoint import Endpoint
from siirl.agents.outside.episode_session import LEFT, Session
from siirl.agents.outside.program import Command, Program, Routine, SessionInfo, Start
from siirl.agents.runner import Game, Played
from siirl.dialect.tool_formats import ToolParser
from siirl.errors import EpisodeFailed

MOST_CLIENTS = 3
"""To so many an episode is assigned, one after the other, if they leave it."""


def starter(command: str | Callable[[SessionInfo], Any]) -> Start:
    """What starts a shell command, or a function."""

    async def start(session: SessionInfo) -> Program:
        if isinstance(command, str):
            return await Command.start(command, session)
        return Routine(command, session)

    return start


@dataclass
class Programs:
    """What plays all episodes of a rank: a command, or clients that come for them."""

    endpoint: Endpoint
    parse: ToolParser | None
    """Reads the tool calls of models; None: by the dialect of each."""
    needs_reward: bool
    """Nobody but the program scores its episodes."""

    async def __call__(self, game: Game, played: Played) -> None:
        """Play one episode. EpisodeFailed if the program does not end it as it should."""
        self.endpoint.start()
        played.node = game.plan.entry
        while True:
            session = Session(game, played, self.parse, self.endpoint.limits.max_requests)
            await self.endpoint.play(session)
            played.num_left += session.left
            try:
                return session.settle(self.needs_reward)
            except EpisodeFailed as error:
                if error.kind != LEFT or played.num_left == MOST_CLIENTS:
                    raise
            played.begin_again()
