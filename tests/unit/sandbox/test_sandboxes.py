"""Every kind of sandbox of an episode: the same commands, files, limits and deaths, behind one interface."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from siirl.errors import SandboxError
from siirl.sandbox.box import strongest_isolation
from siirl.sandbox.open_sandbox import open_sandbox
from siirl.sandbox.sandboxes import KINDS, Build, Sandbox, SandboxSettings
from tests.support import sandbox_services

pytestmark = pytest.mark.heavy
SERVICES = ("daytona", "modal", "e2b")
UNCONFINED = "no namespaces here: the local sandbox refuses shell commands"


def has_namespaces() -> bool:
    return strongest_isolation().mode != "process"


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return sandbox_services.podman_here(tmp_path_factory.mktemp("podman"))


@pytest.fixture(params=["local", *SERVICES, pytest.param("podman", marks=pytest.mark.slow)], scope="module")
def sandbox(request, tmp_path_factory):
    """(kind, a sandbox, the module that stands for its service)."""
    kind, patch, service = request.param, pytest.MonkeyPatch(), None
    settings = {"kind": kind, "time_s": 5, "output_bytes": 1000}
    if kind in SERVICES:
        service = sandbox_services.install(patch, kind)
        settings |= {"image": "some", "workdir": str(tmp_path_factory.mktemp(kind) / "w")}
    if kind == "podman":
        settings |= request.getfixturevalue("podman")
        patch.setenv("PATH", settings.pop("path"))
    if kind == "local" and not has_namespaces():
        pytest.skip(UNCONFINED)
    with open_sandbox(SandboxSettings.of(settings)) as box:
        yield kind, box, service
    patch.undo()


@pytest.fixture
def box(sandbox) -> Sandbox:
    return sandbox[1]


def test_what_a_command_leaves_is_there_for_the_next(box):
    assert box.exec("mkdir -p a && echo hello > a/b.txt").exit_code == 0
    assert box.exec("cat a/b.txt").output == "hello\n"


def test_a_command_gives_its_exit_code_and_all_that_it_prints_in_order(box):
    result = box.exec('echo one; echo two >&2; echo "$NAME three"; exit 3', env={"NAME": "it's"})
    assert (result.exit_code, result.output) == (3, "one\ntwo\nit's three\n")
    assert not result.timed_out and not result.cut


def test_files_go_in_and_out_byte_by_byte(box):
    data = bytes(range(256))
    here = box.exec("pwd").output.strip()
    box.put({"deep/er/data.bin": data, f"{here}/other/x.sh": b"echo put"})
    assert box.get("deep/er/data.bin") == data
    assert box.get(f"{here}/deep/er/data.bin") == data
    assert box.exec("sh other/x.sh").output == "put\n"
    assert box.get("deep/nothing") is None


def test_a_command_is_killed_when_its_time_is_over(box):
    begin_s = time.monotonic()
    result = box.exec("echo begun; sleep 60", time_s=0.2)
    assert result.timed_out and result.exit_code == 137 and result.output == "begun\n"
    assert time.monotonic() - begin_s < 20
    assert box.exec("echo on").output == "on\n"


def test_what_is_printed_above_the_limit_is_dropped(box):
    result = box.exec("seq 10000; exit 5")
    assert result.cut and len(result.output) == 1000 and result.output.startswith("1\n2\n")
    assert result.exit_code == 5
    assert not box.exec("seq 10000", output_bytes=1 << 20).cut


def test_a_command_that_ends_itself_by_a_signal_is_a_result(box):
    assert box.exec("kill -9 $$").exit_code == 137


def test_a_sandbox_that_died_is_an_error_whatever_it_is_asked(sandbox):
    """Last of this module's tests of each kind: the sandbox is gone afterwards."""
    kind, box, service = sandbox
    if kind == "local":
        os.killpg(box._box._process.pid, signal.SIGKILL)
    elif kind == "podman":
        subprocess.run(["podman", "rm", "--force", "--time=0", box._name], capture_output=True, check=True)
    else:
        service.alive = False
    with pytest.raises(SandboxError):
        box.exec("echo 1")
    if kind != "local":  # which is gone for good
        with pytest.raises(SandboxError):
            box.get("a/b.txt")
        with pytest.raises(SandboxError):
            box.put({"a": b""})
    box.close()
    box.close()


