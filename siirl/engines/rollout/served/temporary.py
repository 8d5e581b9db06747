"""What vLLM puts into folders that all processes of the machine share, and leaves there; made to go.

Files and sockets go into a folder of the engine's own, which ends with it. Shared memory has a name until all
who use it have found it.
"""

import contextlib
import getpass
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from siirl.cleanup import FOLDER, owned_folder
from siirl.guarded_files import first_bytes, is_own

SHARED_MEMORY = Path("/dev/shm")
PREFIXES = ("psm_", "vllm_dist_")
"""Of names that Python, and vLLM on a CPU, pick for shared memory."""
NAMES = "shared_memory"
"""File in a folder, with the names that shared memory of its engine had when they were last looked at."""
LOOK_S = 0.5
BEGINNING_S = 0.3
"""How long a process may take to have the environment that it is found by: none as it begins."""
LONGEST = 107 - len("/") - 36
"""Characters of a folder in which vLLM can make a socket, whose name is a UUID."""
KEEPER = """
read -r nothing
for pause in BEGINNING 0; do
  for file in $(grep -lzxF "TMPDIR=$1" /proc/[0-9]*/environ 2> /dev/null); do
    process=${file#/proc/}
    kill -9 "${process%/environ}"
  done
  sleep "$pause"
done
[ -d "$1" ] && [ -O "$1" ] && [ ! -L "$1" ] || exit 0
while read -r name; do
  case $name in
    */*) ;;
    PREFIXES) rm -f -- "/dev/shm/$name" ;;
  esac
done < "$1/shared_memory"
rm -rf -- "$1"
""".replace("PREFIXES", "|".join(f"{prefix}*" for prefix in PREFIXES)).replace("BEGINNING", str(BEGINNING_S))
"""Waits until nobody holds the other end of its input, then ends what has the folder for its temporary files,
and removes the folder and the names of shared memory in it."""


class TemporaryFolder:
    """A folder for temporary files of one engine, whose processes are told by it.

    It and they end by `close`, and when this process is killed; if all keepers are killed, too, the next
    engine on this machine removes it.
    """

    def __init__(self) -> None:
        """OSError if none can be made."""
        base = tempfile.gettempdir()
        base = base if len(base) + 20 <= LONGEST else "/tmp"
        self.path, self._lock = owned_folder("siirl_vllm_", base, forget_names)
        Path(self.path, NAMES).touch()
        self._keeper = subprocess.Popen(
            ["/bin/sh", "-c", KEEPER, "siirl-keeper", self.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # it outlives the process group of this worker
        )

    def environment(self) -> dict[str, str]:
        """Variables of the engine. What is kept from one engine to the next stays where it was.

        SPT_NOENV: processes that give themselves a title, as vLLM's do, leave their variables in /proc, where
        they are found by TMPDIR. setproctitle would write it over them, up to one that was changed before.
        """
        variables = {"TMPDIR": self.path, "SPT_NOENV": "1"}
        with contextlib.suppress(KeyError, OSError):  # of a user without a name
            cache = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
            cache.mkdir(0o700, exist_ok=True)
            if is_own(cache.lstat()):  # what is in it runs
                variables["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
        if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
            variables["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TORCHINDUCTOR_CACHE_DIR"]
        return variables

    def close(self) -> None:
        """Idempotent."""
        for pause_s in (BEGINNING_S, 0.0):
            for pid in self._processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(pause_s)
        with contextlib.suppress(OSError):
            opened = os.open(self.path, FOLDER | os.O_NOFOLLOW)
            forget_names(opened)
            os.close(opened)
        shutil.rmtree(self.path, ignore_errors=True)
        self._keeper.kill()
        self._keeper.communicate()
        self._lock.close()

    def _processes(self) -> Iterator[int]:
        """Those of the engine, whoever started them."""
        mine = f"TMPDIR={self.path}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mine in (folder / "environ").read_bytes().split(b"\0"):
                    yield int(folder.name)


def forget_names(folder: int) -> None:
    """Remove what an engine's processes, which are gone, had in shared memory.

    folder: a descriptor of it. What it says is taken for names of this user's files, never for paths.
    """
    with contextlib.suppress(OSError):
        _unlink(first_bytes(NAMES, folder).decode(errors="replace").split())


def _unlink(names: Iterable[str]) -> None:
    for name in names:
        path = SHARED_MEMORY / name
        with contextlib.suppress(OSError):
            ours = name.startswith(PREFIXES) and "/" not in name and path.lstat().st_uid == os.geteuid()
            if ours:
                path.unlink()


@contextlib.contextmanager
def names_noted() -> Iterator[None]:
    """While this process's engine starts, note its names of shared memory in its folder; then remove them.

    All who use it have found it then: it goes with the last of them, however they end.
    """
    import psutil

    this, file, done = psutil.Process(), Path(tempfile.gettempdir(), NAMES), threading.Event()

    def names() -> set[str]:
        processes = [this, *this.children(recursive=True)]
        return {name for process in processes for name in _mapped(process.pid)}

    def look() -> None:
        noted: set[str] = set()
        while not done.wait(LOOK_S):
            if new := names() - noted:
                noted |= new
                file.write_text("".join(f"{name}\n" for name in sorted(noted)))

    thread = threading.Thread(target=look, name="shared-memory", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    _unlink(names())
    file.write_text("")


def _mapped(pid: int) -> set[str]:
    """Names below SHARED_MEMORY, by PREFIXES, that a process has mapped; none if it has gone."""
    root = f"{SHARED_MEMORY}/"
    with contextlib.suppress(OSError):
        paths = [line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
        names = {path.removeprefix(root) for path in paths if path.startswith(root)}
        return {name for name in names if name.startswith(PREFIXES) and not name.endswith(" (deleted)")}
    return set()
