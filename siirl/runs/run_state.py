"""The state of a run, from the files of its folder alone: live or long ended, here or copied. No torch."""

import os
import re
import shlex
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from siirl.checkpoint.files import newest_step
from siirl.errors import ConfigError
from siirl.launch.attempts import Attempt
from siirl.launch.failure import Failure, cause_line
from siirl.launch.run_folder import LOCK, holder, is_held
from siirl.observe.columns import PART, REWARD, VALIDATION_REWARD, columns_of
from siirl.observe.curve import Series, of_column
from siirl.observe.printable import first_line
from siirl.runs.folder_reader import MARKS, Skipped, attempt, content, one_line
from siirl.runs.run_files import (
    TAIL_BYTES,
    MetricsScan,
    Progress,
    checkpoints_of,
    read_amendments,
    read_attempts,
    read_config,
    read_failures,
    read_positions,
    read_progress,
    read_starts,
    scan_metrics,
)

LOG_FILE = "logs/rank_0.log"
FRESH_S = 120.0
"""A run on another machine whose last heartbeat is younger is taken to go on: locks may not reach here."""
_CULPRIT = re.compile(r"rank (\d{1,9})\b[^:]*: (.*)", re.S)
"""As siirl/launch/failure.py writes a cause."""
_PROBLEM = re.compile(rb"^.*\[rank \d+\] [WEC] .*$", re.M)

Status = Literal["running", "ended", "failed", "interrupted"]


@dataclass(frozen=True)
class RankState:
    """Where a rank is, or was when it ended."""

    rank: int
    step: int
    """0: before the first step."""
    node: str
    """The node or other part of the step that it entered last; "start": it builds its models."""
    since_s: float
    """When it entered it, since the epoch."""
    error: str = ""
    """What ended it, in one line; "" if nothing is known to have."""
    part: str = ""
    order: tuple[int, ...] = ()
    waits: str = ""
    """As siirl/observe/position.py has them."""


@dataclass(frozen=True)
class RunState:
    """A run, as its folder tells. Texts are printable and of one line."""

    folder: Path
    status: Status
    """running: a process holds the folder; ended: it recorded that it came to its end; failed: its launcher
    recorded that, or a rank left an error; interrupted: it was stopped, or killed without a record."""
    cause: str
    """Why it failed, where it was interrupted, or how it is known to run; "" if there is nothing to say."""
    step: int
    """The last step that is done."""
    total_steps: int | None
    """None: the run has not told yet, or trains none."""
    rewards: Series
    """Metric -> {step: value} of the training and validation rewards, agents apart."""
    starts: int
    """How often it was started; 0: unknown."""
    started_s: float
    """When it was started last, since the epoch; 0: unknown."""
    last_sign_s: float
    """When it wrote last how far it is, since the epoch; 0: never."""
    step_s: float | None
    """Seconds a step, all between two steps included, over the last 20 of this start."""
    host: str
    """The machine of its launcher."""
    pid: int | None
    """The launcher's process there."""
    command: str
    """What it was started by, without tokens."""
    directory: str
    """Where that was."""
    ranks: tuple[RankState, ...]
    failures: tuple[Failure, ...]
    """What ended ranks of its last start, the likeliest first cause first."""
    attempts: tuple[Attempt, ...]
    """Those of its last start that failed and were followed by another, in their order."""
    amendments: tuple[str, ...]
    """What was changed while it went on (siirl amend), a line each."""
    checkpoint_step: int | None
    """Of the checkpoint that it can go on from, if it failed or was interrupted and has one."""
    unreadable: Mapping[str, str]
    """File -> why it, or a part of it, could not be read."""

    @property
    def how_on(self) -> str:
        """How it goes on, as the console says of an interrupted run; "" if it cannot, or need not."""
        if self.checkpoint_step is None:
            return ""
        folder = shlex.quote(one_line(str(self.folder)))
        return f"To go on after step {self.checkpoint_step}: siirl resume {folder}"

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step, at the pace of the last ones; None unless it runs and has a pace."""
        if self.status != "running" or self.step_s is None or self.total_steps is None:
            return None
        return max(0, self.total_steps - self.step) * self.step_s

    def reward(self) -> tuple[str, Series]:
        """The validation rewards by agent, or the training rewards of a run that does not validate; which."""
        validated, trained = (of_column(self.rewards, column) for column in (VALIDATION_REWARD, REWARD))
        if validated:
            return "validation", validated
        return ("training" if trained else "-"), trained

    def parts(self) -> dict[str, Series]:
        """What the rewards of `reward` are weighted sums of: name -> series."""
        validates = self.reward()[0] == "validation"
        columns = columns_of(self.rewards)
        return {
            column.header.removeprefix("val "): of_column(self.rewards, column)
            for column in columns
            if any(PART in name and name.startswith("val/") == validates for name in column.names)
        }


def is_run(folder: Path) -> bool:
    """Whether a folder has a file by which a run's is known."""
    return any(os.path.isfile(folder / name) for name in MARKS)


