"""Stand-ins for the clients of Daytona, Modal and E2B, which run commands on this machine.

What their documentation does not have is refused by the signatures here. `alive` of a module says whether its
service answers.
"""

import importlib.machinery
import os
import shutil
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest


def install(patch: pytest.MonkeyPatch, name: str) -> types.ModuleType:
    """Put a stand-in where `import name` finds it."""
    module = {"daytona": daytona, "modal": modal, "e2b": e2b}[name]()
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    patch.setitem(sys.modules, name, module)
    for inner in vars(module).values():
        if isinstance(inner, types.ModuleType):
            patch.setitem(sys.modules, f"{name}.{inner.__name__}", inner)
    return module


def shell(command: str | list[str], env: dict[str, str] | None) -> subprocess.CompletedProcess[str]:
    arguments = command if isinstance(command, list) else ["sh", "-c", command]
    path = {"PATH": "/usr/bin:/bin"}
    return subprocess.run(arguments, env=path | (env or {}), capture_output=True, text=True, check=False)


def made(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.alive, module.created, module.ended = True, [], []  # type: ignore[attr-defined]
    return module


def daytona() -> types.ModuleType:
    it = made("daytona")

    class DaytonaNotFoundError(Exception):
        pass

    class DaytonaConnectionError(Exception):
        pass

    def asked() -> None:
        if not it.alive:
            raise DaytonaConnectionError("no such sandbox")

    @dataclass
    class Resources:
        cpu: int | None = None
        memory: int | None = None
        disk: int | None = None
        gpu: int | None = None

    @dataclass
    class CreateSandboxFromImageParams:
        image: object
        resources: Resources
        network_block_all: bool
        auto_stop_interval: int
        ephemeral: bool

    class Process:
        def exec(self, command: str, cwd=None, env=None, timeout: int | None = None):
            asked()
            assert isinstance(timeout, int)
            ended = shell(command, env)
            return types.SimpleNamespace(exit_code=ended.returncode, result=ended.stdout)

    class FileSystem:
        def upload_file(self, src: bytes, dst: str, timeout: int = 1800) -> None:
            asked()
            Path(dst).write_bytes(src)

        def download_file(self, *args: str) -> bytes:
            asked()
            if not Path(args[0]).is_file():
                raise DaytonaNotFoundError(args[0])
            return Path(args[0]).read_bytes()

    class Daytona:
        def create(self, params, *, timeout: float = 60, on_snapshot_create_logs=None):
            it.created.append(params)
            return types.SimpleNamespace(process=Process(), fs=FileSystem())

        def delete(self, sandbox, timeout: float = 60, wait: bool = False) -> None:
            it.ended.append(sandbox)

    class Image:
        @staticmethod
        def from_dockerfile(path, *, strict_context: bool = False):
            return ("dockerfile", Path(path))

    for one in (DaytonaNotFoundError, Resources, CreateSandboxFromImageParams, Daytona, Image):
        setattr(it, one.__name__, one)
    return it


def modal() -> types.ModuleType:
    it = made("modal")
    it.exception = types.ModuleType("exception")

    class SandboxFilesystemNotFoundError(Exception):
        pass

    class SandboxTerminatedError(Exception):
        pass

    it.exception.SandboxFilesystemNotFoundError = SandboxFilesystemNotFoundError

    def asked() -> None:
        if not it.alive:
            raise SandboxTerminatedError("it has been terminated")

    class Filesystem:
        def read_bytes(self, remote_path: str) -> bytes:
            asked()
            if not Path(remote_path).is_file():
                raise SandboxFilesystemNotFoundError(remote_path)
            return Path(remote_path).read_bytes()

        def write_bytes(self, data: bytes, remote_path: str) -> None:
            asked()
            Path(remote_path).write_bytes(data)

    class Sandbox:
        filesystem = Filesystem()

        @staticmethod
        def create(*args: str, app, image, timeout: int, memory: int | None, block_network: bool):
            it.created.append({"app": app, "image": image, "memory": memory, "block_network": block_network})
            return Sandbox()

        def exec(self, *args: str, timeout: int | None = None, workdir=None, env=None):
            asked()
            assert isinstance(timeout, int)
            ended = shell(list(args), env)
            stdout = types.SimpleNamespace(read=lambda: ended.stdout)
            return types.SimpleNamespace(stdout=stdout, wait=lambda: ended.returncode)

        def terminate(self, *, wait: bool = False) -> None:
            it.ended.append(self)

    class App:
        @staticmethod
        def lookup(name: str, *, client=None, environment_name=None, create_if_missing: bool = False):
            return (name, create_if_missing)

    class Image:
        @staticmethod
        def from_registry(tag: str, secret=None):
            return ("registry", tag)

        @staticmethod
        def from_dockerfile(path, *, context_dir):
            return ("dockerfile", Path(path), Path(context_dir))

    it.Sandbox, it.App, it.Image = Sandbox, App, Image
    return it


def e2b() -> types.ModuleType:
    it = made("e2b")

    class SandboxException(Exception):
        pass

    class FileNotFoundException(SandboxException):
        pass

    class CommandExitException(SandboxException):
        def __init__(self, exit_code: int, stdout: str):
            super().__init__(exit_code)
            self.exit_code, self.stdout = exit_code, stdout

    def asked() -> None:
        if not it.alive:
            raise SandboxException("The sandbox was not found")

    class Commands:
        def run(self, cmd: str, background=None, envs=None, user=None, cwd=None, timeout: float | None = 60):
            asked()
            ended = shell(cmd, envs)
            if ended.returncode:
                raise CommandExitException(ended.returncode, ended.stdout)
            return types.SimpleNamespace(exit_code=0, stdout=ended.stdout)

    class Filesystem:
        def write(self, path: str, data: str | bytes, user=None, request_timeout=None) -> None:
            asked()
            Path(path).write_bytes(data if isinstance(data, bytes) else data.encode())

        def read(self, path: str, format: str = "text", user=None, request_timeout=None):
            asked()
            if not Path(path).is_file():
                raise FileNotFoundException(path)
            return bytearray(Path(path).read_bytes()) if format == "bytes" else Path(path).read_text()

    class Sandbox:
        def __init__(self) -> None:
            self.commands, self.files = Commands(), Filesystem()

        @classmethod
        def create(
            cls, template=None, timeout: int | None = None, *, allow_internet_access: bool | None = None
        ):
            it.created.append({"template": template, "network": allow_internet_access})
            return cls()

        def kill(self) -> bool:
            it.ended.append(self)
            return True

    for one in (FileNotFoundException, CommandExitException, Sandbox):
        setattr(it, one.__name__, one)
    return it


PROGRAMS = "sh bash cat timeout sleep mkdir cp sed head ls rm grep env seq touch"


def make_image(podman: str, folder: Path, name: str) -> str | None:
    """An image of a few programs of this machine, made without a registry. What went wrong; None: nothing."""
    root = folder / "root"
    for made_folder in ("usr/bin", "tmp", "etc"):
        (root / made_folder).mkdir(parents=True)
    (root / "bin").symlink_to("usr/bin")
    for program in PROGRAMS.split():
        if (found := shutil.which(program, path="/usr/bin:/bin")) is None:
            return f"this machine has no {program}"
        told = subprocess.run(["ldd", found], capture_output=True, text=True, check=False).stdout
        libraries = [word for word in told.split() if word.startswith("/")]
        for file in (found, *libraries):
            target = root / "usr/bin" / program if file == found else root / file.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(file).resolve(), target)
    packed = folder / "root.tar"
    subprocess.run(["tar", "-C", str(root), "-cf", str(packed), "."], check=True)
    ended = subprocess.run([podman, "import", str(packed), name], capture_output=True, text=True, check=False)
    return ended.stderr[-300:] if ended.returncode else None


