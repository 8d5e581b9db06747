"""Connections that have not shown a server's token yet: how many there may be, and a small web server.

Every server of ours counts its own. One who only connects costs the others nothing: when there are too many,
the one that has waited longest is closed, of the address that has most.
"""

import contextlib
import hmac
import socket
import threading
from collections import Counter
from collections.abc import Callable, Hashable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MOST_STRANGERS = 64
REQUEST_S = 30.0


class Strangers:
    """Those at the door of one server. For any number of threads."""

    def __init__(self, most: int = MOST_STRANGERS) -> None:
        self.most = most
        self._waiting: dict[
            Hashable, tuple[str, Callable[[], object]]
        ] = {}  # in the order in which they came
        self._lock = threading.Lock()

    def come(self, who: Hashable, address: str, close: Callable[[], object]) -> None:
        """One more, from an address; close ends its connection, from any thread. One may have to go."""
        with self._lock:
            self._waiting[who] = address, close
            if len(self._waiting) <= self.most:
                return
            ((crowd, _),) = Counter(address for address, _ in self._waiting.values()).most_common(1)
            oldest = next(who for who, (address, _) in self._waiting.items() if address == crowd)
            _, close = self._waiting.pop(oldest)
        close()

    def left(self, who: Hashable) -> None:
        """It has shown the token, or has gone. Idempotent."""
        with self._lock:
            self._waiting.pop(who, None)


class PageHandler(BaseHTTPRequestHandler):
    """A request to a BoundedServer."""

    server: "BoundedServer"
    server_version, sys_version = "siirl", ""
    timeout = REQUEST_S

    def admitted(self) -> None:
        """The request has shown the token."""
        self.server.strangers.left(self.connection)

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
    """A thread for each connection, of which few are strangers. Threads end with the process."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[PageHandler]) -> None:
        """OSError or OverflowError: the address cannot be listened on."""
        self.strangers = Strangers()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.strangers.come(request, client_address[0], lambda: shut(request))
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.strangers.left(request)
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
