"""Files where others may write: who may, and reads that follow no link, wait for nothing, have a bound; files
that appear whole or not at all, and lines of JSON.
"""

import errno
import grp
import json
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 20
ENTER = stat.S_IXGRP | stat.S_IXOTH


def is_own(about: os.stat_result) -> bool:
    """Whether a file or folder is this user's, and nobody else may write to it; of a link, False."""
    return about.st_uid == os.geteuid() and not others_write(about) and not stat.S_ISLNK(about.st_mode)


def others_write(about: os.stat_result) -> bool:
    """Whether anybody but its owner may write to a file or folder; a group of this user alone is nobody."""
    mode = about.st_mode
    return bool(mode & stat.S_IWOTH) or (bool(mode & stat.S_IWGRP) and not _is_private(about.st_gid))


def who_may_change(path: Path) -> str:
    """Who besides this user and root can change a file or folder, in words; empty if nobody can.

    Others can who may write to it, or to a folder above it, where they could put another in its place;
    unless a folder above it lets nobody else in.
    """
    try:
        about, above = path.stat(), [parent.stat() for parent in path.resolve().parents]
    except OSError as error:
        return f"cannot be looked at: {error.strerror}"
    if about.st_uid not in (os.geteuid(), 0):
        return f"belongs to {user_name(about.st_uid)}"
    if any(one.st_uid in (os.geteuid(), 0) and not one.st_mode & ENTER for one in above):
        return ""
    if others_write(about):
        return "all users may write to it" if about.st_mode & stat.S_IWOTH else "its group may write to it"
    if any(others_write(one) and not one.st_mode & stat.S_ISVTX for one in above):
        return "others may write to a folder above it"
    return ""


def own_folder(*candidates: Path) -> Path | None:
    """The first of these folders that is this user's alone to write to, made if it is not there; else None.

    A name that others know in a folder that all may write to, such as /tmp, may be theirs already.
    """
    for folder in candidates:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            about = folder.lstat()
        except OSError:
            continue
        if stat.S_ISDIR(about.st_mode) and is_own(about):
            return folder
    return None


def user_name(uid: int) -> str:
    """A user for messages."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


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
        raise OSError("it is no regular file")
    return opened


def open_below(top: Path, path: Path) -> int:
    """A descriptor to read a regular file by, that lies below a folder, whatever links led to it. OSError."""
    try:
        opened = open_regular(path)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        opened = open_regular(os.path.realpath(path))
    if not Path(os.readlink(f"/proc/self/fd/{opened}")).is_relative_to(os.path.realpath(top)):
        os.close(opened)
        raise OSError("it leads out of the folder")
    return opened


def first_bytes(name: str | os.PathLike[str], folder: int | None = None) -> bytes:
    """The beginning of a regular file. OSError."""
    with os.fdopen(open_regular(name, folder), "rb") as file:
        return file.read(MOST_BYTES)


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Gives where to write what takes the file's place at the end, unless that fails; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.tmp")
    aside.unlink(missing_ok=True)
    yield aside
    os.replace(aside, path)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, see `replaced`. OSError."""
    with replaced(path) as aside:
        aside.write_bytes(content if isinstance(content, bytes) else content.encode())


def write_own(path: Path, value: Any) -> None:
    """The same, of a text or of JSON, to a file that this user alone may read, as of secrets. OSError."""

    def opened(name: str, flags: int) -> int:
        return os.open(name, flags, 0o600)

    with replaced(path) as aside, open(aside, "x", opener=opened) as out:
        out.write(value if isinstance(value, str) else json.dumps(value))


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, a line each; none without a file. What was half written is passed over."""
    with suppress(OSError), path.open(errors="replace") as lines:
        for line in lines:
            with suppress(ValueError):
                if isinstance(found := json.loads(line), dict):
                    yield found


def own_secret(path: Path) -> bytes:
    """A small file that this user has written and nobody else may read or write. OSError for any other."""
    with os.fdopen(open_regular(path), "rb") as file:
        about = os.fstat(file.fileno())
        if about.st_uid != os.geteuid() or about.st_mode & 0o077:
            raise PermissionError(errno.EACCES, f"{path} is not this user's alone")
        return file.read(MOST_BYTES)
