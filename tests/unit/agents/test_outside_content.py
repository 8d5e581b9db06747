"""What programs send and functions return: out of bounds, it costs a request or an episode, no more."""

import gzip
import http.client
import json
import math

import numpy as np
import pytest
from episode_cases import Script
from outside_cases import play_outside

from siirl.agents.outside import chat_wire, messages_wire, responses_wire
from siirl.agents.outside.chat_wire import Said, as_message, reward_of
from siirl.agents.outside.content import MOST_DEPTH, TOKENS, BadRequest, check_bounds, parsed, understood
from siirl.dialect.tool_formats import Parsed, ToolCall


def nested(depth: int) -> str:
    return "[" * depth + "1" + "]" * depth


BOUNDS = {
    nested(MOST_DEPTH): "",
    nested(MOST_DEPTH + 1): "inside each other",
    nested(968): "inside each other|no JSON",
    nested(100_000): "no JSON",
    '{"a":' * 65 + "1" + "}" * 65: "inside each other",
    "9" * 308: "",
    "9" * 400: "bits",
    "9" * 5000: "no JSON",
    "1e308": "",
    "1e400": "no number",
    "[NaN]": "no number",
    "-Infinity": "no number",
    r'"\ud83d\ude00"': "",
    r'{"\udfff": 1}': "surrogate",
    r'["a\ud83d"]': "surrogate",
    "[" + ",".join("0" * 200_001) + "]": "more than 200000 values",
}


@pytest.mark.parametrize(("text", "words"), BOUNDS.items(), ids=range(len(BOUNDS)))
def test_json_out_of_bounds_is_a_bad_request_in_words(text, words):
    if not words:
        assert parsed(text, "the body") == json.loads(text)
        return
    with pytest.raises(BadRequest, match=f"^the body .*({words})"):
        parsed(text, "the body")
    with pytest.raises(BadRequest, match=rf"^messages\[0\]: tool_calls\[0\]: arguments = .*({words})"):
        message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}
        chat_wire.message_of(message, "messages[0]")


def test_values_that_contain_themselves_or_are_no_json_are_out_of_bounds():
    loop: list = []
    loop.append(loop)
    for value in (loop, [loop, loop], {1: 2}, object(), {"a": {1, 2}}, b"x"):
        with pytest.raises(BadRequest, match=r"^it "):
            check_bounds(value, "it")


@pytest.mark.parametrize("error", [RecursionError, OverflowError, KeyError, AttributeError, MemoryError])
def test_whatever_reading_a_request_raises_is_a_bad_request(error):
    def read(text):
        raise error("why")

    with pytest.raises(BadRequest, match=f"not understood: {error.__name__}: .*why") as caught:
        understood("not understood", read, "x")
    assert caught.value.status == 400


@pytest.mark.parametrize("value", [10**400, -(10**309), 1e308, 3.5e38, math.inf, math.nan, "1", None, True])
def test_rewards_that_float32_cannot_add_up_are_refused(value):
    for body in ({"reward": value}, {"rewards": {"a": value}}):
        with pytest.raises(BadRequest, match="no reward: write"):
            reward_of(body, {"a": 0})


class Shouts:
    def __repr__(self):
        raise KeyError("no")


LOOP: dict = {}
LOOP["a"] = LOOP
RETURNED = {
    "huge": lambda: 10**400,
    "large": lambda: 1e308,
    "nan": lambda: math.nan,
    "text": lambda: "1",
    "shouts": Shouts,
    "loop": lambda: LOOP,
    "of a": lambda: {"a": 10**5000},
    "of nobody": lambda: {"b": 1},
    "keys": lambda: {1: 1},
}
GIVES = {"one": (lambda: 1, 1.0), "true": (lambda: True, 1.0), "numpy": (lambda: np.float32(0.5), 0.5)}
GIVES["mapping"] = lambda: {"a": np.float64(2)}, 2.0


def says(session):
    from urllib.request import Request, urlopen

    body = {"model": "a", "messages": [{"role": "user", "content": "q"}]}
    head = {"Authorization": f"Bearer {session.api_key}"}
    urlopen(Request(f"{session.base_url}/chat/completions", json.dumps(body).encode(), head)).read()


