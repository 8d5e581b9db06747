"""Sandboxes of services, through their own clients, imported when one is started: Daytona, Modal and E2B.

Each client reads its key from the environment (DAYTONA_API_KEY, MODAL_TOKEN_ID and MODAL_TOKEN_SECRET,
E2B_API_KEY). Whatever a service raises besides what a command did is a SandboxError.
"""

import contextlib
import posixpath
import shlex
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from siirl.errors import SandboxError
from siirl.sandbox.sandboxes import Build, ExecResult, Sandbox, SandboxSettings, shell_command

LIFE_S = 24 * 3600
"""After so long a service ends a sandbox by itself, as when this process was killed; E2B: an hour."""
E2B_LIFE_S = 3600
PATIENCE_S = 15
KILLED = 137
GIB_IN_MB = 1024
APP = "siirl"


@contextlib.contextmanager
def _asked(service: str) -> Iterator[None]:
    """What the client of a service raises is a SandboxError."""
    try:
        yield
    except SandboxError:
        raise
    except Exception as error:  # the edge to the service
        raise SandboxError(f"{service}: {type(error).__name__}: {error}") from error


class HostedSandbox(Sandbox):
    """What the three have in common: a command has `timeout` around it, and its output is cut here."""

    service = ""

    def __init__(self, settings: SandboxSettings, build: Build | None = None, program: str = "") -> None:
        self._settings = settings
        self._box: Any = None
        with _asked(self.service):
            self._box = self._create(settings, build)
        try:
            folder = settings.workdir
            if folder is not None and (made := self.exec(f"mkdir -p {shlex.quote(folder)}")).exit_code:
                raise SandboxError(f"{self.service} cannot make {settings.workdir}: {made.output[-500:]}")
            self._workdir = settings.workdir or self.exec("pwd").output.strip() or "/"
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _create(self, settings: SandboxSettings, build: Build | None) -> Any:
        """Start one at the service."""

    @abstractmethod
    def _run(self, command: str, env: dict[str, str], time_s: float) -> tuple[int, str]:
        """Exit code and output. Whatever it raises is the service's."""

    @abstractmethod
    def _read(self, path: str) -> bytes | None:
        """A file; None if there is none."""

    @abstractmethod
    def _write(self, path: str, data: bytes) -> None:
        """Write a file, whose folder is there."""

    @abstractmethod
    def _end(self) -> None:
        """End it at the service."""

    def exec(
        self,
        command: str,
        time_s: float | None = None,
        env: Mapping[str, str] | None = None,
        output_bytes: int | None = None,
    ) -> ExecResult:
        """See Sandbox."""
        time_s, most = time_s or self._settings.time_s, output_bytes or self._settings.output_bytes
        where = getattr(self, "_workdir", None)
        within = shlex.join(["timeout", "-s", "KILL", f"{time_s:g}", *shell_command(command)])
        begin_s = time.monotonic()
        with _asked(self.service):
            code, said = self._run(
                f"cd {shlex.quote(where)} && {within}" if where else within, dict(env or {}), time_s
            )
        timed_out = code in (-1, 124, KILLED) and time.monotonic() - begin_s >= time_s
        data = said.encode("utf-8", "replace")
        return ExecResult(
            KILLED if code < 0 else code, data[:most].decode("utf-8", "replace"), timed_out, len(data) > most
        )

    def put(self, files: Mapping[str, bytes]) -> None:
        """See Sandbox."""
        paths = {posixpath.join(self._workdir, name): data for name, data in files.items()}
        folders = sorted({posixpath.dirname(path) for path in paths} - {"/"})
        if folders and (made := self.exec(f"mkdir -p {shlex.join(folders)}")).exit_code:
            raise SandboxError(f"{self.service} cannot make folders: {made.output[-500:]}")
        with _asked(self.service):
            for path, data in paths.items():
                self._write(path, data)

    def get(self, path: str) -> bytes | None:
        """See Sandbox."""
        with _asked(self.service):
            return self._read(posixpath.join(self._workdir, path))

    def close(self) -> None:
        """See Sandbox."""
        if self._box is not None:
            with contextlib.suppress(Exception):  # the service ends it by itself
                self._end()
            self._box = None


