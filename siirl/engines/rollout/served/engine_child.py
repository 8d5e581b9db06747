"""The process of an engine, as a child of this one, and the folder of its temporary files. No torch."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping

from siirl.engines.rollout.served.temporary import TemporaryFolder

SERVER = "siirl.engines.rollout.served.server"


class EngineChild:
    """One that this process has started. It ends with the thread that did, however that ends."""

    def __init__(self, environment: Mapping[str, str], connection: int, log: int) -> None:
        """Start it. connection: its end of that to its worker; log: where it writes what it prints.

        OSError if it cannot be started.
        """
        self._temporary = TemporaryFolder()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", SERVER, str(connection)],
                env={**environment, **self._temporary.environment()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[connection],
            )
        except OSError:
            self._temporary.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code, once it has ended; minus the number of the signal that ended it."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """The same, after so many seconds at most."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """End it and all that it has started, at once. Idempotent."""
        if self._process.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self._process.wait()
        self._temporary.close()
