"""Interactions with an environment, a loop, tools and a shared policy: on Megatron, on vLLM, and resumed.

Agent 0 calls a tool, 1 answers it with a policy of another family, 2 speaks with the policy of 1; then an
environment says what comes next.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fixtures_tiny import make_tiny_model_dir
from job_harness import Finished, Inputs, overrides, run_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CODE = '''
from siirl.agents.environments import StepResult
from siirl.dialect.tool_formats import Parsed, ToolCall


def calls(text):
    """The first digit is to be doubled."""
    digits = [character for character in text if character.isdigit()]
    return Parsed(text, (ToolCall("double", {"number": int(digits[0])}),) if digits else ())


def double(number):
    return str(2 * number)


class Count:
    """Pays each agent by its digits; over when there have been six."""

    def reset(self, task, seed):
        self.seen = 0
        return f"go {seed % 10}"

    def step(self, actions):
        digits = {agent: sum(c.isdigit() for c in text) for agent, text in actions.items()}
        self.seen += sum(digits.values())
        return StepResult(str(self.seen), {a: n / 4 for a, n in digits.items()}, self.seen >= 6, {})


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return 0.5 if ground_truth in solution_str else 0.0
'''
TOOLS = """
tools:
  - function: code.py:double
    tool_schema:
      type: function
      function:
        name: double
        description: Twice a number.
        parameters: {type: object, properties: {number: {type: integer}}, required: [number]}
"""
STEPS = 2


def dag_nodes(
    folder: Path, models: tuple[Path, Path], more: dict[int, dict[str, Any]], critic: dict[str, Any] | None
) -> list[dict[str, Any]]:
    """more: keys of each agent. critic: keys of the critic of agent 1, which has none without."""
    tools = {
        "enable": True,
        "max_assistant_turns": 2,
        "tool_config_path": str(folder / "tools.yaml"),
        "format": f"{folder / 'code.py'}:calls",
    }
    own = {
        0: {f"rollout.multi_turn.{key}": value for key, value in tools.items()} | more.get(0, {}),
        1: {"model.path": str(models[1]), "actor.optim.lr": 3e-3} | more.get(1, {}),
        2: {"rollout.agent.share_instance": 1},
    }
    nodes, above = [], []
    for agent in (0, 1, 2):
        nodes.append(
            {
                "node_id": f"talk_{agent}",
                "node_type": "MODEL_INFERENCE",
                "node_role": "ROLLOUT",
                "agent_group": agent,
                "dependencies": above,
                "config": own[agent],
            }
        )
        above = [f"talk_{agent}"]
    nodes.append(
        {
            "node_id": "game",
            "node_type": "ENV_INTERACT",
            "dependencies": above,
            "config": {"env_path": f"{folder / 'code.py'}:Count"},
            "loop": {"to": "talk_0", "max_turns": 2},
        }
    )
    for agent in (0, 1):
        nodes += trained(agent, own[agent], critic if agent else None)
    return nodes


def trained(agent: int, own: dict[str, Any], critic: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Reward, advantage and training of an agent."""

    def node(name: str, kind: str, role: str, *above: str, **keys: Any) -> dict[str, Any]:
        return {
            "node_id": f"{name}_{agent}",
            "node_type": kind,
            "node_role": role,
            "agent_group": agent,
            "dependencies": [f"{one}_{agent}" if one != "game" else one for one in above],
            **keys,
        }

    forward = {"only_forward_compute": True}
    found = [
        node("reward", "COMPUTE", "REWARD", "game"),
        node("old", "MODEL_TRAIN", "ACTOR", "talk", config=own, **forward),
        node("train", "MODEL_TRAIN", "ACTOR", "advantage", "old", config=own),
    ]
    gae = {"algorithm.adv_estimator": "gae_marft"}
    if critic is None:
        return [*found, node("advantage", "COMPUTE", "ADVANTAGE", "reward")]
    critic = {**critic, **gae, "critic.model.path": own["model.path"]}
    return [
        *found,
        node("value", "MODEL_TRAIN", "CRITIC", "talk", config=critic, **forward),
        node("advantage", "COMPUTE", "ADVANTAGE", "reward", "value", config=gae),
        node("critic", "MODEL_TRAIN", "CRITIC", "advantage", config=critic),
    ]


def play(
    inputs: tuple[Inputs, Path],
    folder: Path,
    *settings: str,
    world_size: int = 2,
    more: dict[int, dict[str, Any]] | None = None,
    critic: dict[str, Any] | None = None,
) -> Finished:
    folder.mkdir(exist_ok=True)
    (folder / "code.py").write_text(CODE)
    (folder / "tools.yaml").write_text(TOOLS)
    ours, other = inputs
    nodes = dag_nodes(folder, (ours.model, other), more or {}, critic)
    (folder / "dag.yaml").write_text(yaml.safe_dump({"dag_id": "game", "nodes": nodes}))
    arguments = overrides(
        ours,
        folder / "out",
        f"dag.workflow_path={folder / 'dag.yaml'}",
        f"custom_reward_function.path={folder / 'code.py'}",
        "data.train_batch_size=4",
        "data.max_prompt_length=128",
        "data.max_response_length=128",
        "actor_rollout_ref.rollout.agent.max_turn_tokens=5",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        f"trainer.total_training_steps={STEPS}",
        "trainer.deadline_s=240",
        *settings,
    )
    return run_job(world_size, arguments, deadline_s=800)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> tuple[Inputs, Path]:
    """Head dimensions are the least that vLLM takes."""
    made = Inputs.make(tmp_path_factory.mktemp("inputs"))
    make_tiny_model_dir(made.model, init_std=0.2, head_dim=32)
    other = tmp_path_factory.mktemp("other") / "model"
    return made, make_tiny_model_dir(other, "llama", tie=False, vocab=80, init_std=0.2, seed=5, head_dim=32)


