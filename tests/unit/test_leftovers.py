"""Folders outside of a run are removed by the next one when nobody holds them any more."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from siirl import cleanup
from siirl.cleanup import owned_folder

HOLDS_IT = """
import signal, sys
from siirl.cleanup import owned_folder
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

    def note(folder):
        seen.append(Path(os.readlink(f"/proc/self/fd/{folder}")))

    path, lock = owned_folder("mine-", tmp_path, note)
    with lock:
        monkeypatch.setattr(cleanup, "YOUNG_S", -1.0)
        owned_folder("mine-", tmp_path, note)[1].close()
        assert (tmp_path / path).is_dir() and (tmp_path / theirs).is_dir() and not seen
        process.send_signal(signal.SIGKILL)
        process.wait()
        owned_folder("mine-", tmp_path, note)[1].close()
    assert not (tmp_path / theirs).exists() and tmp_path / theirs in seen
    assert (tmp_path / path).is_dir() and (tmp_path / "other-1").is_dir()


def test_a_young_folder_is_left_alone(holder, tmp_path):
    process, theirs = holder
    process.kill()
    process.wait()
    owned_folder("mine-", tmp_path)[1].close()
    assert (tmp_path / theirs).is_dir()


def sweep(tmp_path, monkeypatch, before=lambda folder: None):
    monkeypatch.setattr(cleanup, "YOUNG_S", -1.0)
    path, lock = owned_folder("mine-", tmp_path, before)
    lock.close()
    shutil.rmtree(path)


def stranger_s(path):
    if os.geteuid():
        pytest.skip("only root gives files away")
    os.chown(path, 65534, 65534)


NOT_OURS = {
    "a link": lambda path, precious: path.symlink_to(precious),
    "a stranger's": lambda path, precious: (path.mkdir(0o700), stranger_s(path)),
    "a group may write": lambda path, precious: (path.mkdir(), path.chmod(0o770)),
    "all may write": lambda path, precious: (path.mkdir(), path.chmod(0o707)),
    "a file": lambda path, precious: path.touch(),
    "a pipe": lambda path, precious: os.mkfifo(path),
}


@pytest.mark.parametrize("what", NOT_OURS)
def test_what_only_has_the_name_of_a_folder_of_ours_is_not_touched(what, tmp_path, monkeypatch):
    precious, trap = tmp_path / "precious", tmp_path / "mine-x"
    precious.mkdir(0o700)
    (precious / "file").touch()
    NOT_OURS[what](trap, precious)
    before, seen = os.lstat(trap), []
    sweep(tmp_path, monkeypatch, seen.append)
    assert os.lstat(trap) == before and not seen
    assert [path.name for path in precious.iterdir()] == ["file"]
    assert trap.is_symlink() or not trap.is_dir() or not list(trap.iterdir())


def test_a_folder_that_becomes_a_link_while_it_is_removed_takes_nothing_else_along(tmp_path, monkeypatch):
    precious, ours = tmp_path / "precious", tmp_path / "mine-x"
    for folder in (precious, ours):
        (folder / "inner").mkdir(parents=True, mode=0o700)
        folder.chmod(0o700)
        (folder / "inner" / "file").touch()
    (ours / "link").symlink_to(precious)
    (ours / "owner").symlink_to(tmp_path / "made")

    def swap(folder):
        ours.rename(tmp_path / "moved")
        ours.symlink_to(precious)

    sweep(tmp_path, monkeypatch, swap)
    assert (precious / "inner" / "file").exists() and not (tmp_path / "made").exists()
    assert not ours.is_symlink(), "whose lock is a link is none of ours"
    (ours / "owner").unlink()
    sweep(tmp_path, monkeypatch, swap)
    assert (precious / "inner" / "file").exists() and ours.is_symlink()
    assert not list((tmp_path / "moved").iterdir())
