"""Serves the page of runs on loopback, to whoever has the address with its token, and to nobody else.

The standard library's server is enough here and needs no package: one reader, two resources, GET alone, and
no address but 127.0.0.1.
"""

import hashlib
import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from siirl.errors import ConfigError
from siirl.strangers import BoundedServer, PageHandler, is_same
from siirl.view.view_page import page, read_runs, safe_json

HOST = "127.0.0.1"
MIN_AGE_S = 2.0
"""The folders are not read more often than this."""


class PageServer(BoundedServer):
    """token: the first part of every path that is answered."""

    def __init__(self, output_dirs: Sequence[Path], port: int = 0):
        self.token = secrets.token_urlsafe(24)
        self._output_dirs = output_dirs
        self._lock = threading.Lock()
        self._data: tuple[float, str, str] | None = None
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"--port {port} cannot be served on: {error}. Choose another, or leave it out for a free one."
            ) from error

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def hosts(self) -> tuple[str, ...]:
        """What a browser names as Host that was sent here by this address, and not by another name's."""
        return f"{HOST}:{self.server_port}", f"localhost:{self.server_port}"

    def data(self) -> tuple[str, str]:
        """(the data as JSON, its tag: the same as long as the folders say the same)."""
        with self._lock:
            if self._data is None or time.monotonic() - self._data[0] > MIN_AGE_S:
                found = read_runs(self._output_dirs, live=True)
                tag = hashlib.sha256(safe_json(found["runs"]).encode()).hexdigest()[:32]
                self._data = (time.monotonic(), safe_json(found), f'"{tag}"')
            return self._data[1], self._data[2]

    def page(self) -> str:
        return page(read_runs(self._output_dirs, live=True), connect="'self'")


class _Handler(PageHandler):
    server: PageServer

    def do_GET(self) -> None:
        """/TOKEN/ is the page, /TOKEN/data.json what it shows."""
        if self.headers.get("Host") not in self.server.hosts():
            self._send(403, "text/plain", "This address serves 127.0.0.1 alone.")
            return
        _, token, *rest = [*self.path.split("/"), ""]
        if not is_same(token, self.server.token):
            self._send(404, "text/plain", "Nothing is here: open the address that siirl view printed.")
            return
        self.admitted()
        if rest == ["", ""]:
            self._send(200, "text/html", self.server.page())
        elif rest[0] == "data.json":
            data, tag = self.server.data()
            unchanged = self.headers.get("If-None-Match") == tag
            self._send(304 if unchanged else 200, "application/json", "" if unchanged else data, tag)
        else:
            self._send(404, "text/plain", "Nothing is here.")

    def _send(self, status: int, kind: str, text: str, tag: str = "") -> None:
        self.send(
            status,
            f"{kind}; charset=utf-8",
            text,
            Cache_Control="no-store",
            X_Content_Type_Options="nosniff",
            Referrer_Policy="no-referrer",
            Cross_Origin_Resource_Policy="same-origin",
            Content_Security_Policy="frame-ancestors 'none'",
            **({"ETag": tag} if tag else {}),
        )
