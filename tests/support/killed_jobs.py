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

from siirl.observe.position import read_position

PATIENCE_S = 600
"""Beside other work a job takes many times as long as alone; what hangs ends by its test's time limit."""


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
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert job.poll() is None and time.monotonic() < deadline, console.read_text()
        time.sleep(0.02)


def steps_done(output: Path) -> int:
    path = output / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def has_gone_on(output: Path, since_s: float, at_s: list[float]) -> bool:
    """Whether both ranks have come to an instruction since then; at_s gets when that was."""
    found = [read_position(output / "status" / f"rank_{rank}") for rank in (0, 1)]
    at_s[:] = [place.time_s for place in found if place and place.step > 0 and place.time_s > since_s]
    return len(at_s) == len(found)


def run_and_kill(
    words: Sequence[str],
    folder: Path,
    at_steps: Sequence[int],
    victims: Sequence[int],
    number: int = signal.SIGKILL,
    patience_s: float = PATIENCE_S,
    restarts_s: list[float] | None = None,
) -> tuple[int, str]:
    """Signal these of two ranks when each of the steps is done; the exit code, and what the console shows.

    patience_s: how long the rest may take after the last of them. restarts_s: gets the seconds of each, from
    the signal until the last rank came to its first instruction.
    """
    console, output = folder / "console", folder / "out"
    job = start(words, console)
    try:
        for done, step in enumerate(at_steps):
            wait_until(lambda step=step: steps_done(output) >= step and len(ranks_of(job)) == 2, job, console)
            pids, struck_s = ranks_of(job), time.time()
            for rank in victims:
                os.kill(pids[rank], number)
            kept = folder / "out" / "attempts" / str(done + 1)
            wait_until(lambda kept=kept: (kept / "logs").is_dir(), job, console)
            if restarts_s is not None:
                went_on_s: list[float] = []
                wait_until(lambda since=struck_s, to=went_on_s: has_gone_on(output, since, to), job, console)
                restarts_s.append(max(went_on_s) - struck_s)
        return job.wait(patience_s), console.read_text()
    finally:
        job.kill()
        job.wait()
