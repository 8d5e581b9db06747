"""Gated delta nets and Mamba-2 by fla-core's kernels on CUDA, against torch's and rows alone; their speed.

    python -m pytest tests/gpu/test_state_kernels_gpu.py -s

Prints distances, milliseconds, MFU and the kernels that take longest.
"""

import time

import causal_lms
import pytest
import torch
from later import needed
from state_rows import ROWS, alone, gradients, packed, rows_of

from siirl.config.common import why_not_fla
from siirl.engines.train.attention.attention_kernels import TUNED, state_kernels
from siirl.engines.train.attention.packed_attention import PACKED_ATTENTION
from siirl.engines.train.attention.state_layers import pin_state_layers
from siirl.engines.train.hf_model import compile_layers, keep_float32
from siirl.engines.train.language_model import PackedLanguageModel, model_flops, run_packed
from siirl.engines.train.packed.packing import pack_rows
from siirl.models.families import family_of
from siirl.observe.metrics import peak_flops

needed("fla", "fla-core is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(400),
]
if torch.cuda.is_available():
    import triton

    if WHY_NOT := why_not_fla(torch.cuda.get_device_capability(), triton.__version__):
        pytest.skip(WHY_NOT, allow_module_level=True)
HYBRID = ["linear_attention"] * 3 + ["full_attention"]
DELTA = {
    **{"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "layer_types": HYBRID},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
}
CASES = {
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA | {"num_experts": 2, "num_experts_per_tok": 2, "mlp_only_layers": [0, 1, 2]},
    "granitemoehybrid": {
        **{"hidden_size": 256, "num_hidden_layers": 4, "mamba_n_heads": 8, "mamba_d_head": 64},
        **{"mamba_n_groups": 1, "mamba_d_state": 128, "mamba_chunk_size": 256, "num_local_experts": 0},
        "layer_types": ["mamba"] * 3 + ["attention"],
    },
}
QWEN3_5_0_8B = {
    **{"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "vocab_size": 248320},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "layer_types": 6 * HYBRID},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 16, "tie_word_embeddings": True},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "max_position_embeddings": 4096},
}


def model_of(kind: str, dtype: torch.dtype, kernels: str, attention: str = PACKED_ATTENTION, **sizes):
    """Alike for each dtype. Decays are slow, so that a leak would show."""
    from transformers import AutoModelForCausalLM

    config, states = causal_lms.tiny_config(kind, **sizes), state_kernels(kernels)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    for name, param in model.named_parameters():
        if name.endswith("A_log"):
            param.data.uniform_(-4.0, 0.0)
    model = model.to(dtype).cuda()
    keep_float32(model)
    pin_state_layers(model, states)
    return model


def relative(found: dict, want: dict) -> float:
    """The largest distance of a tensor, by the norms."""
    return max(float((found[n].float() - want[n].float()).norm() / want[n].float().norm()) for n in want)


@pytest.mark.parametrize("case", ["rows alone", "shared prompts"])
@pytest.mark.parametrize("kind", CASES)
def test_packed_rows_by_fla_are_as_near_to_rows_alone_as_by_torch(kind, case):
    """In bfloat16 no farther than twice; in float32, by products of TensorFloat-32, nearer than bfloat16."""
    torch.backends.cuda.matmul.allow_tf32 = False
    sizes, rows, share = CASES[kind], rows_of(*ROWS[case]), case == "shared prompts"
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512} | sizes
    whole = model_of(kind, torch.float32, "torch", "sdpa", **sizes)
    want = alone(whole, rows)
    exact = gradients(whole, want)
    gaps = {}
    for dtype in (torch.float32, torch.bfloat16):
        for kernels in ("torch", "fla", *["fla, compiled"] * family_of(kind).compiled):
            ours = model_of(kind, dtype, kernels.partition(",")[0], **sizes)
            if "compiled" in kernels:
                compile_layers(ours)
            # As the engine, which shares none in float32: no kernel of CUDA joins the parts.
            found = packed(ours, rows, share and dtype == torch.bfloat16).float()
            grads = gradients(ours, found)
            gaps[dtype, kernels] = (
                float((found - want).detach().norm() / want.norm()),
                relative(grads, exact),
            )
            print(f"{kind}, {case}, {dtype}, {kernels}: log-probs, gradients {gaps[dtype, kernels]}")
    assert max(gaps.pop((torch.float32, "torch"))) < 1e-4
    by_torch = gaps.pop((torch.bfloat16, "torch"))
    for (dtype, _), gap in gaps.items():
        factor = 2 if dtype == torch.bfloat16 else 1
        assert all(one < factor * bound for one, bound in zip(gap, by_torch, strict=True))


def seconds_of_an_update(model: PackedLanguageModel, num_rows: int, share: bool) -> tuple[float, float]:
    """(seconds, model FLOPs) of forward and backward over rows of 256 and 256 tokens, in one micro-batch."""
    numbers = [row // 8 if share else row for row in range(num_rows)]
    rows = rows_of(numbers, [256] * num_rows, [256] * num_rows)
    batch = pack_rows(rows, torch.device("cuda"), share_prompts=share)

    def step() -> None:
        run_packed(model, batch, 1.0, ("log_prob",))["log_prob"].sum().backward()
        model.zero_grad()

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    lengths = [512] * num_rows
    return (time.perf_counter() - begin) / 3, model_flops(model.hf, lengths, backward=True)


def test_an_update_of_the_shape_of_qwen3_5_0_8b_is_faster_by_fla():
    seconds, peak = {}, peak_flops(torch.cuda.get_device_name()) or float("nan")
    for kernels, numbers in (("torch", (8,)), ("fla", (8, 64, 128))):
        model = PackedLanguageModel(model_of("qwen3_5_text", torch.bfloat16, kernels, **QWEN3_5_0_8B))
        compile_layers(model.hf)  # as is chosen
        for num_rows in numbers:
            for share in (False, True):
                torch.cuda.reset_peak_memory_stats()
                took_s, flops = seconds_of_an_update(model, num_rows, share)
                seconds[kernels, num_rows, share] = took_s
                gib = torch.cuda.max_memory_allocated() / 2**30
                of_shared = " of shared prompts, counted whole" if share else ""
                print(
                    f"{kernels}: {num_rows} rows of 512 tokens{of_shared}: {1000 * took_s:.0f} ms, "
                    f"MFU {flops / took_s / peak:.2f}, peak {gib:.0f} GiB",
                    flush=True,
                )
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        seconds_of_an_update(model, 64, False)
    print(profiled.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=90))
    assert seconds["fla", 8, False] < seconds["torch", 8, False] / 2
    if torch.cuda.get_device_capability() in TUNED:
        from fla.modules.norm.l2norm import l2norm_bwd_kernel  # keyed by the number of tokens, too

        assert len(l2norm_bwd_kernel.cache) > 1 and len(set(map(str, l2norm_bwd_kernel.cache.values()))) == 1
