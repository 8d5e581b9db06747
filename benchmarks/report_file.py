"""The JSON of a benchmark, on disk after everything that it has counted; and the processes that it counts in.

A call may be cut by a time limit at any moment. So the file is written anew, in one piece, whenever a step or
a round is counted, and says how far it came: `asked_steps` and `counted_steps`, by what was run, in the order
of running; `complete`: whether all of it is there, with what is compared at the end. SIGTERM (which `timeout`
sends), SIGHUP and Ctrl-C end a benchmark with its processes gone. Results from before have none of the three
fields: they are complete.
"""

import contextlib
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil

POLL_S = 0.5
GRACE_S = 30.0
"""In which a job may end by itself after SIGTERM; that of siirl takes up to 20 s."""
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
Rows = list[dict[str, Any]]


class Report(dict[str, Any]):
    """What a benchmark tells: a dict with a file."""

    def __init__(self, path: Path, asked_steps: dict[Any, int], **told: Any) -> None:
        """asked_steps: of what how many steps (syncs, rounds, kills) will be counted, in their order."""
        self.path = path
        asked = {str(name): steps for name, steps in asked_steps.items()}
        counted = dict.fromkeys(asked, 0)
        where = {"commit": commit(), "host": host()}
        super().__init__(
            command=command(), complete=False, asked_steps=asked, counted_steps=counted, **where, **told
        )

    def count(self, name: Any, steps: int) -> None:
        """So many steps of it are there now. Writes the file."""
        self["counted_steps"][str(name)] = steps
        self.save()

    def finish(self) -> None:
        """All is there that will be. Writes the file, and says where."""
        asked, counted = self["asked_steps"], self["counted_steps"]
        self["complete"] = all(counted[name] >= steps for name, steps in asked.items())
        self.save()
        print(f"wrote {self.path}", flush=True)

    def save(self) -> None:
        write(self.path, self.text())

    def text(self) -> str:
        return json.dumps(self, indent=1) + "\n"


def write(path: Path, text: str) -> None:
    """A file in one piece: whoever reads it finds the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def command() -> str:
    """This call, without the places of this machine: of an absolute path its name."""
    return " ".join(str(Path(word).name) if os.path.isabs(word) else word for word in sys.argv)


def commit() -> str:
    """What runs: SIIRL_COMMIT, which a copy of a checkout needs, or what git says, with changes marked."""
    words = [
        "git",
        "-C",
        str(Path(__file__).resolve().parent),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
    ]
    said = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    return os.environ.get("SIIRL_COMMIT") or said


def host() -> dict[str, Any]:
    """The machine, but for its name."""
    gib = round(psutil.virtual_memory().total / 2**30)
    return {"cpu": cpu_model(), "cores": len(os.sched_getaffinity(0)), "memory_gib": gib}


def cpu_model() -> str:
    """As the kernel names it; on a machine that does not tell, its kind."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def end_by_signals() -> None:
    """Signals that ask this process to end raise SystemExit, once: what must be closed is closed."""

    def end(number: int, _frame: object) -> None:
        for each in ENDING:
            signal.signal(each, lambda *_: None)
        raise SystemExit(128 + number)

    for each in ENDING:
        signal.signal(each, end)


def run_job(
    words: Sequence[str],
    seen: Callable[[], None],
    started: Callable[[int], None] = lambda pid: None,
    longest_s: float = math.inf,
    **how: Any,
) -> int:
    """Run a command to its end; its exit code. seen() is called all the time, and when it has ended.

    longest_s: after so many seconds it is killed, and its exit code is 0: what it has is enough. how: as
    subprocess.Popen has it. Whatever ends this call ends the command, and all that it has started.
    """
    job, until = subprocess.Popen(words, **how), time.monotonic() + longest_s
    started(job.pid)
    grace_s = GRACE_S
    try:
        while time.monotonic() < until:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return job.wait(POLL_S)
            seen()
        grace_s = 0.0
        return 0
    finally:
        end_job(job, grace_s)
        seen()


def end_job(job: subprocess.Popen, grace_s: float = GRACE_S) -> None:
    """End a process and all below it: SIGTERM, and after `grace_s` SIGKILL for what stays."""
    if job.poll() is not None:
        return
    below: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        below = psutil.Process(job.pid).children(recursive=True)
    job.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(grace_s)
    job.kill()
    job.wait()
    stay = psutil.wait_procs(below, timeout=1)[1]
    for process in stay:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(stay, timeout=5)


def on_change(path: Path, told: Callable[[], None]) -> Callable[[], None]:
    """For run_job and run_ranks: told() whenever a file is another one than before."""
    known: tuple[int, int] | None = None

    def seen() -> None:
        nonlocal known
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            if known != (stat.st_mtime_ns, stat.st_size):
                known = stat.st_mtime_ns, stat.st_size
                told()

    return seen


def following(metrics: Path, counted: Callable[[Rows], None]) -> Callable[[], None]:
    """For run_job: counted(rows) whenever the metrics of a job of siirl have another step."""
    return on_change(metrics, lambda: counted(rows_of(metrics)))


def rows_of(metrics: Path) -> Rows:
    """The metrics of the steps that are done, also while the job appends."""
    whole, _, _ = metrics.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def run_ranks(
    worker: Callable[..., None],
    args: Iterable[Any],
    number: int,
    start: str,
    seen: Callable[[], None] = lambda: None,
) -> None:
    """worker(rank, *args) in so many processes. seen: as in run_job. All of them end with this call."""
    import torch.multiprocessing as mp

    ranks = mp.start_processes(_rank, (worker, *args), number, join=False, daemon=False, start_method=start)
    assert ranks is not None
    try:
        while not ranks.join(timeout=POLL_S):
            seen()
    finally:
        for process in ranks.processes:
            process.terminate()
        until = time.monotonic() + GRACE_S
        for process in ranks.processes:
            process.join(max(0.0, until - time.monotonic()))
            process.kill()
        seen()


def _rank(rank: int, worker: Callable[..., None], *args: Any) -> None:
    for each in ENDING:
        signal.signal(each, signal.SIG_DFL)
    worker(rank, *args)
