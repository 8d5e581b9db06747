"""Folders outside of a run are removed by the next one when nobody holds them any more."""

import signal
import subprocess
import sys

import pytest

from siirl import leftovers
from siirl.leftovers import owned_folder

HOLDS_IT = """
import signal, sys
from siirl.leftovers import owned_folder
folder, lock = owned_folder("mine-", sys.argv[1])
print(folder, flush=True)
signal.pause()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds a folder, and the folder's name."""
    words = [sys.executable, "-c", HOLDS_IT, str(tmp_path)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def test_the_folder_of_a_process_that_was_killed_is_removed_and_that_of_a_living_one_stays(
    holder, tmp_path, monkeypatch
):
    process, theirs = holder
    (tmp_path / "other-1").mkdir()
    seen = []
    path, lock = owned_folder("mine-", tmp_path, seen.append)
    with lock:
        monkeypatch.setattr(leftovers, "YOUNG_S", -1.0)
        owned_folder("mine-", tmp_path, seen.append)[1].close()
        assert (tmp_path / path).is_dir() and (tmp_path / theirs).is_dir() and not seen
        process.send_signal(signal.SIGKILL)
        process.wait()
        owned_folder("mine-", tmp_path, seen.append)[1].close()
    assert not (tmp_path / theirs).exists() and tmp_path / theirs in seen
    assert (tmp_path / path).is_dir() and (tmp_path / "other-1").is_dir()


def test_a_young_folder_is_left_alone(holder, tmp_path):
    process, theirs = holder
    process.kill()
    process.wait()
    owned_folder("mine-", tmp_path)[1].close()
    assert (tmp_path / theirs).is_dir()
