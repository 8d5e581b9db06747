"""What vLLM puts into folders that all processes of the machine share, and leaves there; made to go.

Files and sockets go into a folder of the engine's own, which ends with it. Shared memory has a name until all
who use it have found it.
"""

import contextlib
import getpass
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "psm_"
"""Of names that Python picks for shared memory."""
LONGEST = 107 - len("/") - 36
"""Characters of a folder in which vLLM can make a socket, whose name is a UUID."""
KEEPER = 'cat; rm -rf -- "$1"'
"""Waits until nobody holds the other end of its input, then removes the folder."""


class TemporaryFolder:
    """A folder for temporary files of one engine, removed by `close`, and when this process is killed."""

    def __init__(self) -> None:
        """OSError if none can be made."""
        base = tempfile.gettempdir()
        self.path = tempfile.mkdtemp(prefix="siirl_vllm_", dir=base if len(base) + 20 <= LONGEST else "/tmp")
        self._keeper = subprocess.Popen(
            ["/bin/sh", "-c", KEEPER, "siirl-keeper", self.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # it outlives the process group of this worker
        )

    def environment(self) -> dict[str, str]:
        """Variables of the engine. What is kept from one engine to the next stays where it was."""
        variables = {"TMPDIR": self.path}
        with contextlib.suppress(KeyError, OSError):  # of a user without a name
            cache = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
            variables["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(cache))
        return variables

    def close(self) -> None:
        """Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        assert self._keeper.stdin is not None
        with contextlib.suppress(OSError):
            self._keeper.stdin.close()
        self._keeper.wait()


def forget_shared_memory() -> None:
    """Take the names from the shared memory that this process and its children have mapped.

    It goes with the last of them then, however they end; nobody else can map it any more.
    """
    import psutil

    this = psutil.Process()
    for process in [this, *this.children(recursive=True)]:
        for name in _mapped(process.pid):
            (SHARED_MEMORY / name).unlink(missing_ok=True)


def _mapped(pid: int) -> set[str]:
    """Names below SHARED_MEMORY, of Python's, that a process has mapped; none if it has gone."""
    start = f"{SHARED_MEMORY}/{PREFIX}"
    with contextlib.suppress(OSError):
        paths = (line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
        return {path.removeprefix(f"{SHARED_MEMORY}/") for path in paths if path.startswith(start)}
    return set()
