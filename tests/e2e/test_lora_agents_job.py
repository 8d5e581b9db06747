"""Agents on one frozen base through the main job: each has an adapter, rows and an export of its own."""

from pathlib import Path

import pytest
import yaml
from job_harness import Inputs, overrides, run_job

HERE = Path(__file__).parent
MODEL = "actor_rollout_ref.model"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return Inputs.make(tmp_path_factory.mktemp("inputs"))


def run(inputs: Inputs, folder: Path, name: str, share: bool, world: int, *more: str):
    """The solver and the verifier on one model, each with an adapter; share: on one copy of it."""
    dag = yaml.safe_load((HERE / "solver_verifier.yaml").read_text())
    own = {f"{MODEL}.lora_rank": 2} | ({"rollout.agent.share_instance": 0} if share else {})
    next(node for node in dag["nodes"] if node["node_id"] == "verifier")["config"] = own
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(dag))
    common = ("data.max_prompt_length=64", "trainer.total_training_steps=2", f"{MODEL}.lora_rank=4")
    out = folder / name
    return run_job(world, overrides(inputs, out, f"dag.workflow_path={path}", *common, *more), 200)


@pytest.mark.slow
def test_agents_on_one_base_learn_what_agents_on_copies_of_it_learn(inputs, tmp_path):
    shared = run(inputs, tmp_path, "shared", True, 2)
    apart = run(inputs, tmp_path, "apart", False, 2)
    for agent in (0, 1):
        one, other = (finished.weights(f"agent_{agent}.actor") for finished in (shared, apart))
        assert one.keys() == other.keys()
        for name in one:
            assert (one[name] - other[name]).abs().max() < 1e-5, f"agent {agent}: {name}"
        for finished in (shared, apart):
            assert max(finished.values(f"agent_{agent}/actor/rollout_log_prob_diff_max")) < 1e-3
        scores = f"agent_{agent}/reward/score"
        assert shared.values(scores) == apart.values(scores)
    exports = [shared.weights(f"agent_{agent}.actor") for agent in (0, 1)]
    changes = {name: (exports[0][name] - exports[1][name]).abs().max() for name in exports[0]}
    assert changes["model.layers.0.mlp.up_proj.weight"] > 1e-3
    assert changes["model.embed_tokens.weight"] == 0
    bytes_sent = "weight_sync/bytes"
    assert max(shared.values(bytes_sent)) < 0.3 * max(apart.values(bytes_sent))
