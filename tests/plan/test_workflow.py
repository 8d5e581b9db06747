"""What the compiler does once: resolve a node, build the graph, look for what is above its nodes."""

from collections import Counter

from plan_cases import config

from siirl.compiler import compile as compiler
from siirl.compiler import resolved_node
from siirl.compiler.compile import compile_plan
from siirl.dag.graph import Graph
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


def test_nodes_are_resolved_once_and_their_graph_is_built_once(monkeypatch):
    resolved, built, asked = Counter(), [], []
    op_under, build_graph, above = resolved_node.op_under, compiler.build_graph, Graph.__dict__["above"].func

    def counted_op(node, cfg):
        resolved[node.node_id] += 1
        return op_under(node, cfg)

    def counted_graph(dag):
        built.append([node.node_id for node in dag.nodes])
        return build_graph(dag)

    def counted_above(graph):
        asked.append(set(graph.order))
        return above(graph)

    monkeypatch.setattr(resolved_node, "op_under", counted_op)
    monkeypatch.setattr(compiler, "build_graph", counted_graph)
    monkeypatch.setattr(Graph.__dict__["above"], "func", counted_above)
    plan, _ = compile_plan(in_an_environment(), config(), 2)
    written = {"rollout", "reward", "advantage", "train"}
    assert set(resolved) == written | {"rollout_env"} >= set(plan.nodes)
    assert set(resolved.values()) == {1}
    assert [set(nodes) for nodes in built] == [written]
    assert asked.count(written | {"rollout_env"}) == 1, "as run"
    assert asked.count(written) == 1, "those with an instruction of their own; not the DAG as written besides"
