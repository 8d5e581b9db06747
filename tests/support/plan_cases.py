"""DAGs and configurations for tests of the compiler, and an interpreter that runs a plan without data."""

import functools
from collections import Counter
from typing import Any

import yaml

from siirl.compiler.compile import compile_plan, load_dag
from siirl.compiler.instructions import routing
from siirl.compiler.plan import Plan
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
from siirl.config import Config, load_config, with_overrides
from siirl.dag.spec import DagBuilder, DagSpec
from siirl.types import FieldKey

ONE_STEP = (
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.rollout.n=4",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
)
"""Overrides of a GRPO run with one optimizer step for each batch of 8 prompts x 4 responses."""


@functools.cache
def config(*overrides: str) -> Config:
    """ONE_STEP and these overrides. hydra composes only once: it takes longer than a test may."""
    if not overrides:
        return load_config(ONE_STEP)
    pairs = [override.split("=", 1) for override in overrides]
    return with_overrides(config(), {key: yaml.safe_load(value) for key, value in pairs})


def compiled(dag: DagSpec, world_size: int, *overrides: str) -> Plan:
    return compile_plan(dag, config(*overrides), world_size)[0]


def template_plan(world_size: int, *overrides: str) -> Plan:
    """The plan of the template that fits the advantage estimator: GRPO unless overridden."""
    cfg = config(*overrides)
    return compile_plan(load_dag(cfg), cfg, world_size)[0]


def add_agent(dag: DagBuilder, agent: int = 0, placement: Any = None, **options: Any) -> dict[str, str]:
    """Add rollout, reward, advantage and train nodes: name -> node id. options go to the rollout."""
    common = {"agent_group": agent}
    placed = {**common, "placement": placement}
    ids: dict[str, str] = {}
    ids["rollout"] = dag.node(f"rollout_{agent}", "MODEL_INFERENCE", "ROLLOUT", **placed, **options)
    ids["reward"] = dag.node(f"reward_{agent}", "COMPUTE", "REWARD", dependencies=[ids["rollout"]], **common)
    ids["advantage"] = dag.node(
        f"advantage_{agent}", "COMPUTE", "ADVANTAGE", dependencies=[ids["reward"]], **common
    )
    ids["train"] = dag.node(
        f"train_{agent}", "MODEL_TRAIN", "ACTOR", dependencies=[ids["advantage"]], **placed
    )
    return ids


def custom(
    dag: DagBuilder, name: str, dependencies: list[str], reads: list[str], writes: list[str], **options: Any
) -> str:
    """Add a custom COMPUTE node."""
    fields = {"reads": reads, "writes": writes}
    return dag.node(
        name, "COMPUTE", dependencies=dependencies, executable_ref="user.code:fn", **fields, **options
    )


def run_symbolically(plan: Plan, section: str = "instructions") -> dict[str, tuple[int, ...]]:
    """Run a plan on every rank without data: node -> its ranks. AssertionError where a worker would fail.

    Checks that every column is there when it is read, that it is dropped exactly once and none is left, that
    the transport's columns are in the source of every reshard and row ids in a target that has columns, that
    every rank that runs a node knows by then that all its dependencies have run on all of their ranks, and
    that every group that communicates exists. plan_rows.Interpreter follows the rows.
    """
    store: dict[int, set[tuple[FieldKey, str]]] = {rank: set() for rank in range(plan.world_size)}
    knows: dict[int, set[tuple[str, int]]] = {rank: set() for rank in range(plan.world_size)}
    ran: dict[str, tuple[int, ...]] = {}
    for ins in getattr(plan, section):
        assert ins.ranks == tuple(sorted(set(ins.ranks))), f"ranks of {ins}"
        match ins:
            case Load(loader, keys, layout, ranks):
                assert plan.loaders[loader].layout == layout
                assert ranks == plan.layouts[layout].ranks
                _arrive(store, ranks, keys, layout)
            case Reshard(keys, route, ranks):
                _exchange(plan, store, knows, keys, route, ranks)
            case Run(node, reads, writes, source, target, ranks):
                assert ranks == plan.layouts[source].ranks == plan.layouts[target].ranks
                assert ranks in plan.groups
                for rank in ranks:
                    missing = [str(key) for key in reads if (key, source) not in store[rank]]
                    assert not missing, f"{node} on rank {rank} misses {missing}"
                    early = [
                        (parent, other)
                        for parent in plan.nodes[node].dependencies
                        for other in ran.get(parent, ())
                        if rank not in ran[parent] and (parent, other) not in knows[rank]
                    ]
                    assert not early, f"{node} starts before {early}"
                    assert not set(plan.nodes[node].dependencies) & _nodes(plan, section) - ran.keys()
                _arrive(store, ranks, writes, target)
                for rank in ranks:
                    knows[rank].add((node, rank))
                assert node not in ran, f"{node} runs twice"
                ran[node] = ranks
            case Serve(node, ranks):
                assert not set(ranks).intersection(plan.run_of(node).ranks), f"{node} waits for itself"
            case Repeat(_, ranks):
                assert ranks in plan.groups
                before = {rank: set(columns) for rank, columns in store.items()}
            case Collect(node, reads, source, ranks):
                for rank in ranks:
                    missing = [key for key in reads if (key, source) not in store[rank]]
                    assert not missing, f"{node} on rank {rank} misses {missing}"
            case Until(_, ranks):
                _meet(knows, ranks)
                assert store == before, "what a round makes is freed within it"
            case SyncWeights(link, ranks):
                assert ranks == plan.links[link].ranks
                assert ranks in plan.groups
            case Free(keys, ranks):
                for rank in ranks:
                    for column in keys:
                        assert column in store[rank], f"{column} is freed on rank {rank} but not there"
                        store[rank].remove(column)
    assert not any(store.values()), f"left over: {store}"
    return ran


def _nodes(plan: Plan, section: str) -> set[str]:
    return {ins.node for ins in getattr(plan, section) if isinstance(ins, Run)}


def _arrive(store, ranks, keys, layout) -> None:
    for rank in ranks:
        for key in keys:
            assert (key, layout) not in store[rank], f"{key} arrives twice in {layout}"
            store[rank].add((key, layout))


def _exchange(plan, store, knows, keys, route_name, ranks) -> None:
    route = plan.routes[route_name]
    source, target = plan.layouts[route.source], plan.layouts[route.target]
    assert ranks == route.ranks == tuple(sorted({*source.ranks, *target.ranks}))
    assert ranks in plan.groups
    agents = {key.agent for key in keys}
    columns = {FieldKey(a, name) for a in agents for name in routing(source.rowset.split(".")[1])}
    for rank in source.ranks:
        for key in {*keys, *columns}:
            assert (key, route.source) in store[rank], f"{key} is not in {route.source} on rank {rank}"
    for rank in target.ranks:
        there = {key.name for key, layout in store[rank] if layout == route.target}
        assert not there or "row_id" in there, f"{route_name}: {there} are there without row_id"
    _arrive(store, target.ranks, keys, route.target)
    _meet(knows, ranks)


def _meet(knows, ranks) -> None:
    everything = set().union(*(knows[rank] for rank in ranks))
    for rank in ranks:
        knows[rank] |= everything


def moves(plan: Plan, section: str = "instructions") -> Counter[str]:
    """How many instructions of each kind there are."""
    return Counter(type(ins).__name__ for ins in getattr(plan, section))


def order(plan: Plan, section: str = "instructions") -> list[str]:
    return [ins.node for ins in getattr(plan, section) if isinstance(ins, Run)]
