"""Connections that have not shown a server's token yet: how many there may be, how long, and a web server.

Every server of ours counts its own. One who only connects costs the others nothing: when there are too many,
the one that has waited longest is closed, of the address that has most; and each after UNAUTHENTICATED_S,
however it spends them.
"""

import contextlib
import hmac
import ipaddress
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

MOST_UNAUTHENTICATED = 64
REQUEST_S = 30.0
UNAUTHENTICATED_S = 30.0
"""From its connection to its token, which stands in the first kilobytes that a client sends."""


class _Connection(NamedTuple):
    address: str
    close: Callable[[], object]
    until_s: float


class UnauthenticatedConnections:
    """Those at the door of one server. For any number of threads."""

    def __init__(self, most: int = MOST_UNAUTHENTICATED) -> None:
        self.most = most
        self._waiting: dict[Hashable, _Connection] = {}  # in the order in which they came
        self._lock = threading.Lock()
        self._looking = False

    def come(self, who: Hashable, address: str, close: Callable[[], object]) -> None:
        """One more, from an address; close ends its connection, from any thread. One may have to go."""
        with self._lock:
            self._waiting[who] = _Connection(address, close, time.monotonic() + UNAUTHENTICATED_S)
            self._look_later(UNAUTHENTICATED_S)
            if len(self._waiting) <= self.most:
                return
            ((crowd, _),) = Counter(one.address for one in self._waiting.values()).most_common(1)
            oldest = next(who for who, one in self._waiting.items() if one.address == crowd)
            gone = self._waiting.pop(oldest)
        gone.close()

    def left(self, who: Hashable) -> None:
        """It has shown the token, or has gone. Idempotent."""
        with self._lock:
            self._waiting.pop(who, None)

    def _look_later(self, wait_s: float) -> None:
        """Whoever calls holds the lock. One thread at most, as long as some wait."""
        if not self._looking:
            self._looking = True
            timer = threading.Timer(wait_s, self._send_away)
            timer.daemon = True
            timer.start()

    def _send_away(self) -> None:
        """Close those whose time is over."""
        with self._lock:
            self._looking, now_s = False, time.monotonic()
            gone = [who for who, one in self._waiting.items() if one.until_s <= now_s]
            closing = [self._waiting.pop(who).close for who in gone]
            if self._waiting:
                self._look_later(next(iter(self._waiting.values())).until_s - now_s)
        for close in closing:
            with contextlib.suppress(OSError, RuntimeError):  # its server has ended
                close()


class PageHandler(BaseHTTPRequestHandler):
    """A request to a BoundedServer."""

    server: "BoundedServer"
    server_version, sys_version = "siirl", ""
    timeout = REQUEST_S

    def admitted(self) -> None:
        """The request has shown the token."""
        self.server.unauthenticated.left(self.connection)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the terminal is the user's."""

    def send(self, status: int, kind: str, text: str | bytes, **headers: str) -> None:
        """The whole answer. headers: with _ for -."""
        body = text.encode() if isinstance(text, str) else text
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)


class BoundedServer(ThreadingHTTPServer):
    """A thread for each connection, of which few are unauthenticated. Threads end with the process."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[PageHandler]) -> None:
        """OSError or OverflowError: the address cannot be listened on."""
        self.unauthenticated = UnauthenticatedConnections()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.unauthenticated.come(request, client_address[0], lambda: shut(request))
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.unauthenticated.left(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no news."""


def shut(connection: socket.socket) -> None:
    """End a connection, also for a thread that reads from it. Idempotent."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def is_same(shown: str, token: str) -> bool:
    """Whether somebody has shown the token; it takes as long for every guess."""
    return hmac.compare_digest(shown.encode(errors="replace"), token.encode())


def own_host() -> str:
    """This machine's address towards the others of the run; the loopback device where the run is local.

    OSError if the first machine's name is unknown or nothing leads there.
    """
    first = os.environ.get("MASTER_ADDR", "127.0.0.1")
    family, kind, _, _, address = socket.getaddrinfo(first, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return probe.getsockname()[0]


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address or name."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_public(address: str) -> bool:
    """Whether it is an address of the internet."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_global
    except ValueError:
        return False
