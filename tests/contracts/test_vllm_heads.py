"""Heads that check accepts with vLLM are those that its attention on a CPU takes and its models have."""

import json
import subprocess
import sys
from pathlib import Path

import causal_lms
import pytest
import torch
from later import needed
from plan_cases import config
from safetensors.torch import load_file
from some_cases import in_parts

from siirl.compiler.checks.model_checks import check_trained_model
from siirl.compiler.plan import ModelPlan
from siirl.config import Config
from siirl.data.completions import SamplingParams
from siirl.engines.engine_registry import make_rollout_engine
from siirl.errors import NotSupportedError
from siirl.findings import refuse
from siirl.models.families import known_types, types_with
from siirl.models.sampled import CPU_DELTA_NETS, CPU_HEAD_SIZES
from siirl.models.sizes import head_size
from siirl.parallel.dims import ParallelDims

SHARED_HEADS = types_with(lambda row: row.vllm.shares_hidden)
VISION_MODELS = types_with(lambda row: row.sees_images)
WHY_NOT = types_with(lambda row: row.vllm.why_not)

needed("vllm")
STATES = types_with(lambda row: row.has_states)
TYPES = [kind for kind in known_types("fsdp") if kind not in (*VISION_MODELS, *WHY_NOT, *STATES)]
WIDTHS = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim")
TOKENS, BLOCK = 5, 32


