"""How far a program can be shut in: the modes, and what may be read in them.

| mode | needs | file system | processes |
|---|---|---|---|
| namespaces | root with CAP_SYS_ADMIN | of its own | `Limits.processes`, in a process-id namespace |
| user_namespaces | unprivileged user namespaces | of its own | the same |
| process | nothing | the machine's, through Landlock where the kernel has it | one, threads aside |

In every mode: no network (seccomp, and a network namespace in the first two), resource limits, an empty
environment, no privilege, a user id of its own where the caller is root and Python is readable by all.
"""

import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from siirl.sandbox.file_system import SYSTEM

MODES = ("namespaces", "user_namespaces", "process")


@dataclass(frozen=True)
class Isolation:
    """What holds a sandboxed program."""

    mode: str
    seccomp: bool
    """Whether the kernel filters its system calls."""
    landlock: int
    """The kernel's Landlock version, 0 for none."""
    refused: tuple[str, ...] = ()
    """Why stronger modes do not work here, one line each."""

    def gaps(self) -> list[str]:
        """What cannot be guaranteed here, one line each."""
        found = [f"a stronger mode does not work here: {why}" for why in self.refused]
        if self.mode == "process" and not self.landlock:
            found.append("it can read, and where its user may also write, files of this machine")
        if self.mode == "process":
            found.append("the total size of the files that it writes is not limited")
        if not self.seccomp:
            found.append("system calls are not filtered: only Python's own functions refuse the network")
        return found


def site_packages() -> list[str]:
    """Where the installed libraries are."""
    return list(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))


def readable_paths() -> list[str]:
    """What a program may read: the system's libraries, Python's own and the installed ones; no path twice."""
    python = [sysconfig.get_config_var("installed_base"), sysconfig.get_path("stdlib"), *site_packages()]
    paths: list[str] = []
    for path in [*SYSTEM, *(os.path.realpath(path) for path in python)]:
        covered = any(Path(path).is_relative_to(other) for other in paths if not os.path.islink(other))
        if os.path.lexists(path) and not covered:
            paths.append(path)
    return paths


def readable_by_all(path: str) -> bool:
    """Whether a user without rights of its own can read what is in a folder."""
    folder = Path(path).resolve()
    return all(parent.stat().st_mode & 0o001 for parent in (folder, *folder.parents)) and bool(
        folder.stat().st_mode & 0o004
    )
