"""Episodes that an outside program plays: its requests become rows, and what it does wrong costs it alone."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from episode_cases import Script, text_of
from outside_cases import episode, play_outside, program

from siirl.agents.outside.endpoint import MAX_BODY_BYTES, ProgramLimits

pytestmark = pytest.mark.heavy


def said_by(row) -> str:
    """The turns of a row, what it reads between them in brackets."""
    parts, before = [], None
    for token, own in zip(row.ids, row.assistant_mask, strict=True):
        if own != before:
            parts.append([own, []])
        parts[-1][1].append(token)
        before = own
    return "".join(text_of(tokens) if own else f"[{text_of(tokens)}]" for own, tokens in parts)


def test_a_history_that_goes_on_stays_in_its_row_and_one_that_branches_begins_another(tmp_path):
    code = """
first = chat(user("one"))
again = chat(user("one"), first, user("two"), temperature=0.1)
aside = chat(user("one"), first, user("other"), max_tokens=3)
chat(user("one"), first, user("two"), again, user("three"))
chat(user("one"), first, user("other"), aside)
assert ask("/reward", {"reward": 0.5}) == (200, {"ended": True})
"""
    policy = Script("a1", "a2", "b2", "a3", "b3...")
    (played,) = play_outside(program(tmp_path, code), {"a": policy})
    assert (played.kind, played.episode.ended) == (None, "its program gave a reward"), played.episode.error
    rows = played.contexts[0].rows
    assert [text_of(row.prompt_ids) for row in rows] == ["u:one/a:", "u:one/a:a1/u:other/a:"]
    assert [said_by(row) for row in rows] == ["a1/[u:two/a:]a2/[u:three/a:]a3/", "b2/[a:]b3"]
    assert policy.read[3] == "u:one/a:a1/u:two/a:a2/u:three/a:" and policy.most_tokens[2] == 3
    assert [row.rewards[-1] for row in rows] == [sum(row.rewards) for row in rows] == [0.5, 0.5]
    assert [message.reward for message in played.episode.messages] == [0] * 8 + [0.5]
    shown = [message.content for message in played.episode.messages]
    assert shown == ["one", "a1", "two", "a2", "other", "b2", "three", "a3", "b3"]


def test_the_model_name_picks_the_agent_and_each_gets_its_own_reward(tmp_path):
    code = """
assert [one["id"] for one in ask("/v1/models")[1]["data"]] == ["planner", "worker"]
task = ask("/v1/task")[1]
assert task["ground_truth"] == "7" and task["seed"] == 100, task
plan = chat(*task["raw_prompt"], model="planner")
chat(user(plan["content"]), model="worker")
status, error = ask("/v1/chat/completions", {"model": "gpt", "messages": [user("x")]})
assert status == 404 and "planner, worker" in error, error
assert ask("/reward", {"rewards": {"nobody": 1}})[0] == 400
assert ask("/reward", {"reward": "much"})[0] == 400
ask("/reward", {"rewards": {"worker": 1, "planner": -2}})
"""
    policies = {"planner": Script("plan"), "worker": Script("work")}
    (played,) = play_outside(program(tmp_path, code), policies, needs_reward=True)
    assert played.kind is None, played.episode.error
    assert [played.contexts[agent].rows[0].rewards[-1] for agent in (0, 1)] == [-2, 1]
    assert policies["worker"].read == ["u:plan/a:"]


def test_many_strangers_are_few_and_keep_no_program_out(tmp_path):
    code = """
import socket
port = int(os.environ["SIIRL_URL"].rpartition(":")[2])
strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(120)]
assert chat(user("one"))["content"] == "a1"
strangers[0].settimeout(5)
assert strangers[0].recv(1) == b""
ask("/reward", {"reward": 1})
"""
    limits = ProgramLimits(30.0, 64, 1)
    (played,) = play_outside(program(tmp_path, code), {"a": Script("a1")}, limits=limits)
    assert played.kind is None, played.episode.error


def test_an_official_client_uses_tools_and_streams_and_a_stranger_gets_nothing(tmp_path):
    code = """
import openai

