"""Warm standbys: they have imported what a worker imports, and become one when the last has died.

Most of what a restart takes on a CPU is imports. So once an attempt has gone on for a while, there is such a
process for each rank of this machine. It waits on a socket, uses no processor and no device, and ends with
the launcher. One that is not there when it is needed, or does not answer, is done without. No torch.
"""

import contextlib
import json
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from siirl.config import from_dict
from siirl.guarded_files import json_lines
from siirl.launch.job import Job
from siirl.launch.process import Worker, start_worker, worker_environment
from siirl.launch.standby import HERE, READY
from siirl.observe.position import PROGRESS_FILE, read_position

LOOK_S = 1.0


class Pace:
    """Of one attempt: how fast its steps follow each other, and how many are to come."""

    def __init__(self, job: Job, now_s: Callable[[], float] = time.monotonic):
        self._job, self._now_s = job, now_s
        self._looked_s: float | None = None
        self._first: tuple[int, float] | None = None
        self._left_s = 0.0

    def left_s(self) -> float:
        """The least time that the steps behind the current one take, were they as fast as those so far.

        0 where nothing is known yet. The step that runs counts as done, so it cannot look slower than it is.
        """
        now_s = self._now_s()
        if self._looked_s is not None and now_s < self._looked_s + LOOK_S:
            return self._left_s
        self._looked_s = now_s
        position = read_position(self._job.position_path(0))
        if position is None or position.step < 1:
            return self._left_s
        first, since_s = self._first = self._first or (position.step, now_s)
        step_s = (now_s - since_s) / (position.step - first + 1)
        self._left_s = max(0, self._total_steps() - position.step) * step_s
        return self._left_s

    def _total_steps(self) -> int:
        """Of the run, as rank 0 has said; 0: it has not."""
        events = json_lines(self._job.output_path / PROGRESS_FILE)
        own = [event for event in events if event.get("run_id") == self._job.run_id]
        return next((event["total_steps"] or 0 for event in own if event.get("event") == "begin"), 0)


AFTER_S = 60.0
"""Of the first attempt, until one is started: a shorter run gains nothing."""
LONG_S = 120.0
"""A run with at least so much before it is no shorter one."""
AGAIN_S = 10.0
"""Of a later one, which the same machine may well end too, and of a run that is known to be long."""
ANSWER_S = 2.0


@dataclass
class _Standby:
    worker: Worker
    channel: socket.socket
    environment: dict[str, str]
    """It was started with."""
    ready: bool = False

    def looks_ready(self) -> bool:
        with contextlib.suppress(OSError):
            self.ready = self.ready or self.channel.recv(len(READY), socket.MSG_DONTWAIT) == READY
        return self.ready

    def become(self, environment: Mapping[str, str], output: int, fds: Mapping[str, int]) -> bool:
        """Make it a worker; False if it is not able to."""
        if self.worker.ended() or not self.looks_ready():
            return False
        changed = {name: x for name, x in environment.items() if self.environment.get(name) != x}
        message = json.dumps({"environment": changed, "fds": list(fds)}).encode()
        try:
            socket.send_fds(self.channel, [message], [output, *fds.values()])
            self.channel.settimeout(ANSWER_S)
            return self.channel.recv(len(HERE)) == HERE
        except OSError:
            return False

    def end(self) -> None:
        self.channel.close()
        self.worker.signal_group(signal.SIGKILL)
        self.worker.process.wait()


class Standbys:
    """Those of this machine, one for each rank. Only where a run may start again."""

    def __init__(self, job: Job):
        self._job, self._there = job, dict[int, _Standby]()
        self._missing: list[int] = []
        self._begun_s, self._wait_s, self._after_s = 0.0, AFTER_S, AFTER_S
        self._pace = Pace(job)

    def begin_attempt(self) -> None:
        """All have been asked for, and an attempt has begun that may be followed by another."""
        self.close()
        trainer = from_dict(self._job.config).trainer
        self._missing = list(range(self._job.world_size)) if trainer.max_restarts else []
        self._begun_s, self._wait_s, self._pace = time.monotonic(), self._after_s, Pace(self._job)
        self._after_s = min(AFTER_S, AGAIN_S)

    def look(self) -> None:
        """Start the next one if it is time: one after another, beside the work of the run."""
        if not self._missing or not self._is_time():
            return
        if all(one.looks_ready() or one.worker.ended() for one in self._there.values()):
            rank = self._missing.pop(0)
            try:
                self._there[rank] = self._start(rank)
            except OSError:  # no room for another process, or for its files
                self._missing = []

    def _is_time(self) -> bool:
        passed_s = time.monotonic() - self._begun_s
        if passed_s >= self._wait_s:
            return True
        if self._pace.left_s() >= LONG_S and passed_s >= AGAIN_S:
            self._wait_s = 0.0
        return not self._wait_s

    def take(
        self, rank: int, environment: Mapping[str, str], output: int, fds: Mapping[str, int]
    ) -> Worker | None:
        """That of a rank, which is its worker from now on; None if there is none.

        fds: variable -> descriptor that it gets, besides its output.
        """
        one = self._there.pop(rank, None)
        if one is None:
            return None
        if one.become(environment, output, fds):
            one.channel.close()
            return one.worker
        one.end()
        return None

    def close(self) -> None:
        """End those that are there."""
        while self._there:
            self._there.popitem()[1].end()

    def _start(self, rank: int) -> _Standby:
        ours, theirs = socket.socketpair()
        environment = worker_environment(self._job, rank, "127.0.0.1", 0)
        job = str(self._job.output_path / "job.json")
        with theirs:
            worker = start_worker(
                rank, job, environment, subprocess.DEVNULL, [theirs.fileno()], standby=theirs.fileno()
            )
        return _Standby(worker, ours, environment)
