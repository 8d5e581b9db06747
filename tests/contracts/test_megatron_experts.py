"""Mixtures of experts under megatron: grouped products, and the losses of the router."""

import tempfile
from pathlib import Path

import causal_lms
import pytest
import torch
import train_engine_cases as cases
from dist_harness import run_workers
from expert_cases import router_losses_of_hf
from fixtures_tiny import make_tiny_model_dir
from train_engine_cases import Scenario

from siirl.engines.train.packed.packing import packed_lengths

ACTOR = "actor_rollout_ref.actor"
OPTIONS = f"+{ACTOR}.megatron.override_transformer_config"
AUX, Z = 0.3, 0.05


@pytest.fixture(scope="module")
def model_dir() -> str:
    root = Path(tempfile.mkdtemp(prefix="siirl-megatron-experts-"))
    return str(make_tiny_model_dir(root, "qwen3_moe", tie=False, hidden=64, init_std=0.15))


@pytest.mark.parametrize("counts", [(5, 0, 9, 1), (0, 0, 15, 0), (0, 0, 0, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_grouped_product_equals_that_of_each_expert(counts, dtype):
    from siirl.engines.train.experts.grouped_product import GroupedProduct
    from siirl.engines.train.megatron.layers import grouped_linear

    torch.manual_seed(0)
    weights = [torch.randn(16, 24).to(dtype).requires_grad_() for _ in counts]
    x = torch.randn(sum(counts), 24).to(dtype).requires_grad_()
    along = torch.randn(sum(counts), 16).to(dtype)
    parts = zip(x.split(counts), weights, strict=True)
    expected = torch.cat([part.float() @ weight.float().t() for part, weight in parts])
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    results = [grouped_linear(x, weights, counts)]
    if len(x):
        results.append(GroupedProduct.apply(x, ends, *weights))
    wanted = torch.autograd.grad((expected * along).sum(), [x, *weights], retain_graph=True)
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.02}
    for result in results:
        torch.testing.assert_close(result.float(), expected, **close)
        found = torch.autograd.grad((result * along).sum(), [x, *weights])
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours.float(), theirs.float(), **close)


def log_probs(rank: int, world: int, path: str, scenario: Scenario) -> cases.Outcome:
    return cases.run_scenario(scenario, path)


@pytest.mark.slow
def test_grouped_experts_in_bf16_give_what_sequential_ones_give(model_dir):
    bf16 = f"{ACTOR}.megatron.param_dtype=bfloat16"
    one, other = (
        run_workers(
            log_probs,
            2,
            model_dir,
            Scenario(
                "bf16",
                2,
                overrides=(bf16, f"{OPTIONS}.moe_grouped_gemm={grouped}"),
                strategy="megatron",
                sizes=(("ep", 2),),
            ),
        )[0]
        for grouped in (True, False)
    )
    torch.testing.assert_close(one.log_prob, other.log_prob, atol=0.02, rtol=0)
    assert one.grad_norms == pytest.approx(other.grad_norms, rel=0.01)
    assert one.grads.keys() == other.grads.keys()


def step_without_filler() -> int:
    """A step whose rows pack into a multiple of four tokens, so that no layout adds any."""
    return next(step for step in range(100) if sum(packed_lengths(cases.sample_rows(step))) % 4 == 0)


def router_gradients(rank: int, world: int, path: str, scenario: Scenario, step: int) -> dict:
    engine, _ = cases.build_engine(scenario, path)
    cases.train_steps(engine, scenario, range(step, step + 1))
    return of_routers(cases.first_step_gradients(engine))


def of_routers(grads: dict) -> dict:
    return {name: grad for name, grad in grads.items() if "mlp.gate." in name or "mlp.router." in name}


LAYOUTS = [
    (2, ("tp", "ep"), True),
    pytest.param(2, ("tp",), True, marks=pytest.mark.slow),
    pytest.param(1, (), False, marks=pytest.mark.slow),
    pytest.param(2, ("cp",), False, marks=pytest.mark.slow),
    pytest.param(2, ("pp",), False, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("world", "axes", "sequence_parallel"), LAYOUTS, ids=str)
def test_the_losses_of_the_router_are_means_over_the_tokens_of_a_mini_batch(
    model_dir, world, axes, sequence_parallel
):
    assert_router_losses(model_dir, world, axes, sequence_parallel)


@pytest.mark.slow
def test_the_losses_of_routers_with_biases_are(tmp_path):
    path = causal_lms.write_model(tmp_path, causal_lms.tiny_config("gpt_oss", tie_word_embeddings=False))
    assert_router_losses(str(path), 2, ("tp", "ep"), True)


def assert_router_losses(model_dir, world, axes, sequence_parallel):
    overrides = (
        f"{OPTIONS}.moe_aux_loss_coeff={AUX}",
        f"{OPTIONS}.moe_z_loss_coeff={Z}",
        f"{ACTOR}.megatron.sequence_parallel={sequence_parallel}",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu={cases.NUM_ROWS}",
    )
    sizes = tuple((axis, 2) for axis in axes)
    scenario = Scenario("", world, overrides=overrides, strategy="megatron", sizes=sizes)
    step = step_without_filler()
    ours = run_workers(router_gradients, world, model_dir, scenario, step)[0]
    theirs = of_routers(router_losses_of_hf(model_dir, step, AUX, Z))
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        assert grad.abs().max() > 1e-3
        torch.testing.assert_close(ours[name], grad, atol=1e-6, rtol=1e-4, msg=name)
