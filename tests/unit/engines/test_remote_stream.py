"""A stream served over TCP, both sides in this process, over a stream that answers by a script."""

import select
import socket
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from siirl.access import MOST_UNAUTHENTICATED
from siirl.data.completions import Completion, Request, SamplingParams
from siirl.engines.rollout import remote
from siirl.engines.rollout.base import RolloutStream
from siirl.engines.rollout.remote import RemoteStream, StreamServer
from siirl.engines.rollout.served.messages import Unanswered
from siirl.errors import DeadlineError, EpisodeFailed, PeerError, RolloutError
from siirl.launch.failure import describe_exception

pytestmark = pytest.mark.heavy

PARAMS = SamplingParams(max_tokens=3, stop_token_ids=(4, 5))


class Script(RolloutStream):
    """Answers prompt [p] with [p + 1], those of large p later; never p = 0; p = 13 is a failure, p = 12 one
    of this request."""

    def __init__(self):
        super().__init__()
        self.waiting, self.asked, self.closed, self.frozen_s = [], [], 0, 0.0

    @property
    def num_pending(self):
        return len(self.waiting)

    def submit(self, requests):
        self.asked += requests
        self.waiting += requests

    def collect(self, timeout_s):
        time.sleep(self.frozen_s)
        ready = sorted((r for r in self.waiting if r.prompt[0]), key=lambda r: r.prompt[0])
        if any(request.prompt[0] == 13 for request in ready):
            raise RolloutError("engine 'x' cannot read 13\udcff")
        self.waiting = [request for request in self.waiting if request not in ready]
        return [(r.key, self.answer(r.prompt[0])) for r in ready]

    def pause(self, keys):
        taken = [request for request in self.waiting if request.key in keys]
        self.waiting = [request for request in self.waiting if request not in taken]
        return [(r.key, Completion([r.prompt[0]], [-1.0], "paused", 7)) for r in taken]

    def answer(self, p):
        if p == 12:
            return EpisodeFailed("engine 'x' has no answer to 12\udcff", kind="request")
        return Completion([p + 1, 5], [-0.5, -0.25], "stop", 7)

    def close(self):
        self.closed += 1
        self.waiting = []


@contextmanager
def serving(stream, *sessions, deadline_s=20.0):
    """The address of a server; sessions: the clients of each. What its thread raised is in `errors`."""
    server, errors = StreamServer("agent_1.rollout", 5, deadline_s), []

    def work():
        try:
            for clients in sessions:
                server.serve(lambda _: stream, clients)
        except Exception as error:  # noqa: BLE001 - the edge of the thread
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield server.address, errors
    finally:
        thread.join(10)
        server.close()
        assert not thread.is_alive()


def request(p):
    return Request(f"key {p}", [p, 1], PARAMS, (1 << 63) - 1)


def ask(stream, *prompts):
    stream.submit([request(p) for p in prompts])


def collected(stream):
    answers = []
    while stream.num_pending:
        answers += stream.collect(5.0)
    return answers


def test_requests_and_answers_cross_unchanged_whoever_asks():
    script = Script()
    with serving(script, [0, 3]) as (address, errors):
        clients = [RemoteStream(address, rank, 10.0) for rank in (0, 3)]
        assert clients[0].collect(5.0) == []
        for client, prompts in zip(clients, [(9, 2), (7,)], strict=True):
            ask(client, *prompts)
        answers = [collected(client) for client in clients]
        for client in clients:
            client.close()
            client.close()
    assert not errors and script.closed == 1
    assert answers[1] == [("key 7", Completion([8, 5], [-0.5, -0.25], "stop", 7))]
    assert sorted(key for key, _ in answers[0]) == ["key 2", "key 9"]
    asked = sorted(script.asked, key=lambda request: request.prompt)
    assert [replace(r, key=0) for r in asked] == [replace(request(p), key=0) for p in (2, 7, 9)]


