"""Runs a job by the command that users type, strikes it as cases say, and looks at what is left of it."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from chaos_cases import COMMAND_AGAIN, DISKS, NAMED, PHASES, STARTS_AGAIN, Case
from job_harness import ROOT, Finished, Inputs, overrides

from siirl.checkpoint import files

HOOK = Path(__file__).parent / "hook"
STEPS = 24
KEYS = (
    f"trainer.total_training_steps={STEPS}",
    *("trainer.n_gpus_per_node=2", "trainer.logger=[console]"),
    *("trainer.save_freq=2", "trainer.memory_checkpoint_freq=1", "trainer.overwrite=true"),
    *("trainer.test_freq=3", "trainer.val_before_train=False"),
    *("reward_model.num_workers=1", "custom_reward_function.timeout_s=2"),
)
"""Disk in even steps, memory in odd ones, validation in every third."""
REWARD = '''

import sitecustomize

share = compute_score


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """A sample in work is a phase of its own."""
    sitecustomize.reach("scoring")
    return share(data_source, solution_str, ground_truth, extra_info)
'''
MEASURED = re.compile(r"time|perf/|memory/|.*_s$|weight_sync/|reward/(timeout|tried_again|worker_death)$")
"""Metrics that differ between two runs of the same command, or say what came of a reward worker; a new engine
gets weights that an older one has already."""
PATIENCE_S = 150
STOPPED_S = 1.0
"""How long a launcher is stopped, while the run goes on to its next steps."""
CODES = {"SIGTERM": 143, "SIGINT": 130, "SIGHUP": 129, "SIGKILL": -9}


def make_inputs(folder: Path) -> Inputs:
    made = Inputs.make(folder)
    made.reward.write_text(made.reward.read_text() + REWARD)
    return made


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run gives, less what time it took."""

    metrics: list[dict[str, Any]]
    weights: dict[str, Any]

    @classmethod
    def read(cls, output: Path) -> "Result":
        done = Finished.read(output)
        lines = [{name: x for name, x in line.items() if not MEASURED.match(name)} for line in done.lines]
        return cls(lines, done.weights())

    def check_equal(self, other: "Result") -> None:
        assert self.metrics == other.metrics and len(self.metrics) == STEPS
        assert self.weights.keys() == other.weights.keys() and len(self.weights) > 5
        assert all(tensor.equal(other.weights[name]) for name, tensor in self.weights.items())


DISK = """
mkdir -p "$1"; [ "$1" = /dev/shm ] && size=8m || size=24m
mount -t tmpfs -o size=$size tmpfs "$1" || exit 99
disk=$1 copy=$2; shift 2
"$@"; code=$?
rm -f "$disk/filler"; cp -r "$disk/." "$copy"; exit $code
"""
"""Runs a command with a small disk at $1, whose files are copied to $2 in the end."""


