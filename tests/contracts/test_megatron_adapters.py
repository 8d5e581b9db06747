"""LoRA adapters under Megatron give what peft and AdamW give on plain Hugging Face, in every layout."""

import functools
import tempfile
from pathlib import Path

import pytest
import train_engine_cases as cases
from dist_harness import run_workers
from expert_cases import assert_equal_training, reference_on_disk
from fixtures_tiny import make_tiny_model_dir
from recorded_cases import case_of, record_outcome
from train_engine_cases import Outcome, Scenario

ACTOR = "actor_rollout_ref.actor"
MEGATRON = f"{ACTOR}.megatron"
MODEL = "actor_rollout_ref.model"
LORA = (f"{MODEL}.lora_rank={cases.LORA_RANK}", f"{MODEL}.lora_alpha={cases.LORA_ALPHA}")
PLAIN_OPTIMIZER = f"{MEGATRON}.use_distributed_optimizer=False"
SEQUENCE_PARALLEL = f"{MEGATRON}.sequence_parallel=True"
NO_RECOMPUTATION = f"{MODEL}.enable_gradient_checkpointing=False"
OVERLAPS = (
    f"+{MEGATRON}.override_ddp_config.overlap_grad_reduce=True",
    f"+{MEGATRON}.override_ddp_config.overlap_param_gather=True",
)
TOKEN_BUDGET = (f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=24")
SOME = ("q_proj", "v_proj", "up_proj", "down_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TINY = {"hidden": 64, "init_std": 0.15, "layers": 4}


def scenario(name: str, world: int, model: str = "qwen3", targets=(), overrides=(), **sizes):
    chosen = (f"{MODEL}.target_modules=[{','.join(targets)}]",) if targets else ()
    return Scenario(
        name,
        world,
        model,
        overrides=(*LORA, *chosen, *overrides),
        strategy="megatron",
        sizes=tuple(sizes.items()),
    )


FEW = [
    scenario("pp2, tp2, sequence parallel", 4, "qwen2", overrides=[SEQUENCE_PARALLEL], pp=2, tp=2),
]
SLOW = [
    scenario("tp2, cp2, some modules", 4, targets=SOME, overrides=TOKEN_BUDGET, tp=2, cp=2),
    scenario("one rank, no recomputation", 1, "llama", overrides=[NO_RECOMPUTATION]),
    scenario("tp2", 2, "llama", tp=2),
    scenario("pp2, plain optimizer", 2, overrides=[PLAIN_OPTIMIZER, *TOKEN_BUDGET], pp=2),
    scenario("pp2, vpp2, overlapped reductions", 2, overrides=[*OVERLAPS, *TOKEN_BUDGET], pp=2, vpp=2),
    scenario("cp2, sequence parallel", 4, overrides=[SEQUENCE_PARALLEL, *TOKEN_BUDGET], tp=2, cp=2),
    scenario("tp2, dp2", 4, tp=2),
    scenario("tp4, two key-value heads", 4, targets=SOME, tp=4),
    scenario(
        "experts, tp2, ep2, sequence parallel",
        4,
        "qwen3_moe",
        ATTENTION,
        overrides=[SEQUENCE_PARALLEL],
        tp=2,
        ep=2,
    ),
]
SCENARIOS = [*FEW, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]


@functools.cache
def model_dirs() -> dict[str, str]:
    root = Path(tempfile.mkdtemp(prefix="siirl-megatron-adapters-"))
    return {
        "qwen3": str(make_tiny_model_dir(root / "qwen3", tie=True, **TINY)),
        **{
            name: str(make_tiny_model_dir(root / name, name, tie=False, **TINY))
            for name in ("llama", "qwen2", "qwen3_moe")
        },
    }


@functools.cache
def reference(model: str, targets: tuple[str, ...]) -> Outcome:
    return reference_on_disk(model_dirs()[model], model, list(targets) or "all-linear")


@pytest.mark.parametrize("case", SCENARIOS, ids=lambda case: case.name)
def test_adapters_under_megatron_equal_peft_and_adamw(case):
    ours = run_workers(cases.run_scenarios, case.world, [case], model_dirs())[0][case.name]
    chosen = [key.partition("=[")[2].rstrip("]") for key in case.overrides if "target_modules" in key]
    targets = tuple(chosen[0].split(",")) if chosen else ()
    assert_equal_training(ours, theirs := reference(case.model, targets))
    record_outcome(case_of(case.model, case, "adapters"), ours, theirs)