HYBRID = 'umount -l /sys/fs/cgroup/unified; exec /usr/bin/podman "$@"'
"""crun refuses cgroups of both versions beside each other: podman gets a view of the machine without one."""


def podman_here(folder: Path) -> dict:
    """Settings of a sandbox of podman that works here, and the PATH with which it does; skips without one."""
    if not Path("/usr/bin/podman").exists():
        pytest.skip("no podman here")
    script = folder / "podman"
    script.write_text(f"#!/bin/sh\nexec unshare -m sh -c '{HYBRID}' podman \"$@\"\n")
    script.chmod(0o755)
    limits = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]
    image = "siirl-test-programs"
    if problem := make_image("/usr/bin/podman", folder, image):
        pytest.skip(f"podman imports no image: {problem}")
    for path in (os.environ["PATH"], f"{folder}:{os.environ['PATH']}"):
        trial = ["podman", "run", "--rm", "--network=none", *limits, image, "sh", "-c", "echo 42"]
        env = {**os.environ, "PATH": path}
        ended = subprocess.run(trial, env=env, capture_output=True, text=True, check=False)
        if ended.stdout == "42\n":
            return {"path": path, "image": image, "options": limits, "memory_mb": 256, "workdir": "/app"}
    pytest.skip(f"podman runs no container here: {ended.stderr[-300:]}")
