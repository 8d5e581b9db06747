"""The names of shared memory that an engine's folder holds: none leads anywhere else."""

import getpass
import os
import subprocess
import tempfile
import time

import pytest

from siirl.engines.rollout.served import temporary
from siirl.engines.rollout.served.temporary import KEEPER, NAMES, PREFIXES, TemporaryFolder, forget_names


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """(an engine's folder, what stands for shared memory, a precious file beside it)."""
    folder, memory, precious = tmp_path / "folder", tmp_path / "shm", tmp_path / "precious"
    folder.mkdir(0o700), memory.mkdir(), precious.touch()
    monkeypatch.setattr(temporary, "SHARED_MEMORY", memory)
    return folder, memory, precious


def forgotten(folder, memory):
    opened = os.open(folder, os.O_RDONLY)
    try:
        forget_names(opened)
    finally:
        os.close(opened)


def kept_by_the_shell(folder, memory):
    script = KEEPER.replace("/dev/shm", str(memory))
    subprocess.run(["/bin/sh", "-c", script, "keeper", str(folder)], stdin=subprocess.DEVNULL, timeout=30)


@pytest.mark.parametrize("forget", [forgotten, kept_by_the_shell])
def test_only_names_of_shared_memory_are_removed_and_no_paths(forget, machine):
    folder, memory, precious = machine
    ours = [memory / f"{prefix}x" for prefix in PREFIXES]
    others = [memory / "sem.other", memory / "xpsm_1"]
    (memory / "psm_folder").mkdir()
    for path in (*ours, *others, memory / "psm_folder" / "file"):
        path.touch()
    wrong = [
        "../precious",
        "psm_x/../../precious",
        str(precious),
        "psm_folder/file",
        "psm_folder",
        "..",
        "*",
        "",
    ]
    lines = [*wrong, *(path.name for path in ours), "sem.other", "xpsm_1"]
    (folder / NAMES).write_text("".join(f"{line}\n" for line in lines))
    forget(folder, memory)
    assert precious.exists() and all(path.exists() for path in others)
    assert (memory / "psm_folder" / "file").exists() and not any(path.exists() for path in ours)


def test_names_of_a_stranger_and_lists_that_are_no_files_are_left(machine):
    folder, memory, precious = machine
    theirs = memory / "psm_theirs"
    theirs.touch()
    if os.geteuid() == 0:
        os.chown(theirs, 65534, 65534)
        (folder / NAMES).write_text("psm_theirs\n")
        forgotten(folder, memory)
        assert theirs.exists()
    (memory / "psm_mine").touch()
    (precious).write_text("psm_mine\n")
    for make in (
        lambda path: path.symlink_to(precious),
        os.mkfifo,
        lambda path: path.symlink_to("/dev/zero"),
        os.mkdir,
    ):
        (folder / NAMES).unlink(missing_ok=True)
        make(folder / NAMES)
        began_s = time.monotonic()
        forgotten(folder, memory)
        assert (memory / "psm_mine").exists() and time.monotonic() - began_s < 5


def test_a_keeper_does_not_follow_a_link_in_the_place_of_its_folder(machine, tmp_path):
    folder, memory, _ = machine
    (memory / "psm_mine").touch()
    (folder / NAMES).write_text("psm_mine\n")
    (tmp_path / "link").symlink_to(folder)
    kept_by_the_shell(tmp_path / "link", memory)
    assert (memory / "psm_mine").exists() and (folder / NAMES).exists()


@pytest.mark.parametrize("whose", ["nobody's", "mine", "a link", "writable"])
def test_compiled_code_is_not_kept_where_somebody_else_may_put_some(whose, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    cache = tmp_path / f"torchinductor_{getpass.getuser()}"
    if whose == "a link":
        (tmp_path / "other").mkdir(0o700)
        cache.symlink_to(tmp_path / "other")
    elif whose != "nobody's":
        cache.mkdir()
        cache.chmod(0o777 if whose == "writable" else 0o755)
    folder = TemporaryFolder()
    try:
        found = folder.environment().get("TORCHINDUCTOR_CACHE_DIR")
    finally:
        folder.close()
    assert found == (str(cache) if whose in ("nobody's", "mine") else None)
