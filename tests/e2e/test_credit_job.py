"""Credit through the main job: one reward for two agents that talk, turns compared, alternating updates."""

from pathlib import Path

import pytest
import yaml
from job_harness import Inputs, overrides, run_job

DAG = Path(__file__).parent / "solver_verifier.yaml"
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Digits in the first answer."""
    return sum(c.isdigit() for c in solution_str) / 8
'''


def test_agents_share_a_reward_and_are_trained_in_turns(tmp_path):
    inputs = Inputs.make(tmp_path / "inputs")
    dag = yaml.safe_load(DAG.read_text().replace("MODEL_B", str(inputs.model)))
    dag["nodes"] = [node for node in dag["nodes"] if node["node_id"] != "reward_verifier"]
    for node in dag["nodes"]:
        if node["node_id"] == "advantage_verifier":
            node["dependencies"] = ["reward_solver"]
    (tmp_path / "dag.yaml").write_text(yaml.safe_dump(dag))
    (tmp_path / "reward.py").write_text(REWARD)
    arguments = overrides(
        inputs,
        tmp_path / "out",
        f"dag.workflow_path={tmp_path / 'dag.yaml'}",
        f"custom_reward_function.path={tmp_path / 'reward.py'}",
        "data.max_prompt_length=64",
        "trainer.total_training_steps=2",
        "algorithm.credit.group_by=[task,turn]",
        "algorithm.credit.equal_weight=episode",
        "actor_rollout_ref.rollout.agent.train_cycle=1",
    )
    finished = run_job(2, arguments)
    assert finished.values("agent_0/actor/waits") == [0, 1]
    assert finished.values("agent_1/actor/waits") == [1, 0]
    for agent in (0, 1):
        assert len(finished.values(f"agent_{agent}/actor/grad_norm")) == 1
        assert min(finished.values(f"agent_{agent}/actor/grad_norm")) > 0
    rewards = finished.values("agent_0/reward/total")
    assert rewards == finished.values("agent_1/reward/total") and max(rewards) > 0
    # What the reward function gave is told once, of the agent that it scored; the other shares it.
    assert finished.values("agent_0/reward/score") == pytest.approx(rewards)
    assert not finished.values("agent_1/reward/score")
    assert len(finished.values("agent_1/turn_1/reward")) == 2


@pytest.mark.slow
def test_two_agents_train_one_critic(tmp_path):
    inputs = Inputs.make(tmp_path / "inputs")
    dag = yaml.safe_load(DAG.read_text().replace("MODEL_B", str(inputs.model)))
    critic = {"node_type": "MODEL_TRAIN", "node_role": "CRITIC"}
    for agent, name in enumerate(("solver", "verifier")):
        whose = critic | {"agent_group": agent, "config": {"share_instance": 0} if agent else {}}
        values = {"node_id": f"values_{name}", "only_forward_compute": True, "dependencies": ["verifier"]}
        dag["nodes"].append(whose | values)
        above = ["advantage_solver", "advantage_verifier"]
        dag["nodes"].append(whose | {"node_id": f"critic_{name}", "dependencies": above})
    for node in dag["nodes"]:
        if node["node_id"].startswith("advantage"):
            node["dependencies"] += ["values_solver", "values_verifier"]
    (tmp_path / "dag.yaml").write_text(yaml.safe_dump(dag))
    (tmp_path / "reward.py").write_text(REWARD)
    arguments = overrides(
        inputs,
        tmp_path / "out",
        f"dag.workflow_path={tmp_path / 'dag.yaml'}",
        f"custom_reward_function.path={tmp_path / 'reward.py'}",
        "data.max_prompt_length=64",
        "algorithm.adv_estimator=gae",
        "trainer.total_training_steps=2",
        f"critic.model.path={inputs.model}",
        "critic.ppo_mini_batch_size=8",
        "critic.ppo_micro_batch_size_per_gpu=4",
        "critic.optim.lr=1e-3",
        "critic.optim.lr_warmup_steps=4",
    )
    finished = run_job(2, arguments)
    # Each agent's update is an optimizer step of its own, as the warm-up over four of them shows.
    assert finished.values("agent_0/critic/lr") == pytest.approx([0, 0.5e-3])
    assert finished.values("agent_1/critic/lr") == pytest.approx([0.25e-3, 0.75e-3])
    assert min(finished.values("agent_1/critic/grad_norm")) > 0
    assert len(list((tmp_path / "out").glob("hf_critic/**/config.json"))) == 1
