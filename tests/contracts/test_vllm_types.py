"""vLLM on a CPU samples every type that check accepts with it, by weights that are loaded as it runs.

What it says of its tokens is held against transformers, as the trainer is by test_accepted_models.py.
"""

from pathlib import Path
from typing import Any

import causal_lms
import pytest
import torch
from accepted_cases import WINDOWS
from later import needed
from proven_models import ALONE, SAMPLED, Case, record
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from siirl.compiler.checks.model_checks import check_trained_model
from siirl.compiler.plan import ModelPlan
from siirl.config import Config, load_config
from siirl.data.completions import Completion, SamplingParams
from siirl.engines.engine_registry import make_rollout_engine
from siirl.errors import NotSupportedError
from siirl.findings import refuse
from siirl.models.families import family_of, known_types, types_with
from siirl.models.trained import OWN_TYPE
from siirl.parallel.dims import ParallelDims

VISION_MODELS = types_with(lambda row: row.sees_images)

needed("vllm")
ROLLOUT = "actor_rollout_ref.rollout"
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0},
    "original_max_position_embeddings": 32,
}
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 9, 8, 7], [11]]
SIZES = {
    **{"hidden_size": 128, "head_dim": 32, "n_embd": 128, "d_model": 128, "word_embed_proj_dim": 128},
    **{"moe_intermediate_size": 64, "intermediate_size": 128},
}
"""vLLM's attention on a CPU has no heads of fewer than 32 features."""
LATENT = SIZES | {"head_dim": 64, "qk_rope_head_dim": 64, "kv_lora_rank": 512}
"""And one size of compressed vectors."""
OTHERS = {
    "gpt_oss": {"sliding_window": 5, "rope_parameters": YARN | {"truncate": False}},
    "deepseek_v3": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
}
"""What is tried where vLLM does not sample those of WINDOWS."""
GEMMA = ("gemma", "gemma3_text")
"""Whose embeddings are scaled, and tied to the head: narrow and hot, or one token has all probability."""
NEAR = 2e-5
"""Of log-probs in float32, in nats."""
TYPES = [
    kind for kind in known_types("fsdp") if kind not in VISION_MODELS
]  # test_vision_rollout.py has these


def config(model: Path, dtype: str = "float32") -> Config:
    keys = {"name": "vllm", "dtype": dtype, "max_model_len": 64}
    words = [f"{ROLLOUT}.{key}={value}" for key, value in keys.items()]
    return load_config(
        [*words, f"actor_rollout_ref.model.path={model}", f"trainer.output_dir={model}/outputs"]
    )


def accepted(model: Path) -> bool:
    try:
        refuse(check_trained_model(config(model), "actor", "the policy"))
    except NotSupportedError as error:
        assert f"{ROLLOUT}.name=hf" in str(error)
        return False
    return True


def made(folder: Path, kind: str, seed: int) -> Path | None:
    """A model of a type that check accepts, with sliding windows if it can be; None if there is none."""
    known = causal_lms.tiny_config(kind)
    sizes = LATENT if family_of(kind).latent else SIZES
    sizes = {name: size for name, size in sizes.items() if hasattr(known, name)}
    sizes |= {"hidden_size": 64} if kind in GEMMA else {}
    for windows in (WINDOWS.get(kind, {}), OTHERS.get(kind, {})):
        causal_lms.write_model(folder, causal_lms.tiny_config(kind, **sizes, **windows), seed)
        if accepted(folder):
            return folder
    return None


def start(folder: Path, dtype: str = "float32") -> Any:
    plan = ModelPlan("agent_0.rollout", 0, "rollout", "vllm", "lm", False, (0,), ParallelDims(1), "r", ())
    return make_rollout_engine(plan, config(folder, dtype), None, torch.device("cpu"))


def farthest(folder: Path, answers: list[list[Completion]], temperature: float) -> float:
    """The largest distance of what an engine says of its tokens from what transformers does."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    gaps = []
    for prompt, samples in zip(PROMPTS, answers, strict=True):
        for sample in samples:
            assert len(sample.token_ids) == 9
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *sample.token_ids]])).logits[0, len(prompt) - 1 : -1]
            expected = (logits / temperature).log_softmax(-1)
            expected = expected.gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0]
            gaps.append(float((torch.tensor(sample.log_probs) - expected).abs().max()))
    return max(gaps)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", TYPES)
def test_each_accepted_type_is_sampled_by_the_weights_that_came_last(kind, tmp_path):
    first, second = (made(tmp_path / name, kind, seed) for seed, name in enumerate("ab"))
    if first is None or second is None:
        pytest.skip("refused with rollout.name=vllm")
    case = Case(kind, "fsdp", SAMPLED, ALONE, "CPU", "float32")
    record(case)
    temperature, near, apart = 2.0 if kind in GEMMA else 1.0, [], []
    params = SamplingParams(max_tokens=9, n=2, temperature=temperature, ignore_eos=True)
    engine = start(first)
    try:
        for version, (folder, other) in enumerate(((first, second), (second, first), (first, second))):
            engine.load_weights(load_file(folder / "model.safetensors").items(), version)
            answers = engine.generate(PROMPTS, params, range(3))
            near.append(farthest(folder, answers, temperature))
            apart.append(farthest(other, answers, temperature))
    finally:
        engine.close()
    assert max(near) < NEAR and min(apart) > 0.1, (near, apart)
    record(case, max(near))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3"])
def test_biases_of_routers_arrive_in_their_own_type(kind, tmp_path):
    """As the trainer sends them: they are float32, whatever the rest is."""
    folder = made(tmp_path / "a", kind, 0)
    assert folder is not None
    stored = load_file(folder / "model.safetensors")
    own = {name: tensor for name, tensor in stored.items() if name.endswith(OWN_TYPE)}
    assert own and not any(torch.equal(bias, bias.bfloat16().float()) for bias in own.values())
    engine = start(folder, "bfloat16")
    try:
        engine.load_weights([(name, own.get(name, tensor.bfloat16())) for name, tensor in stored.items()], 0)
        for name, bias in own.items():
            (held,) = engine.read_tensor(name)
            assert torch.equal(held, bias), name
    finally:
        engine.close()
