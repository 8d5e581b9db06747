"""Files where others may write: regular ones, never where a link leads, and read up to a bound."""

import grp
import os
import pwd
import stat

MOST_BYTES = 1 << 20


def is_own(about: os.stat_result) -> bool:
    """Whether a file or folder is this user's, and nobody else may write to it; of a link, False."""
    return about.st_uid == os.geteuid() and not others_write(about) and not stat.S_ISLNK(about.st_mode)


def others_write(about: os.stat_result) -> bool:
    """Whether anybody but its owner may write to a file or folder; a group of this user alone is nobody."""
    mode = about.st_mode
    return bool(mode & stat.S_IWOTH) or (bool(mode & stat.S_IWGRP) and not _is_private(about.st_gid))


def _is_private(gid: int) -> bool:
    """Whether a group is this user's alone, as many systems make one for each, by its name or number."""
    try:
        group, name = grp.getgrgid(gid), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return (gid == os.geteuid() or group.gr_name == name) and set(group.gr_mem) <= {name}


def open_regular(name: str | os.PathLike[str], folder: int | None = None) -> int:
    """A descriptor to read a regular file by. OSError for anything else: a link, a pipe, a device.

    folder: a descriptor of the folder that the name is in.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    opened = os.open(name, flags, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(f"{os.fspath(name)!r} is no regular file")
    return opened


def first_bytes(name: str | os.PathLike[str], folder: int | None = None, most: int = MOST_BYTES) -> bytes:
    """The beginning of a regular file. OSError."""
    with os.fdopen(open_regular(name, folder), "rb") as file:
        return file.read(most)
