"""Several agents on GPUs: adapters on one vLLM engine, engines on ranks of their own, HF's running batch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from fixtures_tiny import make_tiny_model_dir
from gpu_share import IN_WORDS
from job_harness import Finished, Inputs, overrides

from siirl.compiler.plan import ModelPlan
from siirl.config import load_config
from siirl.data.completions import Request, SamplingParams
from siirl.engines.engine_registry import make_rollout_engine
from siirl.parallel.dims import ParallelDims

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TESTS = Path(__file__).parents[1]
SHAPE = {"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 64, "init_std": 0.1}
ROLES = ("ROLLOUT", "ACTOR")
RESPONSES = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Inputs:
    folder = tmp_path_factory.mktemp("inputs")
    inputs = Inputs.make(folder)
    make_tiny_model_dir(inputs.model, vocab=128, dtype="bfloat16", **SHAPE)
    make_tiny_model_dir(folder / "other", vocab=128, dtype="bfloat16", seed=1, **SHAPE)
    return inputs


def run(inputs: Inputs, folder: Path, gpus: int, config: dict[int, dict], ranks: dict[int, str], *more: str):
    """Two steps of the solver and the verifier with vLLM; config and ranks by agent."""
    dag = yaml.safe_load(
        (TESTS / "e2e/solver_verifier.yaml")
        .read_text()
        .replace("MODEL_B", str(inputs.model.parent / "other"))
    )
    for node in dag["nodes"]:
        agent = node["agent_group"]
        if node["node_role"] in ROLES and agent in ranks:
            node["placement"] = ranks[agent]
        if node["node_role"] == "ROLLOUT":
            node["config"] = node.get("config", {}) | config.get(agent, {})
            if "model.path" in node["config"] and "rollout.agent.share_instance" in node["config"]:
                del node["config"]["model.path"]
    path = folder / "dag.yaml"
    path.write_text(yaml.safe_dump(dag))
    arguments = overrides(
        inputs,
        folder / "out",
        f"dag.workflow_path={path}",
        "data.max_prompt_length=64",
        "trainer.total_training_steps=2",
        "trainer.device=cuda",
        f"trainer.n_gpus_per_node={gpus}",
        "trainer.deadline_s=240",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.dtype=bfloat16",
        "actor_rollout_ref.rollout.enforce_eager=True",
        *IN_WORDS,
        "actor_rollout_ref.rollout.max_num_seqs=64",
        *more,
    )
    done = subprocess.run(
        [sys.executable, "-m", "siirl.main_dag", *arguments],
        env=os.environ | {"PYTHONPATH": f"{TESTS.parent}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    lines = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
    return Finished(folder / "out", lines)


def check_both_learn(finished: Finished) -> None:
    """The trainer's log-probs are the engine's, up to bf16, before and after an update."""
    for agent in (0, 1):
        distances = finished.values(f"agent_{agent}/actor/rollout_log_prob_diff")
        print(f"agent {agent}: log-prob distances {distances}")
        assert len(distances) == 2 and max(distances) < 0.03
        assert min(finished.values(f"agent_{agent}/actor/grad_norm")) > 0


@pytest.mark.timeout(450)
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "CUDA graphs"])
def test_adapters_of_two_agents_on_one_vllm_engine(eager, inputs, tmp_path):
    rank = "actor_rollout_ref.model.lora_rank"
    config = {1: {rank: 8, "rollout.agent.share_instance": 0}}
    graphs = f"actor_rollout_ref.rollout.enforce_eager={eager}"
    finished = run(inputs, tmp_path, 1, config, {}, f"{rank}=16", graphs)
    check_both_learn(finished)
    logs = [path.name for path in (tmp_path / "out/logs").glob("vllm_*")]
    assert logs == ["vllm_agent_0.rollout_rank_0.log"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.timeout(450)
@pytest.mark.parametrize(
    ("ranks", "tensor_parallel"),
    [({0: "0", 1: "1"}, {}), ({}, {0: {"rollout.tensor_model_parallel_size": 2}})],
    ids=["apart", "two_ranks_and_one"],
)
def test_agents_apart_and_engines_of_several_ranks(ranks, tensor_parallel, inputs, tmp_path):
    check_both_learn(run(inputs, tmp_path, 2, tensor_parallel, ranks))


def test_a_running_batch_says_what_its_requests_say_alone(inputs):
    cfg = load_config(
        [
            "actor_rollout_ref.rollout.name=hf",
            f"actor_rollout_ref.model.path={inputs.model}",
            "actor_rollout_ref.rollout.dtype=float32",
            "actor_rollout_ref.rollout.max_num_seqs=12",
        ]
    )
    plan = ModelPlan("agent_0.rollout", 0, "rollout", "hf", "lm", False, (0,), ParallelDims(1), "rollout", ())
    engine = make_rollout_engine(plan, cfg, None, torch.device("cuda"))
    draw = torch.Generator().manual_seed(0)
    weights = [
        (name, 0.1 * torch.randn(shape, generator=draw) + ("norm" in name))
        for name, (shape, _) in engine.weight_specs().items()
    ]
    engine.load_weights(weights, version=0)
    prompts = [torch.randint(6, 128, (5 + 7 * i % 40,), generator=draw).tolist() for i in range(24)]
    alone = [engine.generate([prompt], RESPONSES, [i])[0][0] for i, prompt in enumerate(prompts)]
    stream, heard = engine.stream(), {}
    waiting = [Request(i, prompt, RESPONSES, i) for i, prompt in enumerate(prompts)]
    while waiting or stream.num_pending:
        stream.submit(waiting[:3])
        waiting = waiting[3:]
        heard |= dict(stream.collect(0.0))
    for i, expected in enumerate(alone):
        assert heard[i].token_ids == expected.token_ids
        assert heard[i].log_probs == pytest.approx(expected.log_probs, abs=1e-4)
    engine.close()
