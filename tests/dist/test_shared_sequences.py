"""A run goes on where ranks share each row's tokens, and where they no longer do."""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import train_engine_cases as cases
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from train_engine_cases import Scenario

ALONE, SHARED = Scenario("", 2), Scenario("", 2, sizes=(("cp", 2),))


def trained(rank: int, world: int, path: str, folder: str, first: Scenario, then: Scenario) -> float:
    """How far the weights lie apart after a step that follows a checkpoint, by both scenarios."""
    engine, _ = cases.build_engine(first, path)
    cases.train_steps(engine, first, range(2))
    dcp.save(engine.state_dict(), checkpoint_id=folder)
    cases.train_steps(engine, first, range(2, 3))
    other, _ = cases.build_engine(then, path)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state)
    cases.train_steps(other, then, range(2, 3))
    pairs = zip(engine.export_weights(torch.float32), other.export_weights(torch.float32), strict=True)
    return max(float((ours - theirs).abs().max()) for (_, ours), (_, theirs) in pairs)


@pytest.mark.parametrize(("first", "then"), [(SHARED, ALONE), (ALONE, SHARED)], ids=["ends", "begins"])
def test_a_checkpoint_goes_on_with_and_without_shared_rows(tmp_path, first, then):
    path = str(make_tiny_model_dir(Path(tempfile.mkdtemp()), hidden=64, init_std=0.15))
    gaps = run_workers(trained, 2, path, str(tmp_path), first, then)
    assert max(gaps) < 0.01 * cases.LR