def run_folder(text: str) -> Path:
    """The run folder that a user names. ConfigError: there is none, or it may not be read."""
    folder = Path(text).expanduser()
    try:
        names = {path.name for path in folder.iterdir()}
    except FileNotFoundError:
        raise ConfigError(
            f"there is no folder {one_line(text)}: nothing can be read of it. Give the trainer.output_dir of "
            "a run; `siirl ls DIR` lists the runs below a folder."
        ) from None
    except NotADirectoryError:
        raise ConfigError(
            f"{one_line(text)} is a file: a run is a folder. Give the folder that it lies in, "
            "trainer.output_dir of the run."
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{one_line(text)} cannot be read: {error.strerror}. Ask its owner for the right to read it, or "
            "for a copy: a copied run folder can be read anywhere."
        ) from None
    if not names & set(MARKS):
        raise ConfigError(
            f"{one_line(text)} is not the folder of a run: it has none of {', '.join(MARKS)}. Give the "
            "trainer.output_dir of a run; `siirl ls DIR` lists the runs below a folder."
        )
    return folder


def read_run(folder: Path, rewards: bool = True) -> RunState:
    """The state of the run in a folder. Reads only; damaged files are in `unreadable`, nothing is raised.

    rewards: also these, for which all of the metrics file is read.
    """
    unreadable = Skipped()
    starts, start = read_starts(folder, unreadable)
    scan = scan_metrics(folder, unreadable, start.started_s, rewards)
    config = read_config(folder, unreadable)
    progress = read_progress(folder, start.run_id, unreadable)
    positions = read_positions(folder, unreadable)
    failures = read_failures(folder, unreadable)
    attempts = read_attempts(folder, unreadable, start.run_id)
    errors = {failure.rank: one_line(first_line(failure.error)) for failure in failures}
    if progress.how == "failed" and (named := _CULPRIT.match(progress.cause)):
        errors.setdefault(int(named[1]), named[2])  # one that was killed leaves no error of its own
    ranks = tuple(
        RankState(rank, at.step, at.node, at.time_s, errors.get(rank, ""), at.part, at.order, at.waits)
        for rank, at in positions.items()
    )
    lockable = os.path.isfile(folder / LOCK)
    about = holder(folder) if lockable else {}
    last_sign_s = max([scan.time_s, progress.time_s, *(rank.since_s for rank in ranks)])
    host = one_line(str(about.get("host") or start.host))
    pid = about.get("pid")
    if lockable and is_held(folder):
        status, cause = "running", ""
    else:
        status, cause = _status(progress, failures, ranks, host, last_sign_s)
    return RunState(
        folder=folder,
        status=status,
        cause=cause,
        step=scan.step,
        total_steps=_total_steps(config, progress),
        rewards=scan.rewards,
        starts=starts,
        started_s=start.started_s,
        last_sign_s=last_sign_s,
        step_s=_pace(scan),
        host=host,
        pid=pid if isinstance(pid, int) else None,
        command=start.command,
        directory=start.directory,
        ranks=ranks,
        failures=tuple(failures),
        attempts=tuple(attempts),
        amendments=tuple(read_amendments(folder, unreadable, start.run_id)),
        checkpoint_step=None
        if status in ("running", "ended")
        else attempt(lambda: newest_step(checkpoints_of(folder, config)), None, "checkpoints", unreadable),
        unreadable=unreadable,
    )


def last_problem(run: RunState) -> str:
    """What went wrong last: the cause of a failure, else the last warning or error of rank 0's log; or ""."""
    if run.failures:
        return failure_text(run.failures[0])
    found = _PROBLEM.findall(content(run.folder / LOG_FILE, Skipped(), TAIL_BYTES))
    return one_line(found[-1].decode(errors="replace")) if found else ""


def failure_text(failure: Failure) -> str:
    """Where a rank failed, and why, in one line."""
    return cause_line(failure.rank, failure.step, failure.node, failure.error)


def attempt_text(attempt: Attempt) -> str:
    """Where an attempt failed first, and why, in one line."""
    return cause_line(attempt.rank, attempt.step, attempt.node, attempt.cause)


def _status(
    progress: Progress, failures: list[Failure], ranks: tuple[RankState, ...], host: str, last_sign_s: float
) -> tuple[Status, str]:
    """The status of a run whose folder no process of this machine holds, and what there is to say of it."""
    if progress.how == "ended":
        return "ended", ""
    if progress.how == "failed":
        return "failed", progress.cause
    if failures and progress.how is None:
        return "failed", failure_text(failures[0])
    elsewhere = bool(host) and host != socket.gethostname()
    if progress.how is None and elsewhere and 0 <= time.time() - last_sign_s < FRESH_S:
        return "running", f"on {host}, by its last heartbeat"
    if not ranks:
        return "interrupted", progress.cause or "before its workers began"
    behind = min(ranks, key=lambda rank: (rank.step, rank.since_s))
    where = f"in step {behind.step}, {behind.node}" if behind.step else f"in {behind.node}"
    return "interrupted", f"{progress.cause} {where}".strip()


def _pace(scan: MetricsScan) -> float | None:
    if len(scan.times) < 2:
        return None
    (first, first_s), (last, last_s) = scan.times[0], scan.times[-1]
    return max(0.0, last_s - first_s) / (last - first)


def _total_steps(config: Mapping[str, Any], progress: Progress) -> int | None:
    """As the run told; as it was set, until its workers know."""
    if progress.begun:
        return progress.total_steps
    wanted = config.get("trainer.total_training_steps")
    return wanted if isinstance(wanted, int) and wanted > 0 else None
