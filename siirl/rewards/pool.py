"""Reward workers: processes that score samples in parallel, each sample with a time limit of its own.

They are plain subprocesses that talk JSON over a socket: nothing is pickled, they do not import the rank's
main module (and with it torch), and one can be killed at any time without harm to the others.
"""

import contextlib
import json
import logging
import math
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from siirl.errors import RewardError
from siirl.rewards.sample import Outcome, Sample

log = logging.getLogger(__name__)

STARTUP_S = 120.0  # longest import of the user's module
CHUNK_S = 0.02  # a worker is handed about so many seconds of work at once
MAX_CHUNK = 64

GIVEN_UP = Outcome(error="not scored: another sample failed")

IsFatal = Callable[[Sample, Outcome], bool]


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen
    pipe: Connection
    deadline: float
    ready: bool = False
    inbox: deque[int] = field(default_factory=deque)  # samples it was handed; it scores the first
    handed_s: float = 0.0


class WorkerPool:
    """Up to num_workers processes, started when there is work. For one thread at a time.

    setup: what worker.py reads first. A sample that takes longer than timeout_s has its worker killed and
    replaced, and so has one whose worker dies; the samples that were behind it go to other workers. Samples
    are handed out one at a time, or several when they take little time. Where setup["batch"] says that the
    function takes many samples, all of them go to one worker, and a time limit or a death is theirs together.
    """

    def __init__(self, num_workers: int, timeout_s: float, setup: dict[str, Any]):
        self.num_workers = 1 if setup["batch"] else num_workers
        self.timeout_s = timeout_s
        self.num_deaths = 0
        self._chunk = 1
        self._batch = bool(setup["batch"])
        self._setup = json.dumps(setup).encode()
        self._workers: list[_Worker] = []

    def start_one(self) -> None:
        """Start a worker and wait until it has loaded its functions. RewardError if it cannot."""
        self._start()
        while not all(worker.ready for worker in self._workers):
            self._take_messages(deque(), {})

    def run(
        self, samples: Sequence[Sample], is_fatal: IsFatal = lambda sample, outcome: False
    ) -> list[Outcome]:
        """Score the samples; outcomes in their order. Those left after a fatal outcome are given up.

        A sample that was given up has an outcome with an error and no failure. RewardError if no worker can
        be started.
        """
        waiting = deque(range(len(samples)))
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < len(samples):
            self._start_missing(len(waiting))
            self._hand_out(samples, waiting)
            known = len(outcomes)
            self._take_messages(waiting, outcomes)
            if any(is_fatal(samples[index], outcomes[index]) for index in list(outcomes)[known:]):
                self._drop([worker for worker in self._workers if worker.inbox])
                break
        return [outcomes.get(index, GIVEN_UP) for index in range(len(samples))]

    def close(self) -> None:
        """End all workers. A later run starts new ones."""
        self._drop(self._workers)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": "1",
        }
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "siirl.rewards.worker", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a reward function prints goes to our log
                env=environment,
            )
        pipe = Connection(ours.detach())
        self._workers.append(_Worker(process, pipe, time.monotonic() + STARTUP_S))
        pipe.send_bytes(self._setup)

    def _start_missing(self, num_waiting: int) -> None:
        busy = sum(bool(worker.inbox) for worker in self._workers)
        for _ in range(min(self.num_workers, busy + num_waiting) - len(self._workers)):
            self._start()

    def _hand_out(self, samples: Sequence[Sample], waiting: deque[int]) -> None:
        for worker in [worker for worker in self._workers if worker.ready and not worker.inbox]:
            share = math.ceil(len(waiting) / self.num_workers)
            count = share if self._batch else min(self._chunk, share)
            if count == 0:
                return
            worker.inbox.extend(waiting.popleft() for _ in range(count))
            worker.handed_s = time.monotonic()
            worker.deadline = worker.handed_s + self.timeout_s
            message = json.dumps([samples[index].__dict__ for index in worker.inbox]).encode()
            try:
                worker.pipe.send_bytes(message)
            except OSError:  # it died while it was idle
                self._bury(worker, waiting)

    def _take_messages(self, waiting: deque[int], outcomes: dict[int, Outcome]) -> None:
        """Wait until something happens; add what came of samples to `outcomes`."""
        active = [worker for worker in self._workers if worker.inbox or not worker.ready]
        if not active:
            return
        patience = min(worker.deadline for worker in active) - time.monotonic()
        spoke = multiprocessing.connection.wait([worker.pipe for worker in active], max(0.0, patience))
        for worker in active:
            if worker.pipe in spoke:
                self._hear(worker, waiting, outcomes)
            elif time.monotonic() >= worker.deadline:
                self._time_out(worker, waiting, outcomes)

    def _hear(self, worker: _Worker, waiting: deque[int], outcomes: dict[int, Outcome]) -> None:
        try:
            while True:
                message = json.loads(worker.pipe.recv_bytes())
                if not worker.ready:
                    self._greet(worker, message)
                    return
                outcomes[worker.inbox.popleft()] = Outcome(**message)
                if not worker.inbox or not worker.pipe.poll():
                    break
        except (EOFError, OSError):
            lost = self._lost(worker)
            how = self._bury(worker, waiting)
            error = f"the process that scored it ended: {how}"
            outcomes |= {index: Outcome(error=error, failure="died") for index in lost}
            return
        now = time.monotonic()
        worker.deadline = now + self.timeout_s
        if not worker.inbox:
            took = now - worker.handed_s
            if took < CHUNK_S / 2:
                self._chunk = min(MAX_CHUNK, self._chunk * 2)
            elif took > CHUNK_S:
                self._chunk = max(1, self._chunk // 2)

    def _greet(self, worker: _Worker, message: dict[str, Any]) -> None:
        if fatal := message.get("fatal"):
            self.close()
            raise RewardError(f"a reward worker cannot start: {fatal}. Correct the reward function.")
        worker.ready = True

    def _time_out(self, worker: _Worker, waiting: deque[int], outcomes: dict[int, Outcome]) -> None:
        if not worker.ready:
            self.close()
            raise RewardError(
                f"a reward worker was not ready after {STARTUP_S:.0f} s: importing the reward function "
                "hangs. Move slow work out of the module's top level."
            )
        error = f"no score after {self.timeout_s:g} s"
        outcomes |= {index: Outcome(error=error, failure="timeout") for index in self._lost(worker)}
        waiting.extendleft(reversed(worker.inbox))
        self._drop([worker])

    def _lost(self, worker: _Worker) -> list[int]:
        """Take out of a worker's inbox what its end costs: the sample at hand, or the whole batch."""
        num_lost = len(worker.inbox) if self._batch else min(1, len(worker.inbox))
        return [worker.inbox.popleft() for _ in range(num_lost)]

    def _bury(self, worker: _Worker, waiting: deque[int]) -> str:
        """Account for a worker that has ended by itself: how it ended. What it had not begun waits again."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(timeout=5)
        code = worker.process.returncode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        if not worker.ready:
            self.close()
            raise RewardError(f"a reward worker ended before it was ready: {how}. The log has its output.")
        self.num_deaths += 1
        log.warning("a reward worker ended by itself (%s); it is replaced", how)
        waiting.extendleft(reversed(worker.inbox))
        self._drop([worker])
        return how

    def _drop(self, workers: Sequence[_Worker]) -> None:
        for worker in list(workers):
            self._workers.remove(worker)
            worker.process.kill()
            worker.process.wait()
            worker.pipe.close()