client = openai.OpenAI(max_retries=0)
tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+2"}]
options = {"model": "gpt-4o", "tools": [tool]}
answer = client.chat.completions.create(messages=messages, **options)
choice = answer.choices[0]
call = choice.message.tool_calls[0]
assert choice.finish_reason == "tool_calls" and choice.message.content == "so", answer
assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}'), call
messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
stream = list(client.chat.completions.create(
    messages=messages, stream=True, stream_options={"include_usage": True}, **options
))
text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
assert text == "it is 3" and stream[-1].usage.completion_tokens == 8, stream
assert [model.id for model in client.models.list()] == ["a"]
for key in ("", "siirl-", "other"):
    try:
        stranger = openai.OpenAI(api_key=key or "none", max_retries=0)
        stranger.chat.completions.create(messages=messages, **options)
    except openai.AuthenticationError:
        pass
    else:
        raise AssertionError(key)
json_only = {"response_format": {"type": "json_object"}}
for wrong in (json_only, {"top_logprobs": 2}, {"tool_choice": "required"}, {"extra_body": {"new": 1}}):
    try:
        client.chat.completions.create(messages=messages, **options, **wrong)
    except openai.BadRequestError as error:
        assert list(wrong.get("extra_body", wrong))[0] in str(error)
    else:
        raise AssertionError(wrong)
client.post("/reward", body={"reward": 1}, cast_to=object)
"""
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    policy = Script(f" so {call}", "it is 3")
    (played,) = play_outside(program(tmp_path, code), {"a": policy}, needs_reward=True)
    assert played.kind is None, played.episode.error
    (row,) = played.contexts[0].rows
    assert said_by(row) == f" so {call}/[t:3/a:]it is 3/" and row.rewards[-1] == 1
    assert text_of(row.prompt_ids) == "[add]s:be brief/u:1+2/a:"
    assert len(policy.read) == 2  # a stranger, and what is refused, gets no token


def test_the_responses_of_an_official_client_use_tools_and_stream_and_go_on_in_their_row(tmp_path):
    code = """
import openai

client = openai.OpenAI(max_retries=0)
tool = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
options = {"model": "gpt-5", "tools": [tool], "instructions": "be brief"}
items = [{"role": "user", "content": "1+2"}]
answer = client.responses.create(input=items, **options)
text, call = answer.output
assert (answer.status, answer.output_text, call.type) == ("completed", "so", "function_call"), answer
assert (call.name, call.arguments) == ("add", '{"a": 1}'), call
items += [item.to_dict() for item in answer.output]
items += [{"type": "function_call_output", "call_id": call.call_id, "output": "3"}]
with client.responses.stream(input=items, **options) as stream:
    kinds = [event.type for event in stream]
    again = stream.get_final_response()
assert "response.function_call_arguments.done" in kinds and kinds[-1] == "response.completed", kinds
assert again.output[0].arguments == '{"b": [2]}' and again.usage.output_tokens > 9, again
items += [*again.output, {"type": "function_call_output", "call_id": "c", "output": "4"}]
items += [{"role": "user", "content": [{"type": "input_text", "text": "so?"}]}]
with client.responses.stream(input=items, max_output_tokens=50, **options) as stream:
    said = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert said == stream.get_final_response().output_text == "it is 3", said
for wrong in (
    {"previous_response_id": answer.id},
    {"tool_choice": "required"},
    {"text": {"format": {"type": "json_object"}}},
    {"tools": [{"type": "web_search"}]},
    {"reasoning": {"effort": "high"}},
):
    try:
        client.responses.create(**({"input": items} | options | wrong))
    except openai.BadRequestError as error:
        assert list(wrong)[0] in str(error), error
    else:
        raise AssertionError(wrong)
try:
    openai.OpenAI(api_key="other", max_retries=0).responses.create(input="x", model="a")
except openai.AuthenticationError:
    pass
else:
    raise AssertionError("a stranger")
