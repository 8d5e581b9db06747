"""The sandbox of this machine, for an episode: commands in one Box, whose files stay until it is closed.

It needs no root, no daemon and no image: what it has is this machine's programs, read-only, and Python with
the packages that are installed beside siirl.
"""

import base64
import json
import os
import posixpath
import sys
import sysconfig
from collections.abc import Mapping

from siirl.errors import SandboxError
from siirl.sandbox.box import Box, strongest_isolation
from siirl.sandbox.isolation import site_packages
from siirl.sandbox.limits import MIB, Limits, Result
from siirl.sandbox.sandboxes import (
    MOST_FILE_BYTES,
    Build,
    ExecResult,
    Sandbox,
    SandboxSettings,
    shell_command,
)

FOLDERS = ("/app", "/workspace", "/logs", "/tests", "/solution", "/oracle", "/root", "/home", "/testbed")
"""What may be written besides /tmp: names that tasks use."""
WORKDIR = "/app"
DISK_MB = 256
FILES_S = 30.0
PROGRAMS = "/tmp/.siirl"
"""Where `python` is found if the machine calls it by another name."""

BEGIN = """
import os, sys
for folder in {folders!r}:
    os.makedirs("/tmp" + folder, exist_ok=True)
os.makedirs({workdir!r}, exist_ok=True)
os.makedirs({programs!r}, exist_ok=True)
for name in ("python", "python3"):
    os.path.lexists({programs!r} + "/" + name) or os.symlink({python!r}, {programs!r} + "/" + name)
"""
EXEC = """
import os, signal
for number in (signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(number, signal.SIG_DFL)
os.chdir({workdir!r})
os.environ.update({env!r})
os.execvp({command!r}[0], {command!r})
"""
PUT = """
import base64, json, os, sys
os.chdir({workdir!r})
for name, text in json.load(sys.stdin).items():
    os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
    with open(name, "wb") as file:
        file.write(base64.b64decode(text))
"""
GET = """
import base64, os, sys
os.chdir({workdir!r})
with open({path!r}, "rb") as file:
    print(base64.b64encode(file.read({most} + 1)).decode())
"""


class LocalSandbox(Sandbox):
    """See Sandbox. No command outlives its end: what it leaves running is killed."""

    def __init__(self, settings: SandboxSettings, build: Build | None = None, program: str = "") -> None:
        """SandboxError where this machine has no namespaces: a command could start no process."""
        if build is not None and build.files is None:
            raise SandboxError(
                f"{build.folder}: its Dockerfile runs commands, and the sandbox 'local' has no images. Set "
                "sandbox.kind=docker."
            )
        isolation = strongest_isolation()
        if isolation.mode == "process":
            raise SandboxError(
                "sandbox.kind=local runs shell commands in namespaces, which this machine refuses: "
                f"{'; '.join(isolation.refused)}. Allow user namespaces, or set sandbox.kind=docker."
            )
        self._settings = settings
        self._workdir = settings.workdir or (build and build.workdir) or WORKDIR
        top = "/" + self._workdir.split("/")[1]
        folders = tuple(dict.fromkeys((*FOLDERS, *((top,) if top != "/tmp" else ()))))
        disk_bytes = (settings.disk_mb or DISK_MB) * MIB
        self._limits = Limits(
            time_s=settings.time_s,
            memory_bytes=(settings.memory_mb or 1 << 20) * MIB,
            file_bytes=disk_bytes,
            processes=settings.processes,
            output_bytes=settings.output_bytes,
            open_files=1024,
        )
        python = os.path.realpath(sys.executable)
        self._env = {
            "PATH": f"{sysconfig.get_config_var('BINDIR')}:/usr/local/bin:/usr/bin:/bin:{PROGRAMS}",
            "PYTHONPATH": ":".join(site_packages()),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # siirl's own may lie where nothing can be read
            "PWD": self._workdir,  # as it is named, not as what it links to
            **(build.env or {} if build else {}),
        }
        self._box = Box(isolation.mode, kept=folders)
        begin = {"folders": folders, "workdir": self._workdir, "programs": PROGRAMS, "python": python}
        try:
            self._python(BEGIN, **begin)
            if build is not None and build.files:
                self.put(build.files)
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
        """See Sandbox. A command that this machine has not given its time is a SandboxError, too."""
        limits = {"time_s": time_s or self._limits.time_s}
        limits["output_bytes"] = output_bytes or self._limits.output_bytes
        code = EXEC.format(
            workdir=self._workdir, env={**self._env, **(env or {})}, command=shell_command(command)
        )
        result = self._run(code, "", **limits)
        exit_code = result.exit if result.exit >= 0 else 128 - result.exit
        output = result.stdout + result.stderr
        return ExecResult(exit_code, output, result.status == "timeout", result.cut)

    def put(self, files: Mapping[str, bytes]) -> None:
        """See Sandbox."""
        self._python(
            PUT,
            json.dumps({name: base64.b64encode(data).decode() for name, data in files.items()}),
            workdir=self._workdir,
        )

    def get(self, path: str) -> bytes | None:
        """See Sandbox. SandboxError for a file of more than MOST_FILE_BYTES."""
        whole = posixpath.join(self._workdir, path)
        code = GET.format(workdir=self._workdir, path=whole, most=MOST_FILE_BYTES)
        result = self._run(code, "", time_s=FILES_S, output_bytes=2 * MOST_FILE_BYTES)
        if result.status == "failed":
            return None
        data = base64.b64decode(result.stdout)
        if len(data) > MOST_FILE_BYTES:
            raise SandboxError(f"{whole} holds more than {MOST_FILE_BYTES} bytes")
        return data

    def close(self) -> None:
        """See Sandbox."""
        self._box.close()

    def _python(self, code: str, stdin: str = "", **values: object) -> None:
        result = self._run(code.format(**values), stdin, time_s=FILES_S)
        if result.status != "ok":
            raise SandboxError(f"files cannot be written in the sandbox: {result.stderr[-500:]}")

    def _run(self, code: str, stdin: str, **limits: float) -> Result:
        result = self._box.run(code, stdin, limits=Limits(**{**self._limits.__dict__, **limits}))
        if result.status == "starved":
            raise SandboxError(
                f"a command has run for {result.cpu_s:.1f} s in {result.time_s:.0f} s on this busy machine: "
                f"it may have {limits['time_s']:g} s"
            )
        return result
