"""Steps that others publish of large runs, on GPUs and in layouts that siirl never had, against predictions.

Source: NVIDIA NeMo RL 0.4, docs/about/performance-summary.md: GRPO on H100s, Megatron and vLLM, bfloat16, on
policy, 2,048 rows a step (235B: 512), 512 of them in a mini-batch. Prompts are taken to have 110 tokens.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from siirl.compiler.compile import compile_plan, load_dag
from siirl.compiler.cost.device_kinds import device_kind
from siirl.compiler.cost.lengths import lengths_of
from siirl.compiler.cost.step_time import StepTime, step_time
from siirl.config import load_config

PAGE = Path(__file__).parents[3] / "docs" / "evidence" / "predictions.md"
POLICY = "actor_rollout_ref"
QWEN = {"model_type": "qwen3", "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False}
EXPERTS = QWEN | {"model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 128,
                  "num_experts_per_tok": 8, "norm_topk_prob": True}  # fmt: skip
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def shape(base, *sizes, **more):
    return base | dict(zip(SIZES, sizes, strict=True)) | more


@dataclass(frozen=True)
class Published:
    """A row of the source."""

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
    recomputes: bool
    """Not in the source: what fits else."""


SAMPLES = 32
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
CP, EP = "context_parallel_size", "expert_model_parallel_size"
LLAMA = {"model_type": "llama", "vocab_size": 128256, "tie_word_embeddings": False}
RUNS = {
    "Llama-3.1-8B": Published(
        shape(LLAMA, 4096, 14336, 32, 32, num_key_value_heads=8),
        *(16, 2048, 4096, 1060, 1, {PP: 2}, 97.7, True),
    ),
    "Qwen3-30B-A3B": Published(
        shape(EXPERTS, 2048, 6144, 48, 32, moe_intermediate_size=768),
        *(32, 2048, 4096, 3154, 4, {TP: 2, EP: 8}, 225, False),
    ),
    "Qwen3-32B": Published(
        shape(QWEN, 5120, 25600, 64, 64, num_key_value_heads=8),
        *(32, 2048, 4096, 3206, 4, {TP: 4, PP: 4}, 393, False),
    ),
    "Qwen3-235B-A22B": Published(
        shape(EXPERTS, 4096, 12288, 94, 64, moe_intermediate_size=1536),
        *(128, 512, 8192, 5671, 16, {TP: 2, CP: 2, EP: 16, PP: 8}, 506, True),
    ),
}
"""The fastest first."""


def predicted(run: Published, folder: Path) -> float:
    """Seconds of its step, with geometric lengths."""
    (folder / "config.json").write_text(json.dumps(run.shape))
    sizes = [f"{name}={size}" for name, size in run.layout.items()] + [
        f"sequence_parallel={TP in run.layout}"
    ]
    if run.shape["num_hidden_layers"] % run.layout.get(PP, 1):
        cut = "override_transformer_config.num_layers_in_{}_pipeline_stage=11"
        sizes += [cut.format(end) for end in ("first", "last")]
    keys = [
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
        f"{POLICY}.rollout.gpu_memory_utilization=0.8",
        f"{POLICY}.rollout.max_num_seqs=1024",
        f"{POLICY}.rollout.enforce_eager=False",
        f"{POLICY}.actor.ppo_mini_batch_size={512 // SAMPLES}",
        f"{POLICY}.actor.use_kl_loss=True",
        f"{POLICY}.actor.use_dynamic_bsz=True",
        f"{POLICY}.actor.ppo_max_token_len_per_gpu={run.longest}",
        f"{POLICY}.ref.log_prob_max_token_len_per_gpu={2 * run.longest}",
        f"{POLICY}.rollout.log_prob_max_token_len_per_gpu={2 * run.longest}",
        f"trainer.nnodes={run.gpus // 8}",
        "trainer.n_gpus_per_node=8",
        f"{POLICY}.actor.strategy=megatron",
        f"{POLICY}.actor.megatron.param_dtype=bfloat16",
        *(f"{POLICY}.actor.megatron.{size}" for size in sizes),
    ]
    cfg = load_config(keys)
    plan, configs = compile_plan(load_dag(cfg), cfg, run.gpus)
    name, engine = next((name, model) for name, model in plan.models.items() if model.is_rollout)
    if run.engine > 8:  # over two machines, which siirl refuses
        dims = replace(engine.dims, tp=run.engine, world=run.gpus)
        plan = replace(plan, models={**plan.models, name: replace(engine, dims=dims)})
    found = step_time(plan, configs, device_kind("h100"), lengths_of(f"110+{run.mean - 110}"))
    assert isinstance(found, StepTime), found
    return found.step_s


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    return {name: predicted(run, folder) for name, run in RUNS.items()}


def test_published_steps_are_predicted_in_their_order_and_too_fast_by_no_more_than_the_page_says(steps):
    published = [run.step_s for run in RUNS.values()]
    assert published == sorted(published) and [*steps.values()] == sorted(steps.values())
    for run, seconds in zip(RUNS.values(), steps.values(), strict=True):
        assert 0.58 * run.step_s < seconds < 1.1 * run.step_s


def test_the_page_has_the_published_steps(steps):
    page = PAGE.read_text()
    for name, seconds in steps.items():
        run = RUNS[name]
        error = round(100 * (seconds / run.step_s - 1))
        assert f"| {name} | {run.gpus} | {run.step_s:g} | {seconds:.0f} | {error:+d}% |" in page
