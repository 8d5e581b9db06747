"""Rank 0's output, live on the launcher's terminal and, without progress-bar frames, in its log. No torch."""

import contextlib
import fcntl
import os
import re
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path

_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_SHOW_CURSOR = b"\x1b[?25h"


class ConsoleWriter:
    """Writes a worker's output to this process's console as it comes, and its plain lines to a log."""

    def __init__(self, log_path: Path):
        self._out = sys.stdout.fileno() if _has_fileno(sys.stdout) else 1
        self.is_tty = os.isatty(self._out)
        self._log = log_path.open("ab")
        self._pending = b""

    def write(self, chunk: bytes) -> None:
        self._show(chunk)
        *lines, pending = (self._pending + chunk).split(b"\n")
        with contextlib.suppress(OSError):  # the disk is full: the console goes on
            for line in lines:
                self._log.write(plain_line(line) + b"\n")
            self._log.flush()
        self._pending = pending[-65536:]

    def close(self) -> None:
        """The worker has ended."""
        with contextlib.suppress(OSError):
            self._log.write(plain_line(self._pending))
            self._log.close()

    def show_cursor(self) -> None:
        """A killed worker may have left the terminal without one."""
        if self.is_tty:
            self._show(_SHOW_CURSOR)

    def window_size(self) -> bytes:
        """The size of the terminal, as the kernel's struct; empty without a terminal."""
        with contextlib.suppress(OSError):
            return fcntl.ioctl(self._out, termios.TIOCGWINSZ, b"\0" * 8)
        return b""

    def _show(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # nobody reads the console any more: the log goes on
            while data:
                data = data[os.write(self._out, data) :]


class OutputSource:
    """The two ends of a worker's output: a terminal of the given size, or a pipe if the size is empty."""

    def __init__(self, window_size: bytes):
        self._is_tty = bool(window_size)
        self._source, self.worker_fd = os.openpty() if self._is_tty else os.pipe()
        self.resize(window_size)

    def resize(self, window_size: bytes) -> None:
        if self._is_tty and window_size:
            with contextlib.suppress(OSError):
                fcntl.ioctl(self._source, termios.TIOCSWINSZ, window_size)

    def started(self) -> None:
        """The worker holds its end now: drop ours, so that the output ends with the worker."""
        os.close(self.worker_fd)

    def copy_to(self, write: Callable[[bytes], object]) -> None:
        """Hand all output to `write` until it ends."""
        while True:
            try:
                chunk = os.read(self._source, 65536)
            except OSError:  # a pty reports its end as EIO
                break
            if not chunk:
                break
            write(chunk)
        os.close(self._source)


class ConsoleTee:
    """Gives a worker a terminal (or a pipe, where the launcher has no terminal) and copies what it writes.

    A worker sees a terminal exactly when the launcher has one, so progress bars and tables look the same as
    without a launcher. One thread copies; close() after the worker has ended.
    """

    def __init__(self, log_path: Path):
        self._console = ConsoleWriter(log_path)
        self._source = OutputSource(self._console.window_size() if self._console.is_tty else b"")
        self.worker_fd = self._source.worker_fd
        self._thread = threading.Thread(target=self._copy, name="rank-0-console", daemon=True)
        self._thread.start()

    def started(self) -> None:
        """The worker holds its end now: drop ours, so that the copy ends with the worker."""
        self._source.started()

    def match_size(self) -> None:
        """Give the worker's terminal the size of ours."""
        self._source.resize(self._console.window_size())

    def close(self, timeout_s: float = 3.0) -> None:
        """Wait until all output is copied; at most `timeout_s` while a process holds the worker's end."""
        self._thread.join(timeout_s)
        self._console.show_cursor()

    def _copy(self) -> None:
        self._source.copy_to(self._console.write)
        self._console.close()


def plain_line(line: bytes) -> bytes:
    """A terminal line as a reader saw it in the end: no escape sequences, no overwritten frames."""
    return _ESCAPES.sub(b"", line).rstrip(b"\r").rsplit(b"\r", 1)[-1]


def _has_fileno(stream) -> bool:
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True
