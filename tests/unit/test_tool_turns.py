"""An agent with tools: what it reads after a call, what others read, what is trained on, when it stops."""

from dataclasses import dataclass

import pytest

from siirl.agents.builtin_tools import Calculator
from siirl.agents.contexts import ChatRenderer, Limits
from siirl.agents.episode import Episode
from siirl.agents.policy import Generated
from siirl.agents.runner import Game, Speaker, run_all
from siirl.agents.tool_parsers import tool_parser
from siirl.agents.tool_use import ToolUse, tool_use
from siirl.agents.tools import Toolbox, ToolLimits
from siirl.config.rollout import MultiTurnConfig
from siirl.dag.interactions import assistant_turns
from siirl.dag.plan import InteractionPlan, StagePlan

END = 3  # the token that ends a turn


class Letters:
    """A vocabulary of characters; a turn in the template is ROLE:content and END."""

    eos_token_id = END
    chat_template = "letters"

    def apply_chat_template(self, conversation, tools=(), **options):
        names = "".join(f"[{tool['function']['name']}]" for tool in tools)
        turns = "".join(f"{m['role'][0]}:{m['content']}{chr(END)}" for m in conversation)
        return f"{names}{turns}a:"

    def encode(self, text, **options):
        return [ord(char) for char in text]

    def decode(self, token_ids, **options):
        return "".join(chr(token) for token in token_ids if token != END)


class Script:
    """A policy that says its lines one after another, and keeps what it read before each."""

    def __init__(self, *lines):
        self.lines, self.read = list(lines), []

    async def generate(self, prompt, params, seed):
        self.read.append("".join(map(chr, prompt)).replace(chr(END), "/"))
        tokens = [ord(char) for char in self.lines.pop(0)] + [END]
        return Generated(tokens, [-1.0] * len(tokens), "stop", 5)


@dataclass(frozen=True)
class Params:
    max_tokens: int = 1000


def call(expression):
    return f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}</tool_call>'


def play(*policies, most_rounds=9, pre_process=None):
    use = ToolUse(Toolbox({"calculator": Calculator()}), tool_parser("hermes"), ToolLimits(), most_rounds)
    stages, speakers = [], {}
    for agent, policy in enumerate(policies):
        node = f"node_{agent}"
        following = f"node_{agent + 1}" if agent + 1 < len(policies) else None
        stages.append(
            StagePlan(
                node=node,
                kind="agent",
                agent=agent,
                policy=agent,
                rows=True,
                following=following,
                back_to=None,
                max_turns=1,
                until=None,
                route=None,
                options={},
            )
        )
        tools = use if agent == 0 else None
        renderer = ChatRenderer(Letters(), {}, tools.toolbox.schemas if tools else ())
        speakers[node] = Speaker(policy, Params(), renderer, Limits(500, 500), pre_process, None, tools)
    task = {"raw_prompt": [{"role": "user", "content": "2+2?"}]}
    game = Game(InteractionPlan("node_0", tuple(stages), ("agent_0.rollout",), 9), speakers)
    (played,) = run_all(game, [Episode(0, 0, 0, 1, task)], [[1, 2, 3]])
    assert played.kind is None, played.episode.error
    return played


def test_an_agent_goes_on_after_its_tool_has_answered_and_others_read_the_outcome():
    first, second = Script(call("2+2"), "it is 4"), Script("yes")
    played = play(first, second)
    start = f"[calculator]u:2+2?/a:{call('2+2')}/t:4/a:"
    assert first.read == ["[calculator]u:2+2?/a:", start]
    assert second.read == ["u:2+2?/u:it is 4/a:"]
    (row,) = played.contexts[0].rows
    own = "".join(chr(token) for token, mine in zip(row.ids, row.own, strict=True) if mine)
    assert own == f"{call('2+2')}{chr(END)}it is 4{chr(END)}"
    assert set(row.turn_ids) == {0, 1, -1}
    conversation = played.episode.conversation()
    assert [message["role"] for message in conversation] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "assistant",
    ]
    assert conversation[1]["tool_calls"] == 1 and conversation[1]["tool_errors"] == []
    assert conversation[2]["tool"] == "calculator" and played.episode.turns == 3


def test_errors_are_read_by_the_model_and_counted_at_its_turn():
    policy = Script('<tool_call>{"name": "calc"}</tool_call>', "<tool_call>", call("1/0"), "no idea")
    played = play(policy)
    answers = [message.content for message in played.episode.messages if message.role == "tool"]
    assert answers[0] == "Error: there is no tool 'calc'. Tools: calculator."
    assert "is not closed" in answers[1] and answers[2] == "Error: division by zero."
    errors = [m.info["tool_errors"] for m in played.episode.messages if "tool_errors" in m.info]
    assert errors == [["unknown"], ["malformed"], []]


def test_an_agent_that_calls_on_and_on_is_stopped_at_the_bound():
    policy = Script(*[call("1+1")] * 4)
    played = play(policy, most_rounds=2)
    assert played.episode.turns == 3 and len(policy.lines) == 1
    assert played.episode.messages[-1].to is None  # the last turn is said to all


def test_answers_extend_what_a_pre_processing_function_has_rewritten():
    policy = Script(call("3*3"), "9")
    played = play(policy, pre_process=lambda messages, episode: [{"role": "user", "content": "short"}])
    assert policy.read[1] == f"[calculator]u:short/a:{call('3*3')}/t:9/a:"
    assert len(played.contexts[0].rows) == 1


@pytest.mark.parametrize(
    "bounds, turns",
    [({}, 16), ({"max_assistant_turns": 1}, 1), ({"max_assistant_turns": 20}, 20),
     ({"max_user_turns": 0}, 1), ({"max_user_turns": 2, "max_assistant_turns": 5}, 3)],
)  # fmt: skip
def test_bounds_of_turns_and_there_always_is_one(bounds, turns):
    assert assistant_turns(MultiTurnConfig(enable=True, **bounds)) == turns
    assert assistant_turns(MultiTurnConfig(**bounds)) == 1 and tool_use(MultiTurnConfig(**bounds)) is None
