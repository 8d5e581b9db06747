"""The configuration that a run writes, run_config.yaml, starts it again, though it sets all keys."""

import pytest
from some_cases import some

from siirl.config import load_config, print_config
from siirl.config.algorithm_table import ESTIMATORS, LOSSES
from siirl.findings import Findings
from siirl.launch.survey import survey

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
RUNS = {
    "as it is": [],
    **{name: [f"algorithm.adv_estimator={name}"] for name in ESTIMATORS},
    **{name: ["algorithm.adv_estimator=grpo", f"{ACTOR}.policy_loss.loss_mode={name}"] for name in LOSSES},
    "lag": ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.max_lag=1"],
    "megatron": [f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron.tensor_model_parallel_size=2"],
    "a conversation": [
        "dag.workflow_path=dag_templates/self_play.yaml",
        "dag.node_config.game.env_path=games.py:Nim",
    ],
}


def problems(cfg) -> set[str]:
    """What is wrong with a configuration and its workflow."""
    found = Findings()
    survey(cfg, found)
    return {str(problem) for problem in found.problems}


QUICK = ("as it is", "grpo", "gae", "vanilla", "gspo", "dpo", "lag", "megatron", "a conversation")


@pytest.mark.parametrize("name", some(RUNS, *QUICK))
def test_the_written_configuration_is_accepted_as_the_command_line_was(name, tmp_path):
    given = load_config([f"{ROLLOUT}.n=4", f"{ROLLOUT}.name=hf", *RUNS[name]])
    file = tmp_path / "run_config.yaml"
    file.write_text(print_config(given))
    assert problems(load_config([], str(file))) == problems(given)
