"""An agent with tools: what it reads after a call, what others read, what is trained on, when it stops."""

import pytest
from episode_cases import END, Script, play, speaker, stage

from siirl.agents.builtin_tools import Calculator
from siirl.agents.runner import turn_seed
from siirl.agents.tool_files import ToolUse, tool_use
from siirl.agents.tools import Toolbox, ToolLimits
from siirl.compiler.interactions.stages import assistant_turns
from siirl.config.rollout import MultiTurnConfig
from siirl.dialect.tool_formats import tool_parser


def call(expression):
    return f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}</tool_call>'


def converse(*policies, most_rounds=9, pre_process=None):
    """One episode of agents that speak one after another, the first with a calculator."""
    use = ToolUse(Toolbox({"calculator": Calculator()}), tool_parser("hermes"), ToolLimits(), most_rounds)
    stages, speakers = [], {}
    for agent, policy in enumerate(policies):
        following = f"node_{agent + 1}" if agent + 1 < len(policies) else None
        stages.append(stage(f"node_{agent}", agent, following=following))
        tools = use if agent == 0 else None
        speakers[f"node_{agent}"] = speaker(policy, tools=tools, pre_process=pre_process)
    (played,) = play(stages, speakers)
    assert played.kind is None, played.episode.error
    return played


def test_an_agent_goes_on_after_its_tool_has_answered_and_others_read_the_outcome():
    first, second = Script(call("2+2"), "it is 4"), Script("yes")
    played = converse(first, second)
    start = f"[calculator]u:q/a:{call('2+2')}/t:4/a:"
    assert first.read == ["[calculator]u:q/a:", start]
    assert second.read == ["u:q/u:it is 4/a:"]
    (row,) = played.contexts[0].rows
    own = "".join(chr(token) for token, mine in zip(row.ids, row.assistant_mask, strict=True) if mine)
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
    played = converse(policy)
    answers = [message.content for message in played.episode.messages if message.role == "tool"]
    assert answers[0] == "Error: there is no tool 'calc'. Tools: calculator."
    assert "is not closed" in answers[1] and answers[2] == "Error: division by zero."
    errors = [m.info["tool_errors"] for m in played.episode.messages if "tool_errors" in m.info]
    assert errors == [["unknown"], ["malformed"], []]


def test_an_agent_that_calls_on_and_on_is_stopped_at_the_bound():
    policy = Script(*[call("1+1")] * 4)
    played = converse(policy, most_rounds=2)
    assert played.episode.turns == 3 and len(policy.lines) == 1
    assert played.episode.messages[-1].to is None  # the last turn is said to all


def test_answers_extend_what_a_pre_processing_function_has_rewritten():
    policy = Script(call("3*3"), "9")
    played = converse(policy, pre_process=lambda messages, episode: [{"role": "user", "content": "short"}])
    assert policy.read[1] == f"[calculator]u:short/a:{call('3*3')}/t:9/a:"
    assert len(played.contexts[0].rows) == 1


@pytest.mark.parametrize(
    "bounds, turns",
    [({}, 16), ({"max_assistant_turns": 1}, 1), ({"max_assistant_turns": 20}, 20),
     ({"max_user_turns": 0}, 1), ({"max_user_turns": 2, "max_assistant_turns": 5}, 3)],
)  # fmt: skip
def test_bounds_of_turns_and_there_always_is_one(bounds, turns):
    assert assistant_turns(MultiTurnConfig(enable=True, **bounds)) == turns
    assert (
        assistant_turns(MultiTurnConfig(**bounds)) == 1
        and tool_use(MultiTurnConfig(**bounds), "node 'n'") is None
    )


def test_the_configuration_bounds_calls_answers_and_rounds():
    keys = {
        "max_parallel_calls": 3,
        "max_tool_response_length": 7,
        "tool_response_truncate_side": "left",
        "tool_timeout_s": 2.5,
    }
    use = tool_use(MultiTurnConfig(enable=True, max_assistant_turns=4, format="json", **keys), "node 'n'")
    assert use is not None and use.limits == ToolLimits(3, 7, "left", 2.5)
    assert use.most_rounds == 3 and use.parse is tool_parser("json")  # after the first of four turns


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_turns_beside_an_agent_with_tools_keep_their_numbers_however_often_it_calls(calls):
    """Numbers 0 to 2 are kept for the agent with tools: the other has 3, and the next round begins at 4."""
    use = ToolUse(Toolbox({"calculator": Calculator()}), tool_parser("hermes"), ToolLimits(), most_rounds=2)
    stages = [
        stage("a", 0, beside=("b",)),
        stage("b", 1, beside=("a",), back_to=("a", "b"), max_turns=2),
    ]
    script, other = Script(*[call("2+2")] * calls, "done", "again"), Script("one", "two")
    (played,) = play(stages, {"a": speaker(script, tools=use), "b": speaker(other)})
    assert played.kind is None, played.episode.error
    spoken = [(m.agent, m.turn) for m in played.episode.messages if m.agent is not None]
    assert spoken == [*((0, turn) for turn in range(calls + 1)), (1, 3), (0, 4), (1, 7)]
    assert script.seeds == [turn_seed(100, 0, turn) for agent, turn in spoken if agent == 0]
    assert other.seeds == [turn_seed(100, 1, turn) for turn in (3, 7)]
    assert other.read[1] == "u:q/a:one/u:done/a:", "calls and their answers are read by their agent alone"
