"""Who may start Ray: `ray stop`, with which a launch script ends, ends every cluster of a machine."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def ray_to_ourselves(alone: bool = False) -> Iterator[None]:
    """Until the block ends no other test of this user runs `ray stop`; alone: none has a cluster."""
    path = Path(tempfile.gettempdir()) / f"siirl_tests_ray_{os.getuid()}.lock"
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
