"""Ray clusters of tests: who may start one, and how long its machines may take.

`ray stop`, with which a launch script ends, ends every cluster of a machine.
"""

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from siirl.launch.ray_cluster import START_S

SHORT = "/tmp"
"""Where Ray's sockets have paths of a length that sockets may have."""


@contextlib.contextmanager
def ray_to_ourselves(alone: bool = False) -> Iterator[None]:
    """Until the block ends no other test of this user runs `ray stop`; alone: none has a cluster."""
    path = Path(tempfile.gettempdir()) / f"siirl_tests_ray_{os.getuid()}.lock"
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


@contextlib.contextmanager
def cluster_here() -> Iterator[Any]:
    """A cluster without a machine yet; it ends with the block. It is where runs that name no cluster do not
    look, as one beside this test would join it."""
    from ray._private import services
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir=SHORT) as folder:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_agent_register_timeout_ms", str(int(1000 * START_S)))
        patch.setattr(services, "get_node", _patient(services.get_node))
        cluster = Cluster()
        try:
            yield cluster
        finally:
            cluster.shutdown()


def _patient(get_node: Callable[..., Any]) -> Callable[..., Any]:
    """It raises RuntimeError until the machine is known, and whoever asks gives up after 30 s."""

    def patient(*of: Any) -> Any:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(RuntimeError):
                return get_node(*of)
            if time.monotonic() > deadline:
                return get_node(*of)
            time.sleep(0.1)

    return patient
