"""The attempts of a run: workers that died for no fault of the user's are started again, and those that have
stopped between two steps for `siirl amend` with other settings. No torch.

OUT/attempts.jsonl    a line for each attempt that failed and was followed by another: when, where, why
OUT/attempts/N/       what attempt N left: logs/, errors/, status/; its results too, if the next restarted
"""

import dataclasses
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from siirl.checkpoint.files import POINTER, current_step, saved_steps
from siirl.config import Config, from_dict
from siirl.errors import ConfigError
from siirl.guarded_files import write_own
from siirl.launch.failure import Death, first_cause, node_and_step, one_line_cause, report
from siirl.launch.job import Job
from siirl.launch.outcome import Stop, conclude
from siirl.launch.run_folder import OWN, absolute, resumes
from siirl.launch.run_record import CONFIG_FILE, write_inputs
from siirl.model_files.run_inputs import RunInputs
from siirl.observe.amendments import Amended, forget, put_back, record, recorded, taken
from siirl.observe.position import read_position

ATTEMPTS_FILE, ATTEMPTS_DIR = "attempts.jsonl", "attempts"
LEFT = (
    *("logs/rank_*.log*", "logs/vllm_*.log*", "logs/sglang_*.log*"),
    *("errors/rank_*", "status/rank_*", "trace/rank_*.jsonl"),
)
"""Patterns of what an attempt leaves in the output folder and the next one writes anew."""


@dataclass(frozen=True)
class Attempt:
    """An attempt that failed and was followed by another."""

    run_id: str
    """The start of the run that it belongs to."""
    attempt: int
    """Counted over all starts in the folder, from 1."""
    started_s: float
    """Seconds since the epoch."""
    ended_s: float
    rank: int
    """That failed first."""
    host: str
    node: str | None
    step: int | None
    cause: str
    """In one line."""
    world_size: int
    """Its ranks."""
    next: str
    """What the run went on from: "global_step_40", "global_step_42 in memory", "the start"."""


