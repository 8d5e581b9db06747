"""vLLM itself reads what `siirl export --adapter` wrote, and says what the trainer's merged weights do."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import train_engine_cases as cases
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from later import needed
from torch import Tensor
from train_engine_cases import Scenario
from transformers import AutoModelForCausalLM

from siirl import cli
from siirl.checkpoint.manager import CheckpointManager
from siirl.checkpoint.staging import SavedModel

needed("vllm")
MODEL = "actor_rollout_ref.model"
LORA = (f"{MODEL}.lora_rank={cases.LORA_RANK}", f"{MODEL}.lora_alpha={cases.LORA_ALPHA}")
FAST = "actor_rollout_ref.actor.optim.lr=0.05"
SAMPLE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

base, adapter = sys.argv[1:]
engine = LLM(
    base, enable_lora=True, max_lora_rank=8, skip_tokenizer_init=True, enforce_eager=True, dtype="float32",
    max_model_len=64, max_num_seqs=4, kv_cache_memory_bytes=1 << 26, seed=0,
)
params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, logprobs=0, detokenize=False, ignore_eos=True)
prompts = [{"prompt_token_ids": ids} for ids in ([6, 7, 8, 9], [11])]
found = {}
for name, request in (("base", None), ("adapted", LoRARequest("exported", 1, adapter))):
    outputs = engine.generate(prompts, params, lora_request=request, use_tqdm=False)
    found[name] = []
    for prompt, output in zip(prompts, outputs):
        ids = list(output.outputs[0].token_ids)
        log_probs = [at[token].logprob for at, token in zip(output.outputs[0].logprobs, ids)]
        found[name].append([prompt["prompt_token_ids"], ids, log_probs])
print("FOUND", json.dumps(found))
"""
"""What a user of vLLM writes; no code of siirl."""


def train(rank: int, world: int, path: str, folder: str) -> dict[str, Tensor]:
    """Train adapters, save a checkpoint, and return the weights with them merged, as they are exported."""
    scenario = Scenario("", world, overrides=(*LORA, FAST))
    engine, _ = cases.build_engine(scenario, path)
    cases.train_steps(engine, scenario, range(cases.NUM_STEPS))
    saved = SavedModel(engine, None, path, ("model",), lora_alpha=cases.LORA_ALPHA)
    CheckpointManager(Path(folder), 1, None).save(1, {"agent_0.actor": saved}, {}, {})
    return {name: weight.clone() for name, weight in engine.export_weights()}


def log_probs(model: torch.nn.Module, prompt: list[int], ids: list[int]) -> Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])  # with biases, and without
def test_vllm_reads_an_exported_adapter_and_says_what_the_merged_weights_do(family, tmp_path):
    sizes = {"init_std": 0.2, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32}
    sizes |= {"max_positions": 64, "tie": False}
    base = make_tiny_model_dir(tmp_path / "base", family, **sizes)
    checkpoints, adapter = tmp_path / "checkpoints", tmp_path / "adapter"
    merged = run_workers(train, 1, str(base), str(checkpoints), deadline_s=100)[0]
    assert cli.main(["export", "--adapter", str(checkpoints), str(adapter)]) == 0
    done = subprocess.run(
        [sys.executable, "-c", SAMPLE, str(base), str(adapter)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    found = json.loads(line.removeprefix("FOUND"))
    models = {name: AutoModelForCausalLM.from_pretrained(base) for name in found}
    models["adapted"].load_state_dict(merged)
    for name, model in models.items():
        for prompt, ids, said in found[name]:
            torch.testing.assert_close(
                torch.tensor(said), log_probs(model, prompt, ids), atol=1e-4, rtol=0, msg=name
            )
    moved = [
        float((log_probs(models["base"], prompt, ids) - torch.tensor(said)).abs().max())
        for prompt, ids, said in found["adapted"]
    ]
    assert min(moved) > 0.1, "the adapter was trained far enough to be seen"
