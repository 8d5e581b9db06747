"""Jobs as a user starts them, whose workers are killed: what the tests of restarts share."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from job_harness import ROOT


def start(words: Sequence[str], console: Path) -> subprocess.Popen:
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    with console.open("wb") as file:
        return subprocess.Popen(words, env=env, stdout=file, stderr=file)


def ranks_of(job: subprocess.Popen) -> dict[int, int]:
    """Rank -> pid of the workers that run now: the oldest; younger ones stand by for the next attempt."""
    found: dict[int, int] = {}
    for child in sorted(psutil.Process(job.pid).children(), key=psutil.Process.create_time):
        try:
            if rank := child.environ().get("RANK"):
                found.setdefault(int(rank), child.pid)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def wait_until(what: Callable[[], bool], job: subprocess.Popen, console: Path) -> None:
    deadline = time.monotonic() + 240
    while not what():
        assert job.poll() is None and time.monotonic() < deadline, console.read_text()
        time.sleep(0.02)


def steps_done(output: Path) -> int:
    path = output / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def run_and_kill(
    words: Sequence[str],
    folder: Path,
    at_steps: Sequence[int],
    victims: Sequence[int],
    number: int = signal.SIGKILL,
    patience_s: float = 200,
) -> tuple[int, str]:
    """Signal these of two ranks when each of the steps is done; the exit code, and what the console shows.

    patience_s: how long the rest may take after the last of them.
    """
    console, output = folder / "console", folder / "out"
    job = start(words, console)
    try:
        for done, step in enumerate(at_steps):
            wait_until(lambda step=step: steps_done(output) >= step and len(ranks_of(job)) == 2, job, console)
            pids = ranks_of(job)
            for rank in victims:
                os.kill(pids[rank], number)
            kept = folder / "out" / "attempts" / str(done + 1)
            wait_until(lambda kept=kept: (kept / "logs").is_dir(), job, console)
        return job.wait(patience_s), console.read_text()
    finally:
        job.kill()
        job.wait()
