"""Worker processes on this machine: how one is started, and how it and all that it started are ended.

No torch.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from siirl.deadline import Deadline
from siirl.launch.job import Job

POLL_S = 0.1
TERM_GRACE_S = 5.0
KILL_GRACE_S = 5.0
WATCH_S = 1.0
STACKS_TAKEN_S = 5.0
STACKS_WRITTEN_S = 2.0


@dataclass
class Worker:
    """One rank's process, leader of its own session, so that one signal reaches all that it started."""

    rank: int
    process: subprocess.Popen
    log_offset: int = 0
    returncode: int | None = None

    def ended(self) -> bool:
        """Whether it has ended. Not reaped yet: its process group cannot be taken over by a stranger."""
        if self.returncode is None:
            try:
                info = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # end_all() in another thread has reaped it
                self.returncode = self.process.wait()
                return True
            if info is not None:
                self.returncode = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        return self.returncode is not None

    def signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def dump_stacks(self) -> None:
        """Have it write its Python stacks to its log, if it still runs.

        Its main thread has to: of a stopped process any thread takes a signal as it goes on, and would read
        the stack of the main one while that runs, which can end the process.
        """
        if not self.ended():
            _signal_main_thread(self.process.pid, signal.SIGUSR1)

    def go_on_for_stacks(self) -> None:
        """A stopped process goes on until it has written its stacks: on a busy machine that takes a while."""
        self.signal_group(signal.SIGCONT)
        Deadline(STACKS_TAKEN_S).until(lambda: self.ended() or not self._has_to_dump(), POLL_S)
        time.sleep(STACKS_WRITTEN_S)

    def _has_to_dump(self) -> bool:
        """Whether dump_stacks() was called and its signal has not been taken yet."""
        with contextlib.suppress(OSError, IndexError, ValueError):
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            of_thread, of_process = (
                int(status.partition(f"\n{name}:")[2].split()[0], 16) for name in ("SigPnd", "ShdPnd")
            )
            return bool((of_thread | of_process) >> (signal.SIGUSR1 - 1) & 1)
        return False


def _signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to the main thread; to the process where the C library cannot."""
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)
    if tgkill is not None:
        tgkill(pid, pid, number)
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def start_worker(
    rank: int,
    job: str,
    env: Mapping[str, str],
    output: int | IO,
    fds: Sequence[int],
    stdin: int | IO = subprocess.DEVNULL,
    cwd: str | None = None,
    standby: int | None = None,
) -> Worker:
    """Start the process of a rank. job: path of its job file; fds: what it inherits besides its output.

    standby: one of fds, where it is to wait for the word to be the worker.
    """
    waits = [] if standby is None else ["--standby", str(standby)]
    process = subprocess.Popen(
        [sys.executable, "-m", "siirl.launch.worker_entry", "--job", job, *waits],
        stdin=stdin,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=dict(env),
        cwd=cwd,
        pass_fds=fds,
        start_new_session=True,
    )
    return Worker(rank, process)


def end_all(workers: Sequence[Worker], at_once: Callable[[], bool] = lambda: False) -> None:
    """End every worker and all that it started: SIGTERM, then SIGKILL to its process group; then reap it.

    at_once: asked again and again; true ends the grace time after SIGTERM.
    """
    for worker in workers:
        if not worker.ended():
            worker.signal_group(signal.SIGTERM)
    Deadline(TERM_GRACE_S).until(lambda: all(one.ended() for one in workers) or at_once(), POLL_S)
    for worker in workers:
        worker.signal_group(signal.SIGKILL)
    grace = Deadline(KILL_GRACE_S)
    for worker in workers:
        try:
            worker.process.wait(max(0.1, grace.left_s))
        except subprocess.TimeoutExpired:
            print(
                f"siirl: rank {worker.rank} (pid {worker.process.pid}) does not react to SIGKILL",
                file=sys.stderr,
            )


def await_groups(workers: Sequence[Worker]) -> None:
    """Wait until all that ended workers had started is gone too, for a few seconds at most."""
    grace = Deadline(KILL_GRACE_S)
    for worker in workers:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            while not grace.over:
                os.killpg(worker.process.pid, 0)
                time.sleep(POLL_S)


def worker_environment(
    job: Job, rank: int, address: str, port: int, base: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The environment of one worker: torchrun's variables, and as many threads as its share of the cores."""
    env = dict(base) | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % job.local_world_size),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(job.local_world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "PYTHONUNBUFFERED": "1",
    }
    env.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // job.local_world_size)))
    # Threads that wait give their core away after about 50 us. By default they spin for milliseconds, which
    # on cores that other programs use, too, made a step of a small model take many times as long.
    env.setdefault("GOMP_SPINCOUNT", "1000")
    if job.world_size == job.local_world_size and any(name == "lo" for _, name in socket.if_nameindex()):
        # All peers are here: independent of how the host name resolves.
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return env


def available_cores() -> int:
    """Cores that this process may use: its affinity, and a container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores


def end_with_parent() -> None:
    """From now on, end this process soon after its parent is gone, even if that was killed.

    The leader of a process group ends all of it.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_S)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


@contextlib.contextmanager
def lifeline() -> Iterator[int]:
    """A pipe that nobody writes to: workers hold its reading end, and end when this process goes away."""
    read_fd, write_fd = os.pipe()
    try:
        yield read_fd
    finally:
        os.close(read_fd)
        os.close(write_fd)
