"""The last steps of a sandboxed process: it gives up what it can do, and then runs the user's program."""

import atexit
import math
import os
import random
import resource
import signal
import sys
import threading
import traceback
import types
from dataclasses import dataclass
from typing import Any

from siirl.sandbox import linux, seccomp
from siirl.sandbox.file_system import DEVICES
from siirl.sandbox.linux import PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, drop_capabilities, prctl

MAIN = "main.py"
FIRST_PRIVATE_UID, PRIVATE_UID_BITS = 0x60000000, 28
REFUSED_EVENTS = (
    "socket.__new__",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.exec",
    "os.system",
    "os.kill",
)


@dataclass(frozen=True)
class Confinement:
    """What a program is confined to."""

    mode: str
    """One of isolation.MODES."""
    folder: str
    """Its working directory, made and filled by it."""
    readable: list[str]
    """The paths that it may read."""
    user: int | None
    """The user id that it takes; None to stay."""
    kept: bool = False
    """The files of one program are there for the next."""


def private_uid() -> int:
    """A user id that no account and, almost surely, no other sandbox of this machine has."""
    return FIRST_PRIVATE_UID + random.SystemRandom().getrandbits(PRIVATE_UID_BITS)


def become(user: int) -> None:
    """Take a user id for good, and with it lose root's capabilities."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def run(
    confinement: Confinement, request: dict[str, Any], descriptor: int, extra_processes: int, parent: int
) -> int:
    """Confine this process and run the program in it, stdin from `descriptor`; the exit code.

    extra_processes: how many of the sandbox's own processes the kernel counts with the program's. parent: the
    process that forked this one, with which it ends. Whatever the program raises is printed to stderr, and
    SystemExit obeyed, as Python does.
    """
    os.dup2(descriptor, 0)
    os.closerange(3, 1024)
    os.setsid()
    os.makedirs(confinement.folder, exist_ok=confinement.kept)
    if confinement.user is not None:
        os.chown(confinement.folder, confinement.user, confinement.user)
        become(confinement.user)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        return 1
    os.chdir(confinement.folder)
    _write_files(request["files"] | {MAIN: request["code"]})
    os.environ.clear()
    os.environ.update(request["environment"] | {"HOME": confinement.folder, "TMPDIR": confinement.folder})
    module = _main_module(confinement.folder, request["site_packages"])
    _limit(request["limits"], extra_processes if confinement.mode != "process" else None)
    _confine(confinement)
    return _execute(module, request["code"])


def _confine(confinement: Confinement) -> None:
    alone = confinement.mode == "process"
    drop_capabilities()
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    linux.restrict_files(
        confinement.readable if alone else ["/"],
        [confinement.folder, *DEVICES] if alone else ["/tmp", *DEVICES],
    )
    if seccomp.available():
        seccomp.restrict(os.getpid() if alone else None)
    else:
        sys.addaudithook(_refuse_event)


def _refuse_event(event: str, arguments: tuple[Any, ...]) -> None:
    if event in REFUSED_EVENTS:
        raise PermissionError(f"{event} is not allowed in the sandbox")


def _limit(limits: dict[str, Any], extra_processes: int | None) -> None:
    cpu_s = math.ceil(limits["time_s"])
    bounds = {
        resource.RLIMIT_CPU: (cpu_s, cpu_s + 1),
        resource.RLIMIT_FSIZE: (limits["file_bytes"],) * 2,
        resource.RLIMIT_NOFILE: (limits["open_files"],) * 2,
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_AS: (limits["memory_bytes"],) * 2,
    }
    if extra_processes is not None:
        bounds[resource.RLIMIT_NPROC] = (limits["processes"] + extra_processes,) * 2
    for which, (soft, hard) in bounds.items():
        highest = resource.getrlimit(which)[1]
        if highest != resource.RLIM_INFINITY:
            soft, hard = min(soft, highest), min(hard, highest)
        resource.setrlimit(which, (soft, hard))


def _write_files(files: dict[str, str]) -> None:
    for name, content in files.items():
        if folder := os.path.dirname(name):
            os.makedirs(folder, exist_ok=True)
        with open(name, "w", encoding="utf-8") as file:
            file.write(content)


def _main_module(folder: str, site_packages: list[str]) -> types.ModuleType:
    """A fresh __main__; Python's own and the installed libraries on the path, none of ours loaded."""
    for name in [name for name in sys.modules if name.split(".")[0] == "siirl"]:
        del sys.modules[name]
    sys.path[:] = [folder, *(path for path in sys.path if path), *site_packages]
    sys.argv[:] = [MAIN]
    module = types.ModuleType("__main__")
    module.__file__ = MAIN
    sys.modules["__main__"] = module
    return module


def _execute(module: types.ModuleType, code: str) -> int:
    """Run the program and what Python runs at its end, short of the slow end of the interpreter."""
    status = 0
    try:
        exec(compile(code, MAIN, "exec", dont_inherit=True), module.__dict__)
    except SystemExit as stop:
        status = _exit_code(stop.code)
    except BaseException as error:  # noqa: BLE001 - the edge to the program
        trace = error.__traceback__
        traceback.print_exception(type(error), error, trace and trace.tb_next)
        status = 1
    main = threading.main_thread()
    while others := [thread for thread in threading.enumerate() if not thread.daemon and thread is not main]:
        others[0].join()
    atexit._run_exitfuncs()
    module.__dict__.clear()  # closes, and so writes out, the files that it left open
    for stream in (sys.stdout, sys.stderr, sys.__stdout__):
        if stream is not None:
            stream.flush()
    return status


def _exit_code(given: object) -> int:
    if given is None or isinstance(given, int):
        return (given or 0) & 0xFF
    print(given, file=sys.stderr)
    return 1