@pytest.fixture(scope="module")
def fsdp(inputs, tmp_path_factory) -> Finished:
    return play(inputs, tmp_path_factory.mktemp("fsdp"))


def megatron(role: str = "actor", **sizes: int) -> dict[str, Any]:
    options = {"param_dtype": "float32", **sizes}
    return {f"{role}.strategy": "megatron"} | {
        f"{role}.megatron.{key}": value for key, value in options.items()
    }


def expect_same(
    ours: Finished, theirs: Finished, models: tuple[str, ...], tolerance: float, but: float = 0.0
) -> None:
    """but: the share of weights that may be farther apart: Adam makes of a gradient near 0 a step in the
    direction of its rounding."""
    for agent in (0, 1):
        for name in ("reward/score", "actor/grad_norm", "reward/total"):
            name = f"agent_{agent}/{name}"
            assert ours.values(name) == pytest.approx(theirs.values(name), rel=2e-4, abs=2e-5), name
            assert len(ours.values(name)) == STEPS
    for model in models:
        one, other = ours.weights(model), theirs.weights(model)
        assert one.keys() == other.keys()
        gaps = torch.cat([(one[name] - other[name]).abs().flatten() for name in other])
        assert float((gaps > tolerance).float().mean()) <= but, model


def expect_a_game(finished: Finished) -> None:
    """Tools were called, environments paid and ended some episodes, both policies learned."""
    assert min(finished.values("agent_0/interaction/tool_calls")) > 0
    assert max(finished.values("agent_0/interaction/tool_errors")) == 0
    assert 0 < max(finished.values("agent_0/interaction/env_done")) <= 1
    assert all(3 <= turns <= 8 for turns in finished.values("agent_0/interaction/turns"))
    for agent in (0, 1):
        assert min(finished.values(f"agent_{agent}/actor/grad_norm")) > 0
        assert max(finished.values(f"agent_{agent}/actor/rollout_log_prob_diff_max")) < 1e-3


def test_agents_on_megatron_learn_in_a_game_what_they_learn_on_fsdp(inputs, fsdp, tmp_path):
    expect_a_game(fsdp)
    more = {0: megatron(tensor_model_parallel_size=2), 1: megatron(pipeline_model_parallel_size=2)}
    ours = play(inputs, tmp_path, more=more)
    expect_a_game(ours)
    expect_same(ours, fsdp, ("agent_0.actor", "agent_1.actor"), 1e-4)


def test_a_critic_on_megatron_values_the_turns_of_an_agent_on_fsdp(inputs, tmp_path):
    on_fsdp = {"critic.optim.lr": 1e-2, "critic.fsdp_config.mixed_precision.param_dtype": "float32"}
    theirs = play(inputs, tmp_path / "fsdp", critic=on_fsdp)
    cut = {"critic.optim.lr": 1e-2, **megatron("critic", tensor_model_parallel_size=2)}
    ours = play(inputs, tmp_path / "megatron", critic=cut)
    expect_same(ours, theirs, ("agent_0.actor", "agent_1.actor"), 2e-4, but=2e-4)
    for name in ("agent_1/critic/value_loss", "agent_1/critic/grad_norm"):
        assert ours.values(name) == pytest.approx(theirs.values(name), rel=1e-3), name


def test_a_game_on_vllm_trains_on_the_tokens_that_it_sampled(inputs, tmp_path):
    vllm = ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.max_num_seqs=16")
    settings = (*vllm, "trainer.deadline_s=600")
    ours = play(inputs, tmp_path, *settings, world_size=1)
    expect_a_game(ours)
    for agent in (0, 1):
        assert max(ours.values(f"agent_{agent}/actor/rollout_log_prob_diff")) < 1e-5


def test_a_resumed_game_of_agents_that_learn_by_turns_equals_the_uninterrupted_one(inputs, tmp_path):
    settings = ("actor_rollout_ref.rollout.agent.train_cycle=1", "trainer.save_freq=2")
    whole = play(inputs, tmp_path / "whole", *settings, "trainer.total_training_steps=4")
    play(inputs, tmp_path / "cut", *settings, "trainer.total_training_steps=2")
    resumed = play(inputs, tmp_path / "cut", *settings, "trainer.total_training_steps=4")
    assert whole.values("agent_0/actor/waits") == [0, 1, 0, 1] != whole.values("agent_1/actor/waits")
    for agent in (0, 1):
        for name in ("reward/score", "actor/waits", "reward/total"):
            name = f"agent_{agent}/{name}"
            assert resumed.values(name)[-2:] == whole.values(name)[-2:] and len(whole.values(name)) == 4, name
        one, other = resumed.weights(f"agent_{agent}.actor"), whole.weights(f"agent_{agent}.actor")
        assert all(one[name].equal(other[name]) for name in other)
    assert resumed.values("agent_0/interaction/turns")[-2:] == whole.values("agent_0/interaction/turns")[-2:]
