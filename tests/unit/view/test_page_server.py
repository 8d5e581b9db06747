"""The page on loopback: for who has the address, and for no page of another site."""

import http.client
import json
import re
import socket
import threading
import time
from contextlib import ExitStack

import pytest
from viewed_runs import write_run

from siirl.access import MOST_UNAUTHENTICATED
from siirl.cli import main
from siirl.errors import ConfigError
from siirl.view import run_parts
from siirl.view.page_server import PageServer


@pytest.fixture
def served(tmp_path, monkeypatch):
    monkeypatch.setattr(run_parts, "REST", 0.0)
    folder = write_run(tmp_path / "run")
    with PageServer([folder]) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield folder, server
        server.shutdown()
        thread.join()


def ask(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read().decode()


def test_the_page_and_its_data_are_served_to_who_has_the_token(served):
    folder, server = served
    status, headers, text = ask(server, f"/{server.token}/")
    assert status == 200 and headers["Cache-Control"] == "no-store"
    assert "connect-src 'self'" in text and '"live":true' in text
    where = f"/{server.token}/part/0/overview"
    status, headers, text = ask(server, where)
    assert status == 200 and json.loads(text)["value"]["step"] == 6
    tag = headers["ETag"]
    assert ask(server, where, **{"If-None-Match": tag})[0] == 304
    curves = f"/{server.token}/part/0/curves"
    assert json.loads(ask(server, curves)[2])["value"]["reward/score"]["steps"][-1] == 6
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "time_s": 1.0, "reward/score": 0.25}\n')
    status, headers, text = ask(server, where, **{"If-None-Match": tag})
    assert status == 200 and json.loads(text)["value"]["step"] == 7
    assert json.loads(ask(server, curves)[2])["value"]["reward/score"]["values"][-1] == 0.25
    said = json.loads(ask(server, f"/{server.token}/part/0/texts%20train%206")[2])["value"]
    assert said["train 6.0"]["messages"][1]["text"] == "four"


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/part/0/overview", "/x/part/0/overview", "/{}x/", "/{}", "/{}/../{}/x", "/{}/job.json", "*"),
        *("/{}/part/1/overview", "/{}/part/-1/overview", "/{}/part/0/job", "/{}/part/0/overview/x"),
        *("/{}/part/%C2%B2/overview", "/{}/part/99999999999999/overview", "/{}/part/0"),
    ],
)
def test_nothing_else_is_served(served, path):
    _, server = served
    status, _, text = ask(server, path.replace("{}", server.token))
    assert status == 404 and "reward/score" not in text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{}", "127.0.0.1", "127.0.0.1:1", ""])
def test_a_name_that_was_bound_to_loopback_is_refused(served, host):
    _, server = served
    status, _, text = ask(server, f"/{server.token}/", Host=host.replace("{}", str(server.server_port)))
    assert status == 403 and "reward/score" not in text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_get_is_the_only_method(served, method):
    _, server = served
    assert ask(server, f"/{server.token}/", method)[0] == 501


def test_it_listens_on_loopback_alone_and_says_when_a_port_is_taken(served):
    folder, server = served
    assert server.server_address[0] == "127.0.0.1" and len(server.token) >= 32
    for port in (server.server_port, 70_000):
        with pytest.raises(ConfigError, match=f"--port {port} cannot be served on"):
            PageServer([folder], port)


def test_many_strangers_are_few_and_keep_nobody_out(served):
    _, server = served
    of_other_tests = served_strangers()
    with ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.server_port)))
            for _ in range(MOST_UNAUTHENTICATED + 40)
        ]
        assert ask(server, f"/{server.token}/")[0] == 200
        strangers[0].settimeout(5)
        assert strangers[0].recv(1) == b""
        deadline = time.monotonic() + 10  # threads of those who had to go are about to notice
        while len(served_strangers() - of_other_tests) > MOST_UNAUTHENTICATED + 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def served_strangers():
    return {thread for thread in threading.enumerate() if "process_request" in thread.name}


def test_the_command_prints_the_address_and_the_line_for_another_machine(tmp_path, capsys, monkeypatch):
    def interrupted(server):
        raise KeyboardInterrupt

    monkeypatch.setattr(PageServer, "serve_forever", interrupted)
    assert main(["view", str(write_run(tmp_path / "run"))]) == 0
    told = capsys.readouterr().out
    port = re.search(r"http://127\.0\.0\.1:(\d+)/", told)
    assert port and f"ssh -L {port[1]}:127.0.0.1:{port[1]} {socket.gethostname()}\n" in told
