"""The sandbox's own process: shuts itself in, then forks a confined child for each run. Runs no user code.

Started as `python launcher.py <descriptor of a socket>` with an empty environment. Messages (frames.py): it
takes a setup, answers {"ready": ...} or {"fatal": why}; then takes {code, stdin, files, limits} and answers
what came of the run, when no process of the run is left. {"stop": reason} during a run ends it. It ends when
the socket closes, and the kernel kills it, and all that it started, when the process that started it dies.
"""

import os
import select
import signal
import socket
import sys
import traceback
from dataclasses import replace
from typing import Any, NoReturn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from siirl.sandbox import child, file_system, frames, linux, seccomp
from siirl.sandbox.processor_clock import TICK_S, RunClock

sys.path.pop(0)

ISOLATED = (
    linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
)


def main() -> int:
    """Serve the socket; the exit code of this process."""
    control = socket.socket(fileno=int(sys.argv[1]))
    setup = frames.receive(control)
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != setup["parent"]:
        return 1
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # no program has it: see child.run
    try:
        confinement, extra_processes = _shut_in(setup)
    except OSError as error:
        frames.send(control, {"fatal": str(error)})
        return 1
    frames.send(
        control, {"ready": True, "seccomp": seccomp.available(), "landlock": linux.landlock_version()}
    )
    signals = _child_signals()
    for number in range(sys.maxsize):
        try:
            request = frames.receive(control)
        except (EOFError, OSError):
            return 0
        if "stop" in request:  # for a run that has ended meanwhile
            continue
        frames.send(control, _run(confinement, number, request, extra_processes, control, signals, proc))
    return 0


def _run(
    confinement: child.Confinement,
    number: int,
    request: dict[str, Any],
    extra_processes: int,
    control: socket.socket,
    signals: int,
    proc: int,
) -> dict[str, Any]:
    if confinement.mode == "process":
        folder = os.path.join(confinement.folder, f"run_{number}")
    else:
        folder = confinement.folder
        if number == 0 or not confinement.kept:
            file_system.renew_tmp(request["limits"]["file_bytes"], confinement.readable)
    standard_input = _memory_file(request["stdin"].encode("utf-8", "replace"))
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _run_child(
            replace(confinement, folder=folder),
            request,
            standard_input,
            extra_processes,
            parent,
        )
    os.close(standard_input)
    clock = RunClock(pid, proc, request["limits"]["time_s"])
    try:
        outcome = _watch(pid, control, signals, clock, confinement.mode)
    finally:
        clock.close()
    return outcome | {"time_s": clock.wall_s, "cpu_s": clock.cpu_s, "own_s": clock.own_s}


def _shut_in(setup: dict[str, Any]) -> tuple[child.Confinement, int]:
    """Enter the namespaces of the mode; where, and how many of our processes count against the child's limit.

    With namespaces only a forked process returns: the first one of the new process-id namespace.
    """
    mode, stage, readable = setup["mode"], setup["stage"], setup["readable"]
    as_root = os.geteuid() == 0
    user = child.private_uid() if as_root and (mode == "namespaces" or setup["readable_by_all"]) else None
    if mode == "process":
        return child.Confinement(mode, stage, readable, user), 0
    if mode == "namespaces":
        linux.unshare(ISOLATED)
    else:
        if user is not None:
            os.chown(stage, user, user)
            child.become(user)
            user = None
        elif as_root:
            raise OSError("a limit on processes does not bind root, and Python cannot be read by other users")
        _new_user_namespace()
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    file_system.enter(stage, readable, setup["kept"])
    confinement = child.Confinement(mode, "/tmp/box", readable, user, bool(setup["kept"]))
    return confinement, 0 if mode == "namespaces" else 2


def _new_user_namespace() -> None:
    """A user namespace in which we have our own ids and all capabilities over the other new namespaces."""
    user, group = os.geteuid(), os.getegid()
    linux.unshare(linux.CLONE_NEWUSER | ISOLATED)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _run_child(
    here: child.Confinement,
    request: dict[str, Any],
    standard_input: int,
    extra_processes: int,
    parent: int,
) -> NoReturn:
    code = 1
    try:
        code = child.run(here, request, standard_input, extra_processes, parent)
    except BaseException:  # noqa: BLE001 - the edge of the process
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _memory_file(content: bytes) -> int:
    descriptor = os.memfd_create("stdin")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _child_signals() -> int:
    """A descriptor that can be read when a child has ended."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(writer)
    return reader


def _watch(pid: int, control: socket.socket, signals: int, clock: RunClock, mode: str) -> dict[str, Any]:
    """Wait for the child, no longer than it may have time, or a stop; leave no process of the run behind."""
    reason: str | None = None
    status: int | None = None
    stopped: set[int] = set()
    while status is None and reason is None:
        ready, _, _ = select.select([control, signals], [], [], TICK_S)
        if signals in ready:
            os.read(signals, 4096)
        elif control in ready:
            try:
                reason = frames.receive(control)["stop"]
            except (EOFError, OSError):
                reason = "closed"
        status, used_s = _reap(pid, stopped)
        clock.tick(used_s, pid in stopped, status is not None)
        if status is None and reason is None:
            reason = clock.verdict()
    if mode != "process":
        assert os.getpid() == 1, "not the first process of a namespace"
        _kill(-1)
    elif status is None:
        _kill(pid)
    used_s = 0.0
    while True:
        try:
            ended, code, usage = os.wait4(-1, 0)
        except ChildProcessError:
            break
        used_s += usage.ru_utime + usage.ru_stime
        status = code if ended == pid else status
    clock.tick(used_s, False, True)
    exit_code = os.waitstatus_to_exitcode(status) if status is not None else -signal.SIGKILL
    return {"exit": exit_code, "reason": reason}


def _reap(pid: int, stopped: set[int]) -> tuple[int | None, float]:
    """Take in the processes that have ended: the status of `pid` if it is among them, and their CPU time.

    stopped: those that are stopped by a signal, brought up to date.
    """
    status, cpu_s = None, 0.0
    while True:
        try:
            ended, code, usage = os.wait4(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        except ChildProcessError:
            return status, cpu_s
        if ended == 0:
            return status, cpu_s
        stopped.discard(ended)
        if os.WIFSTOPPED(code):
            stopped.add(ended)
        elif not os.WIFCONTINUED(code):
            cpu_s += usage.ru_utime + usage.ru_stime
            status = code if ended == pid else status


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(main())
