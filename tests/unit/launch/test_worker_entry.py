"""What every worker does before its entry."""

import gc
import platform
import subprocess
import sys

import pytest

from siirl.launch.worker_entry import no_collection


def test_imports_are_not_looked_through_for_garbage_and_what_follows_is():
    with pytest.raises(ImportError), no_collection():
        assert not gc.isenabled()
        raise ImportError("a module that is not there")
    assert gc.isenabled()


FAULTS = """
import resource, sys
from siirl.launch.worker_entry import keep_freed_memory
import torch
if sys.argv[1] == "kept":
    keep_freed_memory()
def fill():
    for _ in range(16):
        torch.ones(10 << 20)  # 40 MiB, which glibc would never keep by itself
fill()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
fill()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="an option of glibc")
def test_the_memory_of_a_tensor_that_is_gone_serves_the_next():
    def faults(how: str) -> int:
        command = [sys.executable, "-c", FAULTS, how]
        return int(subprocess.run(command, capture_output=True, check=True).stdout)

    kept = faults("kept")
    assert kept < 100 < faults("plain"), "16 x 40 MiB in pages of 2 MiB at most"
