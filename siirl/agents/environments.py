"""Environments: what an episode acts in. Loaded from user code, checked, and run where they cannot do harm.

A hostile environment (one that raises, hangs, blocks or answers nonsense) costs its own episode only.
"""

import asyncio
import copy
import functools
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from siirl.agents.episode import MOST_REWARD
from siirl.agents.gymnasium_env import GymEnvironment, is_gym_class
from siirl.agents.shown import Shown, read_shown, shows_images
from siirl.agents.transcript import REPLAYABLE
from siirl.agents.user_thread import CallSlots, Hung, Raised, UserThread
from siirl.errors import DagError, DataError, EpisodeFailed
from siirl.user_code.extras import EXTRAS, REPLAYABLE_PACKAGES, env_package, missing_extra
from siirl.user_code.load_object import load_object

Texts = str | Shown | dict[int, str | Shown]
"""What agents read: the same for all, or for each agent that is named something of its own. Text, or content
with images: a list of {"type": "text"|"image"} parts, {"text", "images"}, or a Shown, which it becomes."""

RAISED, HUNG, INVALID = "env_raised", "env_hung", "env_invalid"
"""Kinds of EpisodeFailed: under these names failed episodes are counted."""

CLOSE_DEADLINE_S = 10.0
ADAPTERS = {
    "gymnasium": "siirl.agents.gymnasium_env:Gymnasium",
    "textarena": "siirl.agents.textarena_env:TextArena",
    "openenv": "siirl.agents.openenv_env:OpenEnv",
    "nemo_gym": "siirl.agents.nemo_gym_env:NemoGym",
    "sandbox": "siirl.agents.task_run:TaskEnvironment",
}
"""Package -> the class that makes an environment of it, Class(name, **env_kwargs)."""


@dataclass(frozen=True)
class Observation:
    """What agents see before they act. An empty text, and an agent that is not named, see nothing new."""

    texts: Texts = ""
    info: dict[str, Any] = field(default_factory=dict)
    """Plain data for the episode's record and for routes."""

    def text_for(self, agent: int) -> str:
        """What this agent reads, with <image> for each image."""
        what = self.texts.get(agent, "") if isinstance(self.texts, dict) else self.texts
        return what.text if isinstance(what, Shown) else what


@dataclass(frozen=True)
class StepResult:
    """What comes of actions."""

    observations: Texts = ""
    rewards: float | dict[int, float] = 0.0
    """Of each agent that is named, or a single number for every agent that has just acted."""
    done: bool = False
    """The episode is over."""
    info: dict[str, Any] = field(default_factory=dict)
    """Plain data."""

    def text_for(self, agent: int) -> str:
        """What this agent reads."""
        return Observation(self.observations).text_for(agent)


class Environment(Protocol):
    """What a user writes. One object for each episode; `Class(**env_kwargs)`.

    Methods are coroutines or plain functions, which may block: each environment has a thread of its own, in
    which all of its code runs. A method that raises, or passes the deadline, fails the episode.

    A class whose attribute `replayable` is true is brought to the same state by the same seed and actions:
    its episodes survive a kill (siirl/agents/transcript.py).
    """

    async def reset(self, task: dict[str, Any], seed: int) -> Observation | Texts:
        """Begin; a tuple (observations, info) will do, too. task: raw_prompt, data_source, ground_truth,
        extra_info of the dataset row. seed: of the episode (63 bits), the only source of randomness if runs
        shall be repeatable.
        """
        ...

    async def step(self, actions: dict[int, str]) -> StepResult | tuple[Any, ...]:
        """Act. actions: agent -> what it said. A tuple (observations, rewards, done[, info]) will do, too."""
        ...

    async def close(self) -> None:
        """Give back what is held; called once, also after a failure, but not after a hang. It
        may be left out.
        """
        ...


