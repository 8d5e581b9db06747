"""Writes that fail: which file, and why, also where a library keeps that to itself. No torch."""

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

REFUSALS = {errno.ENOSPC: "full", errno.EDQUOT: "full", errno.EFBIG: "full", errno.EROFS: "read-only"}
"""Why a disk takes nothing more (it has no room, the user none, one file none) -> what it is then."""
_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # how Rust's libraries end the text of a failed system call
_PIECE = 1 << 20


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """A failed write of the file at `path` is an OSError that names it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        found = _OS_ERROR.search(str(error))
        number = error.errno if isinstance(error, OSError) else int(found[1]) if found else None
        if number is None or (isinstance(error, OSError) and error.filename is not None):
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def why_unwritten(folder: Path, num_bytes: int) -> OSError:
    """Why so many bytes could not be written to a file in `folder`, by a library that does not say it.

    Found by writing as many.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            for start in range(0, num_bytes, _PIECE):
                file.write(bytes(min(_PIECE, num_bytes - start)))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return OSError(error.errno, os.strerror(error.errno or errno.EIO), str(folder))
    return OSError(errno.EIO, "a file was not written to its end", str(folder))
