"""gpt-oss, with attention sinks and biases of experts, under FSDP2: against plain Hugging Face."""

import tempfile
from pathlib import Path

import causal_lms
import pytest
import torch
import train_engine_cases as cases
from dist_harness import run_workers
from expert_cases import assert_equal_training, largest_gap, router_losses_of_hf
from proven_models import TRAINING
from recorded_cases import case_of, record_outcome
from safetensors.torch import load_file
from train_engine_cases import Scenario

from siirl.compiler.plan import ModelPlan
from siirl.config import load_config
from siirl.parallel.dims import ParallelDims

ACTOR = "actor_rollout_ref.actor"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LORA = (
    f"actor_rollout_ref.model.target_modules=[{','.join(ATTENTION)}]",
    f"actor_rollout_ref.model.lora_rank={cases.LORA_RANK}",
    f"actor_rollout_ref.model.lora_alpha={cases.LORA_ALPHA}",
)
ONE_ROW = (f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",)
DEALT = (("ep", 2),)
SMALL = {"sliding_window": 5, "swiglu_limit": 0.7, "num_experts": 6, "num_local_experts": 6}
"""A window that is shorter than rows, and a bound that the experts' numbers reach."""
SCENARIOS = [
    Scenario("alone", 1, "gpt_oss"),
    Scenario("one row a micro-batch", 1, "gpt_oss", overrides=ONE_ROW),
    Scenario("two ranks", 2, "gpt_oss", split="uneven"),
    Scenario("two ranks, lora", 2, "gpt_oss", overrides=LORA),
    Scenario("two ranks, experts dealt, one without rows", 2, "gpt_oss", split="first_rank", sizes=DEALT),
    Scenario("two ranks share rows", 2, "gpt_oss", sizes=(("cp", 2),)),
    Scenario("two ranks share rows, experts dealt", 2, "gpt_oss", sizes=(("cp", 2), ("ep", 2))),
]


@pytest.fixture(scope="module")
def model_dir() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="siirl-sinks-"))
    return causal_lms.write_model(folder, causal_lms.tiny_config("gpt_oss", **SMALL))


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_sinks_and_experts_with_biases_train_as_in_plain_hf(model_dir, world):
    scenarios = [scenario for scenario in SCENARIOS if scenario.world == world]
    paths = {"gpt_oss": str(model_dir)}
    outcomes = run_workers(cases.run_scenarios, world, scenarios, paths, deadline_s=300)[0]
    for scenario in scenarios:
        adapts = "lora" in scenario.name
        theirs = cases.run_reference(model_dir, ATTENTION if adapts else "")
        assert_equal_training(outcomes[scenario.name], theirs)
        case = case_of("gpt_oss", scenario, "adapters" if adapts else TRAINING)
        record_outcome(case, outcomes[scenario.name], theirs)
        sinks = [name for name in theirs.grads if name.endswith("self_attn.sinks")]
        assert all(theirs.grads[name].abs().min() > 1e-6 for name in sinks)
        assert len(sinks) == (0 if adapts else 2)


def gradients(rank: int, world: int, path: Path, scenario: Scenario) -> dict[str, torch.Tensor]:
    engine, _ = cases.build_engine(scenario, path)
    cases.train_steps(engine, scenario, range(1))
    return cases.first_step_gradients(engine)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_loss_of_its_routers_is_that_of_the_mini_batch(model_dir, world):
    keys = (*ONE_ROW, f"{ACTOR}.fsdp_config.moe_aux_loss_coeff=0.3")
    dealt = DEALT if world == 2 else ()
    ours = run_workers(gradients, world, model_dir, Scenario("", world, overrides=keys, sizes=dealt))[0]
    theirs = router_losses_of_hf(str(model_dir), 0, 0.3, 0.0)
    without = router_losses_of_hf(str(model_dir), 0, 0.0, 0.0)
    gap, name = largest_gap(ours, theirs)
    assert gap < 1e-6, name
    router = "model.layers.0.mlp.router.bias"
    assert (theirs[router] - without[router]).abs().max() > 1e-4


def sampled(rank: int, world: int, folder: Path, sizes: tuple) -> str:
    """What is wrong with the weights that an untouched engine gives, and with what is sampled by them."""
    from transformers import AutoModelForCausalLM

    from siirl.data.completions import SamplingParams
    from siirl.engines.rollout.hf.hf_rollout import HFRollout

    engine, _ = cases.build_engine(Scenario("", world, sizes=sizes), folder)
    exported = {name: tensor.clone() for name, tensor in engine.export_weights()}
    stored = load_file(folder / "model.safetensors")
    if exported.keys() != stored.keys() or exported.keys() != engine.weight_specs().keys():
        return f"other names: {sorted(exported.keys() ^ stored.keys())}"
    if not all(torch.equal(exported[name], tensor) for name, tensor in stored.items()):
        return "other values"
    plan = ModelPlan("agent_0.rollout", 0, "rollout", "hf", "lm", False, (0,), ParallelDims(1), "rollout", ())
    keys = [f"actor_rollout_ref.model.path={folder}", "actor_rollout_ref.rollout.dtype=float32"]
    rollout = HFRollout(plan, load_config(["actor_rollout_ref.rollout.name=hf", *keys]), None, "cpu")
    rollout.load_weights(exported.items(), version=0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 9, 8, 7], [11]]
    params = SamplingParams(max_tokens=12, n=2, ignore_eos=True)
    for prompt, samples in zip(prompts, rollout.generate(prompts, params, range(3)), strict=True):
        for sample in samples:
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *sample.token_ids]])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0]
            if not (torch.tensor(sample.log_probs) - expected).abs().max() < 1e-5:
                return f"sampled log-probs {sample.log_probs} instead of {expected.tolist()}"
    return ""


@pytest.mark.parametrize(
    ("world", "sizes"), [(1, ()), *(pytest.param(2, sizes, marks=pytest.mark.slow) for sizes in ((), DEALT))]
)
def test_its_weights_leave_bit_by_bit_and_are_sampled_with(model_dir, world, sizes):
    assert run_workers(sampled, world, model_dir, sizes, deadline_s=200) == [""] * world
