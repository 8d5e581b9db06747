"""A run that records its rollouts, runs that train on them without an engine, and runs that only sample."""

import pytest
import torch
from job_harness import Inputs, overrides, run_job

from siirl.compiler.compile import compile_plan, load_dag
from siirl.config import load_config
from siirl.errors import DagError, NotSupportedError

NO_VALIDATION = ["trainer.val_before_train=False", "trainer.test_freq=-1"]
COMPARED = ("actor/loss", "actor/grad_norm", "actor/clip_fraction", "reward/score", "rollout/response_length")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return Inputs.make(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    return tmp_path_factory.mktemp("dump")


@pytest.fixture(scope="module")
def sampled(inputs, dump, tmp_path_factory):
    """Two ranks, two steps, with a rollout engine."""
    recording = [*NO_VALIDATION, f"trainer.dump_rollouts_dir={dump}", "trainer.total_training_steps=2"]
    return run_job(2, overrides(inputs, tmp_path_factory.mktemp("sampled"), *recording))


def replay(inputs, dump, output, world_size, *more):
    settings = [
        *NO_VALIDATION,
        "trainer.total_training_steps=2",
        "actor_rollout_ref.rollout.name=replay",
        f"actor_rollout_ref.rollout.replay_dir={dump}",
    ]
    return run_job(world_size, overrides(inputs, output, *settings, *more))


def test_a_replay_on_the_same_ranks_trains_bit_for_bit_the_same(inputs, dump, sampled, tmp_path):
    replayed = replay(inputs, dump, tmp_path, 2)
    for name in COMPARED:
        assert replayed.values(name) == sampled.values(name) and len(sampled.values(name)) == 2, name
    ours, theirs = replayed.weights(), sampled.weights()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not [name for name in replayed.lines[-1] if "weight_sync" in name], "there is nothing to sync"


def test_a_replay_on_another_number_of_ranks_trains_the_same(inputs, dump, sampled, tmp_path):
    replayed = replay(inputs, dump, tmp_path, 1, "trainer.export_hf=False")
    for name in COMPARED:
        assert replayed.values(name) == pytest.approx(sampled.values(name), rel=2e-4, abs=2e-5), name


def test_a_run_that_only_samples_scores_and_records_with_the_weights_of_the_model(
    inputs, dump, sampled, tmp_path
):
    only = [*NO_VALIDATION, "trainer.rollout_only=True", "trainer.total_training_steps=1"]
    run = run_job(1, overrides(inputs, tmp_path / "out", *only, f"trainer.dump_rollouts_dir={tmp_path}/dump"))
    line = run.lines[-1]
    for name in ("reward/score", "rollout/response_length", "perf/tokens"):
        assert line[name] == pytest.approx(sampled.lines[0][name], rel=1e-5), name
    assert not [name for name in line if name.startswith("actor/")]
    assert not (run.output / "hf_model").exists() and not (run.output / "checkpoints").exists()
    assert list((tmp_path / "dump" / "agent_0" / "step_1").glob("*.safetensors"))


def compiled(inputs, tmp_path, *more, workflow=None):
    settings = list(more)
    if workflow:
        (tmp_path / "workflow.yaml").write_text(workflow)
        settings.append(f"dag.workflow_path={tmp_path}/workflow.yaml")
    cfg = load_config(overrides(inputs, tmp_path, *settings))
    return compile_plan(load_dag(cfg), cfg, 2)[0]


ROLLOUT = """\
dag_id: x
nodes:
- {node_id: r, node_type: MODEL_INFERENCE, node_role: ROLLOUT, placement: {ranks: "1"}}
"""
SCORE = "- {node_id: s, node_type: COMPUTE, node_role: REWARD, dependencies: []}\n"


def test_a_run_that_only_samples_has_a_source_of_weights_and_no_trainer(inputs, tmp_path):
    plan = compiled(inputs, tmp_path, "trainer.rollout_only=True", "actor_rollout_ref.actor.use_kl_loss=True")
    assert list(plan.nodes) == ["rollout_actor", "function_reward"]
    assert "nothing is trained" in plan.pruned["actor_train"]
    source = plan.models["agent_0.actor"]
    assert (source.trains, source.nodes, source.ranks) == (False, (), (0, 1))
    assert list(plan.models) == ["agent_0.rollout", "agent_0.actor"]
    assert [link.source for link in plan.links.values()] == ["agent_0.actor"]


def test_a_workflow_without_a_trainer_runs_if_asked_to(inputs, tmp_path):
    with pytest.raises(NotSupportedError, match=r"trains nothing.*trainer\.rollout_only=true"):
        compiled(inputs, tmp_path, workflow=ROLLOUT)
    plan = compiled(inputs, tmp_path, "trainer.rollout_only=True", workflow=ROLLOUT)
    assert plan.models["agent_0.actor"].ranks == plan.links["agent_0.weights"].ranks == (1,)
    with pytest.raises(DagError, match=r"rollout_only is set, but the DAG has no rollout"):
        compiled(inputs, tmp_path, "trainer.rollout_only=True", workflow="dag_id: x\nnodes:\n" + SCORE)


def test_a_replay_has_neither_engine_nor_link(inputs, tmp_path):
    plan = compiled(
        inputs,
        tmp_path,
        "actor_rollout_ref.rollout.name=replay",
        "actor_rollout_ref.rollout.replay_dir=dump",
        *NO_VALIDATION,
    )
    assert list(plan.models) == ["agent_0.actor"] and not plan.links
    assert plan.nodes["rollout_actor"].op == "replay"
