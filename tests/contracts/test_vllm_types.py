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
from vllm_cases import NOISE, PROMPTS, ROLLOUT, config, gaps, plan_of_rollout

from siirl.compiler.checks.model_checks import check_trained_model
from siirl.data.completions import SamplingParams
from siirl.engines.engine_registry import make_rollout_engine
from siirl.errors import NotSupportedError
from siirl.findings import refuse
from siirl.models.families import family_of, known_types, types_with
from siirl.models.trained import OWN_TYPE

VISION_MODELS = types_with(lambda row: row.sees_images)

needed("vllm")
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0},
    "original_max_position_embeddings": 32,
}
SIZES = {
    **{"hidden_size": 128, "head_dim": 32, "n_embd": 128, "d_model": 128, "word_embed_proj_dim": 128},
    **{"moe_intermediate_size": 64, "intermediate_size": 128},
}
"""vLLM's attention on a CPU has no heads of fewer than 32 features."""
LATENT = SIZES | {"head_dim": 64, "qk_rope_head_dim": 64, "kv_lora_rank": 512}
"""And one size of compressed vectors."""
STATES = SIZES | {
    **{"linear_key_head_dim": 64, "linear_value_head_dim": 64, "shared_expert_intermediate_size": 64},
    **{"mamba_n_groups": 1, "mamba_d_head": 64, "mamba_d_state": 32},
}
"""And of gated delta nets; and norms over all heads."""
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


def accepted(model: Path, dtype: str = "float32") -> bool:
    try:
        refuse(check_trained_model(config(model, dtype), "actor", "the policy"))
    except NotSupportedError as error:
        assert f"{ROLLOUT}.name=hf" in str(error)
        return False
    return True


def dtype_of(kind: str) -> str:
    """In which it is sampled."""
    return family_of(kind).vllm.cpu_dtype or "float32"


def made(folder: Path, kind: str, seed: int) -> Path | None:
    """A model of a type that check accepts, with sliding windows if it can be; None if there is none."""
    known = causal_lms.tiny_config(kind)
    sizes = LATENT if family_of(kind).latent else STATES if family_of(kind).has_states else SIZES
    sizes = {name: size for name, size in sizes.items() if hasattr(known, name)}
    sizes |= {"hidden_size": 64} if kind in GEMMA else {}
    for windows in (WINDOWS.get(kind, {}), OTHERS.get(kind, {})):
        causal_lms.write_model(folder, causal_lms.tiny_config(kind, **sizes, **windows), seed)
        if accepted(folder, dtype_of(kind)):
            return folder
    return None


def start(folder: Path, dtype: str = "float32") -> Any:
    return make_rollout_engine(plan_of_rollout(), config(folder, dtype), None, torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", TYPES)
def test_each_accepted_type_is_sampled_by_the_weights_that_came_last(kind, tmp_path):
    if kind.startswith("qwen3_5"):
        pytest.importorskip("torchvision", reason="vLLM's model of it imports that of images")
    first, second = (made(tmp_path / name, kind, seed) for seed, name in enumerate("ab"))
    if first is None or second is None:
        pytest.skip("refused with rollout.name=vllm")
    name = dtype_of(kind)
    case, dtype = Case(kind, "fsdp", SAMPLED, ALONE, "CPU", name), getattr(torch, name)
    record(case)
    temperature, near, apart = 2.0 if kind in GEMMA else 1.0, [], []
    params = SamplingParams(max_tokens=9, n=2, temperature=temperature, ignore_eos=True)
    engine = start(first, name)
    try:
        for version, (folder, other) in enumerate(((first, second), (second, first), (first, second))):
            engine.load_weights(load_file(folder / "model.safetensors").items(), version)
            answers = engine.generate(PROMPTS, params, range(3))
            near.append(gaps(folder, answers, temperature, dtype))
            apart.append(gaps(other, answers, temperature, dtype)[0])
    finally:
        engine.close()
    farthest = max(float(gap[0].max()) for gap in near)
    if dtype == torch.float32:
        assert farthest < NEAR and min(float(gap.max()) for gap in apart) > 0.1, (near, apart)
    else:
        vllm, noise = torch.cat(near, dim=1).mean(dim=1).tolist()
        assert vllm < NOISE * noise and min(float(gap.mean()) for gap in apart) > 10 * noise, (vllm, noise)
    record(case, farthest)


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
