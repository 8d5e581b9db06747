"""Large runs whose steps others publish, on GPUs and in layouts that siirl never had.

Sources: NVIDIA NeMo RL 0.4, docs/about/performance-summary.md, and of 0.3 "Reinforcement Learning with NVIDIA
NeMo-RL: Megatron-Core Support for Optimized Training Throughput" (2025), which has the parts of a step. GRPO
on H100s, Megatron and vLLM, bfloat16, on policy, 512 rows in a mini-batch; what else the recipes of these
releases set. Prompts are taken to have 110 tokens.
"""

from dataclasses import dataclass
from pathlib import Path

POLICY = "actor_rollout_ref"
QWEN = {"model_type": "qwen3", "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False}
EXPERTS = QWEN | {"model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 128,
                  "num_experts_per_tok": 8, "norm_topk_prob": True}  # fmt: skip
LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
         "max_position_embeddings": 131072}  # fmt: skip
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def shape(base, *sizes, **more):
    return base | dict(zip(SIZES, sizes, strict=True)) | more


@dataclass(frozen=True)
class Published:
    """A row of a source."""

    shape: dict
    gpus: int
    rows: int
    longest: int
    mean: int
    """Tokens of a row."""
    engine: int
    """GPUs of it."""
    layout: dict
    step_s: float
    passes_s: tuple[float, ...] = ()
    """Rollout, log-probs and update, where the source has them."""
    beside_s: float | None = None
    """Weight sync and all that is no pass, as 0.3 has it of the model; None: siirl's weight sync."""
    rows_of_log_probs: int = 4
    """The longest rows that a micro-batch of log-probs has room for."""
    recomputes: bool = False


PROMPT, SAMPLES, MINI_BATCH = 110, 32, 512
TP, PP, SP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "sequence_parallel"
CP, EP = "context_parallel_size", "expert_model_parallel_size"
LLAMA_8B = shape(LLAMA, 4096, 14336, 32, 32)
QWEN_32B = shape(QWEN, 5120, 25600, 64, 64, num_key_value_heads=8)
QWEN_30B = shape(EXPERTS, 2048, 6144, 48, 32, moe_intermediate_size=768)
QWEN_235B = shape(EXPERTS, 4096, 12288, 94, 64, moe_intermediate_size=1536)
LAST = "override_transformer_config.num_layers_in_{}_pipeline_stage"
ENDS = {LAST.format(end): 11 for end in ("first", "last")}
RUNS = {
    "Llama-3.1-8B, 0.4": Published(
        *(LLAMA_8B, 16, 2048, 4096, 1060, 1, {PP: 2}, 97.7),
        beside_s=8,
        rows_of_log_probs=2,
        recomputes=True,
    ),
    "Llama-3.1-8B, 0.3": Published(LLAMA_8B, 8, 2048, 4096, 905, 1, {}, 112, (58, 18, 28), 8),
    "Llama-3.1-70B, 0.3": Published(
        shape(LLAMA, 8192, 28672, 80, 64), 64, 2048, 4096, 508, 4, {TP: 4, PP: 4}, 147, (84, 18, 28), 17
    ),
    "Qwen3-30B-A3B, 0.3": Published(
        QWEN_30B, 64, 2048, 4096, 3361, 4, {TP: 2, EP: 8, SP: True}, 167, (78, 23, 50), 16
    ),
    "Qwen3-32B, 0.3": Published(
        QWEN_32B, 64, 2048, 4096, 3393, 4, {TP: 4, PP: 2, SP: True}, 213, (96, 40, 68), 9
    ),
    "Qwen3-30B-A3B, 0.4": Published(
        QWEN_30B, 32, 2048, 4096, 3154, 4, {TP: 2, EP: 8, SP: True}, 225, beside_s=16
    ),
    "Qwen3-32B, 0.4": Published(QWEN_32B, 32, 2048, 4096, 3206, 4, {TP: 4, PP: 4, SP: True}, 393, beside_s=9),
    "Qwen3-235B-A22B, 0.4": Published(
        *(QWEN_235B, 128, 512, 8192, 5671, 16, {TP: 2, CP: 2, EP: 16, PP: 8, SP: True} | ENDS, 506),
        rows_of_log_probs=1,
        recomputes=True,
    ),
}
"""The fastest first."""


def keys_of(run: Published, folder: Path) -> list[str]:
    sizes = [f"{name}={size}" for name, size in ({SP: False} | run.layout).items()]
    log_probs = f"log_prob_max_token_len_per_gpu={run.rows_of_log_probs * run.longest}"
    return [
        "algorithm.adv_estimator=grpo",
        "data.train_files=train.parquet",
        f"data.train_batch_size={run.rows // SAMPLES}",
        "data.max_prompt_length=128",
        f"data.max_response_length={run.longest - 128}",
        f"{POLICY}.model.path={folder}",
        f"{POLICY}.model.enable_gradient_checkpointing={run.recomputes}",
        f"{POLICY}.rollout.name=vllm",
        f"{POLICY}.rollout.n={SAMPLES}",
        f"{POLICY}.rollout.tensor_model_parallel_size={min(run.engine, 8)}",
        f"{POLICY}.rollout.gpu_memory_utilization=0.6",
        f"{POLICY}.rollout.max_num_seqs=1024",
        f"{POLICY}.rollout.enforce_eager=False",
        f"{POLICY}.rollout.{log_probs}",
        f"{POLICY}.ref.{log_probs}",
        f"{POLICY}.actor.ppo_mini_batch_size={MINI_BATCH // SAMPLES}",
        f"{POLICY}.actor.use_kl_loss=True",
        f"{POLICY}.actor.use_dynamic_bsz=True",
        f"{POLICY}.actor.ppo_max_token_len_per_gpu={run.longest}",
        f"{POLICY}.actor.strategy=megatron",
        f"{POLICY}.actor.megatron.param_dtype=bfloat16",
        f"{POLICY}.actor.megatron.param_offload=True",
        f"{POLICY}.actor.megatron.optimizer_offload=True",
        f"{POLICY}.actor.megatron.grad_offload=True",
        *(f"{POLICY}.actor.megatron.{size}" for size in sizes),
        f"trainer.nnodes={run.gpus // 8}",
        "trainer.n_gpus_per_node=8",
    ]
