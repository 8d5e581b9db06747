"""Whatever comes to a socket of ours: the connection ends, and everybody else is served."""

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, InvalidURL

import msgspec
import pytest
from episode_cases import speaker
from fuzzing import PLAIN, WORDS, cases, explore, mangled, replaced_somewhere
from hypothesis import strategies as st
from outside_cases import episode, game_of

from siirl.agents.outside.chat_wire import BadRequest, reward_of
from siirl.agents.outside.endpoint import Endpoint, ProgramLimits
from siirl.agents.outside.program import SessionInfo
from siirl.agents.outside.programs import Programs, starter
from siirl.agents.runner import run_all
from siirl.data.completions import Completion, Request, SamplingParams
from siirl.dialect.formats.json_calls import hermes
from siirl.engines.rollout.remote import Address, RemoteStream, StreamServer
from siirl.engines.rollout.served.messages import (
    Alive,
    Answer,
    Done,
    Failed,
    Finished,
    Hello,
    Pause,
    Submit,
    Unanswered,
)
from siirl.errors import EpisodeFailed, RolloutError

pytestmark = pytest.mark.heavy
DEADLINE_S = 60.0


class Echo:
    """A stream that answers with the prompt."""

    runs_in_background = False

    def __init__(self) -> None:
        self.asked: list[Request] = []

    @property
    def num_pending(self) -> int:
        return len(self.asked)

    def submit(self, requests) -> None:
        self.asked += requests

    def collect(self, timeout_s: float):
        asked, self.asked = self.asked, []
        return [(one.key, Completion(list(one.prompt), [-1.0] * len(one.prompt), "stop", 1)) for one in asked]

    def pause(self, keys=None):
        return self.collect(0)

    def close(self) -> None:
        pass


REQUEST = Request("a", [5, 6], SamplingParams(max_tokens=3), 1)
COMPLETION = Completion([5, 6], [-1.0, -1.0], "stop", 1)
FROM_CLIENT = (Hello(7), Submit([REQUEST]), Pause(), Alive(), Failed("no"), Done())
FROM_SERVER = (Finished([Answer("a", COMPLETION)]), Unanswered("a", "no", "env"), Alive(), Failed("no"))


def framed(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def said_by(messages) -> st.SearchStrategy[bytes]:
    """What one side might say: messages, some of them with other values, or bytes that are none."""
    whole = st.sampled_from([framed(msgspec.msgpack.encode(message)) for message in messages])
    trees = [json.loads(msgspec.json.encode(message)) for message in messages]
    other = st.sampled_from(trees).flatmap(replaced_somewhere).map(packed)
    noise = st.one_of(whole.flatmap(mangled), st.binary(max_size=24), PLAIN.map(packed))
    return st.lists(st.one_of(whole, other, noise), max_size=4).map(b"".join)


def packed(value) -> bytes:
    try:
        return framed(msgspec.msgpack.encode(value))
    except OverflowError:  # of numbers that msgpack does not have
        return framed(b"\xc1")


@contextlib.contextmanager
def quiet_threads() -> Iterator[list[str]]:
    """What threads raise while this lasts: nothing."""
    raised: list[str] = []
    before, threading.excepthook = threading.excepthook, lambda args: raised.append(repr(args.exc_value))
    try:
        yield raised
    finally:
        threading.excepthook = before


def talk(host: str, port: int, data: bytes) -> None:
    """Say something to a server, and read what it says until it ends the connection."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), DEADLINE_S) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass


@cases(80)
def test_whoever_talks_nonsense_to_a_stream_server_disturbs_nobody(num_cases):
    """With the run's token or without it, in the place of a rank that is not expected."""
    server = StreamServer("agent_0.rollout", 0, DEADLINE_S)
    address = server.address
    serving = threading.Thread(target=server.serve, args=(lambda interrupt: Echo(), [3]), daemon=True)
    serving.start()
    client = RemoteStream(address, 3, DEADLINE_S)
    hello = framed(msgspec.msgpack.encode(Hello(7)))

    def check(begins: bytes, said: bytes, number: int) -> None:
        raised.clear()
        talk(address.host, address.port, begins + said)
        client.submit([Request(number, [number], SamplingParams(max_tokens=3), 1)])
        ((key, answer),) = client.collect(DEADLINE_S)
        assert (key, answer.token_ids) == (number, [number])
        assert raised == []

    with quiet_threads() as raised:
        begins = st.sampled_from([b"", address.token, address.token + hello])
        explore(num_cases, check, begins, said_by(FROM_CLIENT), st.integers(0, 2**31))
        client.close()
        serving.join(DEADLINE_S)
    server.close()
    assert not serving.is_alive() and raised == []


@cases(80)
def test_a_server_that_talks_nonsense_is_an_error_of_its_client_alone(num_cases):
    listening = socket.create_server(("127.0.0.1", 0))
    address = Address("agent_0.rollout", 0, *listening.getsockname()[:2], b"x" * 32)

    def answers(said: bytes) -> None:
        sock, _ = listening.accept()
        with sock, contextlib.suppress(OSError):
            sock.sendall(said)

    def check(said: bytes) -> None:
        raised.clear()
        server = threading.Thread(target=answers, args=(said,), daemon=True)
        server.start()
        client = None
        try:
            client = RemoteStream(address, 3, DEADLINE_S)
            client.submit([REQUEST])
            for key, answer in client.collect(DEADLINE_S):
                assert key == "a" and isinstance(answer, Completion | EpisodeFailed)
        except RolloutError as error:
            assert "rank 0" in str(error)
        finally:
            server.join(DEADLINE_S)
            if client is not None:
                client.close()
        assert raised == []

    with listening, quiet_threads() as raised:
        explore(num_cases, check, said_by(FROM_SERVER))


class Talker:
    """A policy that says a line again and again."""

    async def generate(self, prompt, params, seed, seen=None):
        tokens = [ord(char) for char in '<tool_call>{"name": "f", "arguments": {}}</tool_call>'] + [3]
        return Completion(tokens, [-1.0] * len(tokens), "stop", 5)


MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "q"}]},
    {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "t",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "content": "r", "tool_call_id": "1"},
]
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
CHAT = {
    "model": "a",
    "messages": MESSAGES,
    "tools": [{"type": "function", "function": TOOL}],
    "max_tokens": 3,
    "stream": False,
    "temperature": 1.0,
    "n": 1,
    "stop": ["~"],
    "logprobs": True,
}
BLOCKS = [
    {"type": "thinking", "thinking": "t", "signature": "s"},
    {"type": "tool_use", "id": "1", "name": "f", "input": {}},
]
ANSWERED = {
    "model": "a",
    "max_tokens": 3,
    "system": "s",
    "messages": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": BLOCKS},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "r"}]},
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
}
RESPONSES = {
    "model": "a",
    "instructions": "s",
    "max_output_tokens": 3,
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "r"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "text": {"format": {"type": "text"}},
}
PLAIN_MESSAGES = [{"role": "user", "content": "q"}]
TEXTS = {"model": "a", "prompt": ["q", [113, 58]], "max_tokens": 3, "stop": "~", "n": 1, "logprobs": 0}
ASKED = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"messages": PLAIN_MESSAGES}),
    ("/v1/responses", RESPONSES),
    ("/v1/responses", RESPONSES | {"input": "q"}),
    ("/v1/messages", ANSWERED),
    ("/v1/messages", ANSWERED | {"messages": PLAIN_MESSAGES}),
    ("/v1/completions", TEXTS),
    ("/v1/reward", {"reward": 1.0}),
]
OTHERS = ["/task", "/v1/models", "/v1", "/"]


