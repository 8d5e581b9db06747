"""Logs of a long run stay within bounds: what a full one holds is moved to NAME.1. No torch.

Who looks: the local launcher; Ray's driver, and the actors where they write; under torchrun the first worker
of each machine. Several may look at one folder.
"""

import contextlib
import fcntl
import os
import shutil
import threading
import time
from pathlib import Path

from siirl.deadline import Deadline
from siirl.observe.logs import logging_file

MOST_BYTES = 64 << 20
LOOK_EVERY_S = 0.5


class LogSizes:
    """Looks at the logs of a folder from time to time, and at the one that SIIRL_LOGGING_FILENAME names."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES):
        self._folder, self._most_bytes, self._looks = folder, most_bytes, Deadline(0.0)

    def look(self) -> None:
        """If it is time: empty the logs that are full, each after a copy of its last most_bytes.

        Who writes them appends, and goes on; a line that comes in between may be lost.
        """
        if not self._looks.over:
            return
        self._looks = Deadline(LOOK_EVERY_S)
        for log in {*self._folder.glob("*.log"), *filter(None, [logging_file(self._folder)])}:
            with contextlib.suppress(OSError):  # of a full disk: the run goes on
                if log.stat().st_size > self._most_bytes:
                    self._empty(log)

    def _empty(self, log: Path) -> None:
        """Unless another process does so just now, or has."""
        with log.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = os.fstat(file.fileno()).st_size
            if size > self._most_bytes:
                file.seek(size - self._most_bytes)  # whole lines of the end
                file.readline()
                with log.with_name(f"{log.name}.1").open("wb") as kept:
                    shutil.copyfileobj(file, kept, 1 << 20)
                os.truncate(log, 0)

    def look_on(self) -> None:
        """Look from a thread of its own, for as long as this process is there."""

        def watch() -> None:
            while True:
                self.look()
                time.sleep(LOOK_EVERY_S)

        threading.Thread(target=watch, name="log-sizes", daemon=True).start()
