"""The launcher for one machine: one process per rank, watched until the run has ended. No torch."""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Mapping

from siirl.config import from_dict
from siirl.launch.attempts import Attempts
from siirl.launch.engine_keeper import EngineKeeper
from siirl.launch.failure import Death, death_of, only_followers, oom_kill_count, without_folder
from siirl.launch.health import Watch
from siirl.launch.job import Job
from siirl.launch.log_sizes import LogSizes
from siirl.launch.memory_checkpoints import memory_folder, step_in
from siirl.launch.outcome import Stop, catch_signals, conclude
from siirl.launch.output_relay import ConsoleTee
from siirl.launch.process import (
    POLL_S,
    Worker,
    await_groups,
    end_all,
    lifeline,
    start_worker,
    worker_environment,
)
from siirl.launch.rendezvous import STORE_FD, open_socket
from siirl.launch.run_folder import is_gone
from siirl.launch.standbys import Standbys
from siirl.observe.heartbeat import FD_VARIABLE as HEARTBEAT
from siirl.observe.heartbeat import heartbeat_file
from siirl.observe.position import read_position

LIFELINE = "SIIRL_LIFELINE_FD"
GATHER_S = 0.5  # after a first death, wait for those that follow: the one seen first need not be the first


def run_local(job: Job) -> int:
    """Run the job's workers on this machine; the exit code is 0 only if all of them ended well.

    Workers that died for no fault of the user's are started again (see Attempts). The other codes are those
    of `conclude`. No worker, and nothing that a worker started, is left behind.
    """
    with memory_folder(from_dict(job.config)) as folder:
        return _run(dataclasses.replace(job, memory_dir=folder))


def _run(job: Job) -> int:
    stop, standbys, keeper = Stop(), Standbys(job), EngineKeeper(from_dict(job.config))
    attempts = Attempts(job, lambda: step_in(job.memory_dir), keeper.logs)
    consoles: list[ConsoleTee] = []

    def match_size() -> None:
        for console in consoles[-1:]:
            console.match_size()

    with catch_signals(stop, match_size), contextlib.closing(standbys), contextlib.closing(keeper):
        while True:
            workers: list[Worker] = []
            deaths = _attempt(attempts.job, consoles, workers, standbys, keeper, stop)
            offsets = {worker.rank: worker.log_offset for worker in workers}
            if stop.numbers or not deaths or not (told := attempts.after(deaths, offsets)):
                break
            print(told, file=sys.stderr, flush=True)
            await_groups(workers)  # a device's memory is free only then,
            keeper.settle()  # and when engines that stay have given theirs back
    return conclude(attempts.job, deaths, stop, offsets, attempts.fruitless)


def _attempt(
    job: Job,
    consoles: list[ConsoleTee],
    workers: list[Worker],
    standbys: Standbys,
    keeper: EngineKeeper,
    stop: Stop,
) -> list[Death]:
    """Start all workers, and watch them until they have ended; how those died that ended badly."""
    job_path = job.prepare()
    oom_before = oom_kill_count()
    tee = ConsoleTee(job.log_path(0))
    consoles.append(tee)
    with lifeline() as lifeline_fd, heartbeat_file(job.world_size) as heartbeat_fd:
        watch = Watch(workers, heartbeat_fd, from_dict(job.config).trainer.stuck_s)
        try:
            fds = {LIFELINE: lifeline_fd, HEARTBEAT: heartbeat_fd, **keeper.descriptors()}
            _start(job, str(job_path), tee, fds, workers, standbys)
            return _watch(job, workers, watch, standbys, stop, oom_before)
        finally:
            end_all(workers, stop.at_once)
            tee.close()


def _start(
    job: Job,
    job_path: str,
    tee: ConsoleTee,
    fds: Mapping[str, int],
    workers: list[Worker],
    standbys: Standbys,
) -> None:
    """Start every rank, or have the process that stands by be it.

    Rank 0 takes over the rendezvous socket: its port cannot be lost.

    fds: variable -> descriptor that every rank inherits.
    """
    with open_socket("127.0.0.1") as server:
        port = server.getsockname()[1]
        for rank in range(job.world_size):
            log_path = job.log_path(rank)
            offset = log_path.stat().st_size if log_path.exists() else 0
            given = dict(fds) | ({STORE_FD: server.fileno()} if rank == 0 else {})
            variables = {name: str(fd) for name, fd in given.items()}
            env = worker_environment(job, rank, "127.0.0.1", port) | variables
            with contextlib.ExitStack() as stack:
                output = tee.worker_fd if rank == 0 else stack.enter_context(log_path.open("ab"))
                descriptor = output if isinstance(output, int) else output.fileno()
                worker = standbys.take(rank, env, descriptor, given)
                workers.append(worker or start_worker(rank, job_path, env, output, list(given.values())))
            workers[-1].log_offset = offset
    standbys.begin_attempt()
    tee.started()


def _watch(
    job: Job, workers: list[Worker], watch: Watch, standbys: Standbys, stop: Stop, oom_before: int
) -> list[Death]:
    """Wait until all have ended well, one has failed or will not go on (returns the deaths), or a signal."""
    logs, folder = LogSizes(job.log_dir), job.output_path.stat()
    while not stop.numbers:
        if is_gone(job.output_path, folder):
            return [without_folder(job)]
        logs.look()
        standbys.look()
        ended = [worker for worker in workers if worker.ended()]
        if any(worker.returncode for worker in ended):
            time.sleep(GATHER_S)
            oom_kills = oom_kill_count() - oom_before
            deaths = [
                death_of(job, worker.rank, worker.returncode, oom_kills)
                for worker in workers
                if worker.ended() and worker.returncode
            ]
            if only_followers(deaths):  # where is the rank that they waited for?
                for worker in workers:
                    worker.dump_stacks()
                time.sleep(0.2)
            return deaths
        if len(ended) == len(workers):
            return []
        if (found := watch.trouble()) is not None:
            position = read_position(job.position_path(found.rank))  # before a stopped one goes on
            watch.show_stacks(found.rank)
            return [Death(found.rank, 1, time.time(), None, position, lost=found.what)]
        time.sleep(POLL_S)
    return []
