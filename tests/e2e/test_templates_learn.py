"""Each template learns the quickstart task on CPU: validation reward above 0.8."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FP32 = "critic.fsdp_config.mixed_precision.param_dtype=float32"
GSPO_CLIP = ("clip_ratio_low=3e-4", "clip_ratio_high=4e-4", "loss_agg_mode=seq-mean-token-mean")
TEMPLATES = {
    "grpo": [],
    "ppo": ["algorithm.adv_estimator=gae", "critic.optim.lr=1e-3", FP32],
    "dapo": ["algorithm.filter_groups.enable=True", "actor_rollout_ref.actor.clip_ratio_high=0.28"],
    "gspo": [
        "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
        *(f"actor_rollout_ref.actor.{key}" for key in GSPO_CLIP),
    ],
    "rloo": ["algorithm.adv_estimator=rloo"],
    "reinforce++": ["algorithm.adv_estimator=reinforce_plus_plus"],
    "remax": ["algorithm.adv_estimator=remax"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_learns_the_quickstart_task(tmp_path, name):
    environment = os.environ | {
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "QUICKSTART_DIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    prepare = [sys.executable, "examples/quickstart/prepare.py", "--out", str(tmp_path)]
    subprocess.run(prepare, cwd=ROOT, env=environment, check=True, timeout=120)
    keys = [*TEMPLATES[name], "trainer.total_training_steps=60", "trainer.save_freq=-1"]
    run = ["bash", "examples/quickstart/run.sh", *keys]
    subprocess.run(run, cwd=ROOT, env=environment, check=True, timeout=900)
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    rewards = [line["val/reward/mean"] for line in lines if "val/reward/mean" in line]
    assert rewards[-1] > 0.8, rewards
