"""Runs whose rewards wait for a file, so that it is known at which step's end `siirl amend` changes them."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from job_harness import Finished, Inputs, overrides
from killed_jobs import PATIENCE_S, start, wait_until

from siirl.observe.amendments import ASKED

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
HELD_REWARD = '''
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    """The share of digits; while a file is there, nothing is scored."""
    while os.path.exists({hold!r}):
        time.sleep(0.02)
    return sum(character.isdigit() for character in solution_str) / 8
'''
KEYS = (
    *("trainer.total_training_steps=6", "trainer.val_before_train=false", "trainer.test_freq=-1"),
    *("trainer.ledger=rows", "data.mixture={one:1,two:1}", f"{ACTOR}.rollout_correction.weight=truncate"),
)


class Told:
    """A run whose rewards wait while `hold` is there: so it is known at which step's end it is amended."""

    def __init__(self, folder: Path, *keys: str):
        self.hold, self.inputs, self.keys = folder / "hold", Inputs.make(folder / "in", rows=120), keys
        self.folder, self.out, self.console = folder, folder / "out", folder / "console"
        rows = pq.read_table(self.inputs.train)
        sources = pa.array([("one", "two")[number % 2] for number in range(len(rows))])
        place = rows.schema.get_field_index("data_source")
        pq.write_table(rows.set_column(place, "data_source", sources), self.inputs.train)
        self.inputs.reward.write_text(HELD_REWARD.format(hold=str(self.hold)))
        self.hold.touch()

    def words(self, out: Path, *keys: str) -> list[str]:
        return [
            sys.executable,
            "-m",
            "siirl.main_dag",
            *overrides(self.inputs, out, *KEYS, *self.keys, *keys),
        ]

    @contextmanager
    def run(self) -> Iterator[subprocess.Popen]:
        job = start(self.words(self.out), self.console)
        try:
            wait_until(lambda: (self.out / "status" / "rank_0").exists(), job, self.console)
            yield job
            assert job.wait(PATIENCE_S) == 0, self.console.read_text()
        finally:
            job.kill()
            job.wait()

    def amend(self, job: subprocess.Popen, *keys: str, holds_again: bool = False) -> tuple[int, str]:
        """Ask for it in the middle of a step; what the command answers."""
        console = self.folder / "amended"
        command = start([sys.executable, "-m", "siirl.cli", "amend", str(self.out), *keys], console)
        wait_until(lambda: command.poll() is not None or (self.out / ASKED).exists(), job, self.console)
        if command.poll() is None:
            self.hold.unlink()
            wait_until(lambda: not (self.out / ASKED).exists(), job, self.console)
            if holds_again:
                self.hold.touch()
        return command.wait(PATIENCE_S), console.read_text()

    def by_hand(self, step: int, *keys: str, origin: Path | None = None) -> Finished:
        """The same run, resumed after a step by other settings. origin: the folder of its checkpoint."""
        checkpoint = (origin or self.out) / "checkpoints" / f"global_step_{step}"
        changed = ("trainer.resume_mode=resume_path", "trainer.resume_changed=true")
        return self.undisturbed("by_hand", f"trainer.resume_from_path={checkpoint}", *changed, *keys)

    def undisturbed(self, name: str, *keys: str) -> Finished:
        """The same run, to its end, in a folder of this name."""
        self.hold.unlink(missing_ok=True)
        out, console = self.folder / name, self.folder / f"console_{name}"
        assert start(self.words(out, *keys), console).wait(PATIENCE_S) == 0, console.read_text()
        return Finished.read(out)


def check_same(run: Finished, other: Finished, model: str = "") -> None:
    """The steps that both have, and the weights, bit for bit."""
    ours, theirs = run.weights(model), other.weights(model)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    first = other.lines[0]["step"]
    names = {name for name in other.lines[-1] if name.endswith(("reward/score", "grad_norm", "/lr", "loss"))}
    for mine, of_other in zip(run.lines[first - 1 :], other.lines, strict=True):
        assert {name: mine[name] for name in names} == {name: of_other[name] for name in names}
