"""Folders of a process outside of its run: whoever makes one removes those whose process is gone.

A process holds a lock on its folder as long as it lives: the kernel lets go of it however the process ends.
They lie where all users of a machine may write, so a name says nothing: what is looked into, and emptied, is
held by a descriptor, is no link, belongs to this user, and lets nobody else in.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

YOUNG_S = 60.0
"""A folder that is younger may not be locked yet."""
LOCK = "owner"
"""File in a folder, which is locked."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
OTHERS = 0o077


def owned_folder(
    prefix: str, base: str | Path, before: Callable[[int], None] = lambda folder: None
) -> tuple[str, IO[str]]:
    """A new folder below `base`, and the lock on it: close that when the folder is removed.

    Those of the same prefix that nobody holds are removed. before: what is done first with each of them, by a
    descriptor of it. OSError if none can be made.
    """

    def is_left(folder: int, name: str) -> bool:
        if time.time() - os.fstat(folder).st_ctime <= YOUNG_S:
            return False
        with _locked(folder):  # until it is empty: who has it open then finds nothing
            before(folder)
            _empty(folder)
        return True

    sweep(base, prefix, is_left)
    path = tempfile.mkdtemp(prefix=prefix, dir=base)
    with _opened(path) as folder:
        return path, _locked(folder)


def sweep(base: str | Path, prefix: str, is_left: Callable[[int, str], bool]) -> None:
    """Remove this user's folders below `base` of a prefix, if is_left(a descriptor, the name) says so."""
    with contextlib.suppress(OSError), _opened(base, links=True) as around:
        for name in os.listdir(around):
            if not name.startswith(prefix):
                continue
            with contextlib.suppress(OSError):
                with _opened(name, around) as folder:
                    about = os.fstat(folder)
                    if about.st_uid != os.geteuid() or about.st_mode & OTHERS or not is_left(folder, name):
                        continue
                    _empty(folder)
                os.rmdir(name, dir_fd=around)  # if something else has come in its place: that, if it is empty


@contextlib.contextmanager
def _opened(path: str | Path, around: int | None = None, links: bool = False) -> Iterator[int]:
    """A descriptor of a folder. OSError if it is none, or a link."""
    opened = os.open(path, FOLDER | (0 if links else os.O_NOFOLLOW), dir_fd=around)
    try:
        yield opened
    finally:
        os.close(opened)


def _empty(folder: int) -> None:
    """Remove what is in a folder, and no more: links go as links."""
    for name in os.listdir(folder):
        try:
            os.unlink(name, dir_fd=folder)
        except OSError:
            shutil.rmtree(name, ignore_errors=True, dir_fd=folder)


def _locked(folder: int) -> IO[str]:
    """A lock on a folder. OSError if somebody holds it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.fdopen(os.open(LOCK, flags, 0o600, dir_fd=folder), "a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file