@dataclass(frozen=True)
class Ended:
    """How an attempt ended, when nothing of it runs any more."""

    job: Job
    """That it was: of fewer machines perhaps than it was to be."""
    deaths: list[Death] = dataclasses.field(default_factory=list)
    """None: all workers ended well, or were stopped."""
    log_offsets: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Where it begins in the log of each rank."""


@dataclass(frozen=True)
class Before:
    """What a run was before the amendment that it tries."""

    job: Job
    config_text: str
    amended: Amended


class Attempts:
    """Decides whether a run whose workers died starts again, and keeps what each attempt left.

    A restart counts until a new checkpoint has come, or until it is trainer.restart_window_s old.
    """

    def __init__(self, job: Job, step_in_memory: Callable[[], int]):
        """step_in_memory: the newest checkpoint in memory that the next attempt can go on from; 0: none."""
        self.job = job
        """Of the attempt that runs now."""
        self.fruitless = 0
        """Restarts without a new checkpoint, because of which there is no further one."""
        trainer = from_dict(job.config).trainer
        self._most, self._window_s = trainer.max_restarts, trainer.restart_window_s
        self._root = absolute(trainer.default_local_dir)
        self._step_in_memory = step_in_memory
        self._first = self._last = self._pointers()
        self._began_s = time.time()
        self._before: Before | None = None
        forget(job.output_path)
        self._restarts: list[float] = []  # when those that count were, by time.monotonic
        self._ended = Ended(job)

    def run(self, attempt: Callable[[Job], Ended], stop: Stop) -> None:
        """Run attempts until one ends well, is stopped, or fails and is not to be followed by another.

        attempt: starts the workers of a job and sees to their end, on whichever machines.
        """
        while True:
            try:
                self._ended = ended = attempt(self.job)
            except ConfigError as error:  # of a machine that lacks what an amendment names, say
                if self._before is None:
                    raise
                print(self._withdraw(" ".join(str(error).split())), file=sys.stderr, flush=True)
                continue
            self.job = ended.job
            if stop.numbers:
                return
            if ended.deaths:
                put_back(self.job.output_path)
                told = self._taken_back(ended.deaths) or self.after(ended.deaths, ended.log_offsets)
            else:
                told = self._amended()
            if not told:
                return
            print(told, file=sys.stderr, flush=True)

    def conclude(self, stop: Stop) -> int:
        """Tell how the last attempt ended, and so the run; its exit code, see outcome.py."""
        return conclude(self.job, self._ended.deaths, stop, self._ended.log_offsets, self.fruitless)

    def after(self, deaths: list[Death], log_offsets: Mapping[int, int]) -> str:
        """Look at how the attempt failed, record it, and make `job` that of the next one.

        What to tell the user before that; "" if there is no next one. log_offsets: where the attempt begins
        in the log of each rank.
        """
        cause = first_cause(deaths)
        number = self._number()
        self._forget()
        blameless = is_no_fault_of_the_user(cause)
        if not blameless or len(self._restarts) >= self._most:
            self.fruitless = len(self._restarts) if blameless else 0
            return ""
        log_path = self.job.log_path(cause.rank)
        told = report(cause, deaths, log_path, log_offsets.get(cause.rank, 0), f"attempt {number}")
        self._restarts.append(time.monotonic())
        self.job = self._next_job(self.job)
        cfg = from_dict(self.job.config)
        origin, anew = self._origin(cfg)
        left = self._keep(number, anew)
        self._record(cause, number, origin)
        self._began_s = time.time()
        counts = f"restart {len(self._restarts)} of at most {self._most} without a new checkpoint"
        return f"{told}\nsiirl: the run goes on from {origin} ({counts}). {left}"

    def _amended(self) -> str:
        """Make `job` that of the amendment for which the workers have ended; what to tell; "": for none."""
        output, before = self.job.output_path, self.job
        found, step = taken(output, before.run_id), current_step(self._root)
        if found is None or step is None:
            return ""
        told = Amended(
            found.id, found.run_id, time.time(), step, found.settings, found.changes, state="applied"
        )
        left = self._keep(self._number(), anew=False)
        amendments = [*before.amendments, str(told)]
        self.job = self._next_job(dataclasses.replace(before, **found.job, amendments=amendments))
        self._before = Before(before, (output / CONFIG_FILE).read_text(), told)
        self._began_s = time.time()
        _write_config(output, found.config_text, RunInputs(**self.job.inputs))
        record(output, told)
        return f"siirl: amended {told}. The run goes on from global_step_{step}. {left}"

    def _taken_back(self, deaths: list[Death]) -> str:
        """Make `job` what it was before the amendment whose first step failed; what to tell; "": for none.

        Not if the workers died for no fault of the amendment's.
        """
        if self._before is None:
            return ""
        cause = first_cause(deaths)
        at = read_position(self.job.position_path(0))
        if at is not None and at.step > self._before.amended.step + 1:
            self._before = None
        if self._before is None or is_no_fault_of_the_user(cause):
            return ""
        return self._withdraw(one_line_cause(cause))

    def _withdraw(self, why: str) -> str:
        """Take the amendment back that is tried; what to tell."""
        before, self._before, why = self._before, None, why.rstrip(".")
        assert before is not None, "an amendment is tried"
        output = self.job.output_path
        left = self._keep(self._number(), anew=False)
        self.job = self._next_job(before.job)
        self._began_s = time.time()
        _write_config(output, before.config_text, RunInputs())
        record(output, dataclasses.replace(before.amended, time_s=time.time(), state="withdrawn", cause=why))
        step = before.amended.step
        return (
            f"siirl: the amendment after step {step} is taken back: {why}. The run goes on as before. {left}"
        )

    def _number(self) -> int:
        """Of the attempt that has ended, over all starts in the folder."""
        output = self.job.output_path
        return len(recorded_lines(output)) + len(recorded(output)) + 1

    def _origin(self, cfg: Config) -> tuple[str, bool]:
        """What the next attempt goes on from, in words, and whether its results restart."""
        goes_on, given = resumes(cfg), cfg.trainer.resume_mode == "resume_path"
        on_disk = 0
        if goes_on and not given:
            on_disk = current_step(self._root) or saved_steps(self._root)[0]
        in_memory = self._step_in_memory()
        if in_memory > on_disk:
            return f"global_step_{in_memory} in memory", False
        if given:
            return str(cfg.trainer.resume_from_path), not goes_on
        return (f"global_step_{on_disk}", False) if goes_on else ("the start", True)

    def _forget(self) -> None:
        """Drop the restarts that no longer count."""
        if self._pointers() != self._last:
            self._last = self._pointers()
            self._restarts.clear()
        if self._window_s is not None:
            now_s = time.monotonic()
            self._restarts = [at_s for at_s in self._restarts if now_s - at_s <= self._window_s]

    def _pointers(self) -> tuple[tuple[int, int] | None, int]:
        """What changes with each checkpoint that becomes current."""
        return _identity(self._root / POINTER), self._step_in_memory()

    def _next_job(self, job: Job) -> Job:
        """That of the next attempt: it goes on from this run's own checkpoint, however the run began."""
        if self._pointers() == self._first:
            return job
        trainer = job.config["trainer"] | {"resume_mode": "auto"}
        return dataclasses.replace(job, config=job.config | {"trainer": trainer})

    def _keep(self, number: int, anew: bool) -> str:
        """Move what the attempt left into a folder of its own, anew: its results too; what to tell of it."""
        output = self.job.output_path
        kept = output / ATTEMPTS_DIR / str(number)
        patterns = (*LEFT, *OWN) if anew else LEFT
        try:
            for path in sorted({path for pattern in patterns for path in output.glob(pattern)}):
                target = kept / path.relative_to(output)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(path, target)
        except OSError as error:  # the run goes on without
            return f"What attempt {number} left could not all be kept: {error}"
        return f"What attempt {number} left is in {kept}"

    def _record(self, cause: Death, number: int, origin: str) -> None:
        node, step = node_and_step(cause)
        host = cause.failure.host if cause.failure else cause.host
        attempt = Attempt(
            self.job.run_id,
            number,
            self._began_s,
            time.time(),
            cause.rank,
            host,
            node,
            step,
            one_line_cause(cause),
            self.job.world_size,
            origin,
        )
        try:
            with (self.job.output_path / ATTEMPTS_FILE).open("a") as file:
                file.write(json.dumps(dataclasses.asdict(attempt)) + "\n")
        except OSError as error:  # of a full disk: the run goes on, or tells its cause, all the same
            os.write(2, f"siirl: {ATTEMPTS_FILE} cannot be written: {error}\n".encode())


def _write_config(output: Path, text: str, inputs: RunInputs) -> None:
    """What a run is from its next attempt on. Of a full disk it is said: the run goes on all the same."""
    try:
        write_own(output / CONFIG_FILE, text)
        write_inputs(output, inputs)
    except OSError as error:
        os.write(2, f"siirl: {CONFIG_FILE} cannot be written, so a resume has older keys: {error}\n".encode())


def _identity(path: Path) -> tuple[int, int] | None:
    """Of the file that lies there now."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def is_no_fault_of_the_user(cause: Death) -> bool:
    """Whether the same job may well go on: the first worker that died was killed, or lost.

    Not if it raised an error of its own or chose to exit, which would come again; and not after Ctrl-C.
    """
    if cause.lost:
        return True
    if cause.failure is None:
        return cause.returncode < 0 and cause.returncode != -signal.SIGINT
    return not cause.failure.user_error and (cause.failure.secondary or cause.failure.machine_fault)


def recorded_lines(output: Path) -> list[str]:
    """The lines of the record in an output folder, whole or not."""
    try:
        return (output / ATTEMPTS_FILE).read_text(errors="replace").splitlines()
    except OSError:
        return []
