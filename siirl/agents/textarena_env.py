"""Games of TextArena, by their names: env_path: textarena:TicTacToe-v0. Player i is agent i of the DAG.

The package is imported when a game is checked or made.
"""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from siirl.user_code.load_object import load_object

_DICE = threading.Lock()
"""Held while a game computes: the package draws from Python's own generator, which all threads share."""


class TextArena:
    """textarena.make(name, **kwargs), for one player or several, who move one after another.

    Each reads what the game has told it since its last move, once, without its own moves. num_players: of
    them. error_allowance: how many illegal moves in a row a player may correct; the package's own (1) unless
    it is given. show: "file.py:fn", whose fn(observation, info) gives what is read; read: "file.py:fn", whose
    fn(text, info) gives the move.
    """

    def __init__(
        self,
        name: str,
        num_players: int = 2,
        error_allowance: int | None = None,
        show: str | None = None,
        read: str | None = None,
        **kwargs: Any,
    ):
        import textarena

        self._random = random.Random(0).getstate()
        self._show = load_object(show, "env_kwargs.show") if show else None
        self._read = load_object(read, "env_kwargs.read") if read else None
        self._num_players, self._error_allowance = num_players, error_allowance
        self._next_agent = 0
        with self._dice():
            self._env = textarena.make(name, **kwargs)
        self._game = self._env
        while isinstance(self._game, textarena.Wrapper):
            self._game = self._game.env

    def problem(self) -> str | None:
        """Why it cannot be played, and the fix; None if it can. A game is begun to see."""
        try:
            self.reset({}, 0)
        except AssertionError as error:
            return f"{error}. Set env_kwargs.num_players."
        return None

    def reset(self, task: dict[str, Any], seed: int) -> tuple[dict[int, str], dict[str, Any]]:
        """What the first player reads, and who it is."""
        self._random = random.Random(seed).getstate()
        with self._dice():
            self._env.reset(num_players=self._num_players, seed=seed)
        if self._error_allowance is not None:
            self._game.state.error_allowance = self._error_allowance
        return self._next()

    def step(self, actions: dict[int, str]) -> tuple[Any, dict[int, float], bool, dict[str, Any]]:
        """One move of the player whose turn it is. ValueError if another agent has spoken."""
        agent = self._next_agent
        if agent not in actions:
            spoken = ", ".join(map(str, actions))
            raise ValueError(
                f"agent {spoken} has spoken, and player {agent} is to move: again, after an illegal move, "
                "if they take turns. Set env_kwargs.error_allowance: 0, or let the nodes of the game ask who "
                "is next: agent_options: {route: siirl.agents.textarena_env:to_move}."
            )
        said = actions[agent]
        move = said if self._read is None else self._read(said, {"player": agent})
        with self._dice():
            done, info = self._env.step(action=move)
        if not done:
            texts, who = self._next()
            return texts, {}, False, {**info, **who}
        rewards, result = self._game.close()
        return "", {**(rewards or {})}, True, {**info, "players": {str(one): result[one] for one in result}}

    def close(self) -> None:
        """There is nothing to give back."""

    def _next(self) -> tuple[dict[int, str], dict[str, Any]]:
        agent, messages = self._game.get_observation()
        self._next_agent = agent
        names = self._game.state.role_mapping
        lines = [
            text if sender == GAME else f"[{names.get(sender, f'Player {sender}')}] {text}"
            for sender, text, *_ in messages
            if sender != agent
        ]
        text, info = "\n".join(lines), {"player": agent}
        return {agent: text if self._show is None else self._show(text, info)}, info

    @contextmanager
    def _dice(self) -> Iterator[None]:
        """Python's own generator is this game's."""
        with _DICE:
            outside = random.getstate()
            random.setstate(self._random)
            try:
                yield
            finally:
                self._random = random.getstate()
                random.setstate(outside)


GAME = -1
"""The sender of what no player says, as in textarena.GAME_ID."""


def to_move(episode: Any) -> str:
    """A route: the node of the agent that is to move."""
    return episode.nodes[episode.state["env"]["player"]]
