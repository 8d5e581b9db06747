"""The Megatron engine gives what plain Hugging Face and AdamW give, in every parallel layout."""

import functools
import tempfile
from pathlib import Path

import pytest
import train_engine_cases as cases
from dist_harness import run_workers
from expert_cases import assert_equal_training, reference_on_disk
from fixtures_tiny import make_tiny_model_dir
from recorded_cases import case_of, record_outcome, type_of
from train_engine_cases import Outcome, Scenario

ACTOR = "actor_rollout_ref.actor"
MEGATRON = f"{ACTOR}.megatron"
PLAIN_OPTIMIZER = f"{MEGATRON}.use_distributed_optimizer=False"
SEQUENCE_PARALLEL = f"{MEGATRON}.sequence_parallel=True"
NO_RECOMPUTATION = "actor_rollout_ref.model.enable_gradient_checkpointing=False"
OVERLAPS = (
    f"+{MEGATRON}.override_ddp_config.overlap_grad_reduce=True",
    f"+{MEGATRON}.override_ddp_config.overlap_param_gather=True",
)
UNEVEN = (
    f"+{MEGATRON}.override_transformer_config.num_layers_in_first_pipeline_stage=1",
    f"+{MEGATRON}.override_transformer_config.recompute_granularity=selective",
    f"+{MEGATRON}.override_transformer_config.recompute_method=null",
    f"+{MEGATRON}.override_transformer_config.recompute_num_layers=null",
)


def options(**values: object) -> list[str]:
    return [f"+{MEGATRON}.override_transformer_config.{name}={value}" for name, value in values.items()]