@pytest.mark.skipif(not has_namespaces(), reason=UNCONFINED)
def test_a_local_sandbox_has_no_network_no_files_of_the_machine_and_its_limits():
    settings = SandboxSettings.of({"disk_mb": 4, "memory_mb": 300, "processes": 12})
    with open_sandbox(settings) as box:
        asks = "import socket; socket.create_connection(('127.0.0.1', 9), 1)"
        assert "PermissionError" in box.exec(f'python3 -c "{asks}"').output
        assert box.exec("cat /etc/passwd /etc/shadow").exit_code != 0
        assert box.exec(f"ls {Path(__file__).parent}").exit_code != 0
        assert box.exec("touch /usr/bin/x /etc/x /x").exit_code != 0
        assert box.exec("head -c 9000000 /dev/zero > big; ls -l big").output.count("No space left") == 1
        assert "MemoryError" in box.exec('python3 -c "bytearray(1 << 29)"').output
        assert "Cannot fork" in box.exec("exec dash -c 'for i in $(seq 30); do sleep 9 & done'").output
        box.exec("rm big; (sleep 60 &) ; echo")
        assert box.exec("ls -d /proc/[0-9]*").exit_code != 0
        with open_sandbox(settings) as other:
            box.put({"/tmp/mine": b"1"})
            assert other.get("/tmp/mine") is None


def test_images_and_limits_reach_the_services(monkeypatch, tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM x\n")
    given = {"workdir": str(tmp_path), "network": True}
    made = {name: sandbox_services.install(monkeypatch, name) for name in SERVICES}
    for kind in ("daytona", "modal"):
        settings = SandboxSettings.of({"kind": kind, **given, "memory_mb": 1500})
        with open_sandbox(settings, Build(tmp_path)):
            pass
    with open_sandbox(SandboxSettings.of({"kind": "e2b", "image": "mine", "workdir": str(tmp_path)})):
        pass
    (asked,) = made["daytona"].created
    assert asked.image == ("dockerfile", tmp_path / "Dockerfile") and not asked.network_block_all
    assert asked.resources.memory == 2 and asked.resources.disk is None and asked.ephemeral
    (asked,) = made["modal"].created
    assert asked["image"] == ("dockerfile", tmp_path / "Dockerfile", tmp_path)
    assert asked["memory"] == 1500 and not asked["block_network"]
    assert made["e2b"].created == [{"template": "mine", "network": False}]
    assert all(len(module.ended) == 1 for module in made.values())
    with pytest.raises(SandboxError, match="E2B builds no Dockerfile"):
        open_sandbox(SandboxSettings.of({"kind": "e2b"}), Build(tmp_path))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"kind": "dockre"}, "Did you mean 'docker'"),
        ({"memory": 5}, "Did you mean 'memory_mb'"),
        ({"time_s": 0}, "above 0"),
        ({"time_s": "5"}, "above 0"),
        ({"memory_mb": True}, "above 0"),
        ({"network": 1}, "true or false"),
        ({"kind": "docker", "options": "--init"}, "a list of texts"),
        ({"workdir": "app"}, "an absolute path"),
        ({"image": "python:3.12"}, "has no images"),
        ({"network": True}, "never reach a network"),
        ({"kind": "modal", "disk_mb": 10}, "no limit of files"),
        ({"kind": "e2b", "memory_mb": 10}, "the template has it"),
    ],
)
def test_settings_that_mean_nothing_are_refused(given, told):
    with pytest.raises(ValueError, match=told):
        SandboxSettings.of(given)


@pytest.mark.parametrize("kind", SERVICES)
def test_a_package_that_is_missing_is_named(kind, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SandboxError, match=rf"pip install 'siirl\[{KINDS[kind].module}\]'"):
        open_sandbox(SandboxSettings.of({"kind": kind}))


def test_a_program_that_is_missing_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match="there is no program docker"):
        open_sandbox(SandboxSettings.of({"kind": "docker", "image": "x"}))


@pytest.mark.slow
def test_a_container_ends_with_the_process_that_made_it(podman, monkeypatch):
    monkeypatch.setenv("PATH", podman["path"])
    settings = {"kind": "podman", **podman}
    del settings["path"]
    code = (
        "import os; from siirl.sandbox.open_sandbox import *; "
        f"b = open_sandbox(SandboxSettings.of({settings!r})); print(b._name, flush=True); "
        "os.kill(os.getpid(), 9)"
    )
    name = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    ).stdout.strip()
    assert name.startswith("siirl-")
    until_s = time.monotonic() + 20
    while subprocess.run(["podman", "container", "exists", name], check=False).returncode == 0:
        assert time.monotonic() < until_s, "the container goes on"
        time.sleep(0.2)
