"""What programs send and functions return: out of bounds, it costs a request or an episode, no more."""

import contextlib
import gzip
import http.client
import json
import math
import socket
import time

import numpy as np
import pytest
from episode_cases import Script, speaker
from outside_cases import episode, game_of, play_outside

from siirl.agents.outside import chat_wire, completions_wire, messages_wire, responses_wire
from siirl.agents.outside.chat_wire import as_message, reward_of
from siirl.agents.outside.content import MOST_DEPTH, BadRequest, check_bounds, parsed, understood
from siirl.agents.outside.endpoint import Endpoint, ProgramLimits
from siirl.agents.outside.exchange import Said
from siirl.agents.outside.programs import Programs, starter
from siirl.agents.runner import run_all
from siirl.data.seen import Seen
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
    """On all wires."""
    odd = "a\ud800\u2028\0é"
    message = {"role": "assistant", "content": odd if field == "content" else "x"}
    said = Said("0-0", odd if field == "model" else "a", 0, message, "stop", 1, 1)
    for parts in (
        chat_wire.Stream(0, True).end([said]),
        completions_wire.Stream(0, True).end([said]),
        messages_wire.Stream(0, True).end([said]),
        responses_wire.Stream(0, True).end([said]),
    ):
        data = b"".join(parts)
        assert json.dumps(odd).encode() in data and data.isascii()


def test_a_body_that_is_not_in_its_encoding_is_a_bad_request(caplog):
    statuses = []

    def play(session):
        host = session.url.removeprefix("http://")
        good = json.dumps({"model": "a", "messages": [{"role": "user", "content": "q"}]}).encode()
        bomb = gzip.compress(b"[" + b" " * (64 << 20))
        for encoding, body in (("gzip", b"junk"), ("Deflate", b"junk"), ("br", good), ("gzip", bomb[:-9])):
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


PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5E"
    "rkJggg=="
)
NO_IMAGES_HERE = {
    "a path": ("/etc/passwd", "as data:image"),
    "a URL": ("http://127.0.0.1:1/x.png", "as data:image"),
    "no image": ("data:image/png;base64,AAAA", "image"),
    "no base64": ("data:image/png;base64,=", "image"),
    "a model without eyes": (PIXEL, "1 images, and its model is given tokens alone"),
}


def wires_with(url):
    """Requests with an image on all wires that take some."""
    kind, _, data = url.partition(";base64,")
    source = (
        {"type": "base64", "media_type": kind.removeprefix("data:"), "data": data} if data else {"url": url}
    )
    part = {"type": "image_url", "image_url": {"url": url}}
    texts = [{"type": "text", "text": "what?"}]
    return {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": [part, *texts]}]},
        "/v1/messages": {
            "max_tokens": 9,
            "messages": [{"role": "user", "content": [{"type": "image", "source": source}, *texts]}],
        },
        "/v1/responses": {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": url},
                        {"type": "input_text", "text": "what?"},
                    ],
                }
            ]
        },
    }


def asking(url, answers):
    """A program that asks with an image on each wire."""

    def play(session):
        for path, body in wires_with(url).items():
            connection = http.client.HTTPConnection(session.url.removeprefix("http://"), timeout=30)
            head = {"Authorization": f"Bearer {session.api_key}"}
            connection.request("POST", path, json.dumps({"model": "a", **body}), head)
            answer = connection.getresponse()
            answers.append((answer.status, answer.read().decode()))
            connection.close()
        says(session)
        return 1

    return play


@pytest.mark.parametrize("case", NO_IMAGES_HERE)
def test_an_image_that_cannot_be_seen_is_refused_on_every_wire_and_nothing_is_fetched(case):
    url, words = NO_IMAGES_HERE[case]
    answers: list = []
    (played,) = play_outside(asking(url, answers), {"a": Script("x")})
    assert played.kind is None and [status for status, _ in answers] == [400] * 3, answers
    assert all(words in text for _, text in answers), answers


def test_a_model_with_eyes_sees_the_images_of_a_request():
    class Eyes:
        def expand(self, ids, images, where):
            return list(ids), Seen(tuple(images), tuple(range(len(images))))

    class Sees(Script):
        async def generate(self, prompt, params, seed, seen=None):
            saw.append(len(seen.images))
            return await super().generate(prompt, params, seed)

    saw, answers, policy = [], [], Sees(*"wxyz")
    endpoint = Endpoint(starter(asking(PIXEL, answers)), ProgramLimits(30.0, 64, 8))
    one = speaker(policy)
    one.renderer._sight = Eyes()
    try:
        (played,) = run_all(game_of({"a": one}, Programs(endpoint, None, False)), [episode()], [[]])
    finally:
        endpoint.close()
    assert played.kind is None and [status for status, _ in answers] == [200] * 3, answers
    assert saw == [1, 1, 1, 0]
    shown = [(one.content, len(one.images)) for one in played.episode.messages if one.agent is None]
    assert shown == [("<image>what?", 1), ("q", 0)]


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("siirl.agents.outside.endpoint.BODY_S", 0.3)
    took = []

    def play(session):
        host, port = session.url.removeprefix("http://").split(":")
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: {session.api_key}\r\n"
        with socket.create_connection((host, int(port)), 30) as slow:
            slow.sendall(f"{head}Content-Length: {1 << 30}\r\n\r\n".encode())
            began = time.monotonic()
            with contextlib.suppress(OSError):
                while slow.recv(1 << 16):
                    pass
            took.append(time.monotonic() - began)
        says(session)
        return 1

    (played,) = play_outside(play, {"a": Script("x")})
    assert played.kind is None and 0.2 < took[0] < 10