class HostedEnvironment:
    """One environment in its thread. Made without running user code: the class is called by `reset`.

    places: bounds how many environments run at once, None: any number; a deadline begins with a place.
    replayable: the same seed and actions bring it to the same state.
    """

    def __init__(
        self, make: Callable[[], Any], name: str, places: CallSlots | None = None, replayable: bool = False
    ):
        self.name = name
        self.replayable = replayable
        self._make = make
        self._places = places or CallSlots()
        self._env: Any = None
        self._begun = self._ended = False
        self._thread = UserThread(f"env-{name}")

    async def reset(self, task: dict[str, Any], seed: int, deadline_s: float) -> Observation:
        """Make the environment and reset it. EpisodeFailed if it raises, hangs, or gives no observation."""

        def begin() -> Any:
            self._env = self._make()
            return self._env.reset(copy.deepcopy(task), seed)

        self._begun = True
        return await self._call("reset", deadline_s, begin, self._observation)

    async def step(self, actions: Mapping[int, str], deadline_s: float) -> StepResult:
        """One step. EpisodeFailed if it raises, hangs, or does not give what StepResult says."""
        said = dict(actions)
        return await self._call("step", deadline_s, lambda: self._env.step(said), self._step_result)

    async def close(self, deadline_s: float = CLOSE_DEADLINE_S) -> str | None:
        """End the environment and its thread. Never raises: what went wrong is returned.

        Where nobody waits for `reset` any more, it is waited for here: only then is there something to close.
        Who is cancelled while it waits for this is so once the environment is closed.
        """
        if self._thread.abandoned:
            return None
        try:
            if self._begun:
                try:
                    await self._end(deadline_s)
                except asyncio.CancelledError:
                    await self._end(deadline_s)
                    raise
        except Hung as error:
            return f"{self.name}.close: {error}"
        except Raised as error:
            return f"{self.name}.close raised {error}"
        finally:
            self._thread.end()
        return None

    async def _end(self, deadline_s: float) -> None:
        def end() -> Any:
            ended, self._ended = self._ended, True
            close = None if ended else getattr(self._env, "close", None)
            return None if close is None else close()

        async with self._places.place():
            await self._thread.call(deadline_s, end)

    async def _call(
        self, method: str, deadline_s: float, function: Callable[[], Any], check: Callable[[str, Any], Any]
    ) -> Any:
        try:
            async with self._places.place():
                return await self._thread.call(deadline_s, function, functools.partial(check, method))
        except Hung as error:
            raise EpisodeFailed(f"{self.name}.{method}: {error}", HUNG) from None
        except Raised as error:
            raise EpisodeFailed(f"{self.name}.{method} raised {error}", RAISED) from None

    def _observation(self, method: str, answer: Any) -> Observation:
        if isinstance(answer, tuple) and len(answer) == 2:
            answer = Observation(*answer)
        seen: Any = answer
        observation = seen if isinstance(seen, Observation) else Observation(seen)
        return Observation(self._texts(method, observation.texts), self._info(method, observation.info))

    def _step_result(self, method: str, answer: Any) -> StepResult:
        if isinstance(answer, tuple) and len(answer) in (3, 4):
            answer = StepResult(*answer)
        if not isinstance(answer, StepResult):
            self._invalid(method, f"gave {_shown(answer)}, not a StepResult nor a tuple of 3 or 4")
        if type(answer.done).__name__ not in ("bool", "bool_"):  # also numpy's
            self._invalid(method, f"gave done={_shown(answer.done)}, neither True nor False")
        return StepResult(
            self._texts(method, answer.observations),
            self._rewards(method, answer.rewards),
            bool(answer.done),
            self._info(method, answer.info),
        )

    def _rewards(self, method: str, rewards: Any) -> float | dict[int, float]:
        named = rewards if isinstance(rewards, dict) else {0: rewards}
        for agent, reward in named.items():
            if not isinstance(agent, int):
                self._invalid(method, f"gave a reward to {_shown(agent)}: agents are whole numbers")
            if not _is_number(reward):
                self._invalid(
                    method, f"gave the reward {_shown(reward)}, which is no number within {MOST_REWARD:g}"
                )
        plain = {agent: float(reward) for agent, reward in named.items()}
        return plain if isinstance(rewards, dict) else plain[0]

    def _texts(self, method: str, texts: Any) -> Texts:
        if isinstance(texts, str):
            return texts
        if shows_images(texts):
            return self._read(method, texts)
        if not isinstance(texts, dict) or not all(
            isinstance(agent, int) and (isinstance(text, str) or shows_images(text))
            for agent, text in texts.items()
        ):
            self._invalid(
                method,
                f"gave the observations {_shown(texts)}, neither text, content with images, nor {{agent "
                "number: one of these}",
            )
        return {
            agent: text if isinstance(text, str) else self._read(method, text)
            for agent, text in texts.items()
        }

    def _read(self, method: str, content: Any) -> Shown:
        try:
            return read_shown(content)
        except DataError as error:
            self._invalid(method, f"gave images that cannot be shown: {error}")

    def _info(self, method: str, info: Any) -> dict[str, Any]:
        """The info as JSON gives it back; what JSON does not know becomes text."""
        if not isinstance(info, dict):
            self._invalid(method, f"gave info={_shown(info)}, which is no mapping")
        try:
            return json.loads(json.dumps(info, default=str))
        except (TypeError, ValueError, RecursionError) as error:
            self._invalid(method, f"gave an info that is no plain data: {error}")

    def _invalid(self, method: str, what: str) -> NoReturn:
        raise EpisodeFailed(f"{self.name}.{method} {what}", INVALID)


