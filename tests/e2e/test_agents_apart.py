"""Agents on ranks of their own: the same run, whoever's engine answers."""

from pathlib import Path

import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from job_harness import Inputs, overrides, run_job

HERE = Path(__file__).parent
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(character.isdigit() for character in solution_str) / 8
"""
MODELS = ("ROLLOUT", "ACTOR")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return Inputs.make(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    return make_tiny_model_dir(
        tmp_path_factory.mktemp("other") / "model", family="llama", tie=False, vocab=80, init_std=0.2, seed=5
    )


def run_apart(inputs, other_model, folder, world_size, solver, verifier, *more):
    """The solver and the verifier job, with the models of each on ranks of its own."""
    folder.mkdir()
    (folder / "reward.py").write_text(REWARD)
    lines = []
    for line in (HERE / "solver_verifier.yaml").read_text().replace("MODEL_B", str(other_model)).splitlines():
        if any(f"node_role: {role}" in line for role in MODELS):
            ranks = solver if "agent_group: 0" in line else verifier
            line = line.replace("{node_id", f'{{placement: "{ranks}", node_id')
        lines.append(line)
    (folder / "dag.yaml").write_text("\n".join(lines))
    arguments = overrides(
        inputs,
        folder / "out",
        f"dag.workflow_path={folder / 'dag.yaml'}",
        f"custom_reward_function.path={folder / 'reward.py'}",
        "data.max_prompt_length=64",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        *more,
    )
    return run_job(world_size, arguments)


def test_an_agent_on_ranks_of_its_own_learns_what_it_learns_beside_the_other(inputs, other_model, tmp_path):
    beside = run_apart(inputs, other_model, tmp_path / "beside", 2, "0-1", "0-1")
    apart = run_apart(inputs, other_model, tmp_path / "apart", 2, "0", "1")
    for model in ("agent_0.actor", "agent_1.actor"):
        expected = beside.weights(model)
        for name, tensor in apart.weights(model).items():
            torch.testing.assert_close(tensor, expected[name], atol=1e-4, rtol=0)