class DaytonaSandbox(HostedSandbox):
    """A sandbox of Daytona. Memory and disk are whole GiB there, rounded up."""

    service = "Daytona"

    def _create(self, settings: SandboxSettings, build: Build | None) -> Any:
        from daytona import CreateSandboxFromImageParams, Daytona, Image, Resources

        image = settings.image or (build and Image.from_dockerfile(build.folder / "Dockerfile"))
        if not image:
            raise SandboxError("sandbox.kind=daytona needs sandbox.image: the image of the sandbox.")
        gib = [mb and -(-mb // GIB_IN_MB) for mb in (settings.memory_mb, settings.disk_mb)]
        self._client = Daytona()
        return self._client.create(
            CreateSandboxFromImageParams(
                image=image,
                resources=Resources(memory=gib[0], disk=gib[1]),
                network_block_all=not settings.network,
                auto_stop_interval=LIFE_S // 60,
                ephemeral=True,
            ),
            timeout=LIFE_S,
        )

    def _run(self, command: str, env: dict[str, str], time_s: float) -> tuple[int, str]:
        said = self._box.process.exec(command, env=env, timeout=int(time_s) + PATIENCE_S)
        return int(said.exit_code), said.result

    def _read(self, path: str) -> bytes | None:
        from daytona import DaytonaNotFoundError

        try:
            return self._box.fs.download_file(path)
        except DaytonaNotFoundError:
            return None

    def _write(self, path: str, data: bytes) -> None:
        self._box.fs.upload_file(data, path)

    def _end(self) -> None:
        self._client.delete(self._box)


class ModalSandbox(HostedSandbox):
    """A sandbox of Modal, in the app `siirl`."""

    service = "Modal"

    def _create(self, settings: SandboxSettings, build: Build | None) -> Any:
        import modal

        if settings.image:
            image = modal.Image.from_registry(settings.image)
        elif build is not None:
            image = modal.Image.from_dockerfile(build.folder / "Dockerfile", context_dir=build.folder)
        else:
            raise SandboxError("sandbox.kind=modal needs sandbox.image: the image of the sandbox.")
        return modal.Sandbox.create(
            app=modal.App.lookup(APP, create_if_missing=True),
            image=image,
            timeout=LIFE_S,
            memory=settings.memory_mb,
            block_network=not settings.network,
        )

    def _run(self, command: str, env: dict[str, str], time_s: float) -> tuple[int, str]:
        process = self._box.exec("sh", "-c", command, env=dict(env), timeout=int(time_s) + PATIENCE_S)
        output = process.stdout.read()
        return int(process.wait()), output

    def _read(self, path: str) -> bytes | None:
        from modal.exception import SandboxFilesystemNotFoundError

        try:
            return self._box.filesystem.read_bytes(path)
        except SandboxFilesystemNotFoundError:
            return None

    def _write(self, path: str, data: bytes) -> None:
        self._box.filesystem.write_bytes(data, path)

    def _end(self) -> None:
        self._box.terminate()


class E2BSandbox(HostedSandbox):
    """A sandbox of E2B, of a template, which has its size."""

    service = "E2B"

    def _create(self, settings: SandboxSettings, build: Build | None) -> Any:
        from e2b import Sandbox as Service

        if settings.image is None and build is not None:
            raise SandboxError(
                f"{build.folder}: E2B builds no Dockerfile of a task. Make a template of it, and set "
                "sandbox.image to its name."
            )
        return Service.create(settings.image, timeout=E2B_LIFE_S, allow_internet_access=settings.network)

    def _run(self, command: str, env: dict[str, str], time_s: float) -> tuple[int, str]:
        from e2b import CommandExitException

        try:
            said = self._box.commands.run(command, envs=env, timeout=time_s + PATIENCE_S)
        except CommandExitException as ended:  # any code but 0
            said = ended
        return int(said.exit_code), said.stdout

    def _read(self, path: str) -> bytes | None:
        from e2b import FileNotFoundException

        try:
            return bytes(self._box.files.read(path, format="bytes"))
        except FileNotFoundException:
            return None

    def _write(self, path: str, data: bytes) -> None:
        self._box.files.write(path, data)

    def _end(self) -> None:
        self._box.kill()
