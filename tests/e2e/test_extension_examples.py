"""Each example in examples/extend trains a step; a wrong reference is refused before the start."""

import subprocess
import sys
from pathlib import Path

import pytest
from job_harness import ROOT, Finished, Inputs, overrides, run_job

from siirl.compiler.compile import compile_plan, load_dag
from siirl.config import load_config
from siirl.errors import ConfigError

EXTEND = Path(__file__).parents[2] / "examples" / "extend"
EXAMPLES = {
    "advantage": [f"algorithm.adv_estimator={EXTEND}/advantage.py:centred"],
    "policy_loss": [f"actor_rollout_ref.actor.policy_loss.loss_mode={EXTEND}/policy_loss.py:squashed"],
    "dag": [
        f"dag.custom_pipeline_fn={EXTEND}/dag.py:with_bonus",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    ],
    "reward": [
        *(f"custom_reward_function.path={EXTEND}/reward.py", "custom_reward_function.name=digit_reward"),
        "data.max_response_length=1",  # of tokens drawn at random, one in six is a digit; eight have a letter
    ],
}
SHOWN = {"policy_loss": "actor/weight", "dag": "bonus/mean", "reward": "reward/score"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return Inputs.make(tmp_path_factory.mktemp("inputs"))


@pytest.mark.parametrize(
    "name",
    ["advantage", "dag", *(pytest.param(x, marks=pytest.mark.slow) for x in ("policy_loss", "reward"))],
)
def test_an_example_trains(inputs, tmp_path, name):
    more = [*EXAMPLES[name], "trainer.total_training_steps=1", "trainer.val_before_train=False"]
    run = run_job(1, overrides(inputs, tmp_path, *more))
    assert run.values("actor/grad_norm")[0] > 0
    assert len(run.values(SHOWN.get(name, "actor/loss"))) == 1


def test_an_op_of_a_new_kind_gets_its_model_and_its_service(inputs, tmp_path):
    """By the user's command: what the README says of `op.py`."""
    more = ("actor_rollout_ref.actor.ppo_mini_batch_size=8", "trainer.total_training_steps=1")
    dag = "dag.custom_pipeline_fn=examples/extend/dag.py:with_fluency"
    command = [sys.executable, "-m", "siirl.main_dag", *overrides(inputs, tmp_path, dag, *more)]
    done = subprocess.run(command, cwd=ROOT, timeout=200, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    run = Finished.read(tmp_path)
    (before, *_), (step, *_) = (
        [x for x in run.lines if key in x] for key in ("val/reward/mean", "actor/loss")
    )
    for line, kind in ((before, "val"), (step, "reward")):
        rule, fluency = (
            next(line[key] for key in line if key.startswith(kind) and key.endswith(f"/{name}/mean"))
            for name in ("rule", "fluency")
        )
        assert 0 <= rule < 1.5 and -10 < fluency < 0
        assert line[f"{kind}/reward/mean" if kind == "val" else "reward/score"] == pytest.approx(
            rule + 0.1 * fluency, rel=1e-4
        )
    assert step["actor/grad_norm"] > 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def other(): pass", "has no function 'mine' below @register_advantage"),
        ("@register_advantage('mine', needs=FIELDS)\ndef mine(): pass", "written out"),
        ("def mine(:", "is no Python"),
    ],
)
def test_an_estimator_without_declared_needs_is_refused(tmp_path, text, words):
    (tmp_path / "own.py").write_text(text)
    cfg = load_config(
        [
            f"algorithm.adv_estimator={tmp_path}/own.py:mine",
            "actor_rollout_ref.rollout.name=hf",
            "data.train_batch_size=256",
        ]
    )
    with pytest.raises(ConfigError, match=words):
        compile_plan(load_dag(cfg), cfg, 1)
