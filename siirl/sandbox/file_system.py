"""A file system of its own for a sandboxed program: Python read-only, a small /tmp in memory, nothing else.

For a process that is in a mount namespace of its own and may mount there.
"""

import os

from siirl.sandbox.linux import (
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    call,
    mount,
    unmount,
)
from siirl.sandbox.seccomp import CALLS, MACHINES

DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc/ld.so.cache")
KEPT_FLAGS = MS_NOSUID | MS_NODEV | MS_NOEXEC  # statvfs and mount use the same bits
MAX_FILES = 4096
FILE_BYTES = 8192  # of a large /tmp: it may hold a file for each so many
BELOW_TMP = "/.below_tmp"
"""Where what is readable below /tmp (a Python installed there) is kept: each /tmp in memory lies over it."""


def enter(stage: str, readable: list[str], kept: list[str]) -> None:
    """Make `stage`, an empty folder, the root; it has only `readable`, devices and an empty /tmp then.

    kept: folders at the top that are to be found below /tmp.
    """
    mount("", "/", "", MS_REC | MS_PRIVATE)
    mount("", stage, "tmpfs", MS_NOSUID | MS_NODEV, f"size=1m,nr_inodes={MAX_FILES},mode=755")
    os.mkdir(stage + BELOW_TMP)
    for path in readable:
        _show(path, stage + (BELOW_TMP if is_below_tmp(path) else "") + path)
    os.mkdir(f"{stage}/dev")
    for device in DEVICES:
        _touch(stage + device)
        mount(device, stage + device, "", MS_BIND)
    os.symlink("/tmp", f"{stage}/dev/shm")
    os.mkdir(f"{stage}/tmp")
    for folder in kept:
        if not os.path.lexists(stage + folder):
            os.symlink("/tmp" + folder, stage + folder)
    mount("", stage, "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir(stage)
    call(pivot_root_number(), b".", b".")
    unmount(".")
    os.chdir("/")


def is_below_tmp(path: str) -> bool:
    return path.startswith("/tmp/")


def renew_tmp(file_bytes: int, readable: list[str]) -> None:
    """A new /tmp of this size; what was written in an earlier one goes away, however it was written.

    What of `readable` lies below /tmp is there again.
    """
    if os.path.ismount("/tmp"):
        unmount("/tmp")
    options = f"size={file_bytes},nr_inodes={max(MAX_FILES, file_bytes // FILE_BYTES)},mode=1777"
    mount("", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, options)
    for path in filter(is_below_tmp, readable):
        if os.path.lexists(BELOW_TMP + path):
            _show(BELOW_TMP + path, path)


def pivot_root_number() -> int:
    """The number of pivot_root on this machine. OSError on one that is not known."""
    machine = os.uname().machine
    if machine not in MACHINES:
        raise OSError(f"mount namespaces are not used on {machine}")
    number = CALLS["pivot_root"][MACHINES[machine][1]]
    assert isinstance(number, int)
    return number


def _show(path: str, target: str) -> None:
    """Bind a path read-only at `target`; a symbolic link is copied."""
    if os.path.islink(path):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    elif os.path.exists(path):
        _touch(target)
    else:
        return
    mount(path, target, "", MS_BIND | MS_REC)
    kept = os.statvfs(path).f_flag & KEPT_FLAGS
    mount("", target, "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | kept)


def _touch(path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
