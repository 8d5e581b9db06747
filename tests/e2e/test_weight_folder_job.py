"""A run whose engines read weights from a folder: few bytes after the first sync, and the trainer's bits."""

import json
from pathlib import Path

import torch
from fixtures_tiny import make_tiny_model_dir
from job_harness import Inputs, overrides, run_job, work


def compared_work(rank, world_size, arguments, output):
    """A worker that compares its engine's weights with the trainer's after each sync."""
    from siirl.engines.weights.link import WeightLink

    push = WeightLink.push

    def compared(link):
        metrics = push(link)
        exact = {name: x.clone() for name, x in link._source.export_weights(torch.bfloat16)}
        held = link._target._model.state_dict()
        assert len(exact) > 20 and all(torch.equal(held[name], x) for name, x in exact.items())
        checked.append(sum(x.nbytes for x in exact.values()))
        return metrics

    checked: list[int] = []
    WeightLink.push = compared
    work(rank, world_size, arguments, output)
    if rank == 1:
        Path(output, "checked.json").write_text(json.dumps(checked))


def test_engines_that_read_a_folder_hold_the_trainers_bits_and_get_one_byte_in_twenty(tmp_path):
    """At a learning rate of 1e-6 in bf16. The first steps of Adam change the most."""
    inputs = Inputs.make(tmp_path / "inputs")
    make_tiny_model_dir(inputs.model, hidden=128, mlp=512, head_dim=32)
    keys = (
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.rollout.dtype=bfloat16",
        "actor_rollout_ref.rollout.weight_link=checkpoint",
        "trainer.export_hf=False",
    )
    run = run_job(2, overrides(inputs, tmp_path / "run", *keys), run=compared_work)
    checked, sent = json.loads((tmp_path / "run/checked.json").read_text()), run.values("weight_sync/bytes")
    assert len(checked) > 3 and checked[0] > 900_000, "the first one is for the validation before training"
    assert len(sent) == 2 and max(sent) < 0.05 * checked[0], sent
