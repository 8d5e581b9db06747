"""The FSDP engine when gradients or weight files are bad: every rank agrees on what happens."""

import math

import pytest
import torch
import train_engine_cases as cases
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from train_engine_cases import Scenario

from siirl.data.rows import take_rows
from siirl.engines.train.stepping import MAX_SKIPPED_STEPS
from siirl.errors import DataError, NumericsError


def poisoned_loss(outputs, rows, counts):
    share, metrics = cases.policy_loss(outputs, rows, counts)
    return share * math.nan, metrics


def survive_bad_gradients(rank: int, world: int, path: str) -> None:
    engine, _ = cases.build_engine(Scenario("", world), path)
    before = {name: weight.clone() for name, weight in engine.export_weights()}
    rows = take_rows(cases.sample_rows(0), cases.rows_of_rank(rank, world, "even"))

    def step(loss):
        return engine.train_mini_batch(rows, loss, ("log_prob", "entropy"), 1.0).values()

    for _ in range(MAX_SKIPPED_STEPS):
        bad = poisoned_loss if rank == 0 else cases.policy_loss  # one bad rank is enough
        metrics = step(bad)
        assert metrics["skipped_step"] == 1.0
        assert "grad_norm" not in metrics
    assert engine.version == 0
    for name, weight in engine.export_weights():
        assert torch.equal(weight, before[name]), name
    assert step(cases.policy_loss)["skipped_step"] == 0.0
    assert engine.version == 1
    for _ in range(MAX_SKIPPED_STEPS):
        step(poisoned_loss)
    with pytest.raises(NumericsError, match="after 1 optimizer steps"):
        step(poisoned_loss)


def test_steps_with_bad_gradients_are_skipped_by_all_ranks_and_end_the_run_when_they_persist(tmp_path):
    run_workers(survive_bad_gradients, 2, str(make_tiny_model_dir(tmp_path)))


def refuse_to_build(rank: int, world: int, path: str) -> str:
    with pytest.raises(DataError) as caught:
        cases.build_engine(Scenario("", world), path)
    return str(caught.value)


def test_missing_weights_are_refused_on_every_rank(tmp_path):
    first, second = run_workers(refuse_to_build, 2, str(make_tiny_model_dir(tmp_path, weights=False)))
    assert "no *.safetensors file" in first
    assert "first rank" in second


def test_weights_that_do_not_fit_the_config_are_refused(tmp_path):
    path = make_tiny_model_dir(tmp_path, "llama", layers=1)
    config = path / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 1', '"num_hidden_layers": 2'))
    (message,) = run_workers(refuse_to_build, 1, str(path))
    assert "model.layers.1" in message
