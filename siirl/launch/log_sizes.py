"""Logs of a long run stay within bounds: what a full one holds is moved to NAME.1. No torch."""

import contextlib
import os
import shutil
import time
from pathlib import Path

MOST_BYTES = 64 << 20
LOOK_EVERY_S = 10.0


class LogSizes:
    """Looks at the logs of a folder from time to time."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES):
        self._folder, self._most_bytes, self._next_s = folder, most_bytes, 0.0

    def look(self) -> None:
        """If it is time: empty the logs that are full, each after a copy.

        Who writes them appends, and goes on; a line that comes in between may be lost.
        """
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + LOOK_EVERY_S
        for log in self._folder.glob("*.log"):
            with contextlib.suppress(OSError):  # of a full disk: the run goes on
                if log.stat().st_size > self._most_bytes:
                    shutil.copyfile(log, log.with_name(f"{log.name}.1"))
                    os.truncate(log, 0)
