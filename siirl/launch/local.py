"""The launcher for one machine: one process per rank, watched until the run has ended. No torch."""

import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import Mapping

from siirl.config import from_dict
from siirl.launch.attempts import Attempts, Ended
from siirl.launch.failure import Death, death_of, only_followers, oom_kill_count, without_folder
from siirl.launch.health import Watch
from siirl.launch.job import Job
from siirl.launch.log_sizes import LogSizes
from siirl.launch.memory_checkpoints import memory_folder, step_in
from siirl.launch.outcome import Stop, catch_signals
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
from siirl.observe.amendments import ask_to_save, forget, is_asked
from siirl.observe.heartbeat import FD_VARIABLE as HEARTBEAT
from siirl.observe.heartbeat import heartbeat_file
from siirl.observe.position import read_position

LIFELINE = "SIIRL_LIFELINE_FD"
SAVES = "siirl: ends after this step, with a checkpoint to go on from. Ctrl-C again: at once, without."
GATHER_S = 0.5  # after a first death, wait for those that follow: the one seen first need not be the first


def run_local(job: Job) -> int:
    """Run the job's workers on this machine; the exit code is 0 only if all of them ended well.

    Workers that died for no fault of the user's are started again (see Attempts). The other codes are those
    of `conclude`. No worker, and nothing that a worker started, is left behind.
    """
    with memory_folder(from_dict(job.config)) as folder:
        run = LocalRun(dataclasses.replace(job, memory_dir=folder, amendable=True))
        attempts = Attempts(run.job, lambda: step_in(folder))
        with catch_signals(run.stop, run.match_size), contextlib.closing(run.standbys):
            attempts.run(run.attempt, run.stop)
        return attempts.conclude(run.stop)


class LocalRun:
    """What stays from one attempt to the next, and how one goes."""

    def __init__(self, job: Job):
        self.job, self.stop = job, Stop()
        self.standbys = Standbys(job)
        self.workers: list[Worker] = []
        self._saves = False  # one checkpoint, for which Ctrl-C has asked
        self._tee: ConsoleTee | None = None

    def match_size(self) -> None:
        """The terminal has another size."""
        if self._tee is not None:
            self._tee.match_size()

    def attempt(self, job: Job) -> Ended:
        """Start all workers, and watch them until they have ended."""
        await_groups(self.workers)  # of the attempt before: a device's memory is free only then
        self.job, self.workers = job, []
        job_path, oom_before = str(job.prepare()), oom_kill_count()
        self._tee = tee = ConsoleTee(job.log_path(0))
        with lifeline() as lifeline_fd, heartbeat_file(job.world_size) as heartbeat_fd:
            watch = Watch(self.workers, heartbeat_fd, from_dict(job.config).trainer.stuck_s)
            try:
                fds = {LIFELINE: lifeline_fd, HEARTBEAT: heartbeat_fd}
                self.start(job_path, tee, fds)
                deaths = self._watched(watch, oom_before)
            finally:
                end_all(self.workers, self.stop.at_once)
                tee.close()
        if self._saves:
            if is_asked(job.output_path) and not deaths and not self.stop.at_once():
                self.stop.numbers.clear()  # it was in its last step, and has ended by itself
            forget(job.output_path)
        return Ended(job, deaths, {worker.rank: worker.log_offset for worker in self.workers})

    def start(self, job_path: str, tee: ConsoleTee, fds: Mapping[str, int]) -> None:
        """Start every rank, or have a warm standby be it.

        Rank 0 takes over the rendezvous socket: its port cannot be lost.

        fds: variable -> descriptor that every rank inherits.
        """
        with open_socket("127.0.0.1") as server:
            port = server.getsockname()[1]
            for rank in range(self.job.world_size):
                log_path = self.job.log_path(rank)
                offset = log_path.stat().st_size if log_path.exists() else 0
                given = dict(fds) | ({STORE_FD: server.fileno()} if rank == 0 else {})
                variables = {name: str(fd) for name, fd in given.items()}
                env = worker_environment(self.job, rank, "127.0.0.1", port) | variables
                with contextlib.ExitStack() as stack:
                    output = tee.worker_fd if rank == 0 else stack.enter_context(log_path.open("ab"))
                    descriptor = output if isinstance(output, int) else output.fileno()
                    worker = self.standbys.take(rank, env, descriptor, given)
                    fresh = worker or start_worker(rank, job_path, env, output, list(given.values()))
                    self.workers.append(fresh)
                self.workers[-1].log_offset = offset
        self.standbys.begin_attempt()
        tee.started()

    def _watched(self, watch: Watch, oom_before: int) -> list[Death]:
        """Wait until all have ended well, one has failed or will not go on, or a signal; the deaths."""
        job, workers = self.job, self.workers
        logs, folder = LogSizes(job.log_dir), job.output_path.stat()
        while not self._is_to_end():
            if is_gone(job.output_path, folder):
                return [without_folder(job)]
            logs.look()
            self.standbys.look()
            ended = [worker for worker in workers if worker.ended()]
            if any(worker.returncode for worker in ended):
                return self._deaths(oom_before)
            if len(ended) == len(workers):
                return []
            if (found := watch.trouble()) is not None:
                position = read_position(job.position_path(found.rank))  # before a stopped one goes on
                watch.show_stacks(found.rank)
                return [Death(found.rank, 1, time.time(), None, position, lost=found.what)]
            time.sleep(POLL_S)
        return []

    def _is_to_end(self) -> bool:
        """Whether a signal ends the workers now.

        The first Ctrl-C of a run that saves no checkpoints asks for one after the step that it is in, with
        which the workers end by themselves.
        """
        if self.stop.numbers == [signal.SIGINT] and not self._saves and self._can_save():
            with contextlib.suppress(OSError):
                ask_to_save(self.job.output_path)
                self._saves = True
                print(SAVES, file=sys.stderr, flush=True)
        return bool(self.stop.numbers) and (self.stop.at_once() or not self._saves)

    def _can_save(self) -> bool:
        """Whether it would lose steps: it is in one, and there is no checkpoint to go on from."""
        cfg, position = from_dict(self.job.config), read_position(self.job.position_path(0))
        trains = not (cfg.trainer.val_only or cfg.trainer.rollout_only or cfg.service.enable)
        return trains and cfg.trainer.save_freq <= 0 and position is not None and position.step > 0

    def _deaths(self, oom_before: int) -> list[Death]:
        """Of those that ended badly, some of which the first one may have taken with it."""
        time.sleep(GATHER_S)
        oom_kills = oom_kill_count() - oom_before
        deaths = [
            death_of(self.job, worker.rank, worker.returncode, oom_kills)
            for worker in self.workers
            if worker.ended() and worker.returncode
        ]
        if only_followers(deaths):  # where is the rank that they waited for?
            for worker in self.workers:
                worker.dump_stacks()
            time.sleep(0.2)
        return deaths
