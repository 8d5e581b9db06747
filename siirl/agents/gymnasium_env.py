"""Environments of Gymnasium, by their names: env_path: gymnasium:FrozenLake-v1. One agent acts, in words.

The package is imported when an environment is checked or made.
"""

import re
from collections.abc import Sequence
from typing import Any

from siirl.agents.gym_adapter import GymEnvironment
from siirl.user_code.load_object import load_object

COLOURED = re.compile(r"\x1b\[[1-9][0-9;]*m(.*?)\x1b\[0m", re.DOTALL)


class Gymnasium(GymEnvironment):
    """gymnasium.make(name, **kwargs).

    show: "file.py:fn", whose fn(observation, info) gives what the agent reads; by default what is rendered
    with render_mode="ansi", with [brackets] for colours, else the observation as text. read: "file.py:fn",
    whose fn(text, info) gives the action, or raises ValueError with what the agent is told then. actions:
    words for the actions of a Discrete space, in their order.
    """

    def __init__(
        self,
        name: str,
        show: str | None = None,
        read: str | None = None,
        actions: Sequence[str] = (),
        **kwargs: Any,
    ):
        import gymnasium

        super().__init__(gymnasium.make(name, **kwargs))
        self._show = load_object(show, "env_kwargs.show") if show else None
        self._read = load_object(read, "env_kwargs.read") if read else None
        self._actions = [str(word) for word in actions]

    def problem(self) -> str | None:
        """Why agents cannot act in it, and the fix; None if they can."""
        import gymnasium

        space = self._env.action_space
        if self._read is not None:
            return None
        if not isinstance(space, gymnasium.spaces.Discrete | gymnasium.spaces.Text):
            return (
                f"its actions are {space}, and only whole numbers and texts are read by themselves. Set "
                "env_kwargs.read: file.py:fn, whose fn(text, info) gives an action."
            )
        if self._actions and len(self._actions) != getattr(space, "n", None):
            return f"env_kwargs.actions has {len(self._actions)} words for the actions {space}. Name each."
        return None

    def _text(self, observation: Any) -> str:
        if self._show is not None:
            return self._show(observation, self._info)
        if self._env.render_mode == "ansi":
            return COLOURED.sub(r"[\1]", self._env.render()).strip("\n")
        return super()._text(observation)

    def _action(self, said: str) -> tuple[Any, str]:
        if self._read is not None:
            try:
                return self._read(said, self._info), ""
            except ValueError as error:
                return None, str(error)
        if not self._actions:
            return super()._action(said)
        words = [word for word in re.findall(r"\w+", said.lower()) if word in map(str.lower, self._actions)]
        if not words:
            return None, f"Answer with one of {', '.join(self._actions)}."
        start = int(self._env.action_space.start)
        return start + [word.lower() for word in self._actions].index(words[-1]), ""
