"""Ports for servers that tests start, and for addresses where nothing listens."""

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port of this machine that nobody gets by chance until the block ends: it is bound here, unused.

    A server that names it and sets SO_REUSEADDR listens on it, as those of asyncio, http.server, torch and
    Ray do; then the next one. While there is none, connections are refused.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield holder.getsockname()[1]


def await_listening(port: int, server: subprocess.Popen, within_s: float = 120) -> None:
    """Return when the server takes connections."""
    deadline = time.monotonic() + within_s
    while not is_listening(port):
        assert server.poll() is None, f"{server.args} has ended: {server.returncode}"
        assert time.monotonic() < deadline, f"{server.args} takes no connections"
        time.sleep(0.1)


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
