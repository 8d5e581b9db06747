"""The launcher for one machine: one process per rank, watched until the run has ended. No torch."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from siirl.launch.console import ConsoleTee
from siirl.launch.failure import Death, death_of, first_cause, oom_kill_count, report
from siirl.launch.job import Job

POLL_S = 0.1
GATHER_S = 0.5  # after a first death, wait for those that follow: the one seen first need not be the first
TERM_GRACE_S = 5.0
KILL_GRACE_S = 5.0


@dataclass
class Worker:
    """One rank's process, leader of its own session, so that one signal reaches all that it started."""

    rank: int
    process: subprocess.Popen
    log_offset: int
    returncode: int | None = None

    def ended(self) -> bool:
        """Whether it has ended. Not reaped yet: its process group cannot be taken over by a stranger."""
        if self.returncode is None:
            info = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is not None:
                self.returncode = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        return self.returncode is not None

    def signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


@dataclass
class Stop:
    """Signals that asked this launcher to end. A second one means: at once."""

    numbers: list[int] = field(default_factory=list)

    def __call__(self, number: int, _frame: object) -> None:
        self.numbers.append(number)


def run_local(job: Job) -> int:
    """Run the job's workers on this machine; the exit code is 0 only if all of them ended well.

    2: an error in what the user wrote; 1: any other failure; 130 or 143: stopped by Ctrl-C or SIGTERM. No
    worker, and nothing that a worker started, is left behind.
    """
    job_path = job.prepare()
    oom_before = oom_kill_count()
    tee = ConsoleTee(job.log_path(0))
    stop = Stop()
    workers: list[Worker] = []
    with _signals(stop, tee), _lifeline() as lifeline_fd:
        try:
            _start(job, job_path, tee, lifeline_fd, workers)
            deaths = _watch(job, workers, stop)
        finally:
            _end_all(workers, stop)
            tee.close()
    if stop.numbers:
        print(
            f"siirl: stopped by {signal.Signals(stop.numbers[0]).name}; all workers have ended.",
            file=sys.stderr,
        )
        return 128 + stop.numbers[0]
    if not deaths:
        return 0
    cause = first_cause(deaths)
    if cause.failure and cause.failure.user_error:
        print(f"siirl: {cause.failure.error}", file=sys.stderr)
        return 2
    offset = workers[cause.rank].log_offset
    print(
        report(cause, deaths, job.log_path(cause.rank), offset, oom_kill_count() - oom_before),
        file=sys.stderr,
    )
    return 1


def worker_environment(job: Job, rank: int, port: int) -> dict[str, str]:
    """The environment of one worker: torchrun's variables, and as many threads as its share of the cores."""
    env = dict(os.environ)
    env |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(job.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONUNBUFFERED": "1",
    }
    env.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // job.world_size)))
    if any(name == "lo" for _, name in socket.if_nameindex()):
        env.setdefault(
            "GLOO_SOCKET_IFNAME", "lo"
        )  # all peers are here: independent of how the host name resolves
    return env


def available_cores() -> int:
    """Cores that this process may use: its affinity, and a container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores


def _start(job: Job, job_path: Path, tee: ConsoleTee, lifeline_fd: int, workers: list[Worker]) -> None:
    """Start every rank. Rank 0 takes over the rendezvous socket: its port cannot be lost."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
        port = server.getsockname()[1]
        for rank in range(job.world_size):
            log_path = job.log_path(rank)
            offset = log_path.stat().st_size if log_path.exists() else 0
            env = worker_environment(job, rank, port) | {"SIIRL_LIFELINE_FD": str(lifeline_fd)}
            fds = [lifeline_fd]
            if rank == 0:
                env["SIIRL_STORE_FD"] = str(server.fileno())
                fds.append(server.fileno())
            with contextlib.ExitStack() as stack:
                output = tee.worker_fd if rank == 0 else stack.enter_context(log_path.open("ab"))
                process = subprocess.Popen(
                    [sys.executable, "-m", "siirl.launch.worker", "--job", str(job_path)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=env,
                    pass_fds=fds,
                    start_new_session=True,
                )
            workers.append(Worker(rank, process, offset))
    tee.started()


def _watch(job: Job, workers: list[Worker], stop: Stop) -> list[Death]:
    """Wait until all have ended well, one has failed (returns the deaths), or a signal asks to stop."""
    while not stop.numbers:
        ended = [worker for worker in workers if worker.ended()]
        if any(worker.returncode for worker in ended):
            time.sleep(GATHER_S)
            deaths = [
                death_of(
                    worker.rank,
                    worker.returncode,
                    job.error_path(worker.rank),
                    job.position_path(worker.rank),
                )
                for worker in workers
                if worker.ended() and worker.returncode
            ]
            if (
                first_cause(deaths).order[0] == 3
            ):  # only timeouts and lost peers: where is the rank they waited for?
                _dump_stacks(workers)
            return deaths
        if len(ended) == len(workers):
            return []
        time.sleep(POLL_S)
    return []


def _dump_stacks(workers: list[Worker]) -> None:
    """Have the workers that still run write their Python stacks to their logs."""
    for worker in workers:
        if not worker.ended():
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.process.pid, signal.SIGUSR1)
    time.sleep(0.2)


def _end_all(workers: list[Worker], stop: Stop) -> None:
    """End every worker and all that it started: SIGTERM, then SIGKILL to its process group; then reap it."""
    for worker in workers:
        if not worker.ended():
            worker.signal_group(signal.SIGTERM)
    deadline = time.monotonic() + TERM_GRACE_S
    while (
        not all(worker.ended() for worker in workers)
        and time.monotonic() < deadline
        and len(stop.numbers) < 2
    ):
        time.sleep(POLL_S)
    for worker in workers:
        worker.signal_group(signal.SIGKILL)
    deadline = time.monotonic() + KILL_GRACE_S
    for worker in workers:
        try:
            worker.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            print(
                f"siirl: rank {worker.rank} (pid {worker.process.pid}) does not react to SIGKILL",
                file=sys.stderr,
            )


@contextlib.contextmanager
def _lifeline() -> Iterator[int]:
    """A pipe that nobody writes to: workers hold its reading end, and end when this process goes away."""
    read_fd, write_fd = os.pipe()
    try:
        yield read_fd
    finally:
        os.close(read_fd)
        os.close(write_fd)


@contextlib.contextmanager
def _signals(stop: Stop, tee: ConsoleTee) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP stop the run; a resized terminal resizes the worker's."""
    handlers = dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), stop)
    handlers[signal.SIGWINCH] = lambda _number, _frame: tee.match_size()
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
