"""Seeds on vLLM's first model runner, which Qwen2 has on GPUs: also where a prompt is read in parts."""

import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from sampling_reference import drawn_tokens
from transformers import AutoModelForCausalLM

from siirl.compiler.plan import ModelPlan
from siirl.config import load_config
from siirl.engines.engine_registry import make_rollout_engine
from siirl.engines.rollout.base import SamplingParams
from siirl.engines.rollout.sampling import derive_seed
from siirl.parallel.dims import ParallelDims

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.timeout(300)
def test_draws_are_those_of_the_seeds_also_when_prompts_are_read_in_parts(tmp_path):
    shape = {"hidden": 128, "heads": 2, "kv_heads": 2, "head_dim": 64, "init_std": 0.1}
    path = make_tiny_model_dir(tmp_path / "model", "qwen2", vocab=24, tokenizer=False, **shape)
    rollout = "actor_rollout_ref.rollout"
    cfg = load_config(
        [
            f"{rollout}.name=vllm",
            f"actor_rollout_ref.model.path={path}",
            f"{rollout}.dtype=float32",
            f"{rollout}.max_model_len=128",
            f"{rollout}.max_num_seqs=32",
            f"{rollout}.max_num_batched_tokens=64",
            f"{rollout}.gpu_memory_utilization=0.1",
            f"{rollout}.enforce_eager=True",
            f"trainer.output_dir={tmp_path}/outputs",
        ]
    )
    plan = ModelPlan(
        "agent_0.rollout", 0, "rollout", "vllm", "lm", False, (0,), ParallelDims(1), "rollout", ()
    )
    engine = make_rollout_engine(plan, cfg, None, torch.device("cuda", 0))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().cuda()
    state = model.state_dict()
    prompts = [[(7 * row + place) % 20 + 2 for place in range(17 + row % 5)] for row in range(24)]
    try:
        engine.load_weights([(name, state[name]) for name in engine.weight_specs()], version=0)
        completions = engine.generate(prompts, SamplingParams(max_tokens=6), range(24))
    finally:
        engine.close()
    for row, (sample,) in enumerate(completions):
        assert sample.token_ids == drawn_tokens(model, prompts[row], derive_seed(row, 0), 6), row
