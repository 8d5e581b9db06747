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


@pytest.fixture(scope="module")
def beside(inputs, other_model, tmp_path_factory):
    """Both agents on one rank, each with an engine at hand."""
    return run_apart(inputs, other_model, tmp_path_factory.mktemp("runs") / "beside", 1, "0", "0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "solver", "verifier"),
    [(2, "0", "1"), (2, "0-1", "1"), (3, "0-1", "1-2"), (3, "0", "1-2")],
    ids=["apart", "fewer", "overlapping", "more"],
)
def test_agents_on_ranks_of_their_own_learn_what_they_learn_side_by_side(
    world_size, solver, verifier, beside, inputs, other_model, tmp_path
):
    finished = run_apart(inputs, other_model, tmp_path / "apart", world_size, solver, verifier)
    for agent in (0, 1):
        assert min(finished.values(f"agent_{agent}/actor/grad_norm")) > 0
        expected = beside.weights(f"agent_{agent}.actor")
        found = finished.weights(f"agent_{agent}.actor")
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], atol=1e-4, rtol=0)
