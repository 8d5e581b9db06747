"""Messages between the sandbox's two ends: JSON objects, each after its length. Standard library only."""

import json
import socket
import struct
from typing import Any

HEADER = struct.Struct(">I")


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one message. OSError if the other end is gone."""
    payload = json.dumps(message).encode()
    connection.sendall(HEADER.pack(len(payload)) + payload)


def receive(connection: socket.socket) -> dict[str, Any]:
    """The next message. EOFError if the other end is gone."""
    (length,) = HEADER.unpack(_read(connection, HEADER.size))
    return json.loads(_read(connection, length))


def _read(connection: socket.socket, length: int) -> bytes:
    parts = []
    while length:
        part = connection.recv(min(length, 1 << 20))
        if not part:
            raise EOFError("the other end of the sandbox is gone")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
