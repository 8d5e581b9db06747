"""vLLM on a GPU samples models whose layers have states as transformers computes them, by weights that come
as it runs.

    python -m pytest tests/gpu/test_vllm_states_gpu.py -s

Prints the distances. Checks refuse each kind in vLLM on a GPU until it was seen here (InVLLM.on_gpu).
"""

import importlib.metadata
from dataclasses import replace

import causal_lms
import pytest
import torch
from gpu_share import IN_WORDS
from later import needed
from safetensors.torch import load_file
from vllm_cases import NOISE, PROMPTS, ROLLOUT, config, gaps, plan_of_rollout

from siirl.data.completions import SamplingParams
from siirl.engines.engine_registry import make_rollout_engine
from siirl.models import families

needed("vllm")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(400),
]
DELTA = {
    **{"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 128},
    **{"linear_num_key_heads": 4, "linear_num_value_heads": 8},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
CASES = {
    # One layer of experts, and each token takes all: bfloat16 makes a router choose others here and there,
    # and vLLM starts no Qwen3-Next without experts.
    "qwen3_next": {
        **DELTA,
        **{"mlp_only_layers": [0, 1, 2], "num_experts": 2, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
    },
    "qwen3_5_text": DELTA,
    "granitemoehybrid": {
        **{"hidden_size": 512, "num_hidden_layers": 4, "mamba_n_heads": 16, "mamba_d_head": 64},
        **{"mamba_n_groups": 1, "mamba_d_state": 128, "mamba_chunk_size": 256, "num_local_experts": 0},
        "layer_types": ["mamba"] * 3 + ["attention"],
    },
}
TRITON = f"+{ROLLOUT}.engine_kwargs.vllm.gdn_prefill_backend=triton"
"""Not FlashInfer's kernels, which a machine without a compiler of CUDA cannot make."""
OLD = {
    "granitemoehybrid": "vLLM 0.24 does not know what transformers 5.17 calls the layers of Granite",
}


def vllm_minor() -> int:
    return int(importlib.metadata.version("vllm").split(".")[1])


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("kind", CASES)
def test_states_are_sampled_by_the_weights_that_came_last(kind, eager, tmp_path, monkeypatch):
    if kind in OLD and vllm_minor() < 32:
        pytest.skip(OLD[kind])
    row = families.FAMILIES[kind]
    monkeypatch.setitem(families.FAMILIES, kind, replace(row, vllm=replace(row.vllm, since=24)))
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, **CASES[kind]}
    folders = [
        causal_lms.write_model(tmp_path / name, causal_lms.tiny_config(kind, **sizes), seed, deviation=0.02)
        for seed, name in enumerate("ab")
    ]
    keys = (*IN_WORDS, f"{ROLLOUT}.max_num_seqs=16", "trainer.device=cuda")
    keys = (*keys, f"{ROLLOUT}.enforce_eager={eager}", *((TRITON,) if row.delta_nets else ()))
    cfg = config(folders[0], "bfloat16", *keys)
    engine = make_rollout_engine(plan_of_rollout(), cfg, None, torch.device("cuda:0"))
    near, apart = [], []
    try:
        for version in range(3):
            folder, other = folders[version % 2], folders[1 - version % 2]
            if version:
                engine.sleep()
            engine.load_weights(load_file(folder / "model.safetensors", "cuda:0").items(), version)
            answers = engine.generate(PROMPTS, SamplingParams(max_tokens=9, n=2, ignore_eos=True), range(3))
            near.append(gaps(folder, answers, 1.0, torch.bfloat16))
            apart.append(gaps(other, answers, 1.0, torch.bfloat16)[0])
    finally:
        engine.close()
    (vllm, noise), farthest = torch.cat(near, dim=1).mean(dim=1).tolist(), float(torch.cat(near, 1)[0].max())
    others = min(float(gap.mean()) for gap in apart)
    print(f"{kind}, {'eager' if eager else 'graphs'}: vLLM {vllm:.2e} (max {farthest:.2e}), ", end="")
    print(f"bfloat16 {noise:.2e}, other weights {others:.2e}")
    assert vllm < NOISE * noise and others > 5 * vllm
