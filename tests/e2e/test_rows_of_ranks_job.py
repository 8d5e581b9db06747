"""A trainer whose ranks send the rows that they have: the run is that of one whose weights are gathered."""

import pytest
import torch
from job_harness import Inputs, overrides, run_job

APART = (
    "dag.node_config.rollout_actor.placement=2-3",
    *(f"dag.node_config.{node}.placement=0-1" for node in ("actor_old_log_prob", "reference_log_prob")),
    "dag.node_config.actor_train.placement=0-1",
    "trainer.n_gpus_per_node=4",
    "trainer.deadline_s=200",
    "trainer.val_before_train=False",
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_weights_sent_as_rows_train_the_same(tmp_path):
    inputs, weights, norms = Inputs.make(tmp_path / "inputs"), [], []
    for way in ("auto", "spread"):
        keys = (*APART, f"actor_rollout_ref.rollout.weight_link={way}")
        run = run_job(4, overrides(inputs, tmp_path / way, *keys), deadline_s=250)
        weights.append(run.weights("agent_0.actor"))
        norms.append(run.values("actor/grad_norm"))
        assert all(count > 0 for count in run.values("weight_sync/bytes"))
    assert norms[0] == norms[1] and len(norms[0]) == 3
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