client.post("/reward", body={"reward": 1}, cast_to=object)
"""
    given = ('{"a": 1}', '{"b": [2]}')
    calls = [f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>' for arguments in given]
    policy = Script(f"so {calls[0]}", calls[1], "it is 3")
    (played,) = play_outside(program(tmp_path, code), {"a": policy}, needs_reward=True)
    assert played.kind is None, played.episode.error
    (row,) = played.contexts[0].rows
    assert text_of(row.prompt_ids) == "[add]s:be brief/u:1+2/a:" and row.rewards[-1] == 1
    assert said_by(row) == f"so {calls[0]}/[t:3/a:]{calls[1]}/[t:4/u:so?/a:]it is 3/"
    assert len(policy.read) == 3  # what is refused, and a stranger, get no token


@pytest.mark.slow
def test_the_client_of_anthropic_uses_tools_and_streams_and_goes_on_in_its_row(tmp_path):
    code = """
import anthropic

client = anthropic.Anthropic(max_retries=0)
tool = {"name": "add", "input_schema": {"type": "object"}}
options = {"model": "claude", "max_tokens": 99, "tools": [tool], "system": "be brief"}
messages = [{"role": "user", "content": "1+2"}]
answer = client.messages.create(messages=messages, **options)
text, call = answer.content
assert (answer.stop_reason, text.text, call.name, call.input) == ("tool_use", "so", "add", {"a": 1}), answer
result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "3"}]}
messages += [
    {"role": "assistant", "content": answer.content},
    {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
]
with client.messages.stream(messages=messages, **options) as stream:
    again = stream.get_final_message()
assert again.content[0].input == {"b": [2]} and again.usage.output_tokens > 9, again
messages += [{"role": "assistant", "content": again.content}, {"role": "user", "content": "so?"}]
with client.messages.stream(messages=messages, **options) as stream:
    assert "".join(stream.text_stream) == "it is 3"
    assert stream.get_final_message().stop_reason == "end_turn"
for key, wrong, error in (
    ("none", {}, anthropic.AuthenticationError),
    (None, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, anthropic.BadRequestError),
    (None, {"tool_choice": {"type": "any"}}, anthropic.BadRequestError),
):
    try:
        anthropic.Anthropic(api_key=key, max_retries=0).messages.create(messages=messages, **options, **wrong)
    except error:
        pass
    else:
        raise AssertionError(wrong)
"""
    calls = [
        f'<tool_call>{{"name": "add", "arguments": {given}}}</tool_call>'
        for given in ('{"a": 1}', '{"b": [2]}')
    ]
    policy = Script(f"so {calls[0]}", calls[1], "it is 3")
    (played,) = play_outside(program(tmp_path, code), {"a": policy})
    assert played.kind is None, played.episode.error
    (row,) = played.contexts[0].rows
    assert text_of(row.prompt_ids) == "[add]s:be brief/u:1+2/a:"
    assert said_by(row) == f"so {calls[0]}/[t:3/u:and?/a:]{calls[1]}/[u:so?/a:]it is 3/"


HOSTILE = """
import signal, subprocess, sys, time
how = ask("/task")[1]["extra_info"]["how"]
if how == "silent":
    sys.exit(0)
chat(user("hello"))
if how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "exits":
    sys.exit("I cannot go on")
if how == "floods":
    while True:
        ask("/task")
if how == "swells":
    print(ask("/v1/chat/completions", raw=b"{" + b" " * (8 << 20) + b"}"))
if how == "shouts":
    for _ in range(3000):
        print("x" * 1000)
    sys.exit(3)
if how == "leaves":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
    open(os.environ["PIDS"], "a").write(f"{child.pid} ")
if how != "unrewarded":
    ask("/reward", {"reward": 1})
"""
COSTS = {
    "good": None,
    "leaves": None,
    "silent": "program_silent",
    "unrewarded": "program_unrewarded",
    "killed": "program_exited",
    "exits": "program_exited",
    "shouts": "program_exited",
    "floods": "program_flooded",
    "swells": "program_flooded",
}
WORDS = {
    "killed": "SIGKILL",
    "exits": "exit code 1.*I cannot go on",
    "shouts": "exit code 3.*xxx",
    "floods": "max_requests=20",
    "swells": f"more than {MAX_BODY_BYTES} bytes",
}


def test_a_program_that_goes_wrong_costs_its_episode_only_and_leaves_no_process(tmp_path, monkeypatch):
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    policy = Script(*["hi"] * len(COSTS))
    episodes = [episode(number, how=how) for number, how in enumerate(COSTS)]
    found = play_outside(
        program(tmp_path, HOSTILE), {"a": policy}, episodes, True, ProgramLimits(60.0, 20, len(COSTS))
    )
    assert {how: played.kind for how, played in zip(COSTS, found, strict=True)} == COSTS
    for how, played in zip(COSTS, found, strict=True):
        error = played.episode.error or ""
        assert len(error) < 6000
        assert how not in WORDS or re.search(WORDS[how], error, re.DOTALL), (how, error)
    assert [row.rewards[-1] for row in found[0].contexts[0].rows] == [1]
    (left,) = (tmp_path / "pids").read_text().split()
    assert not psutil.pid_exists(int(left))


def test_programs_end_with_the_rank_that_started_them(tmp_path):
    code = f"""# a fork: it imports as much as a rank
import sys
sys.path.insert(0, {str(Path(__file__).parents[2] / "support")!r})
from episode_cases import Script
from outside_cases import play_outside
play_outside("sleep 100 & echo $! > {tmp_path}/pid; wait", {{"a": Script()}})
"""
    rank = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 200
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        assert time.monotonic() < deadline and rank.poll() is None
        time.sleep(0.02)
    started = psutil.Process(int((tmp_path / "pid").read_text()))
    os.kill(rank.pid, signal.SIGKILL)
    rank.wait()
    started.wait(60)


class Slow(Script):
    """Takes its time for each line: waits(how often it was asked before)."""

    def __init__(self, waits, *lines):
        super().__init__(*lines)
        self.waits = waits

    async def generate(self, prompt, params, seed, seen=None):
        generated = await super().generate(prompt, params, seed)
        await self.waits(len(self.read) - 1)
        return generated


async def first_hangs(number):
    await asyncio.sleep(0 if number else 60)


def test_a_turn_that_nobody_waits_for_any_more_leaves_no_trace(tmp_path):
    code = """
try:
    ask("/v1/chat/completions", {"model": "a", "messages": [user("x")]}, timeout=0.3)
except TimeoutError:
    chat(user("x"))
else:
    raise AssertionError
"""
    (played,) = play_outside(program(tmp_path, code), {"a": Slow(first_hangs, "lost", "kept")})
    assert played.kind is None, played.episode.error
    (row,) = played.contexts[0].rows
    assert said_by(row) == "kept/" and played.episode.ended == "its program ended"


def test_a_program_that_hangs_is_ended_at_its_deadline():
    (played,) = play_outside("sleep 100", {"a": Script()}, None, False, ProgramLimits(0.3, 9, 1))
    assert played.kind == "program_hung" and "serve.deadline_s=0.3" in played.episode.error


def test_waiting_for_the_policy_does_not_count_against_a_program(monkeypatch):
    passed_s = [0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s[0])
    monkeypatch.setattr("siirl.agents.outside.episode_session.time", clock)

    async def waits(number):
        passed_s[0] += 1000

    def play(session):
        import httpx

        with httpx.Client(headers={"Authorization": f"Bearer {session.api_key}"}) as client:
            for text in "ab":
                body = {"model": "a", "messages": [{"role": "user", "content": text}]}
                client.post(f"{session.base_url}/chat/completions", json=body).raise_for_status()
        return session.task["ground_truth"] == "7"

    (played,) = play_outside(play, {"a": Slow(waits, "x", "y")}, None, True, ProgramLimits(60.0, 9, 1))
    assert played.kind is None and passed_s == [2000], played.episode.error
    assert [row.rewards for row in played.contexts[0].rows] == [[0, 1], [0, 1]]


def test_a_function_that_raises_costs_its_episode():
    def raises(session):
        return session.nothing

    (played,) = play_outside(raises, {"a": Script()})
    assert played.kind == "program_raised" and "return session.nothing" in played.episode.error


class Fails:
    async def generate(self, prompt, params, seed, seen=None):
        raise RuntimeError("the engine is gone")


def test_an_error_of_the_engine_ends_the_run_and_not_one_episode(tmp_path):
    with pytest.raises(RuntimeError, match="the engine is gone"):
        play_outside(program(tmp_path, 'chat(user("x"))'), {"a": Fails()})