TOKEN_BUDGET = (f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=24")
TINY = {"hidden": 64, "init_std": 0.15, "layers": 4}


def scenario(name: str, world: int, model: str = "qwen3_untied", split: str = "even", overrides=(), **sizes):
    return Scenario(
        name, world, model, split, tuple(overrides), strategy="megatron", sizes=tuple(sizes.items())
    )


FEW = [
    scenario("pp2, tp2, sequence parallel", 4, overrides=[SEQUENCE_PARALLEL], pp=2, tp=2),
    scenario("cp2", 2, overrides=TOKEN_BUDGET, cp=2),
]
SLOW = [
    scenario("pp2, vpp2", 2, "qwen3_tied", overrides=TOKEN_BUDGET, pp=2, vpp=2),
    scenario("tp2", 2, "qwen3_tied", tp=2),
    scenario("dp2, uneven rows", 2, "llama", split="uneven", overrides=TOKEN_BUDGET),
    scenario("one rank", 1),
    scenario("one rank, qwen2, plain optimizer", 1, "qwen2", overrides=[PLAIN_OPTIMIZER]),
    scenario("tp2, plain optimizer, token budget", 2, overrides=[PLAIN_OPTIMIZER, *TOKEN_BUDGET], tp=2),
    scenario("tp2, qwen2", 2, "qwen2", tp=2),
    scenario("dp2, one without rows", 2, split="first_rank"),
    scenario("dp2, plain optimizer", 2, "qwen3_tied", overrides=[PLAIN_OPTIMIZER]),
    scenario("tp4, two key-value heads", 4, "qwen3_tied", tp=4),
    scenario("tp2, dp2", 4, "llama", tp=2),
    scenario("pp2", 2, pp=2),
    scenario("pp2, tied", 2, "qwen3_tied", overrides=[PLAIN_OPTIMIZER, *TOKEN_BUDGET], pp=2),
    scenario("pp4", 4, "qwen2", pp=4),
    scenario("pp2, tp2", 4, "qwen3_tied", overrides=TOKEN_BUDGET, pp=2, tp=2),
    scenario("sequence parallel, tied", 2, "qwen3_tied", overrides=[SEQUENCE_PARALLEL], tp=2),
    scenario("pp2, dp2, uneven rows", 4, "qwen3_tied", split="uneven", overrides=TOKEN_BUDGET, pp=2),
    scenario("pp2, vpp2, dp2, one without rows", 4, split="first_rank", pp=2, vpp=2),
    scenario("uneven pp2", 2, overrides=UNEVEN, pp=2),
    scenario("cp2, tp2, sequence parallel", 4, "qwen3_tied", overrides=[SEQUENCE_PARALLEL], cp=2, tp=2),
    scenario("cp2, pp2", 4, "llama", cp=2, pp=2),
    scenario("cp2, dp2, one without rows", 4, "qwen3_tied", split="first_rank", cp=2),
    scenario(
        "pp2, vpp2, a layout", 2, overrides=options(pipeline_model_parallel_layout="'Ett|t|t|L'"), pp=2, vpp=2
    ),
    scenario(
        "pp3, ends counted as layers",
        3,
        "qwen3_tied",
        overrides=options(
            account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True
        ),
        pp=3,
    ),
    scenario(
        "experts, ep2, allgather, grouped, router in fp64",
        2,
        "qwen3_moe",
        overrides=options(
            moe_token_dispatcher_type="allgather", moe_grouped_gemm=True, moe_router_dtype="fp64"
        ),
        ep=2,
    ),
    scenario(
        "experts, tp2, ep2, allgather, experts recomputed, router in fp32",
        2,
        "mixtral",
        overrides=[
            SEQUENCE_PARALLEL,
            NO_RECOMPUTATION,
            *options(
                moe_token_dispatcher_type="allgather", moe_layer_recompute=True, moe_router_dtype="fp32"
            ),
        ],
        tp=2,
        ep=2,
    ),
    scenario("no recomputation", 2, overrides=[NO_RECOMPUTATION], tp=2),
    scenario("overlapped reductions", 2, overrides=[*OVERLAPS, *TOKEN_BUDGET]),
]
SCENARIOS = [*FEW, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]


@functools.cache
def model_dirs() -> dict[str, str]:
    root = Path(tempfile.mkdtemp(prefix="siirl-megatron-engine-"))
    made = {
        "qwen3_tied": make_tiny_model_dir(root / "tied", tie=True, **TINY),
        "qwen3_untied": make_tiny_model_dir(root / "untied", tie=False, **TINY),
        "llama": make_tiny_model_dir(root / "llama", "llama", tie=False, **TINY),
        "qwen2": make_tiny_model_dir(root / "qwen2", "qwen2", tie=False, **TINY),
        "qwen3_moe": make_tiny_model_dir(root / "qwen3_moe", "qwen3_moe", tie=False, **TINY),
        "mixtral": make_tiny_model_dir(root / "mixtral", "mixtral", tie=False, **TINY),
    }
    return {name: str(path) for name, path in made.items()}


@functools.cache
def reference(model: str) -> Outcome:
    return reference_on_disk(model_dirs()[model], model)


@functools.cache
def outcome(case: Scenario) -> Outcome:
    return run_workers(cases.run_scenarios, case.world, [case], model_dirs())[0][case.name]


@pytest.mark.parametrize("case", SCENARIOS, ids=lambda case: case.name)
def test_a_megatron_model_equals_plain_hf_and_adamw(case):
    ours, theirs = outcome(case), reference(case.model)
    assert_equal_training(ours, theirs)
    record_outcome(case_of(type_of(model_dirs()[case.model]), case), ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [(), (PLAIN_OPTIMIZER,)], ids=["distributed", "plain"])
def test_bf16_weights_with_fp32_masters_stay_near_fp32(optimizer):
    bf16 = (f"{MEGATRON}.param_dtype=bfloat16", *optimizer)
    ours, theirs = outcome(scenario("bf16", 2, overrides=bf16, tp=2)), reference("qwen3_untied")
    gap = (ours.log_prob - theirs.log_prob).abs()
    assert 1e-5 < gap.max() < 0.5
    assert gap.mean() < 0.05
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=0.1)
    for name, weight in theirs.weights.items():
        rounded = (weight.bfloat16() - weight).abs().mean()
        assert (ours.weights[name] - weight).abs().mean() < rounded + cases.LR, name
