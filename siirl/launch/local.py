"""The launcher for one machine: one process per rank, watched until the run has ended. No torch."""

import contextlib
import socket
import time

from siirl.launch.failure import Death, death_of, only_followers, oom_kill_count
from siirl.launch.job import Job
from siirl.launch.outcome import Stop, catch_signals, conclude
from siirl.launch.output_relay import ConsoleTee
from siirl.launch.process import POLL_S, Worker, end_all, lifeline, start_worker, worker_environment

GATHER_S = 0.5  # after a first death, wait for those that follow: the one seen first need not be the first


def run_local(job: Job) -> int:
    """Run the job's workers on this machine; the exit code is 0 only if all of them ended well.

    The other codes are those of `conclude`. No worker, and nothing that a worker started, is left behind.
    """
    job_path = job.prepare()
    oom_before = oom_kill_count()
    tee = ConsoleTee(job.log_path(0))
    stop = Stop()
    workers: list[Worker] = []
    with catch_signals(stop, tee.match_size), lifeline() as lifeline_fd:
        try:
            _start(job, str(job_path), tee, lifeline_fd, workers)
            deaths = _watch(job, workers, stop, oom_before)
        finally:
            end_all(workers, stop.at_once)
            tee.close()
    return conclude(job, deaths, stop, {worker.rank: worker.log_offset for worker in workers})


def _start(job: Job, job_path: str, tee: ConsoleTee, lifeline_fd: int, workers: list[Worker]) -> None:
    """Start every rank. Rank 0 takes over the rendezvous socket: its port cannot be lost."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
        port = server.getsockname()[1]
        for rank in range(job.world_size):
            log_path = job.log_path(rank)
            offset = log_path.stat().st_size if log_path.exists() else 0
            env = worker_environment(job, rank, "127.0.0.1", port) | {"SIIRL_LIFELINE_FD": str(lifeline_fd)}
            fds = [lifeline_fd]
            if rank == 0:
                env["SIIRL_STORE_FD"] = str(server.fileno())
                fds.append(server.fileno())
            with contextlib.ExitStack() as stack:
                output = tee.worker_fd if rank == 0 else stack.enter_context(log_path.open("ab"))
                workers.append(start_worker(rank, job_path, env, output, fds))
            workers[-1].log_offset = offset
    tee.started()


def _watch(job: Job, workers: list[Worker], stop: Stop, oom_before: int) -> list[Death]:
    """Wait until all have ended well, one has failed (returns the deaths), or a signal asks to stop."""
    while not stop.numbers:
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
        time.sleep(POLL_S)
    return []
