"""Runs in surroundings that are not those of a developer: their weights are those of a run in plain ones."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_harness import ROOT, Finished, Inputs, overrides
from killed_jobs import steps_done, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.getuid() != 0, reason="only root becomes other users and makes control groups"),
]
STEPS, USER = 4, 54321
AS_USER = (
    *("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
)
"""Somebody with no right of root's but to enter the folders in which Python and siirl may lie here."""
KEYS = ("trainer.test_freq=2", "trainer.save_freq=1", "trainer.progress=plain", "trainer.deadline_s=300")
ODD = "a, b='c'\n\tデータ {d}"
"""Of a folder in which all that a run reads and writes lies."""
SLOW = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void wait_for(const char *path) {
    static unsigned number;
    const char *folder = getenv("SLOW_FOLDER");
    if (!folder || !path || strncmp(path, folder, strlen(folder))) return;
    usleep(++number % 50 ? 20000 : 1500000);
}

static void wait_for_file(int file) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length > 0) path[length] = 0, wait_for(path);
}

#define REAL(name) static __typeof__(name) *real; if (!real) real = dlsym(RTLD_NEXT, #name)
#define OPEN(name) int name(const char *path, int flags, ...) { \
    REAL(name); va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more); \
    wait_for(path); return real(path, flags, mode); }
OPEN(open)
OPEN(open64)

int rename(const char *from, const char *to) { REAL(rename); wait_for(to); return real(from, to); }
int fsync(int file) { REAL(fsync); wait_for_file(file); return real(file); }
ssize_t write(int file, const void *bytes, size_t length) {
    REAL(write); wait_for_file(file);
    return real(file, bytes, length > 100000 ? 100000 : length);
}
"""
"""Below SLOW_FOLDER each open, write, fsync and rename takes 20 ms, each 50th 1.5 s; writes come in parts."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> tuple[Inputs, Finished]:
    """What the runs read, and the one in plain surroundings."""
    inputs, folder = Inputs.make(tmp_path_factory.mktemp("inputs")), tmp_path_factory.mktemp("plain")
    assert start(inputs, folder).wait(300) == 0, (folder / "console").read_text()
    return inputs, Finished.read(folder / "out")


@pytest.fixture
def others() -> Iterator[Path]:
    """A folder that any user may enter, in the shared one for temporary files."""
    folder = Path(tempfile.mkdtemp(prefix="siirl-surroundings-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def start(inputs: Inputs, folder: Path, *more: str, env: dict | None = None, before=(), **options):
    """`siirl run` as users type it; what it says is in FOLDER/console."""
    keys = overrides(inputs, folder / "out", *KEYS, f"trainer.total_training_steps={STEPS}", *more)
    words = [f"{key}={quoted(value)}" for key, _, value in (one.partition("=") for one in keys)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | (env or {})
    with (folder / "console").open("ab") as file:
        command = [*before, sys.executable, "-m", "siirl.cli", "run", *words]
        return subprocess.Popen(command, env=environment, stdout=file, stderr=file, cwd=folder, **options)


def quoted(value: str) -> str:
    """Paths that are odd are written in quotes on a command line."""
    return "'" + value.replace("'", "\\'") + "'" if "{" in value else value


def check_equal(folder: Path, expected: Finished) -> None:
    """The run has ended as the one in plain surroundings did, bit for bit."""
    found = Finished.read(folder / "out")
    for name in ("reward/score", "actor/loss", "actor/grad_norm", "val/reward/mean"):
        assert found.values(name) == expected.values(name) != [], name
    weights = found.weights()
    assert weights.keys() == expected.weights().keys()
    assert all(tensor.equal(weights[name]) for name, tensor in expected.weights().items())


def test_a_plain_user_with_odd_names_whose_time_zone_changes_and_who_goes_on_in_another(plain, others):
    """What it reads and writes lies below a name with comma, quote, newline and Japanese."""
    given, expected = plain
    home, folder = others / "home", others / ODD
    for path in (home, folder):
        path.mkdir()
    inputs = Inputs(*(folder / path.name for path in (given.model, given.train, given.val, given.reward)))
    shutil.copytree(given.model, inputs.model)
    for name in ("train", "val", "reward"):
        shutil.copy(getattr(given, name), getattr(inputs, name))
    zone = others / "zone"
    shutil.copy("/usr/share/zoneinfo/Asia/Kathmandu", zone)
    for path in (home, folder, *folder.rglob("*")):
        os.chown(path, USER, USER)
    (folder / "console").touch()
    env = {"HOME": str(home), "LANG": "C", "LC_ALL": "C", "TZ": f":{zone}", "USER": "somebody"}
    job = start(inputs, folder, env=env, before=AS_USER)
    wait_until(lambda: steps_done(folder / "out") >= 1, job, folder / "console")
    shutil.copy("/usr/share/zoneinfo/Pacific/Apia", others / "new")
    os.replace(others / "new", zone)
    wait_until(lambda: steps_done(folder / "out") >= 2, job, folder / "console")
    job.kill()
    job.wait()
    job = start(inputs, folder, env=env | {"TZ": "America/Caracas"}, before=AS_USER)
    assert job.wait(300) == 0, (folder / "console").read_text()
    check_equal(folder, expected)
    strangers = [path for path in (folder / "out").rglob("*") if path.lstat().st_uid != USER]
    assert strangers == []


def test_a_file_system_that_takes_its_time(plain, tmp_path):
    """Opening, writing, syncing and renaming are slow, and writes come in parts."""
    inputs, expected = plain
    source, library = tmp_path / "slow.c", tmp_path / "slow.so"
    source.write_text(SLOW)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    folder = tmp_path / "far away"
    folder.mkdir()
    env = {"LD_PRELOAD": str(library), "SLOW_FOLDER": str(folder)}
    job = start(inputs, folder, env=env)
    assert job.wait(600) == 0, (folder / "console").read_text()
    check_equal(folder, expected)
    assert Finished.read(folder / "out").values("time/checkpoint_s")[0] > 0.05, "nothing was slow"


@pytest.fixture
def groups() -> Iterator[dict[str, Path]]:
    """A control group of each kind, for one run."""
    made = {kind: Path(f"/sys/fs/cgroup/{kind}/siirl_surroundings_{os.getpid()}") for kind in LIMITS}
    if not all(path.parent.is_dir() for path in made.values()):
        pytest.skip("no control groups of version 1 are here")
    for path in made.values():
        path.mkdir()
    yield made
    for path in made.values():
        path.rmdir()


LIMITS = {"memory": ("memory.limit_in_bytes", 6 << 30), "cpu": ("cpu.cfs_quota_us", 60_000)}


def entering(groups: dict[str, Path], limits: dict[str, tuple[str, int]]):
    """What a process does before it becomes the command: it enters the groups, whose limits are set."""
    for kind, (name, value) in limits.items():
        (groups[kind] / name).write_text(str(value))

    def enter() -> None:
        for group in groups.values():
            (group / "cgroup.procs").write_text("0")

    return enter


def test_the_limits_of_a_container_are_enough(plain, groups, tmp_path):
    """6 GiB of memory, and 0.6 of a processor."""
    inputs, expected = plain
    job = start(inputs, tmp_path, preexec_fn=entering(groups, LIMITS))
    assert job.wait(800) == 0, (tmp_path / "console").read_text()
    check_equal(tmp_path, expected)
    peak = int((groups["memory"] / "memory.max_usage_in_bytes").read_text())
    assert 200 << 20 < peak < 6 << 30, "the run was not in the group"
