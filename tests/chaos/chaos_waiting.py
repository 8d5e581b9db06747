"""A job between two attempts, with engines that wait for the next one."""

import contextlib
import os
import signal
import time
from pathlib import Path

from chaos_cases import KEPT, PARALLEL, STARTS_AGAIN, Case
from chaos_runs import Chaos, variables_of

ENGINES = {KEPT: (2, 2), PARALLEL: (1, 4)}
"""How many engines a kind of job has, and how many processes they are."""


class Waiting(Chaos):
    """A job whose first rank is killed in a rollout; of the next attempt one is held as it starts."""

    def reach_start(self):
        """The processes of its engines, all of which wait: nobody has asked for them yet."""
        self._arm(Case(f"{self._kind} rank 0", "rollout", "SIGKILL", STARTS_AGAIN))
        self._job, self._folders = self._start(), set()
        self._wait_until((self.folder / "reached_1").exists, self._job, "the rollout")
        held = int((self.folder / "reached_1").read_text().partition('"pid": ')[2].partition(",")[0])
        engines = self.engines()
        self._arm(Case(f"{self._kind} rank 1", "start", "", STARTS_AGAIN))
        os.kill(held, signal.SIGKILL)
        self._wait_until((self.folder / "reached_2").exists, self._job, "the next attempt")
        self._know(engines)
        return engines

    def engines_after(self, victim, how):
        """Strike a process that waits, and go on: the processes of the engines that run then."""
        os.kill(victim, how)
        time.sleep(0.5)
        (self.folder / "strike.json").unlink()
        (self.folder / "struck_2").touch()
        self._wait_until(lambda: self.steps_done() >= 2, self._job, "the next steps")
        engines = self.engines()
        self._know(engines)
        return engines

    def reach_end(self):
        """Of the run, which has done all its steps."""
        assert self._job.wait(240) == 0, self.console

    def end(self):
        """Nothing is left of the run."""
        assert self._end(self._job) == []
        deadline = time.monotonic() + 20
        while left := [folder for folder in self._folders if folder.exists()]:
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
        self._check_nothing_is_left()

    def _know(self, engines):
        """Remember their folders for temporary files."""
        found = {Path(variables_of(pid)["TMPDIR"]) for pid in engines}
        self._folders |= found
        assert (len(found), len(engines)) == ENGINES[self._kind]
        assert all(folder.is_dir() for folder in found)


@contextlib.contextmanager
def between_attempts(inputs, folder, kind):
    """Such a job, and its engines as long as they wait; when the block ends nothing is left of them."""
    chaos = Waiting(inputs, folder, kind=kind)
    try:
        engines = chaos.reach_start()
        assert chaos.engines() == engines
        yield chaos, engines
    finally:
        chaos.end()
