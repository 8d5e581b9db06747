"""The main job with saves in the background: the same checkpoints and the same run as with saves in line."""

import pytest
import torch
from job_harness import Inputs, overrides, run_job
from stored_checkpoints import assert_same_checkpoints

from siirl.checkpoint import files

BACKGROUND = "actor_rollout_ref.actor.checkpoint.async_save=true"
OFFLOAD = [
    f"actor_rollout_ref.actor.{key}=true"
    for key in ("fsdp_config.param_offload", "fsdp_config.optimizer_offload", "grad_offload")
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return Inputs.make(tmp_path_factory.mktemp("inputs"))


@pytest.mark.slow
def test_a_run_resumed_from_a_save_in_the_background_equals_one_that_saved_in_line(inputs, tmp_path):
    """The first run saves in the background, each step; the second resumes from its step 2, saves in line,
    and keeps its parameters and optimizer on the host: both end with the same checkpoint.
    """
    settings = ["trainer.save_freq=1", "trainer.val_before_train=false", "trainer.test_freq=-1"]
    first = run_job(2, overrides(inputs, tmp_path / "first", *settings, *OFFLOAD, BACKGROUND))
    saved = tmp_path / "first" / "checkpoints"
    assert files.current_step(saved) == 3 and files.saved_steps(saved) == [3, 2, 1]
    assert len(first.values("time/checkpoint_stage_s")) == 3
    assert [line["step"] for line in first.lines if "time/checkpoint_s" in line] == [2, 3]
    assert first.lines[-1]["time/checkpoint_s"] > 0
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}/global_step_2"]
    second = run_job(2, overrides(inputs, tmp_path / "second", *settings, *resume))
    assert second.values("step") == [3] and second.values("time/checkpoint_stage_s") == []
    assert len(second.values("time/checkpoint_s")) == 1
    last = [tmp_path / name / "checkpoints" / "global_step_3" for name in ("first", "second")]
    assert_same_checkpoints(*last, "agent_0.actor")
    assert first.weights().keys() == second.weights().keys()
    assert all(torch.equal(first.weights()[name], value) for name, value in second.weights().items())
