"""dag_templates/league.yaml by the command: the opponent has weights that the policy had, also if resumed."""

import hashlib
import json
from pathlib import Path

import pytest
from job_harness import ROOT, Finished, Inputs, overrides, run_job, work

from siirl.compiler.compile import compile_plan, load_dag
from siirl.compiler.memory.engine_memory import version_lines
from siirl.compiler.memory.estimate import read_shape
from siirl.config import load_config

STEPS = 6
GAME = '''
from siirl.agents.environments import Observation, StepResult

class Game:
    """Who says more digits wins."""

    def reset(self, task, seed):
        return Observation("")

    def step(self, actions):
        first, second = (sum(map(str.isdigit, actions[agent])) for agent in (0, 1))
        won = (first > second) - (first < second)
        return StepResult("", {0: float(won), 1: float(-won)}, True)
'''
POOL = "dag.node_config.opponent.rollout.agent.pool"
KEYS = (
    f"dag.workflow_path={ROOT / 'dag_templates' / 'league.yaml'}",
    *(f"{POOL}.every_steps=2", f"{POOL}.size=2", f"{POOL}.sampling=pfsp", f"{POOL}.current=0.2"),
    *("trainer.test_freq=2", "trainer.save_freq=3", "trainer.max_actor_ckpt_to_keep=10"),
    *(f"trainer.total_training_steps={STEPS}", "data.max_prompt_length=64"),
)


def watching(rank, world_size, arguments, output):
    """A worker that writes down which weights both rollout engines have after each sync."""
    from siirl.dag_worker.worker import DAGWorker
    from siirl.engines.weights.target import stored_tensors_of

    sync, lines = DAGWorker.sync_weights, []

    def written(worker, ins, step, validate=False):
        metrics = sync(worker, ins, step, validate)
        engine = worker.rollout_engines[worker.plan.links[ins.link].target]
        digest = hashlib.sha256()
        for name, tensor in sorted(stored_tensors_of(engine._model).items()):
            digest.update(name.encode() + tensor.detach().numpy().tobytes())
        told = {"step": step, "validate": validate, "link": ins.link, "version": engine.weight_version}
        lines.append(told | {"digest": digest.hexdigest()})
        own = worker.train_engines["agent_0.actor"].state_dict()["model"]
        for pool in worker.pools.values():
            lines[-1]["kept"] = [sum(tensor.nbytes for tensor in own.values())] * len(pool.versions)
            lines[-1]["pool"] = pool.state_dict()["pool"]
        if rank == 0:
            Path(f"{output}.syncs").write_text(json.dumps(lines))
        return metrics

    DAGWorker.sync_weights = written
    try:
        work(rank, world_size, arguments, output)
    finally:
        DAGWorker.sync_weights = sync


def keys_of(inputs: Inputs, output: Path) -> list[str]:
    game = f"dag.node_config.game.env_path={inputs.model.parent / 'game.py'}:Game"
    return overrides(inputs, output, *KEYS, game)


def league(inputs: Inputs, output: Path, *more: str, world_size: int = 1) -> tuple[Finished, list[dict]]:
    """A run, and what its rollout engines had after each sync."""
    run = run_job(world_size, [*keys_of(inputs, output), *more], 200, watching)
    return run, json.loads(Path(f"{output}.syncs").read_text())


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Inputs:
    found = Inputs.make(tmp_path_factory.mktemp("inputs"), rows=64)
    (found.model.parent / "game.py").write_text(GAME)
    return found


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory) -> tuple[Finished, list[dict]]:
    return league(inputs, tmp_path_factory.mktemp("whole") / "out")


def of(syncs: list[dict], link: str, validate: bool = False) -> list[tuple[int, int, str]]:
    return [
        (one["step"], one["version"], one["digest"])
        for one in syncs
        if (one["link"], one["validate"]) == (link, validate)
    ]


