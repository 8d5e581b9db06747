"""Agents on one frozen base through the main job: each has an adapter, rows and an export of its own."""

from pathlib import Path

import pytest
import yaml
from fixtures_tiny import make_tiny_model_dir
from job_harness import Inputs, overrides, run_job
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file

from siirl.checkpoint.export import export_adapter, export_hf

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
    return run_job(world, overrides(inputs, out, f"dag.workflow_path={path}", *common, *more), 400)


@pytest.mark.slow
@pytest.mark.timeout(500)
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


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_each_adapter_resumes_from_its_own_checkpoint_and_is_exported_from_it(inputs, tmp_path):
    whole = run(inputs, tmp_path, "whole", True, 1, "trainer.save_freq=1")
    checkpoints = tmp_path / "whole" / "checkpoints"
    settings = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoints}/global_step_1")
    resumed = run(inputs, tmp_path, "resumed", True, 1, *settings)
    assert [line["step"] for line in resumed.lines] == [2]
    for agent in (0, 1):
        name = f"agent_{agent}.actor"
        expected, found = whole.weights(name), resumed.weights(name)
        exported = export_hf(checkpoints, tmp_path / name, name)
        stored = load_file(next(exported.glob("*.safetensors")))
        for key, tensor in expected.items():
            assert found[key].equal(tensor), f"agent {agent}: {key} after the resume"
            assert (stored[key] - tensor).abs().max() < 1e-6, f"agent {agent}: {key} of the checkpoint"
        alone = export_adapter(checkpoints, tmp_path / f"adapter_{agent}", name)
        merged = AutoPeftModelForCausalLM.from_pretrained(alone).merge_and_unload().state_dict()
        assert all((merged[key] - tensor).abs().max() < 1e-6 for key, tensor in stored.items())


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_one_vllm_engine_plays_the_turns_of_both_agents(tmp_path):
    inputs = Inputs.make(tmp_path / "inputs")
    make_tiny_model_dir(inputs.model, init_std=0.2, head_dim=32)  # vLLM's CPU attention has no smaller heads
    engine = ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.max_num_seqs=64")
    finished = run(inputs, tmp_path, "out", True, 1, *engine, "trainer.deadline_s=240")
    for agent in (0, 1):
        assert max(finished.values(f"agent_{agent}/actor/rollout_log_prob_diff")) < 1e-5
        assert all(norm > 0 for norm in finished.values(f"agent_{agent}/actor/grad_norm"))
    logs = [path.name for path in (tmp_path / "out" / "logs").glob("vllm_*")]
    assert logs == ["vllm_agent_0.rollout_rank_0.log"]
