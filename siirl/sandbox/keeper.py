"""The keeper of a worker: a process that leaves nothing behind of the worker and all that it started.

The worker runs code of users, which may start processes, in sessions of their own, too, and may be killed at
any time. Orphans become children of the keeper, which the kernel calls a subreaper (prctl(2)).
"""

import contextlib
import os
import resource
import select
import signal
import socket
import sys

from siirl.sandbox.linux import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, prctl
from siirl.sandbox.shared_frames import SharedFrames

WATCH_S = 1.0
LAST_WORDS_S = 5.0  # for what a worker has said before it ended


def keep(pipe: int, frames: SharedFrames | None = None) -> None:
    """Fork: returns in the new process, the worker. This one, the keeper, ends when the worker does.

    frames: how the worker talks; what goes to and fro is handed on over `pipe`, which the worker then lacks.

    It ends the same way, with the same exit code or signal, once no process is left; and after a SIGTERM, or
    when the other end of `pipe`, a socket, is closed, once it has killed them all.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    os.setsid()  # out of reach of the signals that end the group of the rank: it must do its work first
    parent, keeper = os.getppid(), os.getpid()
    news, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)
    worker = os.fork()
    if worker == 0:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.close(news)
        os.close(wake)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(1)
        if frames is not None:
            os.close(pipe)
            frames.in_fork()
        return
    relay = frames.relay(socket.socket(fileno=pipe)) if frames is not None else None
    status = _watch(worker, parent, pipe, news)
    if frames is not None and relay is not None:
        frames.end()
        relay.join(LAST_WORDS_S)
    _end_children()
    _end_like(status)


def _watch(worker: int, parent: int, pipe: int, news: int) -> int:
    """Wait for the worker's end: its status; 0 if it is to be ended."""
    poller = select.poll()
    poller.register(pipe, 0)  # only whether the other end is there
    poller.register(news, select.POLLIN)
    while os.getppid() == parent:
        for descriptor, _ in poller.poll(1000 * WATCH_S):
            if descriptor == pipe or signal.SIGTERM in os.read(news, 4096):
                return 0
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == worker:
                    return ended[1]
    return 0


def _end_children() -> None:
    """Kill and reap children until there are none: those of a killed one become ours."""
    while True:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return


def _children() -> list[int]:
    """Process ids of this process's children. Source: proc(5), /proc/PID/stat."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                found.append(int(name))
    return found


def _end_like(status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    sys.stdout.flush()
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)
