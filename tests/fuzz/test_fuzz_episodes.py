"""Whatever a model writes as a call is answered; what an environment may not say ends its episode."""

import asyncio
import json
import math
from typing import Any

import numpy as np
import pytest
from fuzzing import NUMBERS, PLAIN, WORDS, cases, explore, mangled, replaced_somewhere
from hypothesis import strategies as st

from siirl.agents.builtin_tools import Calculator
from siirl.agents.environments import HostedEnvironment, Observation, StepResult, reset_env, step_env
from siirl.agents.tool_schema import function_schema
from siirl.agents.tools import Toolbox, ToolLimits, run_tools
from siirl.dialect.tool_formats import TOOL_FORMATS
from siirl.errors import EpisodeFailed

pytestmark = pytest.mark.heavy
LIMITS = ToolLimits(max_calls=4, max_length=200, deadline_s=30.0)


class Search:
    """A tool with arguments of every type."""

    schema = function_schema(
        "search",
        "",
        {
            "query": {"type": "string"},
            "limit": {"type": "integer", "minimum": 1, "maximum": 9},
            "kind": {"enum": ["page", 1]},
            "tags": {"type": "array", "items": {"type": ["string", "null"]}},
            "where": {"type": "object", "properties": {"site": {"type": "string"}}, "required": ["site"]},
        },
        ["query"],
    )

    def __call__(self, arguments: dict[str, Any], episode: Any) -> Any:
        return arguments


CALL = {
    "name": "search",
    "arguments": {"query": "x", "limit": 3, "kind": 1, "tags": ["a"], "where": {"site": "s"}},
}
EXPRESSIONS = st.text("0123456789+-*/().%,^ esqrtinfacoplogm_\n", max_size=20)
FUNCTION = "<function=search><parameter=query>\nx\n</parameter><parameter=limit>3</parameter></function>"
MARKS = (
    "<tool_call>",
    "</tool_call>",
    "```json",
    "```",
    "<|python_tag|>",
    ";",
    "{",
    "}",
    "[" * 5000,
    FUNCTION,
)


def spelled(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


CALLS = st.one_of(
    replaced_somewhere(CALL).map(spelled),
    EXPRESSIONS.map(lambda text: spelled({"name": "calculator", "parameters": {"expression": text}})),
    mangled(FUNCTION.encode()).map(lambda data: data.decode(errors="replace")),
    mangled(spelled(CALL).encode()).map(lambda data: data.decode(errors="replace")),
)
WHOLE = CALLS.map(lambda text: f"<tool_call>{text}</tool_call>")
TURNS = st.lists(st.one_of(WHOLE, WHOLE, CALLS, st.sampled_from(MARKS), WORDS), max_size=4).map("".join)


@cases(120)
@pytest.mark.parametrize("parser", sorted(TOOL_FORMATS))
def test_whatever_a_model_writes_is_answered_by_texts(num_cases, parser):
    toolbox = Toolbox({"search": Search(), "calculator": Calculator()})

    def check(turn: str) -> None:
        parsed = TOOL_FORMATS[parser](turn)
        assert isinstance(parsed.content, str)
        for answer in asyncio.run(run_tools(parsed.calls, toolbox, None, LIMITS)):
            assert isinstance(answer.text, str) and len(answer.text) < LIMITS.max_length + 50
            answer.text.encode()

    explore(num_cases // len(TOOL_FORMATS), check, TURNS)
    toolbox.close()


class Hostile:
    """An object whose methods raise."""

    def __init__(self, error: type[BaseException]):
        self.error = error

    def _raise(self, *_: object) -> Any:
        raise self.error("hostile")

    __repr__ = __str__ = __bool__ = __len__ = __iter__ = __getitem__ = __float__ = __eq__ = _raise
    __hash__ = None


class Shouts(str):
    """A text that is none where it counts."""

    def __len__(self) -> int:
        raise ValueError("no length")


ODD = st.one_of(
    PLAIN,
    st.sampled_from([np.float32(1.5), np.bool_(True), np.zeros(3), np.int64(2), float("nan"), 10**400]),
    st.sampled_from([ValueError, KeyError, SystemExit, KeyboardInterrupt, RecursionError]).map(Hostile),
    st.just(Shouts("x")),
    st.binary(max_size=3),
    st.dictionaries(st.integers(-1, 2), PLAIN, max_size=2),
)
TEXTS = st.one_of(WORDS, st.dictionaries(st.integers(0, 1), WORDS, max_size=2), ODD)
REWARDS = st.one_of(NUMBERS, st.dictionaries(st.integers(0, 1), NUMBERS, max_size=2), ODD)
INFOS = st.one_of(st.dictionaries(WORDS, ODD, max_size=2), ODD)
STEPS = st.one_of(
    st.builds(StepResult, TEXTS, REWARDS, st.booleans() | ODD, INFOS),
    st.tuples(TEXTS, REWARDS, st.booleans() | ODD),
    st.tuples(TEXTS, REWARDS, st.booleans(), INFOS),
    ODD,
)
BEGINS = st.one_of(TEXTS, st.tuples(TEXTS, INFOS), st.builds(Observation, TEXTS, INFOS), ODD)


class Answers:
    """An environment that gives what it is told to."""

    def __init__(self, begin: Any, step: Any):
        self.reset = lambda task, seed: begin
        self.step = lambda actions: step


@cases(80)
def test_whatever_an_environment_answers_is_checked_or_ends_its_episode(num_cases):
    async def episode(begin: Any, step: Any) -> None:
        env = HostedEnvironment(lambda: Answers(begin, step), "env")
        try:
            first = await reset_env(env, {"raw_prompt": "q"}, 1, 30.0)
            assert all(isinstance(first.text_for(agent), str) for agent in (0, 1))
            result = await step_env(env, {0: "a"}, 30.0)
        except EpisodeFailed as error:
            assert str(error).startswith("env.") and error.kind.startswith("env")
        else:
            assert all(isinstance(result.text_for(agent), str) for agent in (0, 1))
            rewards = result.rewards
            rewards = rewards.values() if isinstance(rewards, dict) else [rewards]
            assert all(math.isfinite(reward) for reward in rewards)
            assert result.done in (True, False)
            json.dumps([first.texts, first.info, result.observations, result.rewards, result.info])
        finally:
            assert await env.close(30.0) is None

    def check(begin: Any, step: Any) -> None:
        asyncio.run(episode(begin, step))

    explore(num_cases, check, BEGINS, STEPS)
