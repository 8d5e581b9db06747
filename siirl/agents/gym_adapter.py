"""Text environments in the manner of Gymnasium, by their methods alone: the package is not needed."""

import inspect
import re
from typing import Any

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
