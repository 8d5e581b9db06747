"""Threads that torch's operations on host tensors run in.

Beside a GPU one: a worker's columns on the host are small, and a pool of threads costs more than it saves. On
an H200's host of 16 cores each operation on 128 x 1,024 numbers took 6 ms with 16 threads.
"""

import contextlib
import os
from collections.abc import Iterator

import torch

SHARE_OF_CORES = int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads()))
"""Cores of this process, as its launcher or its user said before it started."""


def set_host_threads(device: torch.device) -> None:
    """Of this process, whose models are on the device."""
    torch.set_num_threads(1 if device.type == "cuda" else SHARE_OF_CORES)


@contextlib.contextmanager
def all_host_threads() -> Iterator[None]:
    """As many threads as this process has cores, for large tensors on the host."""
    before = torch.get_num_threads()
    torch.set_num_threads(SHARE_OF_CORES)
    try:
        yield
    finally:
        torch.set_num_threads(before)
