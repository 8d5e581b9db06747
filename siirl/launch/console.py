"""Rank 0's output, live on the launcher's terminal and, without progress-bar frames, in its log. No torch."""

import contextlib
import fcntl
import os
import re
import sys
import termios
import threading
from pathlib import Path

_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_SHOW_CURSOR = b"\x1b[?25h"


class ConsoleTee:
    """Gives a worker a terminal (or a pipe, where the launcher has no terminal) and copies what it writes.

    A worker sees a terminal exactly when the launcher has one, so progress bars and tables look the same as
    without a launcher. One thread copies; close() after the worker has ended.
    """

    def __init__(self, log_path: Path):
        self._out = sys.stdout.fileno() if _has_fileno(sys.stdout) else 1
        self._is_tty = os.isatty(self._out)
        self._source, self.worker_fd = os.openpty() if self._is_tty else os.pipe()
        self._log = log_path.open("ab")
        self.match_size()
        self._thread = threading.Thread(target=self._copy, name="rank-0-console", daemon=True)
        self._thread.start()

    def started(self) -> None:
        """The worker holds its end now: drop ours, so that the copy ends with the worker."""
        os.close(self.worker_fd)

    def match_size(self) -> None:
        """Give the worker's terminal the size of ours."""
        if self._is_tty:
            with contextlib.suppress(OSError):
                size = fcntl.ioctl(self._out, termios.TIOCGWINSZ, b"\0" * 8)
                fcntl.ioctl(self._source, termios.TIOCSWINSZ, size)

    def close(self, timeout_s: float = 3.0) -> None:
        """Wait until all output is copied; at most `timeout_s` while a process holds the worker's end."""
        self._thread.join(timeout_s)
        if self._is_tty:
            self._write(_SHOW_CURSOR)

    def _copy(self) -> None:
        pending = b""
        while True:
            try:
                chunk = os.read(self._source, 65536)
            except OSError:  # a pty reports its end as EIO
                break
            if not chunk:
                break
            self._write(chunk)
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                self._log.write(plain_line(line) + b"\n")
            self._log.flush()
            pending = pending[-65536:]
        self._log.write(plain_line(pending))
        self._log.close()

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # nobody reads the console any more: the log goes on
            while data:
                data = data[os.write(self._out, data) :]


def plain_line(line: bytes) -> bytes:
    """A terminal line as a reader saw it in the end: no escape sequences, no overwritten frames."""
    return _ESCAPES.sub(b"", line).rstrip(b"\r").rsplit(b"\r", 1)[-1]


def _has_fileno(stream) -> bool:
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True
