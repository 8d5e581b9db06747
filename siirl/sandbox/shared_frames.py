"""Frames between a process and the one that it forks, through memory that both have: there is no descriptor.

So code that runs in the forked process may write to, read from and close every descriptor that it finds, and
hand them on to processes of its own: what we say to it, and it to us, is out of its reach. A frame is bytes;
a lane holds a part of one at a time. Two semaphores of the C library say who may touch the lane (futexes in
the same memory, sem_overview(7)).
"""

import contextlib
import ctypes
import errno
import mmap
import socket
import struct
import threading

from siirl.sandbox.frames import HEADER, length_of, read_exactly

LANE_BYTES = 256 << 10
_SEMAPHORE_BYTES = 64  # sem_t takes 32 of glibc and of musl
_STATE = struct.Struct("<?I")  # whether a frame ends with this part; its bytes
_ROOM = LANE_BYTES - 2 * _SEMAPHORE_BYTES - _STATE.size
_NOTHING = (1 << 32) - 1

_libc = ctypes.CDLL(None, use_errno=True)


class _Semaphore:
    def __init__(self, memory: mmap.mmap, offset: int, value: int):
        self._place = ctypes.c_char.from_buffer(memory, offset)
        if _libc.sem_init(ctypes.byref(self._place), 1, value):
            raise OSError(ctypes.get_errno(), "sem_init")

    def post(self) -> None:
        _libc.sem_post(ctypes.byref(self._place))

    def wait(self) -> None:
        while _libc.sem_wait(ctypes.byref(self._place)):
            if ctypes.get_errno() != errno.EINTR:  # a handler has run: wait on
                raise OSError(ctypes.get_errno(), "sem_wait")


class _Lane:
    """One way: who writes and who reads are one thread each."""

    def __init__(self, memory: mmap.mmap, offset: int):
        self._memory = memory
        self._empty = _Semaphore(memory, offset, 1)
        self._full = _Semaphore(memory, offset + _SEMAPHORE_BYTES, 0)
        self._state = offset + 2 * _SEMAPHORE_BYTES
        self._room = self._state + _STATE.size
        _STATE.pack_into(memory, self._state, False, _NOTHING)

    def write(self, frame: bytes) -> None:
        for start in range(0, len(frame), _ROOM):
            part = frame[start : start + _ROOM]
            self._empty.wait()
            self._memory[self._room : self._room + len(part)] = part
            _STATE.pack_into(self._memory, self._state, start + len(part) == len(frame), len(part))
            self._full.post()

    def read(self) -> bytes:
        """The next frame. EOFError after end() once nothing is left."""
        parts, last = [], False
        while not last:
            self._full.wait()
            last, length = _STATE.unpack_from(self._memory, self._state)
            if length > _ROOM:
                raise EOFError("the other process has ended")
            parts.append(self._memory[self._room : self._room + length])
            _STATE.pack_into(self._memory, self._state, False, _NOTHING)
            self._empty.post()
        return b"".join(parts)

    def end(self) -> None:
        """The writer is gone: the reader shall not wait for it."""
        self._full.post()


class SharedFrames:
    """A connection between this process and one that it will fork: make it first, then fork."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 2 * LANE_BYTES)
        self._to_fork, self._from_fork = _Lane(self._memory, 0), _Lane(self._memory, LANE_BYTES)

    def in_fork(self) -> None:
        """Called by the forked process: those that it forks in turn get nothing of this memory."""
        with contextlib.suppress(OSError):  # an old kernel
            self._memory.madvise(mmap.MADV_DONTFORK)

    def receive(self) -> bytes:
        """In the forked process: what the other one sends next."""
        return self._to_fork.read()

    def send(self, frame: bytes) -> None:
        """In the forked process."""
        self._from_fork.write(frame)

    def relay(self, connection: socket.socket) -> threading.Thread:
        """Hand on all frames between a socket and the forked process, in two threads.

        The one that is returned ends once the other process has ended and all that it sent is handed on;
        see end(). When the socket ends nothing more is read of it.
        """

        def inwards() -> None:
            with contextlib.suppress(OSError, EOFError):
                while True:
                    header = read_exactly(connection, HEADER.size)
                    self._to_fork.write(header + read_exactly(connection, length_of(header)))

        def outwards() -> None:
            with contextlib.suppress(OSError, EOFError):
                while True:
                    connection.sendall(self._from_fork.read())

        threading.Thread(target=inwards, name="frames-in", daemon=True).start()
        out = threading.Thread(target=outwards, name="frames-out", daemon=True)
        out.start()
        return out

    def end(self) -> None:
        """The forked process has ended."""
        self._from_fork.end()
