"""A sharded model whose parts leave and come back trains as if they had stayed."""

import tempfile

import torch
import train_engine_cases as cases
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from train_engine_cases import Scenario


def train_with_parts_away(rank: int, world: int, path: str) -> list[str]:
    scenario = Scenario("", world)
    kept, _ = cases.build_engine(scenario, path)
    moved, _ = cases.build_engine(scenario, path)
    for step in range(3):
        cases.train_steps(kept, scenario, range(step, step + 1))
        cases.train_steps(moved, scenario, range(step, step + 1))
        for part in (
            "params",
            "optimizer",
        ):  # on CPU offload() has nothing to do: empty the storages directly
            moved._host[part].take(moved._local_tensors(part))
        assert all(p.to_local().untyped_storage().nbytes() == 0 for p in moved._model.parameters())
        moved.onload(params=True, grads=True, optimizer=True)
    theirs = dict(moved.export_weights())
    return [name for name, weight in kept.export_weights() if not torch.equal(weight, theirs[name])]


def test_offloaded_parameters_and_optimizer_state_come_back_bit_for_bit():
    with tempfile.TemporaryDirectory() as root:
        assert run_workers(train_with_parts_away, 2, str(make_tiny_model_dir(root))) == [[], []]
