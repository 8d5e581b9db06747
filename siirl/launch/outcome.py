"""How a run ends for the one who started it: signals that stop it, the closing message, the exit code."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from siirl.checkpoint.files import newest_step
from siirl.command_line import EXIT_USER_ERROR
from siirl.config import from_dict
from siirl.launch.failure import Death, first_cause, report, short_cause
from siirl.launch.job import Job
from siirl.observe.position import record_end


@dataclass
class Stop:
    """Signals that asked this launcher to end. A second one means: at once."""

    numbers: list[int] = field(default_factory=list)

    def __call__(self, number: int, _frame: object) -> None:
        self.numbers.append(number)

    def at_once(self) -> bool:
        return len(self.numbers) > 1


@contextlib.contextmanager
def catch_signals(stop: Stop, on_resize: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP stop the run; on_resize is called when the terminal changes its size."""
    handlers = dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), stop)
    handlers[signal.SIGWINCH] = lambda _number, _frame: on_resize()
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _how_on(job: Job) -> str:
    """How a stopped run goes on, or why it cannot."""
    root = Path(from_dict(job.config).trainer.default_local_dir).expanduser()
    step = newest_step(root)
    if step is None:
        return (
            f"There is no checkpoint in {root} to go on from: trainer.save_freq=N writes one every N steps."
        )
    return f"To go on after step {step}: siirl resume {job.output_path}"


def conclude(
    job: Job, deaths: list[Death], stop: Stop, log_offsets: Mapping[int, int], restarts: int = 0
) -> int:
    """Say why the run ended, and record it, unless it ended well; its exit code.

    0: all workers ended well; 2: an error in what the user wrote; 1: any other failure; 130 or 143: stopped
    by Ctrl-C or SIGTERM. log_offsets: where this run begins in the log of each rank. restarts: those before
    that brought no new checkpoint, if there is no further one.
    """
    if stop.numbers:
        name = signal.Signals(stop.numbers[0]).name
        record_end(job.output_path, job.run_id, "stopped", f"stopped by {name}")
        print(f"siirl: stopped by {name}; all workers have ended. {_how_on(job)}", file=sys.stderr)
        return 128 + stop.numbers[0]
    if not deaths:
        return 0
    cause = first_cause(deaths)
    record_end(job.output_path, job.run_id, "failed", short_cause(cause))
    if cause.failure and cause.failure.user_error:
        several = job.world_size > job.local_world_size
        where = f"rank {cause.rank} on {cause.failure.host}: " if several else ""
        print(f"siirl: {where}{cause.failure.error}", file=sys.stderr)
        return 2
    print(report(cause, deaths, job.log_path(cause.rank), log_offsets.get(cause.rank, 0)), file=sys.stderr)
    if restarts:
        print(
            f"  It is not started again: {restarts} restarts brought no new checkpoint "
            f"(trainer.max_restarts). Their causes are in {job.output_path / 'attempts.jsonl'}.",
            file=sys.stderr,
        )
    return EXIT_USER_ERROR if cause.is_users else 1
