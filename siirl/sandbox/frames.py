"""Messages between two processes: JSON objects, each after a mark, its length and a checksum of it.

Standard library only. What does not begin so was written by somebody else: FrameError.
"""

import json
import socket
import struct
import zlib
from typing import Any

MARK = b"siir"
HEADER = struct.Struct(">4sII")
MOST_BYTES = 1 << 30


class FrameError(OSError):
    """What came is no message of ours."""


def packed(message: dict[str, Any]) -> bytes:
    """A message as it travels."""
    payload = json.dumps(message).encode()
    return HEADER.pack(MARK, len(payload), zlib.crc32(payload)) + payload


def length_of(header: bytes) -> int:
    """How many bytes follow a header. FrameError if it is none."""
    mark, length, _ = HEADER.unpack(header)
    if mark != MARK or length > MOST_BYTES:
        raise FrameError(f"bytes that are no message: {header!r}")
    return length


def unpacked(header: bytes, payload: bytes) -> dict[str, Any]:
    """The message of a header and what followed it. FrameError if it was changed on its way."""
    length_of(header)
    if zlib.crc32(payload) != HEADER.unpack(header)[2]:
        raise FrameError("a message whose checksum is wrong")
    return json.loads(payload)


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one message. OSError if the other end is gone."""
    connection.sendall(packed(message))


def receive(connection: socket.socket) -> dict[str, Any]:
    """The next message, waited for. EOFError if the other end is gone; FrameError."""
    header = read_exactly(connection, HEADER.size)
    return unpacked(header, read_exactly(connection, length_of(header)))


class FrameReader:
    """Reads what has come over a connection, without waiting for the rest of a message."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._pending = bytearray()

    def take(self) -> list[dict[str, Any]]:
        """The messages that are whole by now, of a connection that can be read. EOFError; FrameError."""
        part = self._connection.recv(1 << 20)
        if not part:
            raise EOFError("the other end is gone")
        self._pending += part
        messages = []
        while len(self._pending) >= HEADER.size:
            header = bytes(self._pending[: HEADER.size])
            end = HEADER.size + length_of(header)
            if len(self._pending) < end:
                break
            messages.append(unpacked(header, bytes(self._pending[HEADER.size : end])))
            del self._pending[:end]
        return messages


def read_exactly(connection: socket.socket, length: int) -> bytes:
    """So many bytes, waited for. EOFError if the other end is gone before."""
    parts = []
    while length:
        part = connection.recv(min(length, 1 << 20))
        if not part:
            raise EOFError("the other end is gone")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
