"""Jobs of the launch tests: an empty plan, with a function of launch_entries.py as the worker's code."""

import dataclasses
import os
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from siirl.compiler.plan import Plan
from siirl.config import load_config, to_dict
from siirl.launch.job import Job

ROOT = Path(__file__).parents[2]
_EMPTY = {field.name: {} if "dict" in str(field.type) else () for field in dataclasses.fields(Plan)}


def make_job(folder: Path, entry: str, *overrides: str) -> Job:
    """A job whose workers run launch_entries.<entry>; outputs go to folder/out."""
    output = f"trainer.output_dir={folder / 'out'}"
    cfg = load_config(["trainer.device=cpu", "trainer.deadline_s=60", output, *overrides])
    per_node = cfg.trainer.n_gpus_per_node
    world_size = cfg.trainer.nnodes * per_node
    plan = Plan(**(_EMPTY | {"dag_id": "launch_test", "world_size": world_size}))
    extra = {"note": "hello"}
    entry = f"launch_entries:{entry}"
    return Job(
        to_dict(cfg), plan.to_json(), str(folder / "out"), world_size, per_node, extra=extra, entry=entry
    )


def environment() -> dict[str, str]:
    """The environment of a launcher that finds siirl and the entries; threads are for it to choose."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")])
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return env | {"PYTHONPATH": path}


def alive(pid: int) -> bool:
    """Whether a process runs: one that has ended and that nobody has reaped does not count."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_dead(pids: Iterable[int], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, f"still alive: {left}"
        time.sleep(0.05)
