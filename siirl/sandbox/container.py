"""Sandboxes that are containers of Docker or podman, through their command line.

A container lasts as long as its standard input, which we hold: it ends, and is removed, also when this
process is killed.
"""

import hashlib
import io
import os
import posixpath
import selectors
import subprocess
import tarfile
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from siirl.errors import SandboxError
from siirl.sandbox.sandboxes import (
    MIB,
    MOST_FILE_BYTES,
    Build,
    ExecResult,
    Sandbox,
    SandboxSettings,
    shell_command,
)

START_S = 600.0
"""An image may have to be pulled."""
BUILD_S = 3600.0
PATIENCE_S = 15.0
"""How much later than its limit a command must have ended."""
FILES_S = 120.0
READY = b"siirl: ready\n"
WAITS = "mkdir -p \"$0\" && echo 'siirl: ready' && read -r _"
KILLED = (124, 137, 143)
"""Exit codes of what `timeout` has ended."""

_BUILDING = threading.Lock()
_BUILT: dict[Path, str] = {}


class ContainerSandbox(Sandbox):
    """See Sandbox."""

    def __init__(self, settings: SandboxSettings, build: Build | None, program: str) -> None:
        self._program, self._settings = program, settings
        image = settings.image or (build and _image_of(program, build))
        if not image:
            raise SandboxError(
                f"sandbox.kind={settings.kind} needs sandbox.image: the image of the container."
            )
        self._workdir: str | None = None  # that of the image
        self._name = f"siirl-{uuid.uuid4().hex[:16]}"
        limits = ["--network", "bridge" if settings.network else "none", f"--pids-limit={settings.processes}"]
        if settings.memory_mb is not None:
            limits += [f"--memory={settings.memory_mb}m", f"--memory-swap={settings.memory_mb}m"]
        if settings.disk_mb is not None:
            limits += ["--storage-opt", f"size={settings.disk_mb}m"]
        run = ["run", "--interactive", "--rm", "--name", self._name, *limits, *settings.options]
        self._process = subprocess.Popen(
            [program, *run, "--entrypoint", "sh", image, "-c", WAITS, settings.workdir or "."],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C ends us, and by that it
        )
        try:
            self._wait_until_ready()
            self._workdir = settings.workdir
            self._workdir = self.exec("pwd").output.strip()
        except BaseException:
            self.close()
            raise

    def exec(
        self,
        command: str,
        time_s: float | None = None,
        env: Mapping[str, str] | None = None,
        output_bytes: int | None = None,
    ) -> ExecResult:
        """See Sandbox. The image needs `sh` and `timeout`, which ends the command's group of processes."""
        time_s = time_s or self._settings.time_s
        told = ["--workdir", self._workdir] if self._workdir else []
        told += [part for name, value in (env or {}).items() for part in ("--env", f"{name}={value}")]
        within = ["timeout", "-s", "KILL", f"{time_s:g}", *shell_command(command)]
        begin_s = time.monotonic()
        code, output, cut, errors = self._ask(
            ["exec", *told, self._name, *within],
            time_s + PATIENCE_S,
            output_bytes or self._settings.output_bytes,
        )
        if (code is None or (code and errors)) and not self._runs():
            raise SandboxError(f"the container has ended: {errors[-500:]}")
        if code is None:  # something that it has left running holds its output
            return ExecResult(KILLED[1], output.decode("utf-8", "replace"), True, cut)
        timed_out = code in KILLED and time.monotonic() - begin_s >= time_s
        return ExecResult(code, output.decode("utf-8", "replace"), timed_out, cut)

    def put(self, files: Mapping[str, bytes]) -> None:
        """See Sandbox."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            for name, data in files.items():
                entry = tarfile.TarInfo(posixpath.join(self._workdir or "/", name).lstrip("/"))
                entry.size, entry.mode = len(data), 0o755
                tar.addfile(entry, io.BytesIO(data))
        self._checked(["cp", "-", f"{self._name}:/"], packed.getvalue())

    def get(self, path: str) -> bytes | None:
        """See Sandbox. SandboxError for a file of more than MOST_FILE_BYTES."""
        where = posixpath.join(self._workdir or "/", path)
        code, packed, cut, errors = self._ask(
            ["cp", "--follow-link", f"{self._name}:{where}", "-"]
            if self._program == "docker"
            else ["cp", f"{self._name}:{where}", "-"],
            FILES_S,
            MOST_FILE_BYTES,
        )
        if cut:
            raise SandboxError(f"{where} holds more than {MOST_FILE_BYTES} bytes")
        if code != 0:
            if code is None or not self._runs():
                raise SandboxError(f"the container has ended: {errors[-500:]}")
            return None
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            first = next((one for one in tar if one.isfile()), None)
            file = first and tar.extractfile(first)
            return file.read() if file else None

    def close(self) -> None:
        """See Sandbox."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            subprocess.run([self._program, "rm", "--force", self._name], capture_output=True, check=False)
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def _wait_until_ready(self) -> None:
        assert self._process.stdout is not None and self._process.stderr is not None
        line = _line_within(self._process.stdout, START_S)
        if line != READY:
            self._process.kill()
            errors = self._process.stderr.read().decode("utf-8", "replace")
            raise SandboxError(
                f"{self._program} starts no container: {errors.strip()[-500:] or 'no answer'}. Correct "
                "sandbox.image or sandbox.options, or set sandbox.kind=local."
            )

    def _runs(self) -> bool:
        """Whether the container is there, asked of its program: our own client may end a little later."""
        asked = [self._program, "container", "inspect", "--format", "{{.State.Running}}", self._name]
        said = subprocess.run(asked, capture_output=True, timeout=FILES_S, check=False)
        return said.stdout.strip() == b"true"

    def _checked(self, arguments: list[str], stdin: bytes) -> None:
        code, _, _, errors = self._ask(arguments, FILES_S, MIB, stdin)
        if code != 0:
            raise SandboxError(f"{self._program} {arguments[0]} has failed: {errors[-500:]}")

    def _ask(
        self, arguments: list[str], time_s: float, most_bytes: int, stdin: bytes = b""
    ) -> tuple[int | None, bytes, bool, str]:
        """Exit code, standard output up to most_bytes, whether there was more, and errors of the program.

        The code is None if it has not ended within time_s.
        """
        process = subprocess.Popen(
            [self._program, *arguments],
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None and process.stderr is not None
        errors: list[bytes] = []
        kept, num_bytes, until_s = bytearray(), 0, time.monotonic() + time_s
        helpers = [threading.Thread(target=lambda: errors.append(_end_of(process.stderr)), daemon=True)]
        if stdin:
            helpers.append(threading.Thread(target=_feed, args=[process.stdin, stdin], daemon=True))
        for helper in helpers:
            helper.start()
        with process, selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while True:
                if not selector.select(max(0.0, until_s - time.monotonic())):
                    process.kill()
                    return None, bytes(kept), num_bytes > most_bytes, f"no end within {time_s:g} s"
                if not (part := os.read(process.stdout.fileno(), 1 << 16)):
                    break
                num_bytes += len(part)
                kept += part[: max(0, most_bytes - len(kept))]
            code = process.wait(max(1.0, until_s - time.monotonic()))
            helpers[0].join(PATIENCE_S)
        return code, bytes(kept), num_bytes > most_bytes, b"".join(errors).decode("utf-8", "replace").strip()


def _image_of(program: str, build: Build) -> str:
    """The image of a Dockerfile, built once for each content of its folder."""
    with _BUILDING:
        if build.folder not in _BUILT:
            name = f"siirl-task:{_digest(build.folder)}"
            known = subprocess.run([program, "image", "inspect", name], capture_output=True, check=False)
            if known.returncode:
                made = subprocess.run(
                    [program, "build", "--tag", name, str(build.folder)],
                    capture_output=True,
                    text=True,
                    timeout=BUILD_S,
                    check=False,
                )
                if made.returncode:
                    raise SandboxError(
                        f"{program} cannot build {build.folder}: {made.stderr.strip()[-1000:]}"
                    )
            _BUILT[build.folder] = name
        return _BUILT[build.folder]


def _digest(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        data = file.read_bytes()
        digest.update(f"{file.relative_to(folder)}\0{file.stat().st_mode}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def _line_within(pipe: IO[bytes], time_s: float) -> bytes:
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        return pipe.readline() if selector.select(time_s) else b""


def _end_of(pipe: IO[bytes] | None) -> bytes:
    """The last of what comes, however much that is."""
    kept = b""
    while pipe is not None and (part := pipe.read1(1 << 16)):  # type: ignore[attr-defined]
        kept = (kept + part)[-4096:]
    return kept


def _feed(pipe: IO[bytes], data: bytes) -> None:
    try:
        pipe.write(data)
        pipe.close()
    except OSError:  # it has ended, and its exit code says so
        return
