"""Free device memory stays with torch only until somebody who is no training engine may need it."""

import random
from types import SimpleNamespace

import pytest
import torch
from plan_cases import config, template_plan

from siirl.compiler.plan_instructions import (
    Collect,
    Free,
    Load,
    Repeat,
    Reshard,
    Run,
    Serve,
    SyncWeights,
    Until,
)
from siirl.config import with_overrides
from siirl.dag.ops import OPS
from siirl.dag_worker.cached_memory import cached_after
from siirl.dag_worker.worker import DAGWorker

PASSES = ("actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
"""Old log-probs and those of a reference, too."""
TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"


@pytest.mark.parametrize(
    "overrides", [(), PASSES, ("algorithm.adv_estimator=gae",), ("algorithm.adv_estimator=gae", *PASSES)]
)
def test_of_a_step_it_is_given_back_once(overrides):
    plan = template_plan(2, *overrides)
    trains = {name for name, model in plan.models.items() if not model.generates}
    steps = plan.of_rank(0)
    kept = cached_after(steps, plan.nodes, trains)
    computes = [ins for ins in steps if isinstance(ins, Run) and plan.nodes[ins.node].model in trains]
    assert [id(ins) in kept for ins in computes] == [True] * (len(computes) - 1) + [False]
    assert len(computes) > 2 or not overrides
    assert len(kept) == len(computes) - 1
    assert not cached_after(plan.of_rank(0, "validation"), plan.nodes, trains)


NODES = {
    name: SimpleNamespace(model=model, executable=executable, spec=OPS[op])
    for name, model, executable, op in (
        ("update", "actor", None, "actor_train"),
        ("old", "actor", None, "old_log_prob"),
        ("critic", "critic", None, "values"),
        ("rollout", "rollout", None, "rollout"),
        ("replay", None, None, "replay"),
        ("given", None, None, "dataset_rollout"),
        ("advantage", None, None, "advantage"),
        ("reward", None, None, "function_reward"),
        ("own", None, "user.code:fn", "advantage"),
    )
}


@pytest.mark.parametrize("seed", range(40))
def test_whoever_may_need_it_finds_it_given_back(seed):
    rng = random.Random(seed)
    others = [Load("", (), "", ()), Reshard((), "", ()), Free((), ()), Collect("", (), "", ())]
    others += [SyncWeights("", ()), Serve("", ()), Repeat("", ()), Until("", ())]
    weights = [6] * len(NODES) + [rng.choice([0, 2]) for _ in others]
    steps = [
        Run(pick, (), (), "", "", ()) if isinstance(pick, str) else type(pick)(**vars(pick))
        for pick in rng.choices([*NODES, *others], weights, k=30)
    ]
    kept = cached_after(steps, NODES, {"actor", "critic"})
    held, wanted = None, set()  # the last Run that has left memory with torch
    for ins in steps:
        if isinstance(ins, Run) and ins.node in ("update", "old", "critic"):
            wanted |= {held} - {None}
            held = id(ins)
        elif not isinstance(ins, Reshard | Free | Collect) and getattr(ins, "node", "") != "advantage":
            held = None
    assert kept == wanted


def make_worker(in_turn):
    happened = []
    engine = SimpleNamespace(
        host_parts={"params": False, "grads": False, "optimizer": True},
        onload=lambda **parts: happened.append("onload"),
        offload=lambda **parts: happened.append("offload"),
    )
    worker = object.__new__(DAGWorker)
    worker.device, worker.train_engines, worker._in_turn = torch.device("cuda"), {"actor": engine}, in_turn
    worker.plan = SimpleNamespace(models={"actor": SimpleNamespace(nodes=("train",), trains=True)})
    return worker, happened


def test_a_worker_gives_it_back_unless_a_training_engine_is_next(monkeypatch):
    worker, happened = make_worker(in_turn=True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: happened.append("given back"))
    for caches in (True, False):
        with worker._on_device("actor", caches=caches):
            happened.append("computes")
    assert happened == [*["onload", "computes", "offload"] * 2, "given back"]
    with worker._on_device("rollout"):
        pass
    assert happened.count("given back") == 1


def test_where_nobody_takes_memory_in_turn_it_stays_until_little_is_free(monkeypatch):
    worker, happened = make_worker(in_turn=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: happened.append("given back"))
    for free, given_back in ((50, 0), (5, 0), (3, 1)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free << 30, 100 << 30))
        with worker._on_device("actor"):
            pass
        assert happened.count("given back") == given_back


@pytest.mark.parametrize(
    ("overrides", "wakes"),
    [
        ((), True),
        (("actor_rollout_ref.rollout.free_cache_engine=false",), False),
        (("actor_rollout_ref.rollout.free_cache_engine=false", f"{TP}=2"), True),
    ],
)
def test_an_engine_takes_memory_in_turn_if_it_sleeps_or_is_on_several_ranks(overrides, wakes):
    overrides = ("actor_rollout_ref.rollout.name=vllm", *overrides)
    worker = object.__new__(DAGWorker)
    cfg, worker.plan = config(*overrides), template_plan(2, *overrides)
    worker._node_cfgs = {
        name: with_overrides(cfg, node.overrides) for name, node in worker.plan.nodes.items()
    }
    (name,) = (name for name, model in worker.plan.models.items() if model.generates)
    assert worker._wakes(name) == wakes
