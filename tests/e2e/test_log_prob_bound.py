"""A run whose rollout engine is further from the policy than rollout.max_log_prob_diff ends, and says why."""

import json

import pytest
from dist_harness import WorkerFailure
from job_harness import Inputs, overrides, run_job

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
SHORT = (
    *("trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.save_freq=-1"),
    *("trainer.total_training_steps=2", "trainer.export_hf=False"),
)


@pytest.mark.parametrize("recompute", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_ends_after_the_step_that_is_beyond_the_bound(tmp_path, recompute):
    """Also where the engine's own log-probs are the old ones: the first optimizer step of two compares."""
    inputs = Inputs.make(tmp_path / "inputs")
    keys = (*SHORT, f"{ACTOR}.recompute_old_log_prob={recompute}")
    within = run_job(1, overrides(inputs, tmp_path / "within", *keys, f"{ROLLOUT}.max_log_prob_diff=1e-4"))
    found = within.values("actor/rollout_log_prob_diff")
    assert len(found) == 2 and 1e-9 < max(found) < 1e-4
    beyond = overrides(inputs, tmp_path / "beyond", *keys, f"{ROLLOUT}.max_log_prob_diff={min(found) / 2}")
    said = r"rollout_log_prob_diff of step 1 is .*e-0\d nats a token, more than .*max_log_prob_diff="
    with pytest.raises(WorkerFailure, match=said):
        run_job(1, beyond)
    lines = [json.loads(line) for line in (tmp_path / "beyond" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1], "the step itself is told"
