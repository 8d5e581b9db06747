"""Folders of a process outside of its run: whoever makes one removes those whose process is gone.

A process holds a lock on its folder as long as it lives: the kernel lets go of it however the process ends.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

YOUNG_S = 60.0
"""A folder that is younger may not be locked yet."""


def owned_folder(
    prefix: str, base: str | Path, before: Callable[[Path], None] = lambda folder: None
) -> tuple[str, IO[str]]:
    """A new folder below `base`, and the lock on it: close that when the folder is removed.

    Those of the same prefix that nobody holds are removed. before: what is done first with each of them.
    OSError if none can be made.
    """
    for folder in Path(base).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == os.geteuid() and time.time() - folder.stat().st_ctime > YOUNG_S:
                with _locked(folder):
                    before(folder)
                    shutil.rmtree(folder, ignore_errors=True)
    path = tempfile.mkdtemp(prefix=prefix, dir=base)
    return path, _locked(Path(path))


def _locked(folder: Path) -> IO[str]:
    """A lock on a folder. OSError if somebody holds it."""
    file = (folder / LOCK).open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


LOCK = "owner"
"""File in a folder, which is locked."""
