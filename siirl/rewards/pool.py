"""Reward workers: processes that score samples in parallel, each sample with a time limit of its own.

They are plain subprocesses that talk in frames of JSON over a socket, each answer with the number of its
sample: nothing is pickled, they do not import the rank's main module (and with it torch), and one can be
killed at any time without harm to the others.
"""

import contextlib
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from siirl.deadline import Deadline
from siirl.errors import RewardError
from siirl.rewards.sample import Outcome, Sample
from siirl.sandbox import frames

log = logging.getLogger(__name__)

STARTUP_S = 120.0  # longest import of the user's module
CHUNK_S = 0.02  # a worker is handed about so many seconds of work at once
MAX_CHUNK = 64
SEND_S = 10.0  # longest that a worker's keeper may take to accept samples

END_S = 5.0  # a keeper has killed all that its worker started long before
TWICE = ("died", "timeout")  # failures that may be the machine's: such a sample is scored once more

GIVEN_UP = Outcome(error="not scored: another sample failed")

IsFatal = Callable[[Sample, Outcome], bool]


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen
    pipe: socket.socket
    reader: frames.FrameReader
    deadline: Deadline
    ready: bool = False
    inbox: deque[int] = field(default_factory=deque)  # samples it was handed; it scores the first
    handed_s: float = 0.0


@dataclass
class _Work:
    """The samples of one run: those that wait, those that get a second try at the end, what came of each."""

    samples: Sequence[Sample]
    waiting: deque[int]
    tried: dict[int, str] = field(default_factory=dict)  # sample -> why its first try failed
    late: deque[int] = field(default_factory=deque)
    outcomes: dict[int, Outcome] = field(default_factory=dict)

    def settle(self, index: int, outcome: Outcome) -> None:
        """Take in what came of a sample. One that may be the machine's fault is final the second time."""
        if outcome.failure in TWICE and index not in self.tried:
            self.tried[index] = str(outcome.error)
            self.late.append(index)
        elif outcome.failure in TWICE:
            error = f"{outcome.error}, when tried again; at first: {self.tried[index]}"
            if outcome.error == self.tried[index]:
                error = f"{outcome.error}, twice"
            self.outcomes[index] = replace(outcome, error=error)
        else:
            self.outcomes[index] = outcome


