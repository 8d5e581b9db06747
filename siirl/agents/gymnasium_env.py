"""Environments of Gymnasium, by their names: env_path: gymnasium:FrozenLake-v1. One agent acts, in words.

The package is imported when such an environment is checked or made; text environments in its manner, by
their methods alone, need none.
"""

import inspect
import re
from collections.abc import Sequence
from typing import Any

from siirl.user_code.load_object import load_object

WHOLE_NUMBER = re.compile(r"-?\d+")


def is_gym_class(cls: type) -> bool:
    """Whether reset takes `seed` but no `task`, and step takes one action."""
    reset, step = getattr(cls, "reset", None), getattr(cls, "step", None)
    if not callable(reset) or not callable(step):
        return False
    try:
        names = set(inspect.signature(reset).parameters)
    except ValueError:
        return False
    return "seed" in names and "task" not in names


class GymEnvironment:
    """One agent acts: reset(seed=...[, options]) and step(action) of a Gymnasium-style environment.

    The task goes to reset as options={"task": ...} where it takes options. The action is what the agent said,
    without blanks around it; where `action_space.n` says that actions are numbers, the last whole number in
    it. A reply without a legal one is told so and changes nothing.
    """

    def __init__(self, env: Any):
        self._env = env
        self._info: Any = {}
        """What the environment said last besides its observation."""

    def reset(self, task: dict[str, Any], seed: int) -> Any:
        """The first observation."""
        options = {"options": {"task": task}} if _takes_options(self._env.reset) else {}
        answer = self._env.reset(seed=seed, **options)
        observation, self._info = answer if isinstance(answer, tuple) else (answer, {})
        return self._text(observation)

    def step(self, actions: dict[int, str]) -> tuple[Any, float, bool, dict[str, Any]]:
        """(observation, reward, done, info). ValueError if several agents act, which Gymnasium cannot say."""
        if len(actions) != 1:
            raise ValueError(f"agents {list(actions)} act at once: a Gymnasium environment takes one action")
        (said,) = actions.values()
        action, complaint = self._action(said.strip())
        if complaint:
            return complaint, 0.0, False, {"illegal_action": True}
        answer = self._env.step(action)
        if not isinstance(answer, tuple) or len(answer) not in (4, 5):
            raise TypeError(f"step gave {type(answer).__name__}, not a tuple of 5 (or 4, as older ones do)")
        observation, reward, *ended, self._info = answer
        return self._text(observation), reward, any(bool(flag) for flag in ended), self._info

    def close(self) -> None:
        """Close it, if it can be."""
        if hasattr(self._env, "close"):
            self._env.close()

    def _text(self, observation: Any) -> str:
        """What the agent reads of an observation."""
        return observation_text(observation)

    def _action(self, said: str) -> tuple[Any, str]:
        """The action, and what is wrong with it."""
        space = getattr(self._env, "action_space", None)
        count, start = getattr(space, "n", None), int(getattr(space, "start", 0))
        if count is None:
            return said, ""
        numbers = WHOLE_NUMBER.findall(said)
        action = int(numbers[-1][:20]) if numbers else None
        if action is None or not start <= action < start + int(count):
            return None, f"Answer with a whole number from {start} to {start + int(count) - 1}."
        return action, ""


def _takes_options(reset: Any) -> bool:
    parameters = inspect.signature(reset).parameters.values()
    return any(p.name == "options" or p.kind == p.VAR_KEYWORD for p in parameters)


def observation_text(observation: Any) -> str:
    """Texts and numbers, and what holds them, as text: (20, 7, 0), [0.25, -1.5]; decimals to 4 digits."""
    if isinstance(observation, dict):
        return ", ".join(f"{name}: {observation_text(value)}" for name, value in observation.items())
    if isinstance(observation, tuple | list):
        left, right = "()" if isinstance(observation, tuple) else "[]"
        return left + ", ".join(map(observation_text, observation)) + right
    if hasattr(observation, "tolist"):  # of numpy
        return observation_text(observation.tolist())
    if isinstance(observation, float):
        return f"{observation:.4g}"
    if isinstance(observation, str | int):
        return str(observation)
    raise TypeError(f"the observation is {type(observation).__name__}, neither text nor numbers")


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
