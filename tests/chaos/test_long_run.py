"""2,000 steps: what a run holds and writes for each step does not grow with their number."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from chaos_runs import HOOK, in_use, shared_memory
from fixtures_tiny import make_tiny_model_dir
from job_harness import ROOT, Inputs, overrides

STEPS = 2000
WARM = 500
"""Steps after which nothing is made for the first time."""
LOOK_EVERY = 99
"""Steps. What Python frees at times, and a checkpoint in flight, are 20 MB more or less from look to look."""
SAMPLES_EVERY = 10
"""Steps from one report of samples to the next."""
KEYS = (
    f"trainer.total_training_steps={STEPS}",
    *("data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"),
    *("data.max_response_length=2", "actor_rollout_ref.rollout.n=2"),
    *("trainer.logger=[console,tensorboard]", "trainer.test_freq=100", "trainer.val_before_train=False"),
    *("trainer.save_freq=100", "trainer.max_actor_ckpt_to_keep=1", "trainer.memory_checkpoint_freq=10"),
    *("trainer.deadline_s=300", "reward_model.num_workers=1"),
)
PATIENCE_S = 840.0


@dataclass(frozen=True)
class Held:
    """What the processes of a run hold, and what they have written."""

    step: int
    memory_bytes: int
    """Of each process what it does not share."""
    files: int
    threads: int
    processes: int
    shared: int
    """Names in shared memory that were not there before, and that no other process has."""
    log_bytes: int
    event_bytes: int
    sample_files: int
    sample_bytes: int


class LongRun:
    def __init__(self, output: Path, words: list[str]):
        self.output, self._before = output, shared_memory()
        self.console = output.parent / "console"
        environment = os.environ | {"PYTHONPATH": f"{HOOK}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
        # What stands by is there when it is WARM.
        environment |= {"CHAOS_DIR": str(output.parent), "CHAOS_STANDBYS": "1"}
        with self.console.open("wb") as file:
            self.job = subprocess.Popen(words, env=environment, stdout=file, stderr=file)

    @property
    def step(self) -> int:
        path = self.output / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return json.loads(lines[-1])["step"] if lines else 0

    def at(self, step: int) -> Held:
        """What it holds once it has come to a step."""
        deadline = time.monotonic() + PATIENCE_S
        while self.step < step:
            assert self.job.poll() is None and time.monotonic() < deadline, self.console.read_text()[-3000:]
            time.sleep(0.2)
        launcher = psutil.Process(self.job.pid)
        processes = [launcher, *launcher.children(recursive=True)]
        own = {process.pid for process in processes}
        shared = [name for name in shared_memory() - self._before if not in_use(name, besides=own)]
        samples = [path for path in (self.output / "rollouts").rglob("*") if path.is_file()]
        return Held(
            step=self.step,
            memory_bytes=sum(process.memory_full_info().uss for process in processes),
            files=sum(process.num_fds() for process in processes),
            threads=sum(process.num_threads() for process in processes),
            processes=len(processes),
            shared=len(shared),
            log_bytes=size_of(self.output / "logs") + self.console.stat().st_size,
            event_bytes=size_of(self.output / "tensorboard"),
            sample_files=len(samples),
            sample_bytes=sum(path.stat().st_size for path in samples),
        )

    def end(self) -> None:
        self.job.terminate()
        self.job.wait(60)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check_flat(looks: Sequence[Held]) -> None:
    """From the first to the last nothing is held that grows; each step writes as much as any other."""
    half = len(looks) // 2
    low, high = (min(held.memory_bytes for held in part) for part in (looks[:half], looks[half:]))
    assert high - low < 16_000 * (looks[half].step - looks[0].step), looks
    early, middle, late = looks[0], looks[half], looks[-1]
    steps = late.step - early.step
    assert late.files <= early.files + 8 and late.threads <= early.threads + 4, (early, late)
    assert late.processes <= early.processes and late.shared <= early.shared + 2, (early, late)
    for kind, most in (("log_bytes", 400), ("event_bytes", 20_000), ("sample_bytes", 4_000)):
        first, second = (
            (getattr(b, kind) - getattr(a, kind)) / (b.step - a.step)
            for a, b in ((early, middle), (middle, late))
        )
        assert second < most and second < 1.25 * first + 50, (kind, first, second)
    assert late.sample_files - early.sample_files <= 3 * (steps / SAMPLES_EVERY + 1), (early, late)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_a_run_holds_and_writes_is_the_same_in_each_of_its_2000_steps(tmp_path):
    inputs = Inputs.make(tmp_path)
    small = make_tiny_model_dir(tmp_path / "small", hidden=8, layers=1, heads=2, kv_heads=1, mlp=8)
    keys = [*KEYS, f"actor_rollout_ref.model.path={small}"]
    output = tmp_path / "out"
    run = LongRun(output, [sys.executable, "-m", "siirl.main_dag", *overrides(inputs, output, *keys)])
    try:
        looks = [run.at(step) for step in range(WARM, STEPS, LOOK_EVERY)]
    finally:
        run.end()
    check_flat(looks)
