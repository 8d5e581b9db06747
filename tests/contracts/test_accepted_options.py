"""What accepted models may have besides under FSDP2: LoRA adapters, and a loss that balances experts."""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import causal_lms
import pytest
import train_engine_cases as cases
from accepted_cases import WINDOWS
from dist_harness import run_workers
from expert_cases import largest_gap, on_disk, router_losses_of_hf
from recorded_cases import case_of, distance, record_gaps
from some_cases import in_parts
from train_engine_cases import Scenario

from siirl.models.families import known_types, types_with
from siirl.models.sizes import EXPERTS

GROUP_ROUTED = types_with(lambda row: row.experts and row.experts.groups)
LATENT = types_with(lambda row: row.latent)
TURNED = types_with(lambda row: row.turned)
VISION_MODELS = types_with(lambda row: row.sees_images)

MODEL, ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LORA = (f"{MODEL}.lora_rank={cases.LORA_RANK}", f"{MODEL}.lora_alpha={cases.LORA_ALPHA}")
ON_ATTENTION = f"{MODEL}.target_modules=[{','.join(ATTENTION)}]"
AUX = 0.3
ONE_ROW = f"{ACTOR}.ppo_micro_batch_size_per_gpu=1"
BALANCED = (ONE_ROW, f"{ACTOR}.fsdp_config.moe_aux_loss_coeff={AUX}")


@functools.cache
def mixes(kind: str) -> bool:
    config = causal_lms.tiny_config(kind).to_dict()
    return any(config.get(name) not in (None, 0, 1) for name in EXPERTS)


KINDS = [kind for kind in known_types("fsdp") if kind not in VISION_MODELS]
ADAPTED = [kind for kind in KINDS if kind not in (*LATENT, *TURNED)]


def problems(
    rank: int, world: int, kinds: list[str], wrong: Callable[[str, Path, dict[str, float]], tuple[str, str]]
) -> dict[str, str]:
    """Model type -> what is wrong. Of a small model of each, which is recorded."""
    found = {}
    for kind in kinds:
        folder, gaps = Path(tempfile.mkdtemp(prefix="siirl-option-")), {}
        causal_lms.write_model(folder, causal_lms.tiny_config(kind, **WINDOWS.get(kind, {})))
        problem, part = wrong(kind, folder, gaps)
        record_gaps(case_of(kind, Scenario("", world), part), {} if problem else gaps)
        found |= {kind: problem} if problem else {}
    return found


def adapters_are_wrong(
    kind: str, folder: Path, gaps: dict[str, float], has_experts: bool | None = None
) -> tuple[str, str]:
    """Against peft and AdamW, in two steps: the first has a gradient of one half of each adapter only."""
    experts = mixes(kind) if has_experts is None else has_experts
    keys = (*LORA, ON_ATTENTION) if experts else LORA
    ours = cases.run_scenario(Scenario("", 1, overrides=keys), folder)
    theirs = cases.run_reference(folder, ATTENTION if experts else "all-linear")
    part = "adapters"
    gaps["log_prob"] = float((ours.log_prob - theirs.log_prob).abs().max())
    if not gaps["log_prob"] < 1e-5:
        return f"log-probs are off by {gaps['log_prob']}", part
    if ours.grads.keys() != theirs.grads.keys():
        return f"other adapters: {sorted(ours.grads.keys() ^ theirs.grads.keys())[:4]}", part
    gap, name = largest_gap(ours.grads, theirs.grads)
    if not gap < 1e-6:
        return f"the gradient of {name} is off by {gap}", part
    if ours.grad_norms != pytest.approx(theirs.grad_norms, rel=1e-4):
        return f"norms of gradients {ours.grad_norms} instead of {theirs.grad_norms}", part
    gaps["gradient"] = distance(ours.grads, theirs.grads)
    return "", part


def balance_is_wrong(kind: str, folder: Path, gaps: dict[str, float]) -> tuple[str, str]:
    """Against the loss over the whole mini-batch, written out of what each router reads."""
    from transformers import AutoModelForCausalLM

    part = "router loss"
    engine, _ = cases.build_engine(Scenario("", 1, overrides=BALANCED), folder)
    cases.train_steps(engine, Scenario("", 1), range(1))
    ours = cases.first_step_gradients(engine)
    model = AutoModelForCausalLM.from_pretrained(folder)
    theirs, without = (on_disk(model, router_losses_of_hf(str(folder), 0, aux, 0.0)) for aux in (AUX, 0.0))
    if ours.keys() != theirs.keys():
        return f"other gradients: {sorted(ours.keys() ^ theirs.keys())[:4]}", part
    gap, name = largest_gap(ours, theirs)
    if not gap < 1e-6:
        return f"the gradient of {name} is off by {gap}", part
    if not largest_gap(without, theirs)[0] > 1e-4:
        return "the loss changes nothing", part
    gaps["gradient"] = distance(ours, theirs)
    return "", part


def test_adapters_of_some_models_equal_peft():
    some = ["gpt_bigcode", "glm4", "olmoe", "granitemoehybrid"]
    assert run_workers(problems, 1, some, adapters_are_wrong, deadline_s=100)[0] == {}


def adapters_without_experts_are_wrong(rank: int, world: int, kind: str) -> str:
    folder = Path(tempfile.mkdtemp(prefix="siirl-option-"))
    causal_lms.write_model(folder, causal_lms.tiny_config(kind, num_local_experts=0))
    return adapters_are_wrong(kind, folder, {}, has_experts=False)[0]


@pytest.mark.slow
def test_adapters_of_a_hybrid_without_experts_are_on_what_its_states_are_made_of_too():
    assert run_workers(adapters_without_experts_are_wrong, 1, "granitemoehybrid", deadline_s=100)[0] == ""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kinds", in_parts(ADAPTED))
def test_adapters_of_every_model_equal_peft(kinds):
    assert run_workers(problems, 1, kinds, adapters_are_wrong, deadline_s=350)[0] == {}


BALANCES = [kind for kind in KINDS if kind not in GROUP_ROUTED and mixes(kind)]


def test_the_router_loss_of_some_mixtures_is_that_of_the_mini_batch():
    assert (
        run_workers(
            problems, 1, ["mixtral", "granitemoe", "granitemoehybrid"], balance_is_wrong, deadline_s=100
        )[0]
        == {}
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kinds", in_parts(BALANCES))
def test_the_router_loss_of_every_mixture_is_that_of_the_mini_batch(kinds):
    assert run_workers(problems, 1, kinds, balance_is_wrong, deadline_s=350)[0] == {}