def test_the_opponent_plays_with_weights_that_the_policy_had_and_the_policy_with_its_own(whole):
    run, syncs = whole
    had = {version: digest for _, version, digest in of(syncs, "agent_0.weights")}
    played = of(syncs, "agent_1.weights")
    assert [step for step, *_ in played] == [*range(1, STEPS + 1)]
    assert len(set(had.values())) == len(had) == STEPS, "each step has other weights"
    assert all(had[version] == digest for _, version, digest in played), "not what the policy had"
    versions = [version for _, version, _ in played]
    assert any(version < own for version, own in zip(versions, had, strict=True)), "nobody older has played"
    assert run.values("agent_1/pool/playing") == versions
    # kept before steps 1, 3 and 5, two at most; two optimizer steps a step
    assert run.values("agent_1/pool/size") == [1, 1, 2, 2, 2, 2]
    assert [number for number, *_ in syncs[-1]["pool"]] == [4, 8]
    for step, version, digest in of(syncs, "agent_1.weights", validate=True):
        latest = {0: 0, 2: 0, 4: 4, 6: 8}[step]
        assert version == latest and digest == had[latest], "validation has the latest version"
    wins = run.values("agent_1/pool/win_rate")
    earned = run.values("agent_0/interaction/env_reward")
    assert len(wins) == STEPS and all(0 <= rate <= 1 for rate in wins) and earned == [0] * STEPS


def test_the_memory_that_check_counts_is_what_the_versions_take(whole, inputs, tmp_path):
    _, syncs = whole
    cfg = load_config(keys_of(inputs, tmp_path))
    plan, configs = compile_plan(load_dag(cfg), cfg, 1)
    actor = plan.models["agent_0.actor"]
    (line,) = version_lines(actor, configs[actor.node], read_shape(configs[actor.node], "actor"), 2)
    assert line.num_bytes == sum(syncs[-1]["kept"]) and line.host


@pytest.mark.slow
def test_a_run_that_is_resumed_draws_keeps_and_counts_as_the_undisturbed_one(whole, inputs, tmp_path):
    run, syncs = whole
    resume = f"trainer.resume_from_path={run.output}/checkpoints/global_step_3"
    again, found = league(inputs, tmp_path / "again", "trainer.resume_mode=resume_path", resume)
    for link in ("agent_0.weights", "agent_1.weights"):
        assert of(found, link) == [one for one in of(syncs, link) if one[0] > 3]
    names = [name for name in run.lines[-1] if "/pool/" in name]
    assert len(names) > 3
    for name in (*names, "agent_0/reward/mean", "agent_0/actor/grad_norm"):
        late = [line.get(name) for line in run.lines if line.get("step", 0) > 3]
        assert [line.get(name) for line in again.lines if line.get("step", 0) > 3] == late, name
    theirs = run.weights()
    assert theirs and all(tensor.equal(theirs[name]) for name, tensor in again.weights().items())


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True])
def test_on_two_ranks_it_is_the_same_and_goes_on_from_a_checkpoint_of_one(inputs, tmp_path, adapters):
    more = ("actor_rollout_ref.model.lora_rank=4",) if adapters else ()
    run, _ = league(inputs, tmp_path / "one", *more)
    resume = f"trainer.resume_from_path={run.output}/checkpoints/global_step_3"
    for name, keys in (("two", ()), ("again", ("trainer.resume_mode=resume_path", resume))):
        two, found = league(inputs, tmp_path / name, *more, *keys, world_size=2)
        first = 4 if keys else 1
        had = {version: digest for _, version, digest in of(found, "agent_0.weights")}
        played = of(found, "agent_1.weights")
        assert [version for _, version, _ in played] == run.values("agent_1/pool/playing")[first - 1 :]
        known = [(had[version], digest) for _, version, digest in played if version in had]
        assert known and all(own == digest for own, digest in known)
        rates = run.values("agent_1/pool/win_rate")[first - 1 :]
        assert two.values("agent_1/pool/win_rate") == pytest.approx(rates, abs=0.02)