class Chaos:
    """A job in a folder, struck again and again. disk: where it has a small one of its own, if it has."""

    def __init__(self, inputs: Inputs, folder: Path, disk: str = ""):
        self.folder, self.output, self._disk = folder, folder / "out", folder / disk
        self.checkpoints = self.output / "checkpoints"
        if disk == "checkpoints":
            self.checkpoints = self._disk
        keys = [*KEYS, f"trainer.default_local_dir={self.checkpoints}"]
        self._words = [sys.executable, "-m", "siirl.main_dag", *overrides(inputs, self.output, *keys)]
        if disk:
            self._words = ["unshare", "-m", "sh", "-c", DISK, "sh", *self._words]
            self._words[6:6] = [str(self._disk), str(folder / "copy")]
        self._shared_before = shared_memory()
        self._number = 0
        self.took_s: list[float] = []
        """Of each strike, in order: until what was struck was done, or all processes had ended."""

    def run(self, cases: Sequence[Case] = ()) -> Result:
        """All cases, one after another; then the run must end well and leave nothing."""
        if cases:
            self._arm(cases[0])
        job = self._start()
        try:
            for number, case in enumerate(cases, 1):
                job = self._strike(job, case, next(iter(cases[number:]), None))
            code = job.wait(PATIENCE_S)
            assert code == 0 and "leaked" not in self.console, self.console
        finally:
            left = self._end(job)
        assert left == [], f"orphans: {left}"
        self._check_nothing_is_left()
        return Result.read(self.output)

    @property
    def console(self) -> str:
        return (self.folder / "console").read_text()

    def _start(self) -> subprocess.Popen:
        paths = [str(HOOK), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {"PYTHONPATH": os.pathsep.join(paths), "CHAOS_DIR": str(self.folder)}
        with (self.folder / "console").open("ab") as file:
            return subprocess.Popen(
                self._words, env=os.environ | environment | {"OMP_NUM_THREADS": "1"}, stdout=file, stderr=file
            )

    def _arm(self, case: Case | None) -> None:
        """Say where the next strike is to be, if there is one; not before what the last one cost is done."""
        path, self._number = self.folder / "strike.json", self._number + 1
        if case is None:
            path.unlink()
            return
        wanted = {"number": self._number, "phase": PHASES[case.phase], "rank": case.rank, "step": 0}
        path.with_suffix(".new").write_text(json.dumps(wanted))
        os.replace(path.with_suffix(".new"), path)

    def _strike(self, job: subprocess.Popen, case: Case, following: Case | None) -> subprocess.Popen:
        """Strike where the job is held, and see that it goes on as it must; the job of now."""
        reached = self.folder / f"reached_{self._number}"
        self._wait_until(reached.exists, job, f"the phase of {case.name}")
        held, failed = json.loads(reached.read_text()), self.attempts()
        step = self.steps_done() + 1 if case.phase == "scoring" else held["step"]
        struck_s = time.monotonic()
        if case.who in DISKS:
            self._strike_disk(held["pid"])
        else:
            victims = self._victims(job, case, held["pid"])
            assert victims, case.name
            for pid in victims:
                os.kill(pid, signal.Signals[case.how])
        (self.folder / f"struck_{self._number}").touch()
        if (case.who, case.how) == ("launcher", "SIGSTOP"):
            time.sleep(STOPPED_S)
            os.kill(job.pid, signal.SIGCONT)
        if case.then == COMMAND_AGAIN:
            assert job.wait(60) == CODES[case.how], self.console
            assert case.how == "SIGKILL" or f"siirl: stopped by {case.how}" in self.console
            assert self._left(15) == [], case.name
            self._check_checkpoints()
            self.took_s.append(time.monotonic() - struck_s)
            self._arm(following)
            return self._start()
        if case.then == NAMED:
            assert job.wait(60) == 2, self.console
            said = self.console.splitlines()[-1]
            assert said.startswith("siirl: the checkpoint of step ") and "No space left on device" in said, (
                self.console
            )
            self.took_s.append(time.monotonic() - struck_s)
            return job
        if case.then == STARTS_AGAIN:
            self._wait_until(lambda: len(self.attempts()) > len(failed), job, f"the end of {case.name}")
            self._check_attempt(case, step, self.attempts()[-1])
        if case.phase == "export":
            self._wait_until(lambda: job.poll() is not None, None, case.name)
        else:
            self._wait_until(lambda: self.steps_done() >= max(step, 1), job, f"the step of {case.name}")
        self.took_s.append(time.monotonic() - struck_s)
        if case.then != STARTS_AGAIN:
            assert self.attempts() == failed, case.name
        self._arm(following)
        return job

    def _strike_disk(self, held: int) -> None:
        """Fill the disk, as the process that is held sees it."""
        filler = Path(f"/proc/{held}/root{self._disk}/filler")
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while file.write(bytes(1 << 16)):
                file.flush()

    def run_to_the_cause(self, case: Case) -> None:
        """One strike that the run cannot get over: it must say so, and leave nothing half done."""
        assert case.then == NAMED
        self._arm(case)
        job = self._start()
        try:
            job = self._strike(job, case, None)
        finally:
            left = self._end(job)
        assert left == [], f"orphans: {left}"
        copy = self.folder / "copy"
        self.checkpoints = copy if self._disk == self.checkpoints else copy / "checkpoints"
        self._check_checkpoints()

    def _check_attempt(self, case: Case, step: int, attempt: dict[str, Any]) -> None:
        """The record names who was struck, where, and how."""
        cause = f"killed by {case.how}"
        assert attempt["cause"].startswith(cause), (case, attempt)
        assert attempt["rank"] == case.rank, (case, attempt)
        if not case.phase.startswith("write"):
            assert (attempt["node"], attempt["step"]) == (PHASES[case.phase], step), (case, attempt)

    def _victims(self, job: subprocess.Popen, case: Case, held: int) -> list[int]:
        match case.who:
            case "launcher":
                return [job.pid]
            case "reward worker" | "reward keeper":
                scorers = self._processes("siirl.rewards.scoring_process")
                pids = {process.pid for process in scorers if process.environ()["RANK"] == str(case.rank)}
                worker = case.who == "reward worker"
                return [pid for pid in pids if (psutil.Process(pid).ppid() in pids) == worker]
            case "memory keeper":
                return [process.pid for process in self._processes("siirl-keeper")]
        return [held]

    def _processes(self, word: str = "") -> list[psutil.Process]:
        """Of this job, with a word in their command: by their environment, wherever they hang."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("CHAOS_DIR") == str(self.folder) and word in " ".join(
                    process.cmdline()
                ):
                    found.append(process)
        return found

    def _left(self, patience_s: float) -> list[str]:
        """The job's processes that do not end by themselves."""
        _, left = psutil.wait_procs(self._processes(), timeout=patience_s)
        return [str(process) for process in left if process.status() != psutil.STATUS_ZOMBIE]

    def _end(self, job: subprocess.Popen) -> list[str]:
        """End the job; the processes that outlived it, which are killed."""
        job.kill()
        job.wait()
        left = self._left(15)
        for process in self._processes():
            process.kill()
        return left

    def _check_nothing_is_left(self) -> None:
        self._check_checkpoints()
        root = self.checkpoints
        assert not [path for path in root.iterdir() if path.suffix in (".tmp", ".old", ".deleted")]
        made, deadline = shared_memory() - self._shared_before, time.monotonic() + 10
        while made := {name for name in made & shared_memory() if not in_use(name)}:
            assert time.monotonic() < deadline, f"left in shared memory: {made}"
            time.sleep(0.2)  # the name of another test's semaphore lives for a moment

    def _check_checkpoints(self) -> None:
        """Each one that has its name is whole."""
        root = self.checkpoints
        for step in files.saved_steps(root) if root.exists() else ():
            files.verify(files.step_folder(root, step))

    def attempts(self) -> list[dict[str, Any]]:
        """Those that failed."""
        path = self.output / "attempts.jsonl"
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def steps_done(self) -> int:
        path = self.output / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return json.loads(lines[-1])["step"] if lines else 0

    def _wait_until(self, what: Callable[[], bool], job: subprocess.Popen | None, word: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            ended = job is not None and job.poll() is not None
            if ended and what():
                return
            assert not ended and time.monotonic() < deadline, f"waited for {word}\n{self.console}"
            time.sleep(0.02)


def shared_memory() -> set[str]:
    """What lies there now."""
    return {path.name for path in Path("/dev/shm").iterdir()}


def in_use(name: str) -> bool:
    """Whether a process that lives has it open or mapped, or names it: another test's."""
    return any(name in text for text in _texts_of_processes())


def _texts_of_processes() -> Iterator[str]:
    for folder in Path("/proc").glob("[0-9]*"):
        for file in ("maps", "cmdline"):
            with contextlib.suppress(OSError):
                yield (folder / file).read_text(errors="replace")
        with contextlib.suppress(OSError):
            yield " ".join(os.readlink(link) for link in (folder / "fd").iterdir())