@pytest.mark.parametrize("how", [*RETURNED, *GIVES])
def test_what_a_function_returns_costs_its_own_episode_at_most(how):
    def play(session):
        says(session)
        return RETURNED[how]() if how in RETURNED else GIVES[how][0]()

    (played,) = play_outside(play, {"a": Script("x")}, None, True)
    if how in GIVES:
        assert played.kind is None and played.contexts[0].rows[0].rewards[-1] == GIVES[how][1]
    else:
        assert played.kind in ("program_unrewarded", "program_raised") and len(played.episode.error) < 1000


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "array"}}}}}
ODD_PROPERTIES = ([], {"x": "y"}, {"x": {"type": 5}}, {"x": {"type": {}}})
ODD_PARAMETERS = (None, [], "x", 5, *({"properties": one} for one in ODD_PROPERTIES))


@pytest.mark.parametrize("text", [nested(300), nested(65), r'"\ud800"', "9" * 400])
def test_a_call_that_no_request_could_repeat_is_text(text):
    """Of the model's making: else the answer could not be written, or the conversation would end there."""
    calls = Parsed("", (ToolCall("f", {"x": text}, as_text=True),))
    assert as_message(calls, "as said", (TOOL,)) == {"role": "assistant", "content": "as said"}


@pytest.mark.parametrize("parameters", ODD_PARAMETERS, ids=str)
def test_tools_with_odd_schemas_take_texts(parameters):
    calls = Parsed("", (ToolCall("f", {"x": "[1]"}, as_text=True),))
    message = as_message(
        calls, "", ({"type": "function", "function": {"name": "f", "parameters": parameters}},)
    )
    assert message["tool_calls"][0]["function"]["arguments"] == {"x": "[1]"}


@pytest.mark.parametrize("field", ["model", "content"])
def test_streams_can_be_written_whatever_a_text_holds(field):
    """On all three wires."""
    odd = "a\ud800\u2028\0é"
    message = {"role": "assistant", "content": odd if field == "content" else "x"}
    said = Said("0-0", odd if field == "model" else "a", 0, message, "stop", 1, 1)
    for parts in (
        chat_wire.chunks(said, 0, True),
        messages_wire.events(said),
        responses_wire.events(said, 0),
    ):
        data = b"".join(parts)
        assert json.dumps(odd).encode() in data and data.isascii()


def test_a_body_that_is_not_in_its_encoding_is_a_bad_request(caplog):
    statuses = []

    def play(session):
        host = session.url.removeprefix("http://")
        good = json.dumps({"model": "a", "messages": [{"role": "user", "content": "q"}]}).encode()
        bomb = gzip.compress(b"[" + b" " * (64 << 20))
        for encoding, body in (("gzip", b"junk"), ("deflate", b"junk"), ("br", good), ("gzip", bomb[:-9])):
            connection = http.client.HTTPConnection(host, timeout=30)
            head = {"Authorization": f"Bearer {session.api_key}", "Content-Encoding": encoding}
            connection.request("POST", "/v1/chat/completions", body, head)
            statuses.append(connection.getresponse().status)
            connection.close()
        return 1

    (played,) = play_outside(play, {"a": Script("x", "y")})
    assert all(400 <= status < 500 for status in statuses), statuses
    assert played.kind == "program_flooded"
    assert not [record for record in caplog.records if record.exc_info]


ASKED = [{"role": "user", "content": "x"}]
WIRES = {
    "chat": (chat_wire, {"model": "a", "messages": ASKED}),
    "messages": (messages_wire, {"model": "a", "max_tokens": 5, "messages": ASKED}),
    "responses": (responses_wire, {"model": "a", "input": "x"}),
}
CHANGED = {
    "chat_template_kwargs": {"enable_thinking": False},
    "stop_token_ids": [5],
    "min_tokens": 3,
    "ignore_eos": True,
    "structured_outputs": {"regex": "a"},
    "guided_json": {},
    "continue_final_message": True,
    "add_generation_prompt": False,
    "reasoning_effort": "high",
    "parallel_tool_calls": False,
    "best_of": 2,
    "functions": [],
}


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", CHANGED)
def test_a_parameter_that_changes_tokens_is_refused_by_name_and_its_plain_value_taken(wire, name):
    module, body = WIRES[wire]
    with pytest.raises(BadRequest, match=f"^{name} = ") as refused:
        module.asked_of({**body, name: CHANGED[name]})
    assert refused.value.status == 400
    plain, _ = TOKENS[name]
    module.asked_of({**body, name: plain})
