"""Compiled layers compute what transformers does, and are compiled once."""

import pytest
import train_engine_cases as cases
from accepted_cases import results
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from train_engine_cases import Scenario

from siirl.compiler.compiled_layers import COMPILED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
KEY = "actor_rollout_ref.model.compile_layers=True"
KEPT = "actor_rollout_ref.model.enable_gradient_checkpointing=False"


@pytest.mark.parametrize("kind", COMPILED)
def test_each_type_computes_what_transformers_does(kind):
    compiled = Scenario("", 1, overrides=(KEY,))
    assert run_workers(results, 1, [kind], compiled, deadline_s=600)[0] == {}


def graphs_after_each_step(rank: int, world: int, path: str) -> list[int]:
    import torch._dynamo

    engine, _ = cases.build_engine(scenario := Scenario("", world, overrides=(KEY, KEPT)), path)
    found = []
    for step in range(5):
        engine.compute(cases.sample_rows(step), ("log_prob", "entropy"), cases.TEMPERATURE)
        cases.train_steps(engine, scenario, range(step, step + 1))
        found.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_rows_of_other_lengths_compile_nothing_after_the_second_step(world, tmp_path):
    path = str(make_tiny_model_dir(tmp_path, hidden=128, heads=4, kv_heads=2, head_dim=32))
    for found in run_workers(graphs_after_each_step, world, path, deadline_s=600):
        assert found[0] > 0 and set(found[1:]) == {found[1]}
