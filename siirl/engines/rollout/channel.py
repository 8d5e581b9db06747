"""Typed messages over a socket, to an engine's process or another rank: a length, then msgpack. No pickle."""

import contextlib
import logging
import math
import re
import select
import socket
import struct
from typing import Any

import msgspec

from siirl.errors import SiirlError

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<Q")  # bytes of the message
MOST_AT_ONCE = 1 << 20


class Message(msgspec.Struct, frozen=True, tag=lambda name: re.sub(r"\B(?=[A-Z])", "_", name).lower()):
    """What one side says to the other: a type for each kind.

    Fields may be dataclasses, as Request and Completion are: what is added to one of them crosses by itself.
    Texts of errors, which quote anything, are made printable first: halves of surrogate pairs cannot cross.
    """

    @property
    def kind(self) -> str:
        """Its type in small letters, as begin_update: its tag, and its name in errors."""
        return type(self).__struct_config__.tag


class ChannelClosed(Exception):
    """The other side has gone."""


class Channel:
    """One end of a connection. Messages are whole: `receive` returns one, or waits for the rest of it."""

    def __init__(self, sock: socket.socket, receives: Any) -> None:
        """receives: the type of messages that the other side sends, or their union."""
        self._sock = sock
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
        self._decoder = msgspec.msgpack.Decoder(receives)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Message) -> None:
        """Send a message. ChannelClosed if nobody is there to read it."""
        data = self._encoder.encode(message)
        try:
            self._sock.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def ready(self, timeout_s: float) -> bool:
        """Whether a message, or the end, can be received; waits for it at most `timeout_s` seconds."""
        poll = select.poll()  # unlike select, it takes file descriptors of any number
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(math.ceil(timeout_s * 1000)))

    def receive(self) -> Any:
        """The next message. ChannelClosed at the end, and for one that is no message of the other side's."""
        (size,) = _LENGTH.unpack(self.read(_LENGTH.size))
        try:
            return self._decoder.decode(self.read(size))
        except (
            msgspec.DecodeError,
            SiirlError,
            ValueError,
            RecursionError,
        ) as error:  # SiirlError: of a field
            log.error("a message cannot be read: %s", error)
            raise ChannelClosed(str(error)) from error

    def read(self, size: int) -> bytearray:
        """The next bytes, outside of a message. ChannelClosed at the end.

        Memory is taken for what has come, never for what a length promises.
        """
        data = bytearray()
        while len(data) < size:
            try:
                part = self._sock.recv(min(size - len(data), MOST_AT_ONCE))
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not part:
                raise ChannelClosed("end of stream")
            data += part
        return data

    def close(self) -> None:
        """End the connection, also for a thread that waits for a message. Idempotent."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def _plain(value: Any) -> Any:
    """A number or sequence of numpy or torch, or a range, as msgpack has it."""
    return value.tolist() if hasattr(value, "tolist") else list(value)
