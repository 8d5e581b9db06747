"""A large model that stays whole on every rank moves once what others move for each micro-batch."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import train_engine_cases as cases
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from some_cases import some
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from train_engine_cases import Scenario

from siirl.data.rows import take_rows

KEY = "actor_rollout_ref.actor.fsdp_config.reshard_after_forward"
ROW = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"
FORWARD_ROW = "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1"
UNITS, MICRO_BATCHES = 3, 5
"""Two layers and the rest; the rows of each of two ranks."""


class Operators(TorchDispatchMode):
    """Counts the operators that are called in it, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def messages(
    rank: int, world: int, scenarios: dict[str, Scenario], path: str
) -> dict[str, list[tuple[int, int]]]:
    """(gathers, reductions) of a pass, a mini-batch, and both again; after each no weights are gathered."""
    rows = take_rows(cases.sample_rows(0), cases.rows_of_rank(rank, world, "even"))
    found: dict[str, list[tuple[int, int]]] = {name: [] for name in scenarios}
    for name, scenario in scenarios.items():
        engine: Any = cases.build_engine(scenario, path)[0]
        for number in range(4):
            with Operators() as seen:
                if number % 2:
                    cases.train_steps(engine, scenario, range(1))
                else:
                    engine.compute(rows, ("log_prob",), cases.TEMPERATURE)
            found[name].append(
                (seen.counts["c10d::_allgather_base_"], seen.counts["c10d::_reduce_scatter_base_"])
            )
            assert all(isinstance(param, DTensor) for param in engine._model.parameters()), (name, number)
    return found


@pytest.mark.parametrize("lora", some([False, True], True))
def test_weights_are_gathered_and_gradients_reduced_once_for_all_micro_batches(tmp_path, lora):
    make_tiny_model_dir(tmp_path, hidden=64)
    keys = (ROW, FORWARD_ROW, *["actor_rollout_ref.model.lora_rank=4"] * lora)
    large = Scenario("", 2, overrides=keys, large=True)
    scenarios = {
        "small": replace(large, large=False),
        "large": large,
        "large, whole": replace(large, overrides=(*keys, f"{KEY}=False")),
    }
    layers, reduced = UNITS - 1, UNITS - lora  # adapters are in layers only
    once = [(UNITS, 0), (UNITS, reduced)] * 2
    each = [(layers * MICRO_BATCHES + 1, 0), ((2 * layers + 1) * MICRO_BATCHES, reduced * MICRO_BATCHES)] * 2
    expected = {"small": once, "large": each, "large, whole": once}
    assert run_workers(messages, 2, scenarios, str(tmp_path)) == [expected] * 2