@st.composite
def requests(draw) -> tuple[str, bytes]:
    """A path, and a body that may be one that is asked there."""
    path, tree = draw(st.sampled_from([*ASKED, *ASKED, (draw(st.sampled_from(OTHERS) | WORDS), {})]))
    body = replaced_somewhere(tree).map(lambda value: json.dumps(value).encode())
    return path, draw(st.one_of(body, body, mangled(json.dumps(tree).encode()), st.binary(max_size=16)))


def is_reward(body: bytes) -> bool:
    """Whether it would end the episode, as it may."""
    try:
        reward_of(json.loads(body), {"a": 0})
    except (BadRequest, ValueError, RecursionError):
        return False
    return True


@cases(60)
def test_whatever_a_program_asks_its_episode_goes_on(num_cases, caplog):
    """By HTTP, and by bytes that are none; until it gives a reward."""
    told, may_end = [], threading.Event()

    def program(session: SessionInfo) -> float:
        told.append(session)
        begun.set()
        may_end.wait()
        return 0.5

    def play() -> None:
        played.extend(run_all(game, [episode()], [[]]))

    begun, played = threading.Event(), []
    endpoint = Endpoint(starter(program), ProgramLimits(10 * DEADLINE_S, 100 * num_cases, 1))
    game = game_of({"a": speaker(Talker())}, Programs(endpoint, hermes, False))
    playing = threading.Thread(target=play, daemon=True)
    playing.start()
    assert begun.wait(DEADLINE_S)
    (session,) = told
    host, port = session.url.removeprefix("http://").split(":")

    def ask(method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        connection = HTTPConnection(host, int(port), timeout=DEADLINE_S)
        try:
            connection.request(method, path, body, {"Authorization": f"Bearer {session.api_key}"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def check(asked: tuple[str, bytes], noise: bytes) -> None:
        path, body = asked
        if not (path.endswith("reward") and is_reward(body)):
            with contextlib.suppress(ValueError, InvalidURL):  # of a path that no client would send
                status, said = ask("POST", path, body)
                assert status < 500, said
        talk(host, int(port), noise)
        status, said = ask("GET", "/task")
        assert status == 200 and json.loads(said)["ground_truth"] == "7"
        assert not [record for record in caplog.records if record.exc_info]
        caplog.clear()

    head = f"POST /v1/messages HTTP/1.1\r\nHost: {host}\r\nx-api-key: {session.api_key}\r\n"
    line = f"{head}Content-Length: 2\r\n\r\n{{}}".encode()
    try:
        explore(num_cases, check, requests(), st.one_of(mangled(line), st.binary(max_size=24)))
    finally:
        may_end.set()
        playing.join(DEADLINE_S)
        endpoint.close()
    ((ended, failure),) = ((one.episode.ended, one.episode.error) for one in played)
    assert ended == "its program gave a reward", failure
