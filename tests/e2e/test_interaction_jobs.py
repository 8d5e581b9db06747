"""Interactions through the main job: agents that talk, each trained on what it said."""

from pathlib import Path

import pytest
from fixtures_tiny import make_tiny_model_dir
from http_harness import serving
from job_harness import Inputs, overrides, run_job

HERE = Path(__file__).parent

REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Digits in the agent's own turn; the verifier gets half of the solver's as well."""
    turns = [m for m in extra_info["conversation"] if m["agent"] is not None]
    assert [m["agent"] for m in turns] == [0, 1], turns
    assert solution_str == turns[extra_info["agent"]]["content"], (solution_str, turns)
    digits = [sum(c.isdigit() for c in m["content"]) / 8 for m in turns]
    return digits[0] if extra_info["agent"] == 0 else digits[1] + digits[0] / 2
'''


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return Inputs.make(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    return make_tiny_model_dir(
        tmp_path_factory.mktemp("other") / "model", family="llama", tie=False, vocab=80, init_std=0.2, seed=5
    )


@pytest.mark.slow  # test_interaction_training.py sees more, but no validation at the end
def test_two_agents_talk_and_each_trains_on_its_own_tokens(inputs, other_model, tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    dag = tmp_path / "dag.yaml"
    dag.write_text((HERE / "solver_verifier.yaml").read_text().replace("MODEL_B", str(other_model)))
    arguments = overrides(
        inputs,
        tmp_path / "out",
        f"dag.workflow_path={dag}",
        f"custom_reward_function.path={tmp_path / 'reward.py'}",
        "data.max_prompt_length=64",
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
        "trainer.log_val_generations=2",
    )
    finished = run_job(2, arguments)
    for agent in (0, 1):
        assert len(finished.values(f"agent_{agent}/actor/grad_norm")) == 2
        assert min(finished.values(f"agent_{agent}/actor/grad_norm")) > 0
        assert max(finished.values(f"agent_{agent}/actor/rollout_log_prob_diff_max")) < 1e-3
        assert len(finished.values(f"agent_{agent}/val/reward/mean")) == 2
    assert finished.values("agent_0/interaction/turns") == [2, 2]


VERSIONS = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    turns = [m for m in extra_info["conversation"] if m["agent"] is not None]
    versions = {f"version_{m['agent']}": float(m["weight_version"]) for m in turns}
    return {"score": sum(c.isdigit() for c in solution_str) / 8, **versions}
"""


@pytest.mark.slow
def test_a_frozen_agent_speaks_with_the_weights_that_it_began_with(inputs, other_model, tmp_path):
    (tmp_path / "reward.py").write_text(VERSIONS)
    text = (HERE / "solver_verifier.yaml").read_text().replace("MODEL_B", str(other_model))
    lines = [
        line for line in text.splitlines() if "agent_group: 1" not in line or "node_id: verifier" in line
    ]
    (tmp_path / "dag.yaml").write_text("\n".join(lines))
    arguments = overrides(
        inputs,
        tmp_path / "out",
        f"dag.workflow_path={tmp_path / 'dag.yaml'}",
        f"custom_reward_function.path={tmp_path / 'reward.py'}",
        "data.max_prompt_length=64",
        "trainer.total_training_steps=3",
    )
    finished = run_job(2, arguments)
    versions = [finished.values(f"agent_0/reward/arithmetic/version_{agent}/mean") for agent in (0, 1)]
    assert len(set(versions[0])) == 3 and versions[1] == [versions[0][0]] * 3
    assert min(finished.values("agent_0/actor/grad_norm")) > 0
    assert not any(name.startswith("agent_1/") for line in finished.lines for name in line)


@pytest.mark.slow
def test_an_external_agent_answers_through_a_service_and_is_not_trained(inputs, tmp_path):
    dag = tmp_path / "dag.yaml"
    text = (HERE / "solver_verifier.yaml").read_text()
    nodes = [line for line in text.splitlines() if "agent_group: 1" not in line]
    external = """  - {node_id: verifier, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent_group: 1,
     dependencies: [solver], config: {rollout.name: openai, rollout.agent.endpoint.url: "URL"}}"""
    says = (200, {"choices": [{"message": {"content": "12 are right"}, "finish_reason": "stop"}]})
    with serving(lambda message: says) as service:
        dag.write_text("\n".join([*nodes, external.replace("URL", service.url)]))
        finished = run_job(
            2,
            overrides(
                inputs,
                tmp_path / "out",
                f"dag.workflow_path={dag}",
                "data.max_prompt_length=64",
                "trainer.total_training_steps=2",
            ),
        )
    assert finished.values("agent_0/interaction/turns") == [2, 2]
    assert all(asked["messages"][-1]["role"] == "user" for asked in service.messages)


HALF = """
import torch.distributed as dist

from siirl.agents.environments import StepResult


class Half:
    def reset(self, task, seed):
        if dist.get_rank() == 1:
            raise OSError("no more licences")
        return ""

    def step(self, actions):
        return StepResult("", sum(letter.isdigit() for letter in actions[0]) / 8, True)
"""


def test_a_rank_whose_episodes_all_fail_goes_on_without_rows(inputs, tmp_path):
    (tmp_path / "half.py").write_text(HALF)
    agent = "actor_rollout_ref.rollout.agent"
    arguments = overrides(
        inputs,
        tmp_path / "out",
        f"{agent}.env_path=[{tmp_path / 'half.py'}:Half]",
        f"{agent}.rewards_with_env=true",
        "trainer.total_training_steps=2",
    )
    finished = run_job(2, arguments)
    assert finished.values("interaction/failed") == [0.5, 0.5]
    assert finished.values("val/interaction/failed") == [0.5]
    assert min(finished.values("actor/grad_norm")) > 0
