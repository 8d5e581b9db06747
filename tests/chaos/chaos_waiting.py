"""A job between two attempts, with engines that wait for the next one."""

import os
import signal
import time
from pathlib import Path

from chaos_cases import STARTS_AGAIN, Case
from chaos_runs import Chaos, variables_of


class Waiting(Chaos):
    """A job whose first rank is killed in a rollout; of the next attempt one is held as it starts."""

    def reach_start(self):
        """The job, and the processes of its engines, all of which wait: nobody has asked for them yet."""
        self._arm(Case(f"{self._kind} rank 0", "rollout", "SIGKILL", STARTS_AGAIN))
        job = self._start()
        self._wait_until((self.folder / "reached_1").exists, job, "the rollout")
        held = int((self.folder / "reached_1").read_text().partition('"pid": ')[2].partition(",")[0])
        engines = self.engines()
        self._arm(Case(f"{self._kind} rank 1", "start", "", STARTS_AGAIN))
        os.kill(held, signal.SIGKILL)
        self._wait_until((self.folder / "reached_2").exists, job, "the next attempt")
        return job, engines

    def go_on(self, job):
        """From there, to the end of the run."""
        (self.folder / "strike.json").unlink()
        (self.folder / "struck_2").touch()

    def end(self, job, folders):
        """Nothing is left of the run. folders: those of its engines for their temporary files."""
        assert self._end(job) == []
        deadline = time.monotonic() + 20
        while left := [folder for folder in folders if folder.exists()]:
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
        self._check_nothing_is_left()


def folders_of(engines, number=2):
    """Their folders for temporary files, so many."""
    found = {Path(variables_of(pid)["TMPDIR"]) for pid in engines}
    assert len(found) == number and all(folder.is_dir() for folder in found)
    return found
