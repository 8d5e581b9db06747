"""Programs that try to get out of the sandbox, in every mode that this machine has."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import sandbox_cases

from siirl.errors import SandboxError
from siirl.sandbox.box import Box, Boxes, Job, run_code, strongest_isolation
from siirl.sandbox.file_system import is_below_tmp
from siirl.sandbox.isolation import MODES, readable_by_all, readable_paths
from siirl.sandbox.limits import MIB, Limits

pytestmark = pytest.mark.heavy

REPOSITORY = Path(__file__).parents[3]


def available(mode):
    try:
        with Box(mode) as box:
            return box.run("").status == "ok"
    except SandboxError:
        return False


@pytest.fixture(scope="module", params=MODES)
def mode(request):
    if not available(request.param):
        pytest.skip(f"this machine and user have no {request.param}")
    return request.param


@pytest.fixture
def outside(public_path):
    public_path.chmod(0o777)
    (public_path / "secret").write_text(sandbox_cases.SECRET)
    (public_path / "secret").chmod(0o666)
    return public_path


@pytest.fixture
def victim():
    process = subprocess.Popen(["sleep", "600"])
    yield process.pid
    process.kill()
    process.wait()


def test_hostile_programs_are_held(mode, outside, victim, monkeypatch):
    monkeypatch.setenv("TOKEN", sandbox_cases.SECRET)
    assert sandbox_cases.run_all(mode, outside, victim) == {}
    assert psutil.Process(victim).status() != psutil.STATUS_ZOMBIE


def test_hostile_programs_of_a_plain_user_are_held():
    python = next(
        (p for p in (sys.executable, "/usr/bin/python3") if readable_by_all(os.path.realpath(p))), None
    )
    if os.geteuid() != 0 or python is None or not readable_by_all(str(REPOSITORY / "siirl")):
        pytest.skip("needs root, to become another user, and a Python that all users can read")
    for mode in MODES[1:]:
        done = subprocess.run(
            [python, REPOSITORY / "tests" / "support" / "sandbox_cases.py", mode],
            user=12345,
            group=12345,
            extra_groups=[],
            env={"PYTHONPATH": str(REPOSITORY), "TOKEN": sandbox_cases.SECRET},
            capture_output=True,
            text=True,
            timeout=60,
        )
        if "cannot be made" in done.stderr and mode == "user_namespaces":
            continue
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == {}


def test_no_process_outlives_its_run(mode):
    with Box(mode) as box:
        for name in ("daemon", "fork bomb"):
            box.run(sandbox_cases.HOSTILE[name].code, limits=sandbox_cases.LIMITS)
            left = psutil.Process(box._process.pid).children(recursive=True)
            assert len(left) == (mode != "process"), left
        launcher = psutil.Process(box._process.pid)
    assert not launcher.is_running()


def test_no_process_outlives_the_process_that_started_the_sandbox(mode, public_path):
    code = f"from siirl.sandbox.box import Box\nbox = Box({mode!r})\nbox.run('import time; time.sleep(60)')"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(public_path)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment)
    depth = 1 if mode == "process" else 2
    deadline = time.monotonic() + 30
    while len(found := psutil.Process(process.pid).children(recursive=True)) <= depth:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(found, timeout=30)
    assert not alive


RUN = """
import os
from siirl.sandbox.child import Confinement, run
own = Confinement("process", "run", [], None)
os._exit(run(own, {}, os.open("/dev/null", os.O_RDONLY), 0, parent=os.getpid()))
"""


def test_a_program_whose_launcher_has_just_ended_does_not_begin(tmp_path):
    words, environment = [sys.executable, "-c", RUN], os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True)
    assert (done.returncode, done.stderr) == (1, b"")


def test_nothing_is_left_in_the_temporary_folder(mode, public_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(public_path))
    with Box(mode) as box:
        for name in ("deep folders", "unreadable folders", "huge file"):
            box.run(sandbox_cases.HOSTILE[name].code)
            assert [path for stage in public_path.iterdir() for path in stage.iterdir()] == []
    assert list(public_path.iterdir()) == []


def test_many_files_do_not_fill_the_machine(mode):
    if mode == "process":
        pytest.skip("only the size of each file is limited in this mode")
    code = "for n in range(100): open(str(n), 'wb').write(bytes(1 << 20))"
    result = run_code(code, limits=Limits(file_bytes=8 * MIB))
    assert result.status == "failed" and "No space left" in result.stderr


def test_a_program_finds_its_input_and_files_and_no_trace_of_an_earlier_one(mode):
    """Below /tmp are its own folder, and libraries that are installed there."""
    libraries = {Path(path).parts[2] for path in readable_paths() if is_below_tmp(path)}
    there = sorted({"box"} | (libraries if mode != "process" else set()))
    code = """
import os, sys
print(sorted(os.listdir("/tmp") if os.getcwd() == "/tmp/box" else ["box"]), sorted(os.listdir(".")))
print(open("folder/data.txt").read(), input(), sys.stdin.read())
open("left", "w").write("x")
sys.exit("end")
"""
    with Box(mode) as box:
        for _ in range(2):
            result = box.run(code, "one\ntwo\n", {"folder/data.txt": "content"})
            assert result.stdout == f"{there} ['folder', 'main.py']\ncontent one two\n\n"
            assert (result.status, result.exit, result.stderr) == ("failed", 1, "end\n")


def test_what_python_does_at_its_end_is_done():
    code = """
import atexit, threading, time
atexit.register(print, "third")
threading.Thread(target=lambda: (time.sleep(0.1), print("second"))).start()
out = open(1, "w", closefd=False)
print("first")
print("fourth", file=out)
"""
    assert sorted(run_code(code).stdout.split()) == ["first", "fourth", "second", "third"]


def test_installed_libraries_can_be_used_on_any_number_of_cores(mode):
    with Box(mode) as box:
        result = box.run(
            "import numpy\nprint(numpy.linalg.inv(numpy.eye(50) * 2).sum())", limits=Limits(time_s=60)
        )
    assert result.stdout == "25.0\n", result


def test_several_run_at_once_and_a_hanging_program_delays_only_itself():
    jobs = [Job("while True: pass"), *(Job("print(int(input()) ** 2)", str(number)) for number in range(20))]
    start = time.monotonic()
    with Boxes(2) as boxes:
        running = [boxes.submit(job, Limits(time_s=2.0)) for job in jobs]
        hung, *rest = (one.result() for one in running)
    assert hung.status == "timeout"
    assert [int(result.stdout) for result in rest] == [number**2 for number in range(20)]
    assert time.monotonic() - start < 30  # of the 42 that each of its time would take


@pytest.mark.parametrize("name", ["/etc/passwd", "../escape", "a/../../b", ""])
def test_a_file_name_that_leads_out_is_refused(name):
    with pytest.raises(ValueError, match="relative to its folder"):
        run_code("", files={name: "x"})


def test_a_sandbox_that_died_is_reported_and_starts_again():
    with Box() as box:
        box.run("")
        box._process.kill()
        box._process.wait()
        with pytest.raises(SandboxError, match="ended in the middle"):
            box.run("print(1)")
        assert box.run("print(1)").stdout == "1\n"


def test_the_mode_of_this_machine_is_the_strongest_that_works():
    assert strongest_isolation().mode == next(mode for mode in MODES if available(mode))