def test_a_server_that_stays_answers_whoever_comes_again_until_it_closes():
    """A client pauses and comes back while another one stays, and both may be away at once."""
    script, server = Script(), StreamServer("agent_1.rollout", 5, 20.0)
    thread = threading.Thread(target=lambda: server.serve(lambda _: script, [0, 3], stays=True))
    thread.start()
    stays, answers = RemoteStream(server.address, 3, 10.0), []
    for p in (2, 7):
        comes = RemoteStream(server.address, 0, 10.0)
        ask(comes, p)
        answers += collected(comes)
        comes.close()
    ask(stays, 9)
    answers += collected(stays)
    stays.close()
    again = RemoteStream(server.address, 3, 10.0)
    ask(again, 4)
    answers += collected(again)
    assert [key for key, _ in answers] == ["key 2", "key 7", "key 9", "key 4"] and script.closed == 0
    server.close()
    thread.join(10)
    assert not thread.is_alive() and script.closed == 1
    again.close()


def test_a_request_that_fails_alone_reaches_its_asker_as_that():
    with serving(Script(), [0]) as (address, errors):
        client = RemoteStream(address, 0, 10.0)
        ask(client, 12, 3)
        answers = dict(collected(client))
        client.close()
    assert not errors
    assert answers.pop("key 3").token_ids == [4, 5]
    (failed,) = answers.values()
    assert isinstance(failed, EpisodeFailed) and failed.kind == "request"
    assert str(failed) == r"engine 'x' has no answer to 12\udcff"


def test_a_client_takes_back_what_it_has_asked_and_no_other():
    script = Script()
    with serving(script, [0, 3], [0]) as (address, errors):
        first, other = (RemoteStream(address, rank, 10.0) for rank in (0, 3))
        ask(other, 0, -1)
        ask(first, 0)
        assert first.pause() == [("key 0", Completion([0], [-1.0], "paused", 7))]
        assert first.pause() == [] and first.num_pending == 0
        assert [key for key, _ in other.collect(5.0)] == ["key -1"]
        assert other.collect(0.2) == [] and other.num_pending == 1
        assert [key for key, _ in other.pause()] == ["key 0"]
        for client in (first, other):
            client.close()
        again = RemoteStream(address, 0, 10.0)
        ask(again, 4)
        assert [key for key, _ in collected(again)] == ["key 4"]
        again.close()
    assert not errors and script.closed == 2


def test_an_engine_that_works_inside_collect_comes_back_when_a_client_takes_back():
    class Wave(Script):
        """Works until it is interrupted."""

        def collect(self, timeout_s):
            until_s = time.monotonic() + 10
            while self.waiting and not self.interrupt([]) and time.monotonic() < until_s:
                time.sleep(0.01)
            self.waited = time.monotonic() < until_s
            return []

    wave = Wave()
    server = StreamServer("agent_1.rollout", 5, 20.0)

    def opened(interrupt):
        wave.interrupt = interrupt
        return wave

    thread = threading.Thread(target=server.serve, args=(opened, [0]))
    thread.start()
    client = RemoteStream(server.address, 0, 10.0)
    ask(client, 2)
    time.sleep(0.1)
    assert [key for key, _ in client.pause()] == ["key 2"]
    client.close()
    thread.join(15)
    server.close()
    assert wave.waited and not thread.is_alive()


def test_each_stream_of_a_rank_belongs_to_one_session_also_if_it_comes_early():
    script = Script()
    with serving(script, [0, 1], [0, 1]) as (address, errors):
        first = [RemoteStream(address, rank, 10.0) for rank in (0, 1)]
        ask(first[0], 2)
        collected(first[0])
        first[0].close()
        early = RemoteStream(address, 0, 10.0)
        ask(early, 4)
        assert early.collect(0.3) == [] and [r.prompt[0] for r in script.asked] == [2]
        first[1].close()
        assert [key for key, _ in collected(early)] == ["key 4"]
        early.close()
        RemoteStream(address, 1, 10.0).close()
    assert not errors and script.closed == 2


def test_requests_that_nobody_awaits_any_more_end_with_the_session():
    script = Script()
    with serving(script, [0]) as (address, errors):
        client = RemoteStream(address, 0, 10.0)
        ask(client, 0, 3)
        assert [key for key, _ in client.collect(5.0)] == ["key 3"]
        client.close()
    assert not errors and script.closed == 1


def test_no_clients_need_no_stream():
    with serving(None, []) as (_, errors):
        pass
    assert not errors


def test_a_stranger_without_the_token_is_sent_away():
    script = Script()
    with serving(script, [0]) as (address, errors):
        assert address.token.hex() not in repr(address)
        with socket.create_connection((address.host, address.port)) as stranger:
            stranger.sendall(bytes(remote.TOKEN_BYTES))
            stranger.settimeout(5)
            assert stranger.recv(1) == b""
        client = RemoteStream(address, 0, 10.0)
        ask(client, 1)
        assert collected(client)
        client.close()
    assert not errors