def load_environment(
    reference: str, who: str, env_kwargs: Mapping[str, Any] | None = None, max_concurrent: int = 0
) -> Callable[[], HostedEnvironment]:
    """What makes an environment for each episode, of the class "file.py:Class" or "pkg.mod:Class".

    env_kwargs: arguments of the class. max_concurrent: environments that run at once, 0 for any number.
    DagError if there is no such class, it does not take env_kwargs, or has neither reset(task, seed) and
    step(actions) nor Gymnasium's methods. who: the key that names it.
    """
    kwargs = dict(env_kwargs or {})
    if packaged := env_package(reference):
        adapter, name, places = check_packaged(reference, who, kwargs), packaged[1], CallSlots(max_concurrent)
        again = packaged[0] in REPLAYABLE_PACKAGES
        return lambda: HostedEnvironment(lambda: adapter(name, **kwargs), name, places, again)
    cls = load_object(reference, who, "class")
    if not inspect.isclass(cls):
        raise DagError(
            f"{who} = {reference!r} is {_shown(cls)}, not a class. Name a class with reset and step."
        )
    problems = _problems(cls, kwargs)
    if problems:
        raise DagError(
            f"{who} = {reference!r} cannot be used: {'; '.join(problems)}. Give it "
            "reset(self, task, seed) and step(self, actions), or those of Gymnasium."
        )
    name, places, again = cls.__name__, CallSlots(max_concurrent), bool(getattr(cls, REPLAYABLE, False))
    if is_gym_class(cls):
        return lambda: HostedEnvironment(lambda: GymEnvironment(cls(**kwargs)), name, places, again)
    return lambda: HostedEnvironment(lambda: cls(**kwargs), name, places, again)


def check_packaged(reference: str, who: str, env_kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """The adapter of an environment that a package names. DagError if it is not installed, or one that it
    makes to see cannot be made of env_kwargs, or cannot be acted in by words.
    """
    module, name = env_package(reference) or ("", "")
    what = f"{who} = {reference!r}"
    if module in EXTRAS and (problem := missing_extra(module)):
        raise DagError(f"{what}: {problem}")
    adapter = load_object(ADAPTERS[module], who, "class")
    try:
        env = adapter(name, **env_kwargs)
        problem = env.problem()
        env.close()
    except DagError:
        raise
    except Exception as error:  # the edge to the package
        raise DagError(
            f"{what} with env_kwargs {dict(env_kwargs)} cannot be made: {type(error).__name__}: {error} "
            "Correct the name or env_kwargs."
        ) from error
    if problem:
        raise DagError(f"{what}: {problem}")
    return adapter


async def reset_env(
    env: HostedEnvironment, task: dict[str, Any], seed: int, deadline_s: float
) -> Observation:
    """Begin an episode's environment; see HostedEnvironment.reset."""
    return await env.reset(task, seed, deadline_s)


async def step_env(env: HostedEnvironment, actions: Mapping[int, str], deadline_s: float) -> StepResult:
    """One step of it; see HostedEnvironment.step."""
    return await env.step(actions, deadline_s)


def _problems(cls: type, kwargs: Mapping[str, Any]) -> list[str]:
    problems = []
    if not _takes(cls, **kwargs):
        given = ", ".join(kwargs) or "no arguments"
        problems.append(f"{cls.__name__}{_signature(cls)} cannot be called with env_kwargs ({given})")
    methods = {name: getattr(cls, name, None) for name in ("reset", "step")}
    missing = [name for name, method in methods.items() if not callable(method)]
    problems += [f"it has no method {name}" for name in missing]
    if missing:
        return problems
    if is_gym_class(cls):
        coroutines = [name for name, method in methods.items() if inspect.iscoroutinefunction(method)]
        if coroutines:
            shown = f"reset{_signature(methods['reset'])}"
            problems.append(
                f"{shown} lacks task, and so is taken for Gymnasium's, whose {coroutines[0]} is no coroutine"
            )
        return problems
    for name, arguments in (("reset", ("task", 0)), ("step", ({},))):
        if not _takes(methods[name], None, *arguments):
            wanted = "reset(self, task, seed)" if name == "reset" else "step(self, actions)"
            problems.append(f"{name}{_signature(methods[name])} cannot be called as {wanted}")
    return problems


def _takes(function: Any, *args: Any, **kwargs: Any) -> bool:
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # written in C, without a signature: calling it will tell
        return True
    return True


def _signature(function: Any) -> str:
    try:
        return str(inspect.signature(function))
    except ValueError:
        return "(...)"


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, str | bool) and abs(float(value)) <= MOST_REWARD
    except (TypeError, ValueError, OverflowError):
        return False


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"