def attended(size: int, dtype: torch.dtype) -> float:
    """The largest distance of vLLM's attention on a CPU, two heads on one of keys, from torch's."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(dtype, BLOCK, size, "auto")
    generator = torch.Generator().manual_seed(size)
    query, key, value = (
        torch.randn(TOKENS, heads, size, generator=generator).to(dtype) for heads in (2, 1, 1)
    )
    starts, lengths = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, TOKENS], [TOKENS]))
    common = {"query_start_loc": starts, "seq_lens": lengths, "causal": True, "kv_cache_dtype": "auto"}
    metadata = ops.cpu_attn_get_scheduler_metadata(
        **{"num_reqs": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": size, "dtype": dtype, "isa": isa},
        **{"sliding_window_size": -1, "enable_kv_split": True, "dynamic_causal": None},
        **common,
    )
    caches = torch.zeros(2, 1, 2 * BLOCK, size, dtype=dtype).chunk(2, dim=2)
    scales = {"k_scale": 1.0, "v_scale": 1.0}
    slots = torch.arange(TOKENS) + BLOCK
    ops.cpu_attn_reshape_and_cache(key, value, *caches, slots, isa, kv_cache_dtype="auto", **scales)
    output = torch.zeros_like(query)
    ops.cpu_attention_with_kv_cache(
        **{"query": query, "key_cache": caches[0], "value_cache": caches[1], "output": output},
        **{"scale": size**-0.5, "alibi_slopes": None, "sliding_window": -1, "softcap": 0, "s_aux": None},
        **{"block_table": torch.tensor([[1]], dtype=torch.int32), "scheduler_metadata": metadata},
        **{"dynamic_causal": None},
        **(common | scales),
    )
    rows = (tensor.float().transpose(0, 1) for tensor in (query, key, value))
    wanted = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
    return float((output.float() - wanted.transpose(0, 1)).abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_table_has_the_sizes_that_vllms_attention_on_a_cpu_has_a_kernel_for(dtype):
    taken, near = [], 1e-5 if dtype == torch.float32 else 0.03
    for size in (*range(8, 257, 8), 512):
        try:
            assert attended(size, dtype) < near, size
            taken.append(size)
        except RuntimeError as error:
            assert "Unsupported CPU attention" in str(error)
    assert tuple(taken) == CPU_HEAD_SIZES


def delta_net(keys: int, values: int, tokens: int = 70) -> float:
    """The largest distance of vLLM's gated delta net on a CPU, four heads on two of keys, from transformers':
    of outputs and of the last state, relative."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule
    from vllm import _custom_ops as ops

    draw = torch.Generator().manual_seed(keys)
    q, k, v, beta = (
        torch.randn(1, tokens, *size, generator=draw).bfloat16()
        for size in ((2, keys), (2, keys), (4, values), (4,))
    )
    g, beta = -0.2 * torch.rand(1, tokens, 4, generator=draw), beta.sigmoid()
    state_SHKV, index, starts = torch.zeros(3, 4, keys, values), torch.tensor([1]), torch.tensor([0, tokens])
    found, _ = ops.chunk_gated_delta_rule_cpu(
        *(q, k, v, g, beta, state_SHKV, True, starts.int(), False, True, index.int())
    )
    wanted, last = torch_chunk_gated_delta_rule(
        *(x.float().repeat_interleave(4 // x.shape[2], dim=2) for x in (q, k, v)),
        g=g,
        beta=beta.float(),
        initial_state=None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    pairs = ((found, wanted), (state_SHKV[1], last[0]))
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


def test_the_table_has_the_sizes_of_gated_delta_nets_that_a_cpu_has_a_kernel_for():
    taken, sizes = [], (8, 16, 32, 48, 64, 96, 128, 192, 256)
    pairs = sorted({(keys, values) for keys in sizes for values in (keys, 64, 128)})
    for keys, values in pairs:
        try:
            assert delta_net(keys, values) < 0.02, (keys, values)
            taken.append((keys, values))
        except RuntimeError as error:
            assert "head" in str(error)
    assert tuple(taken) == CPU_DELTA_NETS


def test_the_table_has_all_sizes_that_the_package_names():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert set(CPUAttentionBackend.get_supported_head_sizes()) <= set(CPU_HEAD_SIZES)


def accepted(folder: Path) -> bool:
    keys = (f"actor_rollout_ref.model.path={folder}", "actor_rollout_ref.rollout.name=vllm")
    try:
        refuse(check_trained_model(config(*keys, "trainer.device=cpu"), "actor", "the policy"))
    except NotSupportedError as error:
        assert "in vLLM: " in str(error)
        return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kinds", in_parts(sorted(TYPES), size=8))
def test_vllm_builds_the_heads_that_check_reads_off_for_every_type(kinds, tmp_path):
    """A head's features are told by head_dim, or are shares of the hidden size; larger, smaller and equal."""
    folders: dict[str, Path] = {}
    for kind in dict.fromkeys(("mixtral", *kinds)):  # a mixture first: vLLM makes groups of experts only then
        known = causal_lms.tiny_config(kind)
        for width, size in ((256, 64), (128, 64), (256, 32), (160, 40)):
            widths = {name: width for name in WIDTHS if hasattr(known, name)}
            changes = widths | ({"head_dim": size} if kind not in ("gpt2", "gpt_bigcode", "opt") else {})
            folder = tmp_path / f"{kind}-{width}-{size}"
            folders[str(folder)] = causal_lms.write_model(folder, causal_lms.tiny_config(kind, **changes))
    script = Path(__file__).parents[1] / "support" / "vllm_heads.py"
    done = subprocess.run([sys.executable, str(script), *folders], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    wrong = {}
    for name, folder in folders.items():
        raw = json.loads((folder / "config.json").read_text())
        sizes, num_weights, problem = found[name]
        stored = load_file(folder / "model.safetensors")
        whole = sum(tensor.numel() for tensor in stored.values())
        alike = not problem and sizes == [head_size(raw)] and num_weights >= whole
        kept = accepted(folder)
        taken = alike and head_size(raw) in CPU_HEAD_SIZES
        if kept != taken:
            wrong[folder.name] = (sizes, num_weights, whole, problem, kept)
        if raw["model_type"] in SHARED_HEADS and folder.name.endswith(("128-64", "256-32")):
            assert not kept, folder.name
    assert not wrong


def start(folder: Path):
    keys = ("actor_rollout_ref.rollout.dtype=float32", "actor_rollout_ref.rollout.max_model_len=64")
    cfg: Config = config(
        *keys, f"actor_rollout_ref.model.path={folder}", "actor_rollout_ref.rollout.name=vllm"
    )
    plan = ModelPlan("agent_0.rollout", 0, "rollout", "vllm", "lm", False, (0,), ParallelDims(1), "r", ())
    return make_rollout_engine(plan, cfg, None, torch.device("cpu"))


def test_an_engine_on_a_cpu_refuses_what_check_could_not_know(tmp_path):
    """trainer.device=auto is a CPU only where the run starts."""
    folder = causal_lms.write_model(tmp_path / "model", causal_lms.tiny_config("llama"))
    with pytest.raises(NotSupportedError, match=r"no kernel for heads of 8 features.*Set rollout\.name=hf\."):
        start(folder)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("kind", "size"), [("llama", 48), ("qwen2", 80), ("phi3", 112), ("gemma3_text", 256)]
)
def test_an_engine_starts_and_samples_with_heads_that_check_accepts(tmp_path, kind, size):
    changes = {"hidden_size": 4 * size} | ({} if kind in ("qwen2", "phi3") else {"head_dim": size})
    folder = causal_lms.write_model(tmp_path / "model", causal_lms.tiny_config(kind, **changes))
    assert accepted(folder)
    engine = start(folder)
    try:
        engine.load_weights(load_file(folder / "model.safetensors").items(), 0)
        params = SamplingParams(max_tokens=4, n=2, temperature=1.0, ignore_eos=True)
        (samples,) = engine.generate([[5, 6, 7]], params, range(1))
        assert [len(sample.token_ids) for sample in samples] == [4, 4]
    finally:
        engine.close()