def test_many_strangers_are_few_and_keep_nobody_out():
    script = Script()
    with serving(script, [0]) as (address, errors), ExitStack() as stack:
        where = (address.host, address.port)
        strangers = [stack.enter_context(socket.create_connection(where)) for _ in range(150)]
        client = RemoteStream(address, 0, 10.0)
        ask(client, 1)
        assert collected(client)
        until_s = time.monotonic() + 5  # before those who say nothing are sent away for that
        sent_away = []
        while len(sent_away) < 150 - (MOST_UNAUTHENTICATED + 2) and time.monotonic() < until_s:
            sent_away, _, _ = select.select(strangers, [], [], 0.1)
        client.close()
    assert len(sent_away) >= 150 - (MOST_UNAUTHENTICATED + 2) and not errors


def test_a_failure_of_the_engine_reaches_both_sides():
    script = Script()
    with serving(script, [0]) as (address, errors):
        client = RemoteStream(address, 0, 10.0)
        ask(client, 13)
        with pytest.raises(RolloutError, match=r"rank 5 .*'agent_1.rollout', failed: .*read 13\\udcff"):
            collected(client)
        client.close()
    assert "cannot read 13" in str(errors[0]) and script.closed == 1


def test_a_client_that_fails_says_why_whatever_the_words():
    with serving(Script(), [2]) as (address, errors):
        client = RemoteStream(address, 2, 10.0)
        client.fail("ValueError: no \udcff\nin the file")
        client.close()
    assert isinstance(errors[0], PeerError)
    assert str(errors[0]).endswith("to, failed: ValueError: no \\udcff\nin the file")


def test_a_client_that_dies_is_named():
    with serving(Script(), [2]) as (address, errors):
        client = RemoteStream(address, 2, 10.0)
        ask(client, 0)
        client._closed.set()
        client._channel.close()
    assert "rank 2 has gone before it closed its stream of 'agent_1.rollout'" in str(errors[0])


def test_a_client_that_says_what_nobody_understands_is_named_at_once(caplog):
    with serving(Script(), [2]) as (address, errors):
        client = RemoteStream(address, 2, 60.0)
        client._channel.send(Unanswered("key 1", "", ""))  # what only servers say
        before = time.monotonic()
    assert "rank 2 has gone before it closed its stream" in str(errors[0])
    assert time.monotonic() - before < 30 and "Invalid value 'unanswered'" in caplog.text
    client.close()


def test_a_client_that_never_comes_is_named():
    with serving(Script(), [2], deadline_s=0.2) as (_, errors):
        pass
    assert isinstance(errors[0], DeadlineError) and "rank 2 did not open its stream" in str(errors[0])


def test_a_client_that_only_thinks_is_waited_for(monkeypatch):
    monkeypatch.setattr(remote, "ALIVE_EVERY_S", 0.1)
    with serving(Script(), [2], deadline_s=1.0) as (address, errors):
        client = RemoteStream(address, 2, 1.0)
        time.sleep(1.5)
        ask(client, 0, 1)
        assert client.collect(1.0) and client.collect(1.5) == []
        client.close()
    assert not errors


def test_a_server_that_hangs_is_named():
    script = Script()
    with serving(script, [2]) as (address, errors):
        client = RemoteStream(address, 2, 0.5)
        script.frozen_s = 2.0
        ask(client, 0)
        with pytest.raises(DeadlineError, match=r"rank 5 .* said nothing for 0.5 s, while 1 requests wait"):
            client.collect(5.0)
        script.frozen_s = 0.0
        client.close()
    assert not errors


def test_a_server_that_is_not_there_is_named():
    server = StreamServer("agent_1.rollout", 5, 1.0)
    time.sleep(0.1)  # its thread waits for clients
    server.close()
    with pytest.raises(RolloutError, match=r"rank 5 .*'agent_1.rollout', cannot be reached"):
        RemoteStream(server.address, 0, 1.0)


def test_a_rank_that_lost_a_peer_is_not_the_first_cause_of_a_failed_run():
    assert describe_exception(PeerError("rank 1 has gone"), 0, None).secondary
    assert not describe_exception(RolloutError("engine 'x' cannot read 13"), 1, None).secondary