class WorkerPool:
    """Up to num_workers processes, started when there is work. For one thread at a time.

    setup: what worker.py reads first. longer: name of a function -> seconds that it may take on top, since it
    has limits of its own. A sample that takes longer than timeout_s has its worker killed and
    replaced, and so has one whose worker dies; the samples that were behind it go to other workers, it itself
    is tried once more when all others are done, on half of the workers. Samples are handed out one at a time,
    or several when they take little time. Where setup["batch"] says that the function takes many samples, all
    of them go to one worker, and a time limit or a death is theirs together. With a worker ends all that the
    reward functions have started in it.
    """

    def __init__(
        self,
        num_workers: int,
        timeout_s: float,
        setup: dict[str, Any],
        longer: Mapping[str, float] = MappingProxyType({}),
    ):
        self.num_workers = 1 if setup["batch"] else num_workers
        self.timeout_s = timeout_s
        self._longer = dict(longer)
        self.num_deaths = 0
        self.num_tried_again = 0
        self.num_leaks = 0
        self._num_false_starts = 0
        self._chunk = 1
        self._batch = bool(setup["batch"])
        self._setup = setup
        custom = setup["custom"]
        self._name = f"the reward function {custom['name']} of {custom['path']}" if custom else "the rewards"
        self._workers: list[_Worker] = []

    def start_one(self) -> None:
        """Start a worker and wait until it has loaded its functions. RewardError if it cannot."""
        while not any(worker.ready for worker in self._workers):
            if not self._workers:
                self._start()
            self._take_messages(_Work((), deque()))

    def run(
        self, samples: Sequence[Sample], is_fatal: IsFatal = lambda sample, outcome: False
    ) -> list[Outcome]:
        """Score the samples; outcomes in their order. Those left after a fatal outcome are given up.

        A sample that was given up has an outcome with an error and no failure. RewardError if no worker can
        be started.
        """
        work = _Work(samples, deque(range(len(samples))))
        most = self.num_workers
        while len(work.outcomes) < len(samples):
            if not work.waiting and not any(worker.inbox for worker in self._workers):
                work.waiting, work.late = work.late, deque()
                most = max(1, self.num_workers // 2)
                self.num_tried_again += len(work.waiting)
            self._start_missing(len(work.waiting), most)
            self._hand_out(work, most)
            known = len(work.outcomes)
            self._take_messages(work)
            if any(is_fatal(samples[index], work.outcomes[index]) for index in list(work.outcomes)[known:]):
                self._drop([worker for worker in self._workers if worker.inbox])
                break
        return [work.outcomes.get(index, GIVEN_UP) for index in range(len(samples))]

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
            module = "siirl.rewards.scoring_process"
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a reward function prints goes to our log
                env=environment,
            )
        ours.settimeout(SEND_S)
        self._workers.append(_Worker(process, ours, frames.FrameReader(ours), Deadline(STARTUP_S)))
        with contextlib.suppress(OSError):  # it has ended: what is read of it says so
            frames.send(ours, self._setup)

    def _start_missing(self, num_waiting: int, most: int) -> None:
        busy = sum(bool(worker.inbox) for worker in self._workers)
        for _ in range(min(most, busy + num_waiting) - len(self._workers)):
            self._start()

    def _hand_out(self, work: _Work, most: int) -> None:
        idle = [worker for worker in self._workers if worker.ready and not worker.inbox]
        room = most - sum(bool(worker.inbox) for worker in self._workers)
        for worker in idle[: max(0, room)]:
            share = math.ceil(len(work.waiting) / self.num_workers)
            count = share if self._batch else min(self._chunk, share)
            if count == 0:
                return
            worker.inbox.extend(work.waiting.popleft() for _ in range(count))
            worker.handed_s = time.monotonic()
            worker.deadline = Deadline(self._limit_s(work.samples[worker.inbox[0]]))
            message = {"samples": [(index, work.samples[index].__dict__) for index in worker.inbox]}
            try:
                frames.send(worker.pipe, message)
            except OSError:  # it died while it was idle, or takes nothing
                self._bury(worker, work)

    def _take_messages(self, work: _Work) -> None:
        """Wait until something happens; take in what came of samples."""
        active = [worker for worker in self._workers if worker.inbox or not worker.ready]
        if not active:
            return
        patience_s = min(worker.deadline.left_s for worker in active)
        spoke = multiprocessing.connection.wait([worker.pipe for worker in active], patience_s)
        for worker in active:
            if worker.pipe in spoke:
                self._hear(worker, work)
            waits = worker in self._workers and (worker.inbox or not worker.ready)
            if waits and worker.deadline.over:
                self._time_out(worker, work)

    def _hear(self, worker: _Worker, work: _Work) -> None:
        try:
            for message in worker.reader.take():
                if worker.ready:
                    self._take_answer(worker, work, message)
                else:
                    self._greet(worker, message)
        except (EOFError, OSError) as error:
            lost, why = self._lost(worker), f"what its process answered cannot be used: {error}"
            if isinstance(error, frames.FrameError):
                log.warning("a reward worker is replaced: %s", why)
                self._replace(worker, work)
            else:
                why = f"the process that scored it ended: {self._bury(worker, work)}"
            for index in lost:
                work.settle(index, Outcome(error=why, failure="died"))

    def _take_answer(self, worker: _Worker, work: _Work, message: dict[str, Any]) -> None:
        """What came of a sample. FrameError unless it is the one that the worker is at."""
        if not worker.inbox or message["sample"] != worker.inbox[0]:
            wanted = worker.inbox[0] if worker.inbox else "none"
            raise frames.FrameError(f"an answer to sample {message['sample']}, where it is at {wanted}")
        work.settle(worker.inbox.popleft(), Outcome(**message["outcome"]))
        if leak := message["leak"]:
            self.num_leaks += 1
            if self.num_leaks == 1:
                log.warning("a reward worker is replaced: %s. Check what %s keeps.", leak, self._name)
        if message["last"]:
            self._replace(worker, work)
        elif worker.inbox:
            worker.deadline = Deadline(self._limit_s(work.samples[worker.inbox[0]]))
        else:
            took = time.monotonic() - worker.handed_s
            if took < CHUNK_S / 2:
                self._chunk = min(MAX_CHUNK, self._chunk * 2)
            elif took > CHUNK_S:
                self._chunk = max(1, self._chunk // 2)

    def _greet(self, worker: _Worker, message: dict[str, Any]) -> None:
        if fatal := message.get("fatal"):
            self.close()
            raise RewardError(f"a reward worker cannot start: {fatal}. Correct {self._name}.")
        worker.ready, self._num_false_starts = True, 0

    def _time_out(self, worker: _Worker, work: _Work) -> None:
        if not worker.ready:
            self.close()
            raise RewardError(
                f"a reward worker was not ready after {STARTUP_S:.0f} s: importing {self._name} "
                "hangs. Move slow work out of the module's top level."
            )
        for index in self._lost(worker):
            limit_s = self._limit_s(work.samples[index])
            work.settle(index, Outcome(error=f"no score after {limit_s:g} s", failure="timeout"))
        self._replace(worker, work)

    def _limit_s(self, sample: Sample) -> float:
        return self.timeout_s + sum(self._longer.get(name, 0.0) for name, _ in sample.parts)

    def _lost(self, worker: _Worker) -> list[int]:
        """Take out of a worker's inbox what its end costs: the sample at hand, or the whole batch."""
        num_lost = len(worker.inbox) if self._batch else min(1, len(worker.inbox))
        return [worker.inbox.popleft() for _ in range(num_lost)]

    def _bury(self, worker: _Worker, work: _Work) -> str:
        """Account for a worker that has ended by itself: how it ended. What it had not begun waits again."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(END_S)
        code = worker.process.returncode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        self._num_false_starts += not worker.ready
        if self._num_false_starts > 1:
            self.close()
            raise RewardError(
                f"reward workers end before they are ready: {how}. The log has what they printed; check what "
                f"{self._name} does when it is imported."
            )
        self.num_deaths += 1
        log.warning("a reward worker ended by itself (%s); it is replaced", how)
        self._replace(worker, work)
        return how

    def _replace(self, worker: _Worker, work: _Work) -> None:
        """End a worker; what it had not begun waits again, for it and others to be started."""
        work.waiting.extendleft(reversed(worker.inbox))
        self._drop([worker])

    def _drop(self, workers: Sequence[_Worker]) -> None:
        dropped = list(workers)
        for worker in dropped:
            self._workers.remove(worker)
            worker.process.terminate()
            worker.pipe.close()
        for worker in dropped:
            try:
                worker.process.wait(END_S)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
