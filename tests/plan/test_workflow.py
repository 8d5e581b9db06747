"""What the compiler does once: resolve a node, look for what is above it."""

from collections import Counter

import networkx as nx
from plan_cases import config

from siirl.compiler import resolved_node
from siirl.compiler.compile import compile_plan
from siirl.dag.spec import DagBuilder


def in_an_environment():
    """An agent whose rollout names its environment, which becomes a node of its own."""
    dag = DagBuilder("acting")
    acts = {"rollout.agent.env_path": [f"{__name__}:World"], "rollout.agent.obs_with_env": True}
    dag.node("rollout", "MODEL_INFERENCE", "ROLLOUT", config=acts)
    dag.node("reward", "COMPUTE", "REWARD", dependencies=["rollout"])
    dag.node("advantage", "COMPUTE", "ADVANTAGE", dependencies=["reward"])
    dag.node("train", "MODEL_TRAIN", "ACTOR", dependencies=["advantage"])
    return dag.build()


class World:
    def reset(self, task, seed): ...

    def step(self, actions): ...


def test_a_node_is_resolved_once_and_asked_once_what_is_above_it(monkeypatch):
    resolved, asked = Counter(), Counter()
    op_under, ancestors = resolved_node.op_under, nx.ancestors

    def counted_op(node, cfg):
        resolved[node.node_id] += 1
        return op_under(node, cfg)

    def counted_ancestors(graph, node):
        asked[node] += 1
        return ancestors(graph, node)

    monkeypatch.setattr(resolved_node, "op_under", counted_op)
    monkeypatch.setattr(nx, "ancestors", counted_ancestors)
    plan, _ = compile_plan(in_an_environment(), config(), 2)
    assert set(resolved) == {"rollout", "rollout_env", "reward", "advantage", "train"} >= set(plan.nodes)
    assert set(resolved.values()) == {1}
    assert asked["rollout_env"] == 1 and max(asked.values()) <= 2, "once in the DAG as written, once as run"
