"""The process that answers clients: what it is asked comes to the worker, and it ends when that does."""

import json
import os
import signal
import socket
import time
import urllib.request

import psutil
import pytest

from siirl.errors import ConfigError, RequestError
from siirl.service.commands import OptimStep, Refused
from siirl.service.desk import Desk
from siirl.service.request_journal import Kept
from siirl.service.saved_weights import OPERATOR
from siirl.service.server_process import ServerProcess
from siirl.service.service_endpoint import Served

KEY = "tml-0123456789abcdef"
SOON_S = 20.0


@pytest.fixture
def begun(tmp_path):
    """Start one, which listens, or goes on with models of an earlier one: it, and where."""
    started: list[ServerProcess] = []

    def begin(kept=(), address="127.0.0.1:0"):
        served = Served("M", 64, (), 60.0)
        started.append(ServerProcess(Desk(), served, tmp_path / "models", {OPERATOR: KEY}))
        return started[-1], *started[-1].open(address, kept, {}, frozenset())

    yield begin
    for one in started:
        one.close()


def ask(url: str, path: str, body: dict):
    heads = {"X-API-Key": KEY, "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/api/v1/{path}", json.dumps(body).encode(), heads)
    with urllib.request.urlopen(request, timeout=SOON_S) as answer:
        return json.loads(answer.read())


def new_model(url: str) -> str:
    session = ask(url, "create_session", {})["session_id"]
    body = {"session_id": session, "base_model": "M", "lora_config": {"rank": 4}, "model_seq_id": 0}
    return ask(url, "create_model", body)["model_id"]


def is_gone(pid: int) -> bool:
    end_s = time.monotonic() + SOON_S
    while time.monotonic() < end_s and psutil.pid_exists(pid):
        if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.01)
    return not psutil.pid_exists(pid)


def test_what_clients_ask_comes_to_the_worker_and_its_answers_to_them(begun):
    server, url, gone = begun()
    assert gone == [] and server.take_together(0.0, 8) == []
    models = [new_model(url), new_model(url)]
    created = [server.take_together(1.0, 8) for _ in models]
    assert [one.command.model for (one,) in created] == models and server.num_sessions == 2
    server.answer([(created[1][0], {"made": True}, None)])
    assert ask(url, "retrieve_future", {"request_id": f"{models[1]}:0"}) == {"made": True}
    for model in models:
        ask(url, "optim_step", {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 0.5}})
    taken = server.take_together(1.0, 8)
    assert [type(one.command) for one in taken] == [OptimStep, OptimStep]
    assert taken[0].command.adam.learning_rate == 0.5
    server.answer([(one, Refused(f"not {one.id}"), None) for one in taken])
    for one in taken:
        told = ask(url, "retrieve_future", {"request_id": one.id})
        assert told == {"error": f"not {one.id}", "category": "user"}


def test_it_goes_on_with_the_sessions_of_an_earlier_one_and_names_models_of_none(begun):
    server, url, _ = begun()
    model = new_model(url)
    server.take_together(1.0, 8)
    server.close()
    refused = f"{model[:-1]}1"
    kept = [Kept(model, 1, answers=[(0, {"made": 1})]), Kept("session-0123456789abcdef:train:0", 1)]
    kept.append(Kept(refused, 1, answers=[(0, Refused("it ended servers"))]))
    server, url, gone = begun(kept)
    assert gone == ["session-0123456789abcdef:train:0"]
    assert ask(url, "retrieve_future", {"request_id": f"{model}:0"}) == {"made": 1}
    told = ask(url, "retrieve_future", {"request_id": f"{refused}:0"})
    assert told == {"error": "it ended servers", "category": "user"}, "a model that was never made, too"


def test_an_address_that_cannot_be_listened_on_is_the_workers_error(begun):
    refused = pytest.raises(ConfigError, match=r"service\.address")
    with socket.create_server(("127.0.0.1", 0)) as other, refused:
        begun(address=f"127.0.0.1:{other.getsockname()[1]}")


def test_the_worker_is_told_that_it_has_died_and_what_the_group_is_sent_ends_it_not(begun):
    server, url, _ = begun()
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(server.pid, number)
    assert ask(url, "create_session", {})["session_id"]
    os.kill(server.pid, signal.SIGKILL)
    with pytest.raises(RequestError, match="was killed by SIGKILL"):
        while True:
            server.take_together(0.01, 8)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_the_worker_however_that_ends(begun, tmp_path, how):
    told, tell = os.pipe()
    if (worker := os.fork()) == 0:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            server, url, _ = begun()
            os.write(tell, f"{server.pid} {url}\n".encode())
            server.take_together(3600.0, 8)
        finally:
            os._exit(1)
    pid, url = os.read(told, 1000).decode().split()
    assert ask(url, "create_session", {})["session_id"]
    os.kill(worker, how)
    os.waitpid(worker, 0)
    assert is_gone(int(pid))
    with pytest.raises(OSError):  # refused, or reset
        ask(url, "create_session", {})
