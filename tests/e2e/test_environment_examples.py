"""The examples in environments of other packages, by their scripts: a small run each, and what they learn."""

import importlib
from pathlib import Path

import pytest
from job_harness import ROOT, Finished, run_example, run_job

SMALL = ["data.train_batch_size=4", "actor_rollout_ref.rollout.n=4", "trainer.total_training_steps=1"]
SMALL += ["trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.logger=[]"]


def quick(name: str, folder: Path, monkeypatch, *changes: str) -> Finished:
    """An example's job by the keys of its script, made smaller, on one process."""
    importlib.import_module("examples.environments.prepare").write(name, folder / name)
    words = run_example(folder, name, *SMALL, *changes, example="environments", python="echo").split()
    monkeypatch.chdir(ROOT)
    return run_job(1, words[2:], deadline_s=180)


def test_answers_are_scored_by_reasoning_gym(tmp_path, monkeypatch):
    pytest.importorskip("reasoning_gym", reason="pip install 'siirl[reasoning-gym]'")
    finished = quick("reasoning_gym", tmp_path, monkeypatch)
    (worth,) = finished.values("reward/reasoning_gym/leg_counting/mean")
    assert finished.values("reward/score") == [pytest.approx(worth, abs=1e-6)] and 0 <= worth < 0.5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_learns_to_count_the_legs_of_an_animal(tmp_path):
    pytest.importorskip("reasoning_gym", reason="pip install 'siirl[reasoning-gym]'")
    run_example(tmp_path, "reasoning_gym", example="environments")
    worth = Finished.read(tmp_path / "reasoning_gym" / "run").values("val/reward/mean")
    assert worth[0] < 0.1 and worth[-1] > 0.8, worth
