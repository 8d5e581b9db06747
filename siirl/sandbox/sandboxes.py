"""Sandboxes of episodes: where commands of an agent run, behind one interface whoever provides them.

A sandbox lasts for an episode: files that one command leaves are there for the next. Which kind it is, and
its limits, are the mapping `sandbox` of an environment; KINDS is the one table of the kinds. Standard library
only.
"""

import importlib.util
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from siirl.spelling import suggest

MIB = 1 << 20
MOST_FILE_BYTES = 64 * MIB
"""What one `get` or `put` may carry."""


@dataclass(frozen=True)
class SandboxSettings:
    """The key `sandbox` of an environment."""

    kind: str = "local"
    """A key of KINDS."""
    image: str | None = None
    """Of the container; E2B: the template. None: what the task says."""
    workdir: str | None = None
    """Where commands run, made if it is not there. None: as the image has it; local: /app."""
    time_s: float = 60.0
    """Of one command. local: processor time; one that waits may take three times as long."""
    memory_mb: int | None = 2048
    """Of the sandbox; local: of each process. None: no limit of ours."""
    disk_mb: int | None = None
    """All files. None: no limit of ours; local: 256, as they are in memory."""
    output_bytes: int = 65536
    """Of one command; what it prints beyond is dropped."""
    processes: int = 256
    """At once."""
    network: bool = False
    """Whether commands reach it."""
    options: tuple[str, ...] = ()
    """docker and podman: more arguments of `run`."""

    @classmethod
    def of(cls, given: Mapping[str, Any] | None, who: str = "sandbox") -> Self:
        """What a mapping of the configuration says. ValueError for a key or a value that is none."""
        values: dict[str, Any] = dict(given or {})
        known = {one.name: one for one in fields(cls)}
        for name, value in values.items():
            if name not in known:
                raise ValueError(f"{who}.{name} is no key of a sandbox. {suggest(name, known)}")
            if problem := _problem(name, value):
                raise ValueError(f"{who}.{name} = {value!r}: {problem}.")
        settings = cls(**{**values, "options": tuple(values.get("options", ()))})
        if settings.kind not in KINDS:
            raise ValueError(f"{who}.kind = {settings.kind!r} is no sandbox. {suggest(settings.kind, KINDS)}")
        for name in KINDS[settings.kind].lacks:
            if values.get(name) is not None and getattr(settings, name) != known[name].default:
                kind = settings.kind
                raise ValueError(f"{who}.{name} = {values[name]!r}: {LACKS[name].format(kind=kind)}")
        return settings


def _problem(name: str, value: Any) -> str | None:
    match name:
        case "kind" | "image" | "workdir":
            good, wanted = isinstance(value, str) or (value is None and name != "kind"), "a text"
            if name == "workdir" and isinstance(value, str):
                good, wanted = value.startswith("/"), "an absolute path"
        case "network":
            good, wanted = isinstance(value, bool), "true or false"
        case "options":
            good = isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)
            wanted = "a list of texts"
        case _:
            kinds = int | float if name == "time_s" else int
            good = isinstance(value, kinds) and not isinstance(value, bool) and value > 0
            good = good or (value is None and name in ("memory_mb", "disk_mb"))
            wanted = "a number above 0"
    return None if good else f"it must be {wanted}"


@dataclass(frozen=True)
class ExecResult:
    """What came of a command."""

    exit_code: int
    """As a shell gives it; 128 and the number of the signal that ended it."""
    output: str
    """What it printed, stdout and stderr in one."""
    timed_out: bool = False
    """It was killed as its time was over."""
    cut: bool = False
    """It has printed more than output holds."""


class Sandbox(ABC):
    """A running sandbox, for one thread at a time, and no longer than the thread that made it.

    SandboxError from any method means that it has died, or that its service does not answer: nothing that a
    command does raises it, so nobody is rewarded for it.
    """

    @abstractmethod
    def exec(
        self,
        command: str,
        time_s: float | None = None,
        env: Mapping[str, str] | None = None,
        output_bytes: int | None = None,
    ) -> ExecResult:
        """Run a shell command in the working directory to its end. None: the limit of the settings."""

    @abstractmethod
    def put(self, files: Mapping[str, bytes]) -> None:
        """Write files, with the folders that they need; relative names are below the working directory."""

    @abstractmethod
    def get(self, path: str) -> bytes | None:
        """The bytes of a file; None if there is no such file."""

    @abstractmethod
    def close(self) -> None:
        """End it, with all that runs in it. Idempotent, never raises."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Build:
    """The folder of a Dockerfile, of which the image is made where the settings name none."""

    folder: Path
    workdir: str | None = None
    """Its last WORKDIR."""
    env: Mapping[str, str] | None = None
    """Its ENV."""
    files: Mapping[str, bytes] | None = None
    """What it copies, by path, if copying is all that it does; None where it runs commands, too."""


@dataclass(frozen=True)
class Kind:
    """A row of KINDS."""

    program: str = ""
    """The command that is asked; empty for none."""
    module: str = ""
    """The package that is asked; empty for none."""
    lacks: tuple[str, ...] = ()
    """Keys that mean nothing here."""


LACKS = {
    "image": "the sandbox {kind!r} has no images. Leave it out, or set sandbox.kind=docker.",
    "network": "commands of the sandbox {kind!r} never reach a network. Set sandbox.kind=docker.",
    "options": "these are of docker and podman. Leave them out.",
    "memory_mb": "the template has it. Leave it out.",
    "disk_mb": "the sandbox {kind!r} has no limit of files of its own. Leave it out.",
    "processes": "the sandbox {kind!r} has no limit of processes. Leave it out.",
}
"""Key -> what is wrong with it where a kind lacks it."""

KINDS = {
    "local": Kind(lacks=("image", "network", "options")),
    "docker": Kind(program="docker"),
    "podman": Kind(program="podman"),
    "daytona": Kind(module="daytona", lacks=("options", "processes")),
    "modal": Kind(module="modal", lacks=("options", "processes", "disk_mb")),
    "e2b": Kind(
        module="e2b",
        lacks=("options", "processes", "disk_mb", "memory_mb"),
    ),
}
"""sandbox.kind -> what it needs and lacks. Where it is: siirl/sandbox/open_sandbox.py."""


def missing_here(settings: SandboxSettings) -> str | None:
    """What a kind needs and is not installed, and the fix."""
    kind, what = KINDS[settings.kind], f"sandbox.kind={settings.kind}"
    if kind.module and importlib.util.find_spec(kind.module) is None:
        fix = f"Install it: pip install 'siirl[{kind.module}]'."
        return f"{what}: the package {kind.module} is not installed. {fix}"
    if kind.program and shutil.which(kind.program) is None:
        return f"{what}: there is no program {kind.program} here. Install it, or set sandbox.kind=local."
    return None


def shell_command(command: str) -> list[str]:
    """How a command is run: by bash where there is one, with its errors among what it prints."""
    return [
        "sh",
        "-c",
        'command -v bash >/dev/null && exec bash -c "$0"; exec sh -c "$0"',
        f"exec 2>&1\n{command}",
    ]
