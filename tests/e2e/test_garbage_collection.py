"""What a run has built by its third step is passed over by full collections, until its end."""

import subprocess
import sys

import pytest
from job_harness import ROOT, Inputs, overrides

OWN = """
import atexit
import gc

from siirl.algorithms.advantages import Advantages, register_advantage


def note():
    print(f"spared: {gc.get_freeze_count()}", flush=True)


atexit.register(note)


@register_advantage("noting", needs=("reward", "response_mask"))
def noting(reward_BT, response_mask_BT):
    note()
    return Advantages(reward_BT.sum(-1, keepdim=True) * response_mask_BT)
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return Inputs.make(tmp_path_factory.mktemp("inputs"))


def test_full_collections_pass_over_what_two_steps_have_built(inputs, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    more = (
        f"algorithm.adv_estimator={tmp_path}/own.py:noting",
        "trainer.total_training_steps=4",
        "trainer.val_before_train=False",
    )
    command = [sys.executable, "-m", "siirl.main_dag", *overrides(inputs, tmp_path / "out", *more)]
    done = subprocess.run(command, cwd=ROOT, timeout=200, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    log = (tmp_path / "out" / "logs" / "rank_0.log").read_text().splitlines()
    first, second, third, fourth, end = (int(line.split()[1]) for line in log if line.startswith("spared: "))
    assert first == second and third - first > 5_000, "a fork begins with what its nursery set aside"
    assert end == 0
    assert fourth >= third * 0.99, "they stay"
