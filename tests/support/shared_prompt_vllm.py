"""vLLM's own builder and attention, in two parts and in one, with FlashAttention's definition for its kernel.

As a script, with TRITON_INTERPRET=1. Parts of both are made by hand: their constructors ask for a GPU.
"""

import inspect
import random
from types import SimpleNamespace

import torch
from shared_prompt_cases import BLOCK, paged_attention, plain_runs, random_batch
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn

from siirl.engines.rollout.vllm.native_prefixes import SharedPromptAttention, SharedPromptBuilder
from siirl.engines.rollout.vllm.shared_prompts import RunFinder

HEADS, KV_HEADS, DIM, ROWS, WIDTH = 4, 2, 16, 20, 8


def made(kind, **values):
    """An object without what its constructor asks of a device."""
    one = object.__new__(kind)
    vars(one).update(values)
    return one


BUILDER = {
    "aot_schedule": False,
    "aot_sliding_window": (-1, -1),
    "use_full_cuda_graph": False,
    "max_cudagraph_size": None,
    "dcp_world_size": 1,
    "rswa_window": None,
    "mm_prefix_query_ranges_np": None,
    "cache_config": SimpleNamespace(cache_dtype="auto"),
    "kv_cache_dtype": torch.bfloat16,
}
ATTENTION = {
    "vllm_flash_attn_version": 3,
    "attn_type": AttentionType.DECODER,
    "kv_cache_dtype": "auto",
    "num_heads": HEADS,
    "num_kv_heads": KV_HEADS,
    "head_size": DIM,
    "scale": DIM**-0.5,
    "sliding_window": (-1, -1),
    "logits_soft_cap": 0,
    "alibi_slopes": None,
    "sinks": None,
    "dcp_world_size": 1,
    "supports_quant_query_input": True,
    "fa4_hd256": False,
}


def laid_out(keys, values):
    """The cache of a layer as this version of vLLM has it."""
    if "unbind(1)" in inspect.getsource(flash_attn.FlashAttentionImpl.forward):
        return torch.stack([keys, values], 1)
    return torch.cat([keys, values], -1).transpose(1, 2).contiguous()


def step(lengths, table, tokens_of_row=1):
    """What vLLM tells a builder of rows that each have so many tokens in a step."""
    count = len(lengths)
    real = sum(length > 0 for length in lengths)
    starts = (torch.arange(count + 1).clamp(max=real) * tokens_of_row).to(torch.int32)
    tokens = count * tokens_of_row
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=count,
        num_actual_tokens=tokens,
        max_query_len=tokens_of_row,
        max_seq_len=WIDTH * BLOCK,
        block_table_tensor=table,
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
    )


def main():
    calls = []

    def counted(**call):
        calls.append(call)
        assert call["q_descale"].shape == (len(call["seqused_k"]), KV_HEADS)
        return paged_attention(**{"return_softmax_lse": False} | call)

    flash_attn.flash_attn_varlen_func = counted
    rng = random.Random(8)
    torch.manual_seed(8)
    builder = made(SharedPromptBuilder, **BUILDER)
    builder._finder = RunFinder(ROWS + 4, HEADS // KV_HEADS, BLOCK, torch.device("cpu"))
    attention = made(SharedPromptAttention, **ATTENTION)
    layer = SimpleNamespace(**dict.fromkeys(("_q_scale", "_k_scale", "_v_scale"), torch.ones(1)))
    shared = 0
    for _ in range(12):
        batch = random_batch(rng, ROWS, WIDTH)
        count = len(batch.lines)
        ids, table = torch.unique(torch.tensor(batch.lines).reshape(count, WIDTH), return_inverse=True)
        table, batch.lines = table.to(torch.int32), table.tolist()
        cache = laid_out(*torch.randn(2, len(ids), BLOCK, KV_HEADS, DIM, dtype=torch.float64))
        query, key = torch.randn(count, HEADS, DIM, dtype=torch.float64), torch.empty(0)
        given = step(batch.lengths, table)
        results = []
        for build in (builder.build, super(SharedPromptBuilder, builder).build):
            output = torch.zeros_like(query)
            metadata = build(0, given)
            assert attention.forward(layer, query, key, key, cache, metadata, output) is output
            results.append(output)
        assert (results[0] - results[1]).abs().max() < 1e-10
        assert len(calls) == 3 and calls[0]["fa_version"] == 3
        calls.clear()
        shared += sum(blocks > 0 for _, blocks in plain_runs(batch, 32))
        several = builder.build(0, step(batch.lengths, table, tokens_of_row=2))
        assert not hasattr(several, "runs") and several.block_table is table
    assert shared > 12 and flash_attn.flash_attn_varlen_func is counted


if __name__ == "__main__":
    main()
