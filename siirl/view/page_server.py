"""Serves the page of runs on loopback, to whoever has the address with its token, and to nobody else.

The standard library's server is enough here and needs no package: one reader, GET alone, and no address but
127.0.0.1.
"""

import hashlib
import secrets
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

from siirl.access import BoundedServer, PageHandler, is_same
from siirl.errors import ConfigError
from siirl.view.run_parts import RunParts
from siirl.view.view_page import first_data, page, part_data, safe_json

HOST = "127.0.0.1"


class PageServer(BoundedServer):
    """token: the first part of every path that is answered."""

    def __init__(self, output_dirs: Sequence[Path], port: int = 0):
        self.token = secrets.token_urlsafe(24)
        self._runs = [RunParts(folder) for folder in output_dirs]
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

    def page(self) -> str:
        return "".join(page(first_data(self._runs, live=True), connect="'self'"))

    def part(self, run: str, name: str) -> tuple[str, str] | None:
        """(a part of a run as JSON, its tag: the same as long as it says the same); None if there is none."""
        if not (run.isascii() and run.isdigit() and int(run[:9]) < len(self._runs)):
            return None
        part = self._runs[int(run[:9])].read(name)
        if part is None:
            return None
        text = safe_json(part_data(part))
        return text, f'"{hashlib.sha256(text.encode()).hexdigest()[:32]}"'


class _Handler(PageHandler):
    server: PageServer

    def do_GET(self) -> None:
        """/TOKEN/ is the page, /TOKEN/part/RUN/NAME a part of what it shows."""
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
        elif rest[0] == "part" and len(rest) == 4 and (found := self.server.part(rest[1], unquote(rest[2]))):
            data, tag = found
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
