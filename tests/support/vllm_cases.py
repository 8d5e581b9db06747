"""A small model in a vLLM engine: its configuration, and how far what it says is from transformers."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from siirl.compiler.plan import ModelPlan
from siirl.config import Config, load_config
from siirl.data.completions import Completion
from siirl.parallel.dims import ParallelDims

ROLLOUT = "actor_rollout_ref.rollout"
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 9, 8, 7], [11]]
NOISE = 3.0
"""How many times farther vLLM's are in bfloat16, in the mean, than those of transformers in it."""


def config(model: Path, dtype: str = "float32", *more: str) -> Config:
    keys = {"name": "vllm", "dtype": dtype, "max_model_len": 64}
    words = ["trainer.device=cpu", *(f"{ROLLOUT}.{key}={value}" for key, value in keys.items())]
    return load_config(
        [*words, f"actor_rollout_ref.model.path={model}", f"trainer.output_dir={model}/outputs", *more]
    )


def plan_of_rollout() -> ModelPlan:
    return ModelPlan("agent_0.rollout", 0, "rollout", "vllm", "lm", False, (0,), ParallelDims(1), "r", ())


def gaps(folder: Path, answers: list[list[Completion]], temperature: float, dtype: Any) -> torch.Tensor:
    """The distances of what an engine says of its tokens from what transformers does; and, if not in float32,
    those of what transformers does in a type itself."""
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=used, attn_implementation="eager").eval()
        for used in (torch.float32, dtype)
    )
    found = []
    for prompt, samples in zip(PROMPTS, answers, strict=True):
        for sample in samples:
            assert len(sample.token_ids) == 9
            said, rows = [torch.tensor(sample.log_probs)], torch.tensor([[*prompt, *sample.token_ids]])
            for model in (rounded, exact):
                with torch.no_grad():
                    logits = model(rows).logits[0, len(prompt) - 1 : -1].float()
                chosen = (logits / temperature).log_softmax(-1)
                said.append(chosen.gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0])
            found.append(torch.stack([(one - said[-1]).abs() for one in said[:-1]]))
    return torch.cat(found, dim=1)
