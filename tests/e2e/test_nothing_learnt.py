"""A run in which no optimizer step was taken has not trained: it ends with an error, not with exit code 0."""

import pytest
from dist_harness import WorkerFailure
from job_harness import Inputs, overrides, run_job

HUGE = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return 3e38 * sum(character.isdigit() for character in solution_str) / 8
"""


def test_a_run_whose_every_step_was_skipped_ends_with_an_error(tmp_path):
    inputs = Inputs.make(tmp_path / "inputs")
    inputs.reward.write_text(HUGE)
    more = [
        "algorithm.norm_adv_by_std_in_grpo=False",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
    ]
    more += ["trainer.save_freq=-1", "trainer.total_training_steps=2"]
    said = "agent_0.actor: every optimizer step of the 2 training steps was skipped, so nothing was learnt"
    with pytest.raises(WorkerFailure, match=said):
        run_job(1, overrides(inputs, tmp_path / "out", *more))
