"""Messages over a socket, to an engine's process or another rank: a JSON header and raw arrays. No pickle."""

import contextlib
import json
import math
import select
import socket
import struct
from typing import Any

import numpy as np

_LENGTHS = struct.Struct("<QQ")  # bytes of the header, bytes of all arrays


class ChannelClosed(Exception):
    """The other side has gone."""


class Channel:
    """One end of a connection. Messages are whole: `receive` returns one, or waits for the rest of it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, kind: str, arrays: dict[str, np.ndarray] | None = None, **values: Any) -> None:
        """Send one message. values: JSON values. ChannelClosed if nobody is there to read it."""
        arrays = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
        described = {name: [array.dtype.str, array.shape] for name, array in arrays.items()}
        header = json.dumps({"kind": kind, "values": values, "arrays": described}).encode()
        size = sum(array.nbytes for array in arrays.values())
        try:
            self._sock.sendall(_LENGTHS.pack(len(header), size) + header)
            for array in arrays.values():
                self._sock.sendall(array.reshape(-1).view(np.uint8).data)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def ready(self, timeout_s: float) -> bool:
        """Whether a message, or the end, can be received; waits for it at most `timeout_s` seconds."""
        poll = select.poll()  # unlike select, it takes file descriptors of any number
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(math.ceil(timeout_s * 1000)))

    def receive(self) -> tuple[str, dict[str, Any], dict[str, np.ndarray]]:
        """(kind, values, arrays) of the next message. ChannelClosed at the end."""
        header_size, size = _LENGTHS.unpack(self._read(_LENGTHS.size))
        header = json.loads(bytes(self._read(header_size)))
        data, start, arrays = self._read(size), 0, {}
        for name, (dtype, shape) in header["arrays"].items():
            count = int(np.prod(shape, dtype=np.int64))
            arrays[name] = np.frombuffer(data, dtype, count, start).reshape(shape)
            start += arrays[name].nbytes
        return header["kind"], header["values"], arrays

    def close(self) -> None:
        """End the connection, also for a thread that waits for a message. Idempotent."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            try:
                count = self._sock.recv_into(view[got:])
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not count:
                raise ChannelClosed("end of stream")
            got += count
        return data
