"""A Megatron model whose functions between products are compiled, as on a GPU, equals Hugging Face."""

import contextlib

import pytest
import torch
import train_engine_cases as cases
from dist_harness import run_workers
from expert_cases import assert_equal_training, reference_on_disk
from fixtures_tiny import make_tiny_model_dir
from train_engine_cases import Outcome, Scenario

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
KEPT = "actor_rollout_ref.model.enable_gradient_checkpointing=False"
FUNCTIONS = ("_norm", "_sum_norm", "_norm_backward", "_heads", "_heads_backward", "_gated", "_gated_backward")


def trained_compiled(rank: int, world: int, scenario: Scenario, path: str) -> tuple[Outcome, int]:
    from siirl.engines.train.megatron import fused

    for name in FUNCTIONS:
        setattr(fused, name, getattr(fused, name).by_compiler)
    torch.compiler.set_stance = lambda stance: contextlib.nullcontext()  # a CPU would not compile
    torch._dynamo.trace_rules.get_torch_obj_rule_map()  # of torch before cpu_shim.py replaces names of it
    outcome = cases.run_scenario(scenario, path)
    return outcome, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_compiled_functions_train_as_plain_ones(kind, tmp_path):
    path = str(make_tiny_model_dir(tmp_path, kind, hidden=64, init_std=0.15, layers=2))
    scenario = Scenario("", 1, overrides=(KEPT,), strategy="megatron", sizes=())
    ours, graphs = run_workers(trained_compiled, 1, scenario, path, deadline_s=600)[0]
    assert graphs >= len(FUNCTIONS)
    assert_equal_training(ours, reference_on_disk(path, kind))
