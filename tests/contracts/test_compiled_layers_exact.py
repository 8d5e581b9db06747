"""Compiled layers compute what transformers does, and are compiled once."""

from typing import Any

import pytest
import train_engine_cases as cases
from accepted_cases import results
from compiled_cases import SETTLED, graphs_after_each_step
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from train_engine_cases import Scenario

from siirl.models.families import types_with

COMPILED = types_with(lambda row: row.compiled and not row.sees_images)
"""Those with images are in test_vision_engine.py."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
KEY = "actor_rollout_ref.model.compile_layers=True"
KEPT = "actor_rollout_ref.model.enable_gradient_checkpointing=False"


LAYOUTS = {
    "two_kept": (2, (KEPT,)),
    "alone_recomputed": (1, ()),
    "alone_kept": (1, (KEPT,)),
    "two_recomputed": (2, ()),
}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [*((kind, "two_kept") for kind in COMPILED), *(("qwen3", name) for name in list(LAYOUTS)[1:])],
)
def test_each_type_computes_what_transformers_does(kind, layout):
    """Each on two ranks, and one in all layouts: what a layout changes is around the layers."""
    world, more = LAYOUTS[layout]
    compiled = Scenario("", world, overrides=(KEY, *more))
    for found in run_workers(results, world, [kind], compiled, deadline_s=600):
        assert found == {}


def calls_of_an_update(rank: int, world: int, path: str) -> tuple[int, int]:
    """Of all layers, in an optimizer step of one micro-batch: matrix products, and copies of gradients."""
    from torch.profiler import ProfilerActivity, profile

    one_batch = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=100"
    engine, _ = cases.build_engine(scenario := Scenario("", world, overrides=(KEY, KEPT, one_batch)), path)
    cases.train_steps(engine, scenario, range(2))
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        cases.train_steps(engine, scenario, range(2, 3))
    callers = [(event.name, callers_of(event)) for event in seen.events()]
    products = sum(name == "aten::mm" and "Call CompiledFxGraph" in above for name, above in callers)
    copies = sum(name == "aten::copy_" and "CompiledFunctionBackward" in above for name, above in callers)
    return products, copies


def callers_of(event: Any) -> str:
    names = []
    while (event := event.cpu_parent) is not None:
        names.append(event.name)
    return " ".join(names)


def test_queries_keys_and_values_are_one_product_and_no_gradient_is_copied(tmp_path):
    path = str(make_tiny_model_dir(tmp_path, hidden=128, heads=4, kv_heads=2, head_dim=32, mlp=256, layers=3))
    (found,) = run_workers(calls_of_an_update, 1, path, deadline_s=600)
    assert found == (3 * 3 * len(["qkv", "o", "gate", "up", "down"]), 0)


@pytest.mark.parametrize("world", [1, 2])
def test_rows_of_other_lengths_and_prompts_compile_nothing_after_some_steps(world, tmp_path):
    path = str(make_tiny_model_dir(tmp_path, hidden=128, heads=4, kv_heads=2, head_dim=32))
    for found in run_workers(graphs_after_each_step, world, path, (KEY, KEPT), deadline_s=600):
        assert found[0] > 0 and found[SETTLED] == found[-1]
