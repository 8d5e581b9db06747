"""Ranks are struck whose engines stay for the next attempt, and engines while they wait for it."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from chaos_cases import KEPT, STARTS_AGAIN, Case
from chaos_chains import chains_of, take
from chaos_runs import Chaos, Result

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@chains_of("kept_engines")
def test_ranks_that_are_struck_find_their_engines_and_the_run_ends_as_if_nothing_had_been(
    chain, inputs, undisturbed, tmp_path
):
    take(chain, inputs, undisturbed, tmp_path)


class Waiting(Chaos):
    """A job whose first rank is killed in a rollout; of the next attempt one is held as it starts."""

    def reach_start(self):
        """The job, and its engines, both of which wait: nobody has asked for them yet."""
        self._arm(Case(f"{KEPT} rank 0", "rollout", "SIGKILL", STARTS_AGAIN))
        job = self._start()
        self._wait_until((self.folder / "reached_1").exists, job, "the rollout")
        held = int((self.folder / "reached_1").read_text().partition('"pid": ')[2].partition(",")[0])
        engines = self.engines()
        self._arm(Case(f"{KEPT} rank 1", "start", "", STARTS_AGAIN))
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


def folders_of(engines):
    found = {Path(psutil.Process(pid).environ()["TMPDIR"]) for pid in engines}
    assert len(found) == 2 and all(folder.is_dir() for folder in found)
    return found


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_an_engine_that_is_struck_while_it_waits_is_done_without(how, inputs, undisturbed, tmp_path):
    chaos = Waiting(inputs, tmp_path, kind=KEPT)
    job, engines = chaos.reach_start()
    folders = folders_of(engines)
    try:
        assert chaos.engines() == engines and len(engines) == 2
        victim = min(engines)
        os.kill(victim, how)
        time.sleep(0.5)
        chaos.go_on(job)
        chaos._wait_until(lambda: chaos.steps_done() >= 2, job, "the next steps")
        now = chaos.engines()
        folders |= folders_of(now)
        assert len(now) == 2 and victim not in now and max(engines) in now
        assert job.wait(240) == 0, chaos.console
    finally:
        chaos.end(job, folders)
    Result.read(chaos.output).check_equal(undisturbed(KEPT))


def test_engines_that_wait_end_with_the_launcher(inputs, tmp_path):
    chaos = Waiting(inputs, tmp_path, kind=KEPT)
    job, engines = chaos.reach_start()
    folders = folders_of(engines)
    try:
        assert chaos.engines() == engines and len(engines) == 2
    finally:
        chaos.end(job, folders)
