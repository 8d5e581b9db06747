"""Mixtures of experts under FSDP2: against plain Hugging Face, and into and out of files of every layout."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import train_engine_cases as cases
from dist_harness import run_workers
from expert_cases import assert_equal_training, names_on_disk, reference_on_disk, router_losses_of_hf
from fixtures_tiny import make_tiny_model_dir
from proven_models import TRAINING
from recorded_cases import case_of, record_outcome
from safetensors.torch import load_file
from train_engine_cases import Scenario

from siirl.engines.train.packed.micro_batches import row_lengths

ACTOR = "actor_rollout_ref.actor"
ONE_ROW = (f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",)
WHOLE = (f"{ACTOR}.fsdp_config.reshard_after_forward=False",)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LORA = (
    f"actor_rollout_ref.model.target_modules=[{','.join(ATTENTION)}]",
    f"actor_rollout_ref.model.lora_rank={cases.LORA_RANK}",
    f"actor_rollout_ref.model.lora_alpha={cases.LORA_ALPHA}",
)
AUX = 0.3
MODELS = {"qwen3_moe": 5, "mixtral": 4, "few": 3, "six": 6}
"""Model -> experts of a layer; few: fewer than ranks."""
FAMILIES = {"few": "qwen3_moe", "six": "qwen3_moe"}
DEALT = (("ep", 2),)


@pytest.fixture(scope="module")
def model_dirs() -> dict[str, str]:
    root = Path(tempfile.mkdtemp(prefix="siirl-fsdp-experts-"))
    sizes = {"tie": False, "hidden": 64, "init_std": 0.15}
    return {
        name: str(make_tiny_model_dir(root / name, FAMILIES.get(name, name), experts=num, **sizes))
        for name, num in MODELS.items()
    }


def grouped(counts: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    weight_EOD = torch.randn(len(counts), 16, 24).to(dtype).requires_grad_()
    x_SD = torch.randn(sum(counts), 24).to(dtype).requires_grad_()
    return x_SD, weight_EOD, torch.tensor(counts).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("counts", [(5, 0, 9, 1), (0, 0, 15, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_grouped_product_equals_that_of_each_expert(counts, dtype):
    from siirl.engines.train.experts.grouped_product import GroupedProduct
    from siirl.engines.train.experts.hf_experts import grouped_product

    x_SD, weight_EOD, ends_E = grouped(counts, dtype)
    expert_S = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    expected = (weight_EOD.float()[expert_S] @ x_SD.float().unsqueeze(-1)).squeeze(-1)
    along = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * along).sum(), [x_SD, weight_EOD])
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.02}
    for result in (grouped_product(x_SD, weight_EOD, ends_E), GroupedProduct.apply(x_SD, ends_E, weight_EOD)):
        torch.testing.assert_close(result.float(), expected, **close)
        found = torch.autograd.grad((result * along).sum(), [x_SD, weight_EOD])
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours.float(), theirs.float(), **close)


SCENARIOS = [
    Scenario("alone", 1, "mixtral"),
    Scenario("one row a micro-batch", 1, "qwen3_moe", overrides=ONE_ROW),
    Scenario("two ranks", 2, "mixtral", split="uneven"),
    Scenario("two ranks, one row a micro-batch", 2, "qwen3_moe", overrides=ONE_ROW),
    Scenario("two ranks, one without rows", 2, "qwen3_moe", split="first_rank"),
    Scenario("two ranks, lora", 2, "qwen3_moe", overrides=LORA),
    Scenario("four ranks, one without experts", 4, "few", split="uneven"),
    Scenario("two shards, two copies", 4, "qwen3_moe", fsdp_size=2),
    Scenario("two ranks, experts dealt", 2, "mixtral", split="uneven", sizes=DEALT),
    Scenario("two ranks, one without rows, experts dealt", 2, "six", split="first_rank", sizes=DEALT),
    Scenario("two ranks, one row a micro-batch, experts dealt", 2, "six", overrides=ONE_ROW, sizes=DEALT),
    Scenario("two ranks, lora, experts dealt", 2, "six", overrides=LORA, sizes=DEALT),
    Scenario("two ranks, experts dealt, whole", 2, "six", overrides=ONE_ROW + WHOLE, sizes=DEALT, large=True),
    Scenario("four ranks, experts dealt", 4, "mixtral", split="uneven", sizes=(("ep", 4),)),
    Scenario("two copies of dealt experts", 4, "six", split="uneven", fsdp_size=2, sizes=DEALT),
    Scenario("two pairs share rows, experts dealt", 4, "mixtral", sizes=(("cp", 2), ("ep", 4))),
]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_experts_train_as_in_plain_hf(model_dirs, world):
    scenarios = [scenario for scenario in SCENARIOS if scenario.world == world]
    outcomes = run_workers(cases.run_scenarios, world, scenarios, model_dirs, deadline_s=300)[0]
    for scenario in scenarios:
        family = "mixtral" if scenario.model == "mixtral" else "qwen3_moe"
        adapted = ATTENTION if "lora" in scenario.name else ""
        theirs = reference_on_disk(model_dirs[scenario.model], family, adapted)
        assert_equal_training(outcomes[scenario.name], theirs)
        case = case_of(family, scenario, "adapters" if adapted else TRAINING)
        record_outcome(case, outcomes[scenario.name], theirs)


def gradients(rank: int, world: int, path: str, scenario: Scenario) -> dict[str, torch.Tensor]:
    engine, _ = cases.build_engine(scenario, path)
    cases.train_steps(engine, scenario, range(1))
    return cases.first_step_gradients(engine)


BUDGET = (f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=24")
CUTS = [
    Scenario("two ranks, token budget", 2, split="uneven", overrides=BUDGET),
    Scenario("two ranks, one without rows", 2, split="first_rank", overrides=ONE_ROW),
    Scenario("two pairs share rows", 4, split="uneven", overrides=BUDGET, sizes=(("cp", 2),)),
    Scenario("experts dealt, one without rows", 2, split="first_rank", overrides=ONE_ROW, sizes=DEALT),
    Scenario(
        "alone, not recomputed", 1, overrides=("actor_rollout_ref.model.enable_gradient_checkpointing=False",)
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", CUTS, ids=lambda scenario: scenario.name)
def test_the_loss_of_the_router_is_that_of_the_mini_batch_however_it_is_cut(model_dirs, scenario):
    path = model_dirs["six" if "dealt" in scenario.name else "qwen3_moe"]
    weighed = replace(
        scenario, overrides=(*scenario.overrides, f"{ACTOR}.fsdp_config.moe_aux_loss_coeff={AUX}")
    )
    ours = run_workers(gradients, scenario.world, path, weighed)[0]
    theirs = names_on_disk(router_losses_of_hf(path, 0, AUX, 0.0), "qwen3_moe")
    without = names_on_disk(router_losses_of_hf(path, 0, 0.0, 0.0), "qwen3_moe")
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        torch.testing.assert_close(ours[name], grad, atol=1e-6, rtol=1e-4, msg=name)
    router = "model.layers.0.mlp.gate.weight"
    assert (theirs[router] - without[router]).abs().max() > 1e-4


def through_files(rank: int, world: int, path: str, folder: str, sizes: tuple = ()) -> dict:
    """What an engine exports untouched, after a step that follows a checkpoint, and after it is resumed."""
    scenario = Scenario("", world, "qwen3_moe", sizes=sizes)
    engine, groups = cases.build_engine(scenario, path)
    found = {"specs": engine.weight_specs(), "flops": engine.flops(cases.sample_rows(0), backward=False)}
    found["untouched"] = {name: weight.clone() for name, weight in engine.export_weights()}
    cases.train_steps(engine, scenario, range(2))
    dcp.save(engine.state_dict(), checkpoint_id=folder)
    cases.train_steps(engine, scenario, range(2, 3))
    found["trained"] = {name: weight.clone() for name, weight in engine.export_weights()}
    again = cases.make_engine(scenario, path, groups, tuple(range(world)))
    found["resumed"] = go_on(again, scenario, folder)
    return found


def go_on(engine, scenario: Scenario, folder: str) -> dict[str, torch.Tensor]:
    state = engine.state_dict()
    dcp.load(state, checkpoint_id=folder)
    engine.load_state_dict(state)
    cases.train_steps(engine, scenario, range(2, 3))
    return {name: weight.clone() for name, weight in engine.export_weights(torch.float32)}


def flops_of_chosen(files: dict[str, torch.Tensor], rows, experts: int) -> float:
    """2 for each token and weight that it meets, two experts of a layer, and causal attention."""
    weights = {name: tensor.numel() for name, tensor in files.items() if tensor.ndim == 2}
    num = sum(num * (2 / experts if ".experts." in name else 1) for name, num in weights.items())
    lengths = row_lengths(rows)
    num -= weights["model.embed_tokens.weight"]
    return 2 * num * sum(lengths) + 4 * 2 * 64 * sum(length**2 for length in lengths) / 2


@pytest.mark.slow
@pytest.mark.parametrize(("model", "sizes"), [("qwen3_moe", ()), ("six", DEALT)])
def test_experts_leave_and_enter_files_bit_by_bit(model_dirs, tmp_path, model, sizes):
    found = run_workers(through_files, 2, model_dirs[model], str(tmp_path), sizes)[0]
    files = load_file(Path(model_dirs[model]) / "model.safetensors")
    assert {name: shape for name, (shape, _) in found["specs"].items()} == {
        name: tuple(tensor.shape) for name, tensor in files.items()
    }
    assert list(found["specs"]) == list(found["untouched"])
    for name, tensor in files.items():
        assert torch.equal(found["untouched"][name], tensor), name
        assert torch.equal(found["resumed"][name], found["trained"][name]), name
        assert not torch.equal(found["trained"][name], tensor), name
    assert found["flops"] == pytest.approx(
        flops_of_chosen(files, cases.sample_rows(0), MODELS[model]), rel=1e-6
    )
    stored = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert {f"model.{name}" for name in files} <= stored.keys()


def resumed(
    rank: int, world: int, path: str, folder: str, strategy: str, sizes: tuple = ()
) -> dict[str, torch.Tensor]:
    scenario = Scenario("", world, strategy=strategy, sizes=sizes)
    engine, _ = cases.build_engine(scenario, path)
    return go_on(engine, scenario, folder)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "strategy"), [(1, "fsdp"), (3, "fsdp"), (1, "megatron"), (2, "megatron")])
def test_a_checkpoint_of_experts_goes_on_with_other_ranks_and_strategies(
    model_dirs, tmp_path, world, strategy
):
    found = run_workers(through_files, 2, model_dirs["qwen3_moe"], str(tmp_path))[0]
    other = run_workers(resumed, world, model_dirs["qwen3_moe"], str(tmp_path), strategy)[0]
    for name, weight in found["trained"].items():
        torch.testing.assert_close(other[name], weight, atol=0.01 * cases.LR, rtol=0, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "world", "after"), [(DEALT, 1, ()), (DEALT, 3, ()), ((), 2, DEALT), (DEALT, 3, (("ep", 3),))]
)
def test_a_checkpoint_of_dealt_experts_goes_on_dealt_otherwise(model_dirs, tmp_path, before, world, after):
    found = run_workers(through_files, 2, model_dirs["six"], str(tmp_path), before)[0]
    other = run_workers(resumed, world, model_dirs["six"], str(tmp_path), "fsdp", after)[0]
    for name, weight in found["trained"].items():
        torch.testing.assert_close(other[name], weight, atol=0.01 * cases.LR, rtol=0, msg=name)


def saved_by_megatron(rank: int, world: int, path: str, folder: str) -> dict[str, torch.Tensor]:
    scenario = Scenario("", world, strategy="megatron", sizes=(("ep", 2),))
    engine, _ = cases.build_engine(scenario, path)
    cases.train_steps(engine, scenario, range(2))
    dcp.save(engine.state_dict(), checkpoint_id=folder)
    cases.train_steps(engine, scenario, range(2, 3))
    return {name: weight.clone() for name, weight in engine.export_weights(torch.float32)}


@pytest.mark.slow
def test_a_checkpoint_of_megatron_goes_on_under_fsdp(model_dirs, tmp_path):
    trained = run_workers(saved_by_megatron, 2, model_dirs["mixtral"], str(tmp_path))[0]
    other = run_workers(resumed, 2, model_dirs["mixtral"], str(tmp_path), "fsdp")[0]
    for name, weight in trained.items():
        torch.testing.assert_close(other[name], weight, atol=0.01 * cases.LR, rtol=0, msg=name)
