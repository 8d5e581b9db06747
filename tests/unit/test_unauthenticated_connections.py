"""Whoever comes to a server of ours without its token has little time, however it spends it."""

import contextlib
import socket
import threading
import time

import pytest
from episode_cases import Script
from outside_cases import play_outside

from siirl import access
from siirl.access import BoundedServer, PageHandler, UnauthenticatedConnections
from siirl.engines.rollout.remote import StreamServer

pytestmark = pytest.mark.heavy


class Admits(PageHandler):
    def do_GET(self) -> None:
        if self.path == "/known":
            self.admitted()
            time.sleep(2.0)
        self.send(200, "text/plain", "hello")


@contextlib.contextmanager
def page():
    with BoundedServer(("127.0.0.1", 0), Admits) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@contextlib.contextmanager
def stream():
    server = StreamServer("agent_0.rollout", 0, 60.0)
    yield server.address.port
    server.close()


@contextlib.contextmanager
def programs():
    begun, end, ports = threading.Event(), threading.Event(), []

    def play(session):
        ports.append(int(session.url.rpartition(":")[2]))
        begun.set()
        end.wait(60)
        return 1.0

    thread = threading.Thread(target=play_outside, args=[play, {"a": Script()}], daemon=True)
    thread.start()
    assert begun.wait(60)
    yield ports[0]
    end.set()
    thread.join(60)


def until_closed_s(port: int, say) -> float:
    """How long a connection lasts that keeps on saying something."""
    began_s = time.monotonic()
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.settimeout(0.05)
        while time.monotonic() - began_s < 30:
            try:
                say(sock)
                if sock.recv(1 << 16) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
    return time.monotonic() - began_s


BODY = b"POST /v1/session HTTP/1.1\r\nHost: x\r\nContent-Length: 1073741824\r\n\r\n"


class Body:
    """A body of a GiB, as fast as it is taken."""

    def __init__(self):
        self.begun = False

    def __call__(self, sock):
        sock.sendall(b"x" * (1 << 16) if self.begun else BODY)
        self.begun = True


SAYS = {
    "nothing": lambda: lambda sock: None,
    "a byte now and then": lambda: lambda sock: sock.sendall(b"G"),
    "a body of a GiB": Body,
}


@pytest.mark.parametrize("what", SAYS)
@pytest.mark.parametrize("server", [page, stream, programs])
def test_a_stranger_is_closed_in_time_whatever_it_says(server, what, monkeypatch):
    monkeypatch.setattr(access, "UNAUTHENTICATED_S", 0.7)
    with server() as port:
        assert until_closed_s(port, SAYS[what]()) < 12


def test_one_that_has_shown_its_token_takes_as_long_as_it_needs(monkeypatch):
    monkeypatch.setattr(access, "UNAUTHENTICATED_S", 0.5)
    with page() as port, socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(b"GET /known HTTP/1.0\r\n\r\n")
        assert sock.makefile("rb").read().endswith(b"hello")


def test_each_has_its_own_time_and_one_thread_looks(monkeypatch):
    monkeypatch.setattr(access, "UNAUTHENTICATED_S", 0.4)
    gone, door = [], UnauthenticatedConnections(99)
    before = threading.active_count()
    for number in range(20):
        door.come(number, "a", lambda number=number: gone.append(number))
        time.sleep(0.02)
        assert threading.active_count() <= before + 2  # one that ends starts the next
    door.left(19)
    deadline_s = time.monotonic() + 20
    while len(gone) < 19 and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert gone == list(range(19))
