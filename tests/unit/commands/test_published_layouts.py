"""`siirl plan --search` of large runs that others publish: their layout is among the best, or the reason why
not is printed. The runs are those of test_published_steps.py."""

import json
import re
import time
from dataclasses import replace

import pytest
from published_runs import CP, EP, LAST, PP, RUNS, SP, TP, Published, keys_of

from siirl.commands.plan_search import search

POLICY = "actor_rollout_ref"
CHOSEN = ("micro", "token_len", "max_num_seqs", "gradient_checkpointing", "offload", "gpu_memory_utilization")
"""Parts of keys that the plan chooses, or that a search tries."""
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "moe_intermediate_size": 2048, "num_attention_heads": 128, "num_key_value_heads": 128,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "vocab_size": 129280,
    "scoring_func": "sigmoid", "norm_topk_prob": True, "tie_word_embeddings": False,
    "max_position_embeddings": 163840,
}  # fmt: skip


def searched(run, folder, *more, device="h100"):
    """(sizes of each layout that is printed, all that is printed, processor seconds)."""
    (folder / "config.json").write_text(json.dumps(run.shape))
    keys = [key for key in keys_of(run, folder) if not any(part in key for part in CHOSEN)]
    began = time.process_time()
    out = search([*keys, *more], "ppo_dag_trainer", device, f"110+{run.mean - 110}")
    spent = time.process_time() - began
    layouts = []
    for text in re.split(r"^\d\. ", out, flags=re.MULTILINE)[1:]:
        named = dict(re.findall(r"actor\.megatron\.(\w+)=(\S+)", text))
        layouts.append({size: int(named.get(size, run.layout.get(size, 1))) for size in (TP, PP, CP, EP)})
    return layouts, out, spent


def test_the_published_layout_of_32b_trains_among_the_best(tmp_path):
    """TP 4 x PP 4 on 32 GPUs; an engine of eight GPUs before the published one of four."""
    run = RUNS["Qwen3-32B, 0.4"]
    layouts, out, spent = searched(run, tmp_path)
    compiled = re.search(r"(\d+) layouts compiled", out)
    assert compiled and int(compiled[1]) <= 40 and spent < 20, "6 s were measured, most of it compiles"
    assert len(layouts) == 5 and layouts[0] == {TP: 4, PP: 4, CP: 1, EP: 1}
    assert re.search(r"^as it is, against 1\.: \+[\d.]+ s \(weights and KV cache \+", out, re.MULTILINE)


SAID = {
    "Qwen3-30B-A3B, 0.4": r"as it is, against 1\.: \+[\d.]+ s \(communication \+",
    "Llama-3.1-70B, 0.3": r"as it is, against 1\.: \+[\d.]+ s \(",
    "Qwen3-235B-A22B, 0.4": r"as it is, against 1\.: \+[\d.]+ s \(communication between machines \+",
}
"""Run -> why its layout is not the first: what takes longer."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SAID)
def test_a_published_layout_is_among_the_best_or_what_takes_longer_is_printed(name, tmp_path):
    run = RUNS[name]
    more = [f"{POLICY}.rollout.tensor_model_parallel_size=8"] if run.engine > 8 else []
    layouts, out, spent = searched(run, tmp_path, *more)
    assert len(layouts) == 5 and spent < 30, spent
    own = {size: run.layout.get(size, 1) for size in (TP, PP, CP, EP)}
    assert own in layouts or re.search(SAID[name], out), out


@pytest.mark.slow
def test_a_search_for_256_gpus_takes_at_most_30_seconds_of_a_core(tmp_path):
    """235B on twice its GPUs, with four times the rows: 21 s were measured."""
    run = replace(RUNS["Qwen3-235B-A22B, 0.4"], gpus=256, rows=2048)
    layouts, out, spent = searched(run, tmp_path, f"{POLICY}.rollout.tensor_model_parallel_size=8")
    assert out.startswith("layouts for 256 x h100") and len(layouts) == 5 and spent < 30, spent


MOONLIGHT = DEEPSEEK | {
    "hidden_size": 2048, "intermediate_size": 11264, "num_hidden_layers": 27, "moe_intermediate_size": 1408,
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "vocab_size": 163840, "max_position_embeddings": 8192,
}  # fmt: skip
OF_256 = {
    TP: 1,
    PP: 16,
    EP: 16,
    "expert_tensor_parallel_size": 1,
    LAST.format("first"): 4,
    LAST.format("last"): 1,
}
LATENT = {
    "DeepSeek-V3": Published(DEEPSEEK, 256, 2048, 6144, 1500, 8, OF_256, 1),
    "Moonlight": Published(
        MOONLIGHT,
        24,
        1536,
        3072,
        1000,
        4,
        {TP: 4, PP: 3, EP: 4, "expert_tensor_parallel_size": 1, SP: True},
        1,
    ),
}
"""Layouts of scripts that verl publishes for H100s of 80 GiB; the engine of the first has 32 GPUs there."""


def test_the_published_layout_of_moonlight_is_among_the_best_or_what_takes_longer_is_printed(tmp_path):
    layouts, out, spent = searched(LATENT["Moonlight"], tmp_path)
    assert len(layouts) == 5 and spent < 30, spent
    own = {TP: 4, PP: 3, CP: 1, EP: 4}
    assert own in layouts or re.search(r"^as it is, against 1\.: \+[\d.]+ s \(", out, re.MULTILINE), out


def test_no_engine_of_a_machine_of_h100s_holds_deepseek_v3_and_that_is_said(tmp_path):
    layouts, out, spent = searched(LATENT["DeepSeek-V3"], tmp_path)
    assert layouts == [] and spent < 30, spent
    assert re.search(r"none fits: an engine of the 8 GPUs of a machine takes 158\.\d GiB of each", out), out
    assert "for weights and one row, and may have 0.95 of its 79.6. Larger devices" in out


@pytest.mark.slow
def test_the_published_layout_of_deepseek_v3_trains_on_larger_gpus_or_what_takes_longer_is_printed(tmp_path):
    layouts, out, spent = searched(LATENT["DeepSeek-V3"], tmp_path, device="b200")
    assert len(layouts) == 5 and spent < 30, spent
    own = {TP: 1, PP: 16, CP: 1, EP: 16}
    longer = r"^as it is, against 1\.: \+[\d.]+ s \("
    assert own in layouts or re.search(longer, out, re.MULTILINE), out
